"""Plain decoding: no drafter, one token per request and step."""

from __future__ import annotations

from specbench.policies.base import POLICIES, Drafter, Policy, StepCosts, VerifyBatch


@POLICIES.register("ar")
class Autoregressive(Policy):
    """The yardstick: speculation switched off."""

    name = "ar"
    drafter = Drafter.NONE

    def verify_budget(self, batch: VerifyBatch, costs: StepCosts | None) -> int:
        """Nothing is drafted, so nothing is verified."""
        return 0
