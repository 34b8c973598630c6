from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from specbench.policies.chain_choice import ChainChoice, choose_chains, prefers_ngram
from specbench.policies.price import (
    chain_value,
    goodput_optima,
    goodput_optimal_budget,
    marginal_price,
)

NUM_MODEL_STEPS, NUM_NGRAM_STEPS = 7, 16

# Machine load must not fail a test.
unhurried = settings(deadline=None)


def survivals(draw: st.DrawFn, num_reqs: int, num_steps: int) -> torch.Tensor:
    """[num_reqs, num_steps] float64; a row may end early, or be empty."""
    confidence = st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0.0, 1.0)
    level = [draw(confidence) for _ in range(num_reqs)]
    noise = draw(st.lists(confidence, min_size=num_steps, max_size=num_steps))
    length = [draw(st.integers(0, num_steps)) for _ in range(num_reqs)]
    rows = torch.tensor(level, dtype=torch.float64)[:, None]
    columns = torch.tensor(noise, dtype=torch.float64)[None]
    drafted = torch.arange(num_steps)[None] < torch.tensor(length, dtype=torch.int64)[:, None]
    return (0.7 * rows + 0.3 * columns).cumprod(dim=1) * drafted


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Model survivals, n-gram survivals and cost by verified tokens (convex or stepped)."""
    num_reqs = draw(st.integers(1, 8))
    model = survivals(draw, num_reqs, NUM_MODEL_STEPS)
    ngram = survivals(draw, num_reqs, NUM_NGRAM_STEPS)
    max_budget = draw(st.integers(0, num_reqs * NUM_NGRAM_STEPS + 5))
    stair = draw(st.sampled_from([1, 8, 32]))
    slope_ms = draw(st.floats(0.0, 3.0))
    tokens = torch.arange(max_budget + 1, dtype=torch.float64) + num_reqs
    return model, ngram, 5.0 + slope_ms * stair * (tokens / stair).ceil()


def choose(model: torch.Tensor, ngram: torch.Tensor, cost_ms: torch.Tensor) -> ChainChoice:
    return choose_chains(model, ngram, cost_ms=cost_ms, num_sampling=model.shape[0])


def goodput(survival: torch.Tensor, cost_ms: torch.Tensor) -> float:
    optima = goodput_optima(survival.flatten()[None], survival.shape[0], cost_ms)
    return float(optima.goodput)


def rows(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


class TestByHand:
    # Expected accepted tokens: 1.9 of the model's block, 2.4 of the copy.
    model = rows([0.9, 0.6, 0.4])
    ngram = rows([0.5, 0.5, 0.5, 0.5, 0.4])

    def test_a_chain_is_worth_what_it_earns_beyond_the_price(self) -> None:
        values = chain_value(self.model, torch.tensor([0.0, 0.5, 0.95], dtype=torch.float64))
        assert values[:, 0].tolist() == pytest.approx([1.9, 0.5, 0.0])

    def test_the_longer_chain_wins_while_slots_are_cheap_and_the_surer_when_dear(self) -> None:
        prices = torch.tensor([0.0, 0.45, 1.0], dtype=torch.float64)
        assert prefers_ngram(self.model, self.ngram, prices)[:, 0].tolist() == [True, False, False]
        flat = torch.full((6,), 10.0, dtype=torch.float64)
        assert choose(self.model, self.ngram, flat).use_ngram.tolist() == [True]
        # One slot of the model's gives 1.9 tokens in 1.8 ms; one of the copy's 1.5, none 1 in 1.
        choice = choose(self.model, self.ngram, 1.0 + 0.8 * torch.arange(6.0))
        assert choice.use_ngram.tolist() == [False]
        assert int(choice.budget) == 1

    def test_a_tie_goes_to_the_model(self) -> None:
        same = rows([0.5, 0.25])
        prices = torch.linspace(0, 1, 5, dtype=torch.float64)
        assert not prefers_ngram(same, same, prices).any()
        assert not choose(same, same, 10.0 + torch.arange(3.0)).use_ngram.any()

    def test_each_request_gets_its_own_and_the_shorter_chain_is_padded(self) -> None:
        model = rows([0.9, 0.8, 0.7], [0.2, 0.1, 0.0])
        ngram = rows([0.5, 0.0, 0.0, 0.0, 0.0], [0.9, 0.9, 0.9, 0.9, 0.9])
        choice = choose(model, ngram, 10.0 + 0.01 * torch.arange(11.0))
        assert choice.use_ngram.tolist() == [False, True]
        assert choice.survival.tolist() == [[0.9, 0.8, 0.7, 0.0, 0.0], [0.9] * 5]
        assert int(choice.budget) == 8

    def test_no_match_leaves_the_model_whatever_the_costs(self) -> None:
        model, nothing = torch.full((3, 7), 0.1), torch.zeros(3, 16)
        for slope in (0.0, 1.0, 100.0):
            assert not choose(model, nothing, 1.0 + slope * torch.arange(49.0)).use_ngram.any()

    def test_a_budget_the_engine_cannot_exceed_makes_slots_dear(self) -> None:
        # Two slots in all: the model's first two beat any two of the copy's.
        flat = torch.full((3,), 10.0, dtype=torch.float64)
        choice = choose(self.model, self.ngram, flat)
        assert choice.use_ngram.tolist() == [False]
        assert int(choice.budget) == 2

    def test_no_room_and_no_request(self) -> None:
        choice = choose(self.model, self.ngram, torch.tensor([10.0]))
        assert int(choice.budget) == 0
        nobody = choose(torch.empty(0, 7), torch.empty(0, 16), 10.0 + torch.arange(3.0))
        assert nobody.use_ngram.shape == (0,)
        assert nobody.survival.shape == (0, 16)
        assert int(nobody.budget) == 0
        assert 0 <= float(nobody.price) <= 1


class TestPrice:
    slots = torch.tensor([0.8, 0.6, 0.2])

    @pytest.mark.parametrize(("budget", "price"), [(0, 0.9), (1, 0.7), (2, 0.4), (3, 0.1)])
    def test_between_the_last_slot_in_and_the_first_out(self, budget: int, price: float) -> None:
        assert float(marginal_price(self.slots, torch.tensor(budget))) == pytest.approx(price)

    def test_of_a_choice(self) -> None:
        model = torch.tensor([[0.6, 0.2], [0.8, 0.0]])
        choice = choose(model, torch.zeros(2, 2), torch.tensor([10.0, 10.0, 10.0, 99.0, 99.0]))
        assert int(choice.budget) == 2
        assert float(choice.price) == pytest.approx(0.4)


@unhurried
@given(batches())
def test_never_worse_than_one_drafter_for_all(batch: Any) -> None:
    model, ngram, cost_ms = batch
    chosen = goodput(choose(model, ngram, cost_ms).survival, cost_ms)
    assert chosen >= goodput(model, cost_ms) * (1 - 1e-12)
    assert chosen >= goodput(ngram, cost_ms) * (1 - 1e-12)


@unhurried
@given(batches())
def test_the_outcome_is_what_the_choice_says(batch: Any) -> None:
    model, ngram, cost_ms = batch
    choice = choose(model, ngram, cost_ms)
    padded = torch.nn.functional.pad(model, (0, NUM_NGRAM_STEPS - NUM_MODEL_STEPS))
    for use, row, ours, theirs in zip(
        choice.use_ngram.tolist(), choice.survival, padded, ngram, strict=True
    ):
        assert torch.equal(row, theirs if use else ours)
    capacity = torch.full((model.shape[0],), NUM_NGRAM_STEPS)
    host = goodput_optimal_budget(choice.survival, capacity, model.shape[0], cost_ms)
    assert int(choice.budget) == host
    assert 0.0 <= float(choice.price) <= 1.0


@unhurried
@given(batches(), st.integers(-8, 8))
def test_the_unit_of_time_does_not_matter(batch: Any, power: int) -> None:
    # A power of two, which scales without rounding: the choice must be the very same.
    model, ngram, cost_ms = batch
    choice, scaled = choose(model, ngram, cost_ms), choose(model, ngram, cost_ms * 2.0**power)
    assert torch.equal(choice.use_ngram, scaled.use_ngram)
    assert torch.equal(choice.budget, scaled.budget)
    assert torch.equal(choice.price, scaled.price)


@unhurried
@given(batches(), st.randoms(use_true_random=False))
def test_the_order_of_requests_does_not_matter(batch: Any, random: Any) -> None:
    model, ngram, cost_ms = batch
    order = list(range(model.shape[0]))
    random.shuffle(order)
    choice, shuffled = choose(model, ngram, cost_ms), choose(model[order], ngram[order], cost_ms)
    assert torch.equal(choice.use_ngram[order], shuffled.use_ngram)
    assert torch.equal(choice.survival[order], shuffled.survival)
    assert torch.equal(choice.budget, shuffled.budget)


@unhurried
@given(batches(), st.data(), st.floats(0.0, 1.0))
def test_a_better_copy_is_never_dropped_for_it_at_a_fixed_price(
    batch: Any, data: Any, price: float
) -> None:
    model, ngram, _ = batch
    raised = torch.maximum(ngram, survivals(data.draw, ngram.shape[0], NUM_NGRAM_STEPS))
    prices = torch.tensor([price], dtype=torch.float64)
    before, after = (prefers_ngram(model, chain, prices) for chain in (ngram, raised))
    assert not (before & ~after).any()


@unhurried
@given(batches())
def test_requests_without_any_draft_change_nothing(batch: Any) -> None:
    # Rows still in their prompt: no drafts, no bonus token.
    model, ngram, cost_ms = batch
    idle = [torch.cat([chains, torch.zeros(2, chains.shape[1])]) for chains in (model, ngram)]
    num_reqs = model.shape[0]
    choice = choose(model, ngram, cost_ms)
    longer = choose_chains(*idle, cost_ms=cost_ms, num_sampling=torch.tensor(num_reqs))
    assert torch.equal(longer.use_ngram[:num_reqs], choice.use_ngram)
    assert not longer.use_ngram[num_reqs:].any()
    optima = goodput_optima(longer.survival.flatten()[None], num_reqs, cost_ms)
    assert goodput(choice.survival, cost_ms) == pytest.approx(float(optima.goodput))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_reqs", [1, 16, 512])
def test_both_precisions_and_any_batch_size(dtype: torch.dtype, num_reqs: int) -> None:
    generator = torch.Generator().manual_seed(num_reqs)
    model = torch.rand(num_reqs, 7, generator=generator, dtype=torch.float64).cumprod(1)
    ngram = torch.rand(num_reqs, 16, generator=generator, dtype=torch.float64).cumprod(1)
    cost_ms = 10.0 + (1.0 / num_reqs) * torch.arange(num_reqs * 16 + 1, dtype=torch.float64)
    choice = choose(model.to(dtype), ngram.to(dtype), cost_ms)
    assert choice.survival.dtype == dtype
    assert choice.budget.dtype == torch.int64
    exact = choose(model, ngram, cost_ms)
    assert goodput(choice.survival.double(), cost_ms) == pytest.approx(
        goodput(exact.survival, cost_ms), rel=1e-5
    )


class CountOperations(TorchDispatchMode):
    """Counts what would be a kernel on a device: every operation that is not a view."""

    def __init__(self) -> None:
        super().__init__()
        self.num_operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        # A view says so in its schema: its result aliases an argument that it does not write.
        alias = func._schema.returns[0].alias_info
        self.num_operations += alias is None or alias.is_write
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_reqs", [1, 64])
def test_the_number_of_operations_is_small_and_independent_of_the_batch(num_reqs: int) -> None:
    model, ngram = torch.full((num_reqs, 7), 0.5), torch.full((num_reqs, 16), 0.5)
    cost_ms = 10.0 + torch.arange(num_reqs * 16 + 1.0)
    with CountOperations() as counter:
        choose(model, ngram, cost_ms)
    assert counter.num_operations <= 23
