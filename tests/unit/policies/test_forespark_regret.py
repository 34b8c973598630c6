"""How much goodput the draft schedule gives away against the best draft lengths.

What drafting shows is drawn from Beta distributions, which the schedule does not assume:
every request and position has a predicted conditional acceptance, and the drafter's
confidence scatters around it. For every vector of draft lengths the same outcomes are
verified with DSpark's budget; the best vector is the yardstick. ``pytest -rP`` prints the
figures.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

from specbench.policies.draft_schedule import schedule_drafts
from specbench.policies.price import allocate_by_survival

F64 = torch.float64
NUM_STEPS = 4
MAX_REQS = 3
NUM_BATCHES = 25
NUM_OUTCOMES = 400
MAX_MEAN_REGRET = 0.01
# With three requests and stairs of four tokens, a few per cent are a single token.
MAX_REGRET = 0.05

# Milliseconds by tokens of the target's pass, and by drafted tokens (more than 0).
VERIFY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "memory-bound": lambda tokens: 10.0 + 0.05 * tokens,
    "compute-bound": lambda tokens: 8.0 + 1.2 * tokens,
    "steep": lambda tokens: 2.0 + 2.0 * tokens,
    "knee at 6": lambda tokens: 10.0 + 2.0 * (tokens - 6).clamp(min=0),
    "stairs of 4": lambda tokens: 6.0 + 3.0 * (tokens / 4).ceil(),
}
DRAFT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cheap drafting": lambda tokens: 0.3 + 0.02 * tokens,
    "dear drafting": lambda tokens: 1.5 + 0.3 * tokens,
}
# Beta(p k, (1 - p) k) explains 1 / (k + 1) of the variance of acceptance.
CONCENTRATION = {"blind": float("inf"), "weak": 5.0, "sharp": 1.0}


def costs(verify: str, draft: str, num_reqs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafting by drafted tokens, verification by verified draft tokens; [num_slots + 1]."""
    tokens = torch.arange(num_reqs * NUM_STEPS + 1, dtype=F64)
    return DRAFT[draft](tokens) * (tokens > 0), VERIFY[verify](num_reqs + tokens)


def predictions(generator: torch.Generator, num_reqs: int) -> torch.Tensor:
    """[num_reqs, NUM_STEPS] conditional acceptances, easy and hard requests mixed."""
    level = 0.2 + 0.75 * torch.rand(num_reqs, 1, generator=generator, dtype=F64)
    noise = 0.2 * (torch.rand(num_reqs, NUM_STEPS, generator=generator, dtype=F64) - 0.5)
    return (level + noise).clamp(0.02, 0.98)


def outcomes(conditional: torch.Tensor, concentration: float) -> torch.Tensor:
    """[NUM_OUTCOMES, num_reqs, NUM_STEPS] survivals that drafting may show."""
    drawn = conditional.expand(NUM_OUTCOMES, *conditional.shape)
    if concentration != float("inf"):
        drawn = torch.distributions.Beta(drawn * concentration, (1 - drawn) * concentration)
        drawn = drawn.sample()
    return drawn.cumprod(dim=2)


def realised_goodput(
    lengths: torch.Tensor, shown: torch.Tensor, draft_ms: torch.Tensor, verify_ms: torch.Tensor
) -> float:
    """Tokens per millisecond over all outcomes, each verified with DSpark's budget."""
    num_reqs = lengths.shape[0]
    drafted = shown * (torch.arange(NUM_STEPS) < lengths[:, None])
    slots = drafted.flatten(start_dim=1).sort(dim=1, descending=True).values
    accepted = torch.nn.functional.pad(slots.cumsum(dim=1), (1, 0)) + num_reqs
    cost_ms = draft_ms[lengths.sum()] + verify_ms
    budget = (accepted / cost_ms).argmax(dim=1)
    emitted = accepted.gather(1, budget[:, None]).sum()
    return float(emitted / cost_ms[budget].sum())


