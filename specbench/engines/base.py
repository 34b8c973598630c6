"""What the bench needs of an engine; the vLLM engine and the fake one both satisfy it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from specbench.records import Chunk, Conversation, EngineRequest, Message, StepRecord


class Engine(Protocol):
    """A running engine that serves token prompts and switches policies at run time."""

    async def set_policy(self, policy: str) -> None:
        """Switch to ``name[:argument]``. No request may be running; caches are reset."""

    def generate(self, request: EngineRequest) -> AsyncIterator[Chunk]:
        """Stream one request. Closing the iterator early aborts it.

        Raises:
            EngineFailure: the engine died.
            InputError: the engine refuses the request (too long, bad parameter).
        """

    async def take_steps(self) -> list[StepRecord]:
        """Steps recorded since the last call, oldest first."""

    def encode_chat(self, messages: list[Message]) -> list[int]:
        """Apply the model's chat template, generation prompt included."""

    def encode_text(self, text: str) -> list[int]:
        """Tokenize a raw completion prompt."""

    def decode(self, token_ids: list[int]) -> str:
        """Text of output tokens, special tokens left out."""

    def describe(self) -> dict[str, Any]:
        """Provenance: model, drafter, dtype, versions, processor, threads, engine arguments."""

    async def close(self) -> None:
        """Stop the engine and free what it holds; safe to call twice."""


__all__ = ["Conversation", "Engine"]
