"""N-gram lookup alone: every matched token is verified, whatever it costs."""

from __future__ import annotations

import torch

from specbench.errors import UsageError
from specbench.policies.base import POLICIES, Drafter, Policy, StepCosts, VerifyBatch

# As long as the embedded model drafter's block, so that the two compare on equal terms.
DEFAULT_LENGTH = 7
MAX_LENGTH_DIGITS = 4


@POLICIES.register("ngram")
class Ngram(Policy):
    """vLLM's prompt-lookup speculation: fixed length, nothing adaptive.

    Args:
        length: longest chain, in tokens; cut to the engine's draft slots.
    """

    name = "ngram"
    drafter = Drafter.NGRAM

    def __init__(self, length: int = DEFAULT_LENGTH) -> None:
        self.max_ngram_tokens = length

    def verify_budget(self, batch: VerifyBatch, costs: StepCosts | None) -> int:
        """All that was matched (survival above 0), as far as the engine can take it.

        Capacity alone would not do: an engine that schedules asynchronously reserves a
        full block for every request, matched or not.
        """
        steps = torch.arange(batch.survival.shape[1])
        matched = (batch.survival > 0) & (steps[None] < batch.capacity[:, None])
        return min(int(matched.sum()), batch.max_budget)

    @classmethod
    def from_argument(cls, argument: str | None) -> Policy:
        """``ngram`` drafts up to 7 tokens; ``ngram:12`` up to 12."""
        if argument is None:
            return cls()
        plain = argument.isascii() and argument.isdigit() and len(argument) <= MAX_LENGTH_DIGITS
        if not plain or int(argument) == 0:
            raise UsageError(f"'ngram:{argument}': the length must be a whole number, 1 to 9999")
        return cls(length=int(argument))
