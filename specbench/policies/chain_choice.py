"""Which of its two chains each request verifies: the model's block or the n-gram copy.

The exact answer is a multiple-choice knapsack: one chain per request, and one number of
slots for all of them. At a price per slot it falls apart into one comparison per request,
so a handful of prices is tried at once and the outcome with the highest goodput is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from specbench.policies.price import chain_value, goodput_optima, marginal_price

# Steps of the price ladder 0, 1/n, ..., 1 (survivals lie between 0 and 1). On 6,300 random
# batches of up to 8 requests (tests/unit/policies/test_hybrid_regret.py, 300 of each kind) 16
# steps lose 0.0002% of the exact choice's goodput on average and 0.5% at worst, 8 steps 0.002%
# and 2.9%, 4 steps 0.004% and 2.9%. Iterating instead (choose, size the budget, take its price,
# choose again), three rounds from price 0, loses 0.002% and 2.9% and needs more than twice
# the operations.
NUM_PRICE_STEPS = 16


@dataclass(frozen=True)
class ChainChoice:
    """One chain per request. All tensors are on the device of the survivals.

    Attributes:
        use_ngram: [num_reqs] bool, True where the n-gram chain replaces the model's.
        survival: [num_reqs, num_steps] of the chosen chains, num_steps being the longer of
            the two drafters'; 0 beyond a chain's end.
        budget: 0-dim int64, slots to verify at the expected optimum.
    """

    use_ngram: torch.Tensor
    survival: torch.Tensor
    budget: torch.Tensor

    @property
    def price(self) -> torch.Tensor:
        """0-dim, expected tokens that a slot of this batch earns; computed when asked for."""
        slots = self.survival.flatten().sort(descending=True).values
        return marginal_price(slots, self.budget)


def prefers_ngram(
    model_survival: torch.Tensor, ngram_survival: torch.Tensor, prices: torch.Tensor
) -> torch.Tensor:
    """Where the n-gram chain is worth strictly more than the model's.

    Args:
        model_survival: [num_reqs, num_model_steps].
        ngram_survival: [num_reqs, num_ngram_steps].
        prices: [num_prices] expected tokens per slot.

    Returns:
        [num_prices, num_reqs] bool; a tie goes to the model.
    """
    return chain_value(ngram_survival, prices) > chain_value(model_survival, prices)


def choose_chains(
    model_survival: torch.Tensor,
    ngram_survival: torch.Tensor,
    *,
    cost_ms: torch.Tensor,
    num_sampling: int | torch.Tensor,
) -> ChainChoice:
    """Choose chains for the whole batch so that expected goodput is as high as possible.

    Candidates are the choices at each price of the ladder and "n-gram wherever something
    matched". Each is sized on its own, and the best is kept. The ladder's last price, 1,
    stands for the model everywhere, so the result is never worse than either drafter alone.

    Device only: 23 tensor operations (a test counts them), one of them a sort of
    ``NUM_PRICE_STEPS + 2`` rows; no value is read back and no state is kept between steps.

    Args:
        model_survival: [num_reqs, num_model_steps] float, each row non-increasing within
            0..1; 0 where nothing was drafted.
        ngram_survival: [num_reqs, num_ngram_steps], same dtype and rules, at least 1 step.
        cost_ms: [max_budget + 1] positive step cost (draft + verify) by verified tokens.
        num_sampling: requests that emit a bonus token whatever is verified.
    """
    num_steps = max(model_survival.shape[1], ngram_survival.shape[1])
    model = pad(model_survival, (0, num_steps - model_survival.shape[1]))
    ngram = pad(ngram_survival, (0, num_steps - ngram_survival.shape[1]))
    use_ngram = _candidates(model, ngram)
    survival = torch.where(use_ngram[..., None], ngram, model)
    optima = goodput_optima(survival.flatten(1), num_sampling, cost_ms)
    # Ties go to the lowest price, that is to the longest expected acceptance. Selecting by
    # an index tensor of one element, because a 0-dim index is read by the host.
    best = optima.goodput.argmax(dim=0, keepdim=True)
    return ChainChoice(
        use_ngram=use_ngram.index_select(0, best).squeeze(0),
        survival=survival.index_select(0, best).squeeze(0),
        budget=optima.budget.index_select(0, best).squeeze(0),
    )


def _candidates(model: torch.Tensor, ngram: torch.Tensor) -> torch.Tensor:
    """[NUM_PRICE_STEPS + 2, num_reqs] bool: choices by price, then every matched n-gram."""
    prices = torch.linspace(0, 1, NUM_PRICE_STEPS + 1, dtype=ngram.dtype, device=ngram.device)
    # Survival does not increase along a chain, so its first slot tells whether there is one.
    matched = ngram[:, 0] > 0
    return torch.cat([prefers_ngram(model, ngram, prices), matched[None]])
