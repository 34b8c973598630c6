"""Hybrid Spark: a model drafter and the n-gram lookup side by side, priced on one scale.

Rule and name follow arXiv:2611.05611. Both drafters run every step, each request verifies
the chain that is worth more, and the verification budget is sized and shared as in DSpark.
"""

from __future__ import annotations

from specbench.policies.base import (
    POLICIES,
    DraftBatch,
    Drafter,
    Policy,
    StepCosts,
    VerifyBatch,
)
from specbench.policies.chain_choice import ChainChoice, choose_chains
from specbench.policies.dspark import DSpark


@POLICIES.register("hybrid")
class Hybrid(Policy):
    """Per request the better of the model's block and the n-gram copy.

    The choice looks at confidences that depend on the drafted tokens. It keeps the output
    distribution only if chosen chains are verified as certain (one-hot) proposals: the
    n-gram's always are, the model's if it drafts greedily.
    """

    name = "hybrid"
    drafter = Drafter.BOTH
    needs_costs = True
    needs_calibration = True

    def __init__(self) -> None:
        self._verification = DSpark()

    def choose_chains(self, batch: DraftBatch, costs: StepCosts | None) -> ChainChoice:
        """The choice of highest expected goodput among those that a price induces."""
        costs = self.required(costs)
        base = batch.num_base_tokens
        verify_ms = costs.verify_ms[base : base + batch.max_budget + 1]
        return choose_chains(
            batch.model_survival,
            batch.ngram_survival,
            cost_ms=costs.draft_ms[batch.num_drafted] + verify_ms,
            num_sampling=batch.num_sampling,
        )

    def verify_budget(self, batch: VerifyBatch, costs: StepCosts | None) -> int:
        """DSpark's goodput-optimal budget, over the survivals of the chosen chains."""
        return self._verification.verify_budget(batch, self.required(costs))
