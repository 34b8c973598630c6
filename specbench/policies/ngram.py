"""N-gram lookup alone: every matched token is verified, whatever it costs."""

from __future__ import annotations

import torch

from specbench.policies.base import POLICIES, Drafter, Policy, StepCosts, VerifyBatch


@POLICIES.register("ngram")
class Ngram(Policy):
    """vLLM's prompt-lookup speculation: fixed length, nothing adaptive."""

    name = "ngram"
    drafter = Drafter.NGRAM

    def verify_budget(self, batch: VerifyBatch, costs: StepCosts | None) -> int:
        """All that was matched (survival above 0), as far as the engine can take it.

        Capacity alone would not do: an engine that schedules asynchronously reserves a
        full block for every request, matched or not.
        """
        steps = torch.arange(batch.survival.shape[1])
        matched = (batch.survival > 0) & (steps[None] < batch.capacity[:, None])
        return min(int(matched.sum()), batch.max_budget)
