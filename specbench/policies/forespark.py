"""ForeSpark: draft only what is expected to pay (arXiv:2611.13442)."""

from __future__ import annotations

from specbench.errors import UsageError
from specbench.policies.base import (
    POLICIES,
    Drafter,
    Policy,
    PreDraftBatch,
    StepCosts,
    VerifyBatch,
)
from specbench.policies.draft_schedule import schedule_drafts
from specbench.policies.dspark import DSpark


@POLICIES.register("forespark")
class ForeSpark(Policy):
    """Sizes drafting by predicted survivals, verification by the drafter's confidences.

    How many tokens are drafted depends on nothing that was drafted, and how many are
    verified is decided as in DSpark: the output distribution stays the target's.
    """

    name = "forespark"
    drafter = Drafter.MODEL
    needs_costs = True
    needs_calibration = True
    sizes_drafts = True

    def __init__(self) -> None:
        self._verification = DSpark()

    def draft_budget(self, batch: PreDraftBatch, costs: StepCosts | None) -> int:
        """Drafted tokens of the joint schedule with the highest expected goodput."""
        costs = self._require(costs)
        base = batch.num_base_tokens
        schedule = schedule_drafts(
            batch.survival,
            batch.capacity,
            num_sampling=batch.num_sampling,
            draft_ms=costs.draft_ms,
            verify_ms=costs.verify_ms[base : base + batch.max_budget + 1],
            resolution=batch.resolution,
        )
        return schedule.num_drafted

    def verify_budget(self, batch: VerifyBatch, costs: StepCosts | None) -> int:
        """DSpark's goodput-optimal budget, over what was drafted."""
        return self._verification.verify_budget(batch, self._require(costs))

    def _require(self, costs: StepCosts | None) -> StepCosts:
        if costs is None:
            raise UsageError("policy 'forespark' needs step costs; run 'specbench costs profile'")
        return costs
