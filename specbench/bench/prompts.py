"""From conversations to token prompts, and whether they fit the engine's context."""

from __future__ import annotations

from collections.abc import Iterable

from specbench.engines.base import Engine
from specbench.errors import InputError
from specbench.records import Conversation, Message, SamplingSpec


def output_limit(conversation: Conversation, sampling: SamplingSpec) -> int:
    """Tokens that each request of the conversation may generate."""
    limit = conversation.max_tokens
    return sampling.max_tokens if limit is None else limit


def encode_turn(
    engine: Engine, conversation: Conversation, turn: int, replies: list[str]
) -> tuple[int, ...]:
    """Prompt of turn ``turn``, given the model's replies to the turns before it."""
    if conversation.text is not None:
        return tuple(engine.encode_text(conversation.text))
    messages = list(conversation.history)
    for question, reply in zip(conversation.turns[:turn], replies, strict=True):
        messages += [Message("user", question), Message("assistant", reply)]
    messages.append(Message("user", conversation.turns[turn]))
    return tuple(engine.encode_chat(messages))


def encode_first_turns(
    engine: Engine, conversations: Iterable[Conversation]
) -> dict[str, tuple[int, ...]]:
    """item id -> prompt tokens of its first turn, encoded ahead of the measurement."""
    return {item.item_id: encode_turn(engine, item, 0, []) for item in conversations}


def check_fit(
    engine: Engine, conversations: Iterable[Conversation], sampling: SamplingSpec
) -> None:
    """Make sure that every request fits the context, replies at full length included.

    An engine would refuse what does not fit in the middle of a run, or cut outputs short
    without a word; either would make the policies' work unequal.

    Raises:
        InputError: names the first item that does not fit, and the lengths.
    """
    context = engine.describe().get("max_model_len")
    if context is None:
        return
    for item in conversations:
        num_requests = 1 if item.text is not None else len(item.turns)
        last = encode_turn(engine, item, num_requests - 1, [""] * (num_requests - 1))
        num_output = num_requests * output_limit(item, sampling)
        if len(last) + num_output > context:
            raise InputError(
                f"workload item {item.item_id!r} does not fit the engine's context of {context} "
                f"tokens: {len(last)} prompt tokens and up to {num_output} output tokens over "
                f"{num_requests} turn(s); shorten it, lower --max-tokens or raise --max-model-len"
            )
