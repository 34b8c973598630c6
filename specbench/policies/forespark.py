"""ForeSpark: draft only what is expected to pay (arXiv:2611.13442)."""

from __future__ import annotations

import torch

from specbench.policies.base import (
    POLICIES,
    DraftBudget,
    Drafter,
    Policy,
    PreDraftBatch,
    StepCosts,
    VerifyBatch,
)
from specbench.policies.draft_schedule import schedule_drafts
from specbench.policies.dspark import DSpark, fixed_length_of


@POLICIES.register("forespark")
class ForeSpark(Policy):
    """Sizes drafting by predicted survivals, verification by the drafter's confidences.

    How many tokens are drafted depends on nothing that was drafted, and how many are
    verified is decided as in DSpark: the output distribution stays the target's.

    Args:
        fixed_length: draft and verify this many tokens of every request instead; None adapts.
    """

    name = "forespark"
    drafter = Drafter.MODEL
    sizes_drafts = True

    def __init__(self, fixed_length: int | None = None) -> None:
        self.fixed_length = fixed_length
        self.needs_costs = self.needs_calibration = fixed_length is None
        self._verification = DSpark(fixed_length)

    def draft_budget(self, batch: PreDraftBatch, costs: StepCosts | None) -> DraftBudget:
        """Drafted tokens of the joint schedule with the highest expected goodput."""
        if self.fixed_length is not None:
            return DraftBudget(int(batch.capacity.clamp(max=self.fixed_length).sum()))
        costs = self.required(costs)
        base = batch.num_base_tokens
        schedule = schedule_drafts(
            batch.survival,
            batch.capacity,
            num_sampling=batch.num_sampling,
            draft_ms=costs.draft_ms,
            verify_ms=costs.verify_ms[base : base + batch.max_budget + 1],
            resolution=batch.resolution,
        )
        return DraftBudget(schedule.num_drafted, schedule.gain_ms)

    def draft_lengths(
        self, survival: torch.Tensor, capacity: torch.Tensor, budget: int
    ) -> torch.Tensor:
        """Best slots first; with a fixed length, the same number for everyone."""
        if self.fixed_length is not None:
            capacity = capacity.clamp(max=self.fixed_length)
        return super().draft_lengths(survival, capacity, budget)

    def verify_budget(self, batch: VerifyBatch, costs: StepCosts | None) -> int:
        """DSpark's goodput-optimal budget, over what was drafted."""
        if self.fixed_length is None:
            costs = self.required(costs)
        return self._verification.verify_budget(batch, costs)

    def verify_lengths(
        self, survival: torch.Tensor, capacity: torch.Tensor, budget: int
    ) -> torch.Tensor:
        """As DSpark's."""
        return self._verification.verify_lengths(survival, capacity, budget)

    @classmethod
    def from_argument(cls, argument: str | None) -> Policy:
        """``forespark`` adapts; ``forespark:3`` drafts and verifies three tokens a request."""
        return cls(fixed_length_of(cls.name, argument))
