"""N-gram lookup alone: every matched token is verified, whatever it costs."""

from __future__ import annotations

from specbench.policies.base import POLICIES, Drafter, Policy, StepCosts, VerifyBatch


@POLICIES.register("ngram")
class Ngram(Policy):
    """vLLM's prompt-lookup speculation: fixed length, nothing adaptive."""

    name = "ngram"
    drafter = Drafter.NGRAM

    def verify_budget(self, batch: VerifyBatch, costs: StepCosts | None) -> int:
        """All that was matched, as far as the engine can take it."""
        return min(int(batch.capacity.sum()), batch.max_budget)
