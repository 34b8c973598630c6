"""How much goodput the price rule gives away against the exact choice of chains.

Choosing chains is a multiple-choice knapsack. Up to 8 requests it is solved by trying
every assignment; above, by an upper bound. ``pytest -rP`` prints the figures.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from specbench.policies.chain_choice import choose_chains, prefers_ngram
from specbench.policies.price import chain_value, goodput_optima

NUM_MODEL_STEPS, NUM_NGRAM_STEPS = 7, 16
NUM_BATCHES = 40
MAX_REQS = 8
MAX_MEAN_REGRET = 0.01
# In a small batch the best assignment may be one that no price of the ladder induces.
MAX_REGRET = 0.01

Generator = torch.Generator


def uniform(generator: Generator, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


def pick(generator: Generator, *choices: float) -> float:
    return choices[int(torch.randint(len(choices), (1,), generator=generator))]


def model_survivals(generator: Generator, num_reqs: int, kind: str) -> torch.Tensor:
    """[num_reqs, NUM_MODEL_STEPS]; conditional acceptance about 0.42 weak, 0.82 strong."""
    spread = uniform(generator, num_reqs, 1)
    level = {
        "weak": 0.3 + 0.25 * spread,
        "strong": 0.7 + 0.25 * spread,
        "mixed": 0.2 + 0.7 * spread,
    }
    noise = 0.35 * (uniform(generator, num_reqs, NUM_MODEL_STEPS) - 0.5)
    return (level[kind] + noise).clamp(0.01, 0.995).cumprod(dim=1)


def ngram_survivals(generator: Generator, num_reqs: int, match_share: float) -> torch.Tensor:
    """[num_reqs, NUM_NGRAM_STEPS], peaked: true copies hold on, coincidences break at once.

    First position 0.8 to 0.98 in true copies and 0.35 to 0.75 otherwise, later positions
    0.8 to 0.99: the range replayed on outputs of a small model for matches of 2 to 8
    tokens. Some copies end early, because the text they copy from ends.
    """
    true_copy = uniform(generator, num_reqs) < 0.6
    draw = uniform(generator, num_reqs)
    first = torch.where(true_copy, 0.8 + 0.18 * draw, 0.35 + 0.4 * draw)
    later = 0.8 + 0.19 * uniform(generator, num_reqs, 1)
    noise = 0.05 * (uniform(generator, num_reqs, NUM_NGRAM_STEPS) - 0.5)
    confidence = (later + noise).clamp(max=0.99)
    confidence[:, 0] = first
    length = (1 + 15 * uniform(generator, num_reqs)).long()
    length[uniform(generator, num_reqs) < 0.7] = NUM_NGRAM_STEPS
    length[uniform(generator, num_reqs) >= match_share] = 0
    return confidence.cumprod(dim=1) * (torch.arange(NUM_NGRAM_STEPS) < length[:, None])


# Step cost in ms by tokens of the target's pass and requests. Above 8 requests the slopes are
# divided by num_reqs / 8, as on hardware that takes larger batches for the same time.
COSTS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "memory-bound": lambda tokens, reqs: 10.5 + 0.01 * tokens,
    "compute-bound": lambda tokens, reqs: 10.0 + 0.4 * reqs + tokens,
    "steep": lambda tokens, reqs: 2.0 + 0.4 * reqs + 1.5 * tokens,
    "knee at 8": lambda tokens, reqs: 13.0 + 0.3 * reqs + (tokens - 8).clamp(min=0),
    "stairs of 8": lambda tokens, reqs: 10.0 + 0.4 * reqs + 4.8 * (tokens / 8).ceil(),
    "stairs of 32": lambda tokens, reqs: 10.0 + 0.4 * reqs + 6.4 * (tokens / 32).ceil(),
    "few slots": lambda tokens, reqs: 10.5 + 0.01 * tokens,
}
# The one scenario in which the engine's own limit binds: verified tokens per request.
FEW_SLOTS = 3


def step_cost(kind: str, num_reqs: int) -> torch.Tensor:
    """[max_budget + 1] ms by verified draft tokens."""
    max_budget = num_reqs * (FEW_SLOTS if kind == "few slots" else NUM_NGRAM_STEPS)
    tokens = num_reqs + torch.arange(max_budget + 1, dtype=torch.float64)
    scale = max(num_reqs / MAX_REQS, 1.0)
    return COSTS[kind](tokens / scale, round(num_reqs / scale))


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random_batch(generator: Generator, cost: str, model: str, num_reqs: int) -> Batch:
    """Model survivals, n-gram survivals, step cost."""
    match_share = pick(generator, 0.2, 0.5, 0.95)
    return (
        model_survivals(generator, num_reqs, model),
        ngram_survivals(generator, num_reqs, match_share),
        step_cost(cost, num_reqs),
    )


def goodput(survival: torch.Tensor, cost_ms: torch.Tensor) -> float:
    """Best goodput of chosen chains; leading dimensions are alternatives."""
    flat = survival.reshape(-1, survival.shape[-2] * survival.shape[-1])
    return float(goodput_optima(flat, survival.shape[-2], cost_ms).goodput.max())


def chosen_goodput(batch: Batch) -> float:
    model, ngram, cost_ms = batch
    choice = choose_chains(model, ngram, cost_ms=cost_ms, num_sampling=model.shape[0])
    return goodput(choice.survival, cost_ms)


def exact_goodput(batch: Batch) -> float:
    """Highest goodput over every assignment of chains and every budget."""
    model, ngram, cost_ms = batch
    num_reqs = model.shape[0]
    padded = torch.nn.functional.pad(model, (0, ngram.shape[1] - model.shape[1]))
    use = (torch.arange(2**num_reqs)[:, None] >> torch.arange(num_reqs)) % 2 == 1
    return goodput(torch.where(use[:, :, None], ngram, padded), cost_ms)


def goodput_bound(batch: Batch) -> float:
    """Upper bound for any number of requests, from Lagrangian duality.

    B slots, whatever they go to, earn at most price * B plus every request's better chain
    at that price; each price bounds, the lowest bound counts.
    """
    model, ngram, cost_ms = batch
    prices = torch.linspace(0, 1, 401, dtype=torch.float64)
    worth = torch.maximum(chain_value(model, prices), chain_value(ngram, prices)).sum(dim=1)
    budgets = torch.arange(cost_ms.shape[0], dtype=torch.float64)
    accepted = (prices[:, None] * budgets + worth[:, None]).min(dim=0).values
    return float(((model.shape[0] + accepted) / cost_ms).max())


def regrets(cost: str, model: str, num_batches: int = NUM_BATCHES, seed: int = 0) -> torch.Tensor:
    """[num_batches] share of the exact goodput that the rule gives away."""
    generator = Generator().manual_seed(seed)
    found = []
    for _ in range(num_batches):
        num_reqs = int(torch.randint(1, MAX_REQS + 1, (1,), generator=generator))
        batch = random_batch(generator, cost, model, num_reqs)
        found.append(1.0 - chosen_goodput(batch) / exact_goodput(batch))
    return torch.tensor(found, dtype=torch.float64)


def test_the_brute_force_agrees_with_trying_every_length() -> None:
    # Two requests, every chain and every verified prefix of it, without sorting anything.
    generator = Generator().manual_seed(1)
    for _ in range(20):
        model, ngram, cost_ms = random_batch(generator, "compute-bound", "mixed", 2)
        prefixes = [
            [(length, float(chain[:length].sum())) for chain in chains for length in range(17)]
            for chains in zip(model, ngram, strict=True)
        ]
        best = max(
            (2 + first[1] + second[1]) / float(cost_ms[first[0] + second[0]])
            for first, second in itertools.product(*prefixes)
        )
        assert exact_goodput((model, ngram, cost_ms)) == pytest.approx(best)


@pytest.mark.parametrize("model", ["weak", "strong", "mixed"])
@pytest.mark.parametrize("cost", COSTS)
def test_regret_against_brute_force(
    cost: str, model: str, record_property: Callable[[str, object], None]
) -> None:
    found = regrets(cost, model)
    assert (found >= -1e-12).all()
    mean, worst = float(found.mean()), float(found.max())
    record_property("mean_regret", mean)
    record_property("worst_regret", worst)
    print(f"{cost}, {model} model: mean regret {mean:.4%}, worst {worst:.4%}")
    assert mean <= MAX_MEAN_REGRET
    assert worst <= MAX_REGRET


@pytest.mark.parametrize("num_reqs", [32, 256])
@pytest.mark.parametrize("cost", COSTS)
def test_regret_of_large_batches_against_the_bound(cost: str, num_reqs: int) -> None:
    generator = Generator().manual_seed(num_reqs)
    for model in ("weak", "strong", "mixed"):
        batch = random_batch(generator, cost, model, num_reqs)
        ratio = chosen_goodput(batch) / goodput_bound(batch)
        assert ratio <= 1 + 1e-12
        assert ratio >= 1 - MAX_MEAN_REGRET


def test_prices_matter_expected_length_alone_is_a_poor_rule() -> None:
    # The same measure must tell a worse rule: the chain with more expected tokens, at price 0.
    generator = Generator().manual_seed(2)
    lost = []
    for _ in range(NUM_BATCHES):
        model, ngram, cost_ms = random_batch(generator, "compute-bound", "strong", MAX_REQS)
        longer = prefers_ngram(model, ngram, torch.zeros(1, dtype=torch.float64))[0]
        padded = torch.nn.functional.pad(model, (0, NUM_NGRAM_STEPS - NUM_MODEL_STEPS))
        by_length = goodput(torch.where(longer[:, None], ngram, padded), cost_ms)
        lost.append(1.0 - by_length / exact_goodput((model, ngram, cost_ms)))
    assert sum(lost) / len(lost) > MAX_MEAN_REGRET
