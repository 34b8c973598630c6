"""An engine whose every token, time and step is known beforehand: it tests the instrument.

With :class:`VirtualClockLoop` nothing really waits: an hour of simulated serving takes
milliseconds, and times can be asserted exactly.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from specbench.errors import EngineFailure, InputError
from specbench.records import Chunk, EngineRequest, Message, StepRecord

T = TypeVar("T")

# Tokens that the fake chat template adds around each message.
TEMPLATE_TOKENS_PER_MESSAGE = 2


@dataclass(frozen=True)
class FakeBehaviour:
    """How the engine serves under one policy.

    Attributes:
        chunk_tokens: tokens of successive chunks of a request; the last entry repeats
            until the request's limit is reached, which may cut the last chunk.
        num_output_tokens: tokens after which the model stops by itself; None: at the limit.
        first_token_s: from submission to the first chunk.
        chunk_s: from one chunk to the next.
        num_verified_tokens: draft tokens verified for every chunk but the first; a chunk
            of k tokens then means k - 1 accepted.
        draft_share: part of ``chunk_s`` that the step records call drafting.
    """

    chunk_tokens: tuple[int, ...] = (1,)
    num_output_tokens: int | None = None
    first_token_s: float = 0.002
    chunk_s: float = 0.001
    num_verified_tokens: int = 0
    draft_share: float = 0.0


@dataclass
class FakeEngine:
    """Satisfies :class:`specbench.engines.base.Engine` without a model.

    Output token i of a request is ``prompt length + i``, under every policy. One step is
    recorded for every chunk.

    Attributes:
        behaviours: by policy name; an unknown policy gets ``FakeBehaviour()``.
        refuse: parts of request ids whose requests are refused with InputError.
        die_after_requests: the engine dies when it receives the request after that many.
        clock: where chunk times come from; a virtual loop's ``time`` in exact tests.
        on_request: called with every request that arrives, before it is served.
    """

    behaviours: Mapping[str, FakeBehaviour] = field(default_factory=dict)
    refuse: tuple[str, ...] = ()
    die_after_requests: int | None = None
    max_model_len: int | None = 2048
    clock: Callable[[], float] = time.perf_counter
    on_request: Callable[[EngineRequest], None] = lambda request: None
    policy: str | None = None
    policies_set: list[str] = field(default_factory=list)
    requests: list[EngineRequest] = field(default_factory=list)
    num_running: int = 0
    max_running: int = 0
    num_aborted: int = 0
    dead: bool = False
    closed: bool = False
    _steps: list[StepRecord] = field(default_factory=list)

    async def set_policy(self, policy: str) -> None:
        """Switch; an engine that died raises EngineFailure."""
        self._check_alive()
        if self.num_running:
            raise AssertionError("the policy was switched while requests were running")
        self.policy = policy
        self.policies_set.append(policy)

    async def generate(self, request: EngineRequest) -> AsyncIterator[Chunk]:
        """Stream the scripted chunks."""
        self.on_request(request)
        if self.die_after_requests is not None and len(self.requests) >= self.die_after_requests:
            self.dead = True
        self.requests.append(request)
        self._check_alive()
        if any(part in request.request_id for part in self.refuse):
            raise InputError(f"request {request.request_id} was refused")
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        ended = False
        try:
            async for chunk in self._chunks(request):
                ended = chunk.finish_reason is not None
                yield chunk
        finally:
            self.num_running -= 1
            self.num_aborted += not ended

    async def _chunks(self, request: EngineRequest) -> AsyncIterator[Chunk]:
        behaviour = self.behaviours.get(self.policy or "", FakeBehaviour())
        wanted = behaviour.num_output_tokens
        stops = wanted is not None and wanted <= request.max_tokens
        total = wanted if stops and wanted is not None else request.max_tokens
        finish_reason = "stop" if stops else "length"
        sent, index = 0, 0
        while True:
            await asyncio.sleep(behaviour.chunk_s if index else behaviour.first_token_s)
            self._check_alive()
            size = behaviour.chunk_tokens[min(index, len(behaviour.chunk_tokens) - 1)]
            size = min(size, total - sent)
            first_id = len(request.prompt_token_ids) + sent
            sent, index = sent + size, index + 1
            self._steps.append(self._step(behaviour, size, is_first=index == 1))
            yield Chunk(
                tuple(range(first_id, first_id + size)),
                self.clock(),
                finish_reason if sent >= total else None,
            )
            if sent >= total:
                return

    def _step(self, behaviour: FakeBehaviour, num_tokens: int, *, is_first: bool) -> StepRecord:
        verified = 0 if is_first else behaviour.num_verified_tokens
        accepted = min(max(num_tokens - 1, 0), verified)
        step_ms = behaviour.chunk_s * 1e3
        return StepRecord(
            num_requests=1,
            num_decoding=int(num_tokens > 0),
            num_prompt_tokens=0,
            num_verified_tokens=verified,
            num_accepted_tokens=accepted,
            num_emitted_tokens=num_tokens,
            num_drafted_tokens=behaviour.num_verified_tokens,
            num_requests_verified=int(verified > 0),
            step_ms=step_ms,
            verify_ms=step_ms * (1 - behaviour.draft_share),
            draft_ms=step_ms * behaviour.draft_share,
            decide_ms=0.0,
            context_tokens=0.0,
            accepted_per_request=(accepted,) if verified else (),
            verified_per_request=(verified,) if verified else (),
        )

    async def take_steps(self) -> list[StepRecord]:
        """Steps since the last call; an engine that died raises EngineFailure."""
        self._check_alive()
        steps, self._steps = self._steps, []
        return steps

    def encode_chat(self, messages: list[Message]) -> list[int]:
        """One token a word, and :data:`TEMPLATE_TOKENS_PER_MESSAGE` a message."""
        num_words = sum(len(message.content.split()) for message in messages)
        return list(range(num_words + TEMPLATE_TOKENS_PER_MESSAGE * len(messages)))

    def encode_text(self, text: str) -> list[int]:
        """One token a word."""
        return list(range(len(text.split())))

    def decode(self, token_ids: list[int]) -> str:
        """One word a token."""
        return " ".join(f"t{token}" for token in token_ids)

    def describe(self) -> dict[str, Any]:
        """What a real engine would say of itself."""
        return {
            "engine": "fake",
            "model": "fake",
            "drafter": None,
            "dtype": "float32",
            "max_model_len": self.max_model_len,
            "processor": "none",
        }

    async def close(self) -> None:
        """Remember that it was closed."""
        self.closed = True

    def _check_alive(self) -> None:
        if self.dead:
            raise EngineFailure("the engine died (log: fake.log)")


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits: asked to wait, it moves the loop's clock forward instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is not None and timeout > 0:
            self.now_s += timeout
        if not ready and timeout is None:
            ready = super().select(None)
        return ready


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose time advances only when every task sleeps, and then at once."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now_s


def run_virtually(main: Callable[[Callable[[], float]], Coroutine[Any, Any, T]]) -> T:
    """Run ``main(clock)`` on a virtual-time loop; ``clock`` reads its time."""
    loop = VirtualClockLoop()
    try:
        return loop.run_until_complete(main(loop.time))
    finally:
        loop.close()
