"""DSpark with adaptive verification (vLLM's, the baseline), and with a fixed length.

Budget and allocation follow vLLM 0.32's AdaptiveVerificationManager, which a test holds
them to: all survivals of the batch are sorted and the number of verified tokens that
maximises expected goodput is taken.
"""

from __future__ import annotations

import torch

from specbench.errors import UsageError
from specbench.policies.base import POLICIES, Drafter, Policy, StepCosts, VerifyBatch
from specbench.policies.price import goodput_optimal_budget

# No drafter proposes blocks anywhere near this long.
MAX_LENGTH_DIGITS = 4


@POLICIES.register("dspark")
class DSpark(Policy):
    """Whole blocks are drafted; how many tokens are verified adapts every step.

    Args:
        fixed_length: verify this many tokens of every request instead; None adapts.
    """

    name = "dspark"
    drafter = Drafter.MODEL

    def __init__(self, fixed_length: int | None = None) -> None:
        self.fixed_length = fixed_length
        self.needs_costs = fixed_length is None

    def verify_budget(self, batch: VerifyBatch, costs: StepCosts | None) -> int:
        """Goodput-optimal number of verified tokens, or the fixed one."""
        max_budget = min(int(batch.capacity.sum()), batch.max_budget)
        if self.fixed_length is not None:
            return min(int(batch.capacity.clamp(max=self.fixed_length).sum()), max_budget)
        costs = self.required(costs)
        base = batch.num_base_tokens
        verify_ms = costs.verify_ms[base : base + max_budget + 1]
        cost_ms = costs.draft_ms[batch.num_drafted] + verify_ms
        return goodput_optimal_budget(batch.survival, batch.capacity, batch.num_sampling, cost_ms)

    def verify_lengths(
        self, survival: torch.Tensor, capacity: torch.Tensor, budget: int
    ) -> torch.Tensor:
        """Best slots first; with a fixed length, the same number for everyone."""
        if self.fixed_length is not None:
            capacity = capacity.clamp(max=self.fixed_length)
        return super().verify_lengths(survival, capacity, budget)

    @classmethod
    def from_argument(cls, argument: str | None) -> Policy:
        """``dspark`` adapts; ``dspark:3`` verifies three tokens of every request."""
        return cls(fixed_length_of(cls.name, argument))


def fixed_length_of(name: str, argument: str | None) -> int | None:
    """The length in ``name:length``; raises UsageError if it is none."""
    if argument is None:
        return None
    if not (argument.isascii() and argument.isdigit()) or len(argument) > MAX_LENGTH_DIGITS:
        raise UsageError(f"'{name}:{argument}': the length must be a whole number, 0 to 9999")
    return int(argument)