def planned(
    conditional: torch.Tensor, concentration: float, draft_ms: torch.Tensor, verify_ms: torch.Tensor
) -> torch.Tensor:
    """Draft lengths of the schedule."""
    survival = conditional.cumprod(dim=1)
    capacity = torch.full((survival.shape[0],), NUM_STEPS)
    budget = schedule_drafts(
        survival,
        capacity,
        num_sampling=survival.shape[0],
        draft_ms=draft_ms,
        verify_ms=verify_ms,
        resolution=1.0 / (concentration + 1.0),
    ).num_drafted
    return allocate_by_survival(survival, capacity, budget)


def every_vector(num_reqs: int) -> Iterator[torch.Tensor]:
    return map(torch.tensor, itertools.product(range(NUM_STEPS + 1), repeat=num_reqs))


def every_number(conditional: torch.Tensor) -> Iterator[torch.Tensor]:
    """Draft lengths for every number of tokens, likeliest slots first."""
    survival = conditional.cumprod(dim=1)
    capacity = torch.full((survival.shape[0],), NUM_STEPS)
    for budget in range(survival.numel() + 1):
        yield allocate_by_survival(survival, capacity, budget)


def regret(num_reqs: int, verify: str, draft: str, shown: str, generator: torch.Generator) -> float:
    """Share of the best lengths' goodput that the schedule gives away in one random batch."""
    conditional, concentration = predictions(generator, num_reqs), CONCENTRATION[shown]
    draft_ms, verify_ms = costs(verify, draft, num_reqs)
    drawn = outcomes(conditional, concentration)
    lengths = planned(conditional, concentration, draft_ms, verify_ms)
    tried = every_vector(num_reqs) if num_reqs <= MAX_REQS else every_number(conditional)
    best = max(realised_goodput(other, drawn, draft_ms, verify_ms) for other in tried)
    return 1.0 - realised_goodput(lengths, drawn, draft_ms, verify_ms) / best


def assert_small(regrets: torch.Tensor, scenarios: list[tuple[str, str]]) -> None:
    """``regrets`` is [num_scenarios, num_batches]."""
    for (draft, shown), found in zip(scenarios, regrets, strict=True):
        print(
            f"{draft}, {shown} confidences: "
            f"mean regret {float(found.mean()):.4%}, worst {float(found.max()):.4%}"
        )
    assert (regrets >= -1e-12).all()
    assert float(regrets.mean()) <= MAX_MEAN_REGRET
    assert float(regrets.max()) <= MAX_REGRET


SCENARIOS = [(draft, shown) for draft in DRAFT for shown in CONCENTRATION]


@pytest.mark.parametrize("verify", VERIFY)
def test_regret_against_every_vector_of_draft_lengths(verify: str) -> None:
    found = []
    for draft, shown in SCENARIOS:
        generator = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        sizes = torch.randint(1, MAX_REQS + 1, (NUM_BATCHES,), generator=generator).tolist()
        found.append([regret(size, verify, draft, shown, generator) for size in sizes])
    assert_small(torch.tensor(found, dtype=F64), SCENARIOS)


@pytest.mark.parametrize("verify", VERIFY)
def test_regret_of_larger_batches_against_every_number_of_tokens(verify: str) -> None:
    found = []
    for draft, shown in SCENARIOS:
        generator = torch.Generator().manual_seed(1)
        torch.manual_seed(1)
        found.append([regret(16, verify, draft, shown, generator) for _ in range(5)])
    assert_small(torch.tensor(found, dtype=F64), SCENARIOS)


def test_the_measure_tells_a_schedule_that_ignores_what_drafting_shows() -> None:
    # Verifying is dear and confidences are sharp: drafting only what predictions alone
    # would verify gives away several per cent.
    generator = torch.Generator().manual_seed(2)
    torch.manual_seed(2)
    lost = []
    for _ in range(NUM_BATCHES):
        conditional = predictions(generator, MAX_REQS)
        draft_ms, verify_ms = costs("steep", "cheap drafting", MAX_REQS)
        drawn = outcomes(conditional, CONCENTRATION["sharp"])
        blind = planned(conditional, float("inf"), draft_ms, verify_ms)
        best = max(
            realised_goodput(other, drawn, draft_ms, verify_ms) for other in every_vector(MAX_REQS)
        )
        lost.append(1.0 - realised_goodput(blind, drawn, draft_ms, verify_ms) / best)
    assert sum(lost) / len(lost) > 2 * MAX_MEAN_REGRET
