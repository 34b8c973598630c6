"""Make training data: the target answers prompts, some of which it wrote itself.

The batch is kept full: whenever an answer ends, the next prompt enters. Answers go to disk
in shards, so that a run can be stopped at any time and taken up again; more tokens or
another seed add to what is there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from specbench.engines.offline import Finished, OfflineEngine
from specbench.errors import InputError
from specbench.records import Message
from specbench.training.prompts import PromptSpec, follow_up, next_turn
from specbench.training.responses import (
    MIN_RESPONSE_TOKENS,
    Response,
    ResponseWriter,
    without_loops,
)

# At temperature 1 a small model writes noise for prompts, below 0.7 always the same ones.
PROMPT_TEMPERATURE = 0.8
MAX_PROMPT_TOKENS = 160
MIN_PROMPT_TOKENS = 4
# Second turns are common in chat and copy more than first ones.
FOLLOW_UP_SHARE = 0.25
# About a minute of work on two cores: what an interruption can lose.
RESPONSES_PER_SHARD = 256
_PLACEHOLDER = "PLACEHOLDER-OF-THE-FIRST-TURN"

# Prompts in a row that the target has no room for, before generation gives up: far more than
# any mix of the built-in sources has by chance.
MAX_REFUSED_IN_A_ROW = 1_000

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class _Running:
    """A request in the batch: it writes a prompt (``spec.messages`` None) or answers one."""

    spec: PromptSpec
    prompt_token_ids: list[int]


class Generator:
    """Feeds the engine with prompts and turns what it finishes into responses.

    Args:
        engine: the target.
        writer: where answers go; prompts it has already are skipped.
        prompts: what to ask; may be endless.
        seed: of the choice of follow-up questions.
        batch_size: requests kept in the engine.

    Attributes:
        num_finished: prompts that need nothing more, those skipped included.
    """

    def __init__(
        self,
        engine: OfflineEngine,
        writer: ResponseWriter,
        prompts: Iterable[PromptSpec],
        *,
        seed: int,
        batch_size: int,
    ) -> None:
        self._engine = engine
        self._writer = writer
        self._batch_size = batch_size
        self._prompts = iter(prompts)
        self._rng = random.Random(f"follow-ups:{seed}")
        self._running: dict[str, _Running] = {}
        self._ready: list[Response] = []
        self._unusable: list[str] = []
        self._num_ready_tokens = 0
        self._num_loop_tokens = 0
        self._num_refused_in_a_row = 0
        self.num_finished = 0

    def run(self, num_tokens: int | None, on_progress: OnProgress) -> None:
        """Generate until the stream has ``num_tokens`` response tokens, or no prompt is left.

        Args:
            num_tokens: on disk, loops removed, both splits; None answers every prompt.
            on_progress: called with (response tokens so far, prompts finished so far).

        Raises:
            InputError: the target's context has no room for these prompts.
            KeyboardInterrupt: passed on after everything finished is written.
        """
        try:
            while num_tokens is None or self._num_tokens() < num_tokens:
                self._fill()
                if not self._running:
                    break
                for finished in self._engine.step():
                    self._take(finished)
                if len(self._ready) >= RESPONSES_PER_SHARD:
                    self._flush()
                on_progress(self._num_tokens(), self.num_finished)
        finally:
            self._flush()

    def _num_tokens(self) -> int:
        return self._writer.num_tokens + self._num_ready_tokens

    def _flush(self) -> None:
        self._writer.write(
            self._ready, unusable=self._unusable, num_loop_tokens=self._num_loop_tokens
        )
        self._ready, self._num_ready_tokens = [], 0
        self._unusable, self._num_loop_tokens = [], 0

    def _fill(self) -> None:
        while len(self._running) < self._batch_size:
            spec = next(self._prompts, None)
            if spec is None:
                return
            if self._writer.done.issuperset(spec.all_ids):
                self.num_finished += 1
            else:
                self._start(spec)

    def _start(self, spec: PromptSpec) -> None:
        tokenizer = self._engine.tokenizer
        writes_prompt = spec.messages is None
        if spec.messages is None:
            token_ids = opening_tokens(tokenizer)
        else:
            token_ids = chat_tokens(tokenizer, spec.messages)
        if len(token_ids) + spec.max_tokens > self._engine.max_model_len:
            self._refuse(spec)
            return
        self._num_refused_in_a_row = 0
        self._engine.add(
            spec.prompt_id,
            token_ids,
            temperature=PROMPT_TEMPERATURE if writes_prompt else spec.temperature,
            max_tokens=MAX_PROMPT_TOKENS if writes_prompt else spec.max_tokens,
        )
        self._running[spec.prompt_id] = _Running(spec, token_ids)

    def _refuse(self, spec: PromptSpec) -> None:
        """Too long for the target: neither this turn nor a later one can be answered."""
        self._unusable += spec.all_ids
        self.num_finished += 1
        self._num_refused_in_a_row += 1
        if self._num_refused_in_a_row >= MAX_REFUSED_IN_A_ROW:
            raise InputError(
                f"{MAX_REFUSED_IN_A_ROW} prompts in a row do not fit into the target's "
                f"{self._engine.max_model_len} tokens; choose a target with a longer context"
            )

    def _take(self, finished: Finished) -> None:
        running = self._running.pop(finished.request_id)
        spec = running.spec
        text = str(
            self._engine.tokenizer.decode(finished.token_ids, skip_special_tokens=True)
        ).strip()
        if spec.messages is None:
            if finished.stopped and len(finished.token_ids) > MIN_PROMPT_TOKENS and text:
                self._start(replace(spec, messages=(Message("user", text),)))
            else:
                self._unusable.append(spec.prompt_id)
                self.num_finished += 1
            return
        num_kept = self._keep(running, finished)
        whole = finished.stopped and num_kept == len(finished.token_ids)
        if spec.later_turns:
            self._start(next_turn(spec, text))
        elif spec.may_follow_up and whole and self._rng.random() < FOLLOW_UP_SHARE:
            self._start(follow_up(spec, text, self._rng))
        else:
            self.num_finished += 1

    def _keep(self, running: _Running, finished: Finished) -> int:
        """Queue an answer for the next shard; tokens that are left of it."""
        spec = running.spec
        token_ids = without_loops(finished.token_ids)
        if spec.prompt_id in self._writer.done:
            # Asked again only because a later turn of the conversation is missing.
            return len(token_ids)
        self._num_loop_tokens += len(finished.token_ids) - len(token_ids)
        if len(token_ids) < MIN_RESPONSE_TOKENS:
            self._unusable.append(spec.prompt_id)
            return len(token_ids)
        self._ready.append(
            Response(
                spec.prompt_id,
                spec.source,
                spec.split,
                spec.temperature,
                running.prompt_token_ids,
                token_ids,
            )
        )
        self._num_ready_tokens += len(token_ids)
        return len(token_ids)


def chat_tokens(tokenizer: Any, messages: tuple[Message, ...]) -> list[int]:
    """The conversation in the model's chat template, ready for its answer."""
    chat = [{"role": message.role, "content": message.content} for message in messages]
    if getattr(tokenizer, "chat_template", None) is None:
        raise InputError("the target has no chat template: a drafter is trained on chat models")
    return list(
        tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    )


def opening_tokens(tokenizer: Any) -> list[int]:
    """The chat template up to where the user's first turn begins.

    Completing it makes a chat model write what users ask (Magpie, arXiv:2406.08464).
    """
    chat = [{"role": "user", "content": _PLACEHOLDER}]
    text = str(tokenizer.apply_chat_template(chat, tokenize=False))
    return list(tokenizer.encode(text[: text.index(_PLACEHOLDER)], add_special_tokens=False))
