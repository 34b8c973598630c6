"""What every registered policy must satisfy, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.policies import (
    POLICIES,
    ChainChoice,
    DraftBatch,
    Drafter,
    Policy,
    PreDraftBatch,
    StepCosts,
    VerifyBatch,
    make_policy,
)

FIXED = ("dspark:0", "dspark:3", "forespark:0", "forespark:2")
SPECS = [*POLICIES.names(), *FIXED]
MAX_TOKENS = 128

every_policy = pytest.mark.parametrize("spec", SPECS)
CHOOSING = [spec for spec in SPECS if make_policy(spec).drafter is Drafter.BOTH]
every_choosing_policy = pytest.mark.parametrize("spec", CHOOSING)


def step_costs(verify_slope_ms: float = 0.5) -> StepCosts:
    sizes = torch.arange(MAX_TOKENS + 1, dtype=torch.float64)
    return StepCosts(draft_ms=0.05 * sizes, verify_ms=10.0 + verify_slope_ms * sizes)


def make_batch(
    survival: torch.Tensor, capacity: torch.Tensor, max_budget: int = MAX_TOKENS
) -> VerifyBatch:
    num_reqs, num_steps = survival.shape
    return VerifyBatch(survival, capacity, num_reqs, num_reqs, num_reqs * num_steps, max_budget)


@st.composite
def batches(draw) -> VerifyBatch:
    num_reqs, num_steps = draw(st.integers(0, 6)), draw(st.integers(0, 8))
    confidence = st.sampled_from([0.0, 1.0]) | st.floats(0.0, 1.0)
    rows = [[draw(confidence) for _ in range(num_steps)] for _ in range(num_reqs)]
    capacity = [draw(st.integers(0, num_steps)) for _ in range(num_reqs)]
    survival = torch.tensor(rows, dtype=torch.float64).reshape(num_reqs, num_steps).cumprod(dim=1)
    return make_batch(survival, torch.tensor(capacity, dtype=torch.int32), draw(st.integers(0, 60)))


@every_policy
def test_a_policy_says_what_it_is(spec: str) -> None:
    policy = make_policy(spec)
    assert policy.name == spec.partition(":")[0]
    assert isinstance(policy.drafter, Drafter)
    assert isinstance(policy.needs_costs, bool)


@every_policy
@settings(deadline=None)  # machine load must not fail a test
@given(batch=batches(), slope=st.floats(0.0, 20.0))
def test_budget_and_lengths_stay_within_what_was_drafted(
    spec: str, batch: VerifyBatch, slope: float
) -> None:
    policy = make_policy(spec)
    budget = policy.verify_budget(batch, step_costs(slope))
    assert type(budget) is int
    assert 0 <= budget <= min(int(batch.capacity.sum()), batch.max_budget)
    lengths = policy.verify_lengths(batch.survival, batch.capacity, budget)
    assert lengths.shape == batch.capacity.shape
    assert lengths.dtype == batch.capacity.dtype
    assert ((lengths >= 0) & (lengths <= batch.capacity)).all()
    assert int(lengths.sum()) == budget


def pre_draft(batch: VerifyBatch, resolution: float = 0.3) -> PreDraftBatch:
    """The same survivals, predicted."""
    return PreDraftBatch(
        survival=batch.survival,
        capacity=batch.capacity,
        resolution=resolution,
        num_base_tokens=batch.num_base_tokens,
        num_sampling=batch.num_sampling,
        max_budget=batch.max_budget,
    )


@every_policy
@settings(deadline=None)  # machine load must not fail a test
@given(batch=batches(), slope=st.floats(0.0, 20.0), resolution=st.floats(0.0, 1.0))
def test_drafting_is_shared_out_whole_and_best_slots_first(
    spec: str, batch: VerifyBatch, slope: float, resolution: float
) -> None:
    policy = make_policy(spec)
    budget, gain_ms = policy.draft_budget(pre_draft(batch, resolution), step_costs(slope))
    assert type(budget) is int
    assert gain_ms >= 0
    assert 0 <= budget <= int(batch.capacity.sum())
    lengths = policy.draft_lengths(batch.survival, batch.capacity, budget)
    assert lengths.shape == batch.capacity.shape
    assert lengths.dtype == batch.capacity.dtype
    assert ((lengths >= 0) & (lengths <= batch.capacity)).all()
    assert int(lengths.sum()) == budget
    if spec in FIXED:
        return  # leaves slots on purpose
    # Work-conserving: no slot that is left out is likelier than one that was taken.
    steps = torch.arange(batch.survival.shape[1])
    taken = steps < lengths[:, None]
    left = ~taken & (steps < batch.capacity[:, None])
    if taken.any() and left.any():
        assert batch.survival[left].max() <= batch.survival[taken].min()


@every_policy
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_impossible_predictions_do_not_crash(spec: str, bad: float) -> None:
    policy = make_policy(spec)
    survival = torch.tensor([[0.9, bad, bad], [bad, 0.2, 0.1]], dtype=torch.float64)
    batch = make_batch(survival, torch.tensor([3, 2], dtype=torch.int32))
    budget = policy.draft_budget(pre_draft(batch), step_costs()).num_tokens
    assert 0 <= budget <= 5
    lengths = policy.draft_lengths(survival, batch.capacity, budget)
    assert ((lengths >= 0) & (lengths <= batch.capacity)).all()


@every_policy
@settings(deadline=None)  # machine load must not fail a test
@given(batch=batches())
def test_deciding_twice_gives_the_same_and_changes_no_input(spec: str, batch: VerifyBatch) -> None:
    policy, costs = make_policy(spec), step_costs()
    inputs = (batch.survival, batch.capacity, costs.draft_ms, costs.verify_ms)
    before = [tensor.clone() for tensor in inputs]
    decisions = []
    for _ in range(2):
        drafted = policy.draft_budget(pre_draft(batch), costs)
        draft_lengths = policy.draft_lengths(batch.survival, batch.capacity, drafted.num_tokens)
        budget = policy.verify_budget(batch, costs)
        lengths = policy.verify_lengths(batch.survival, batch.capacity, budget)
        decisions.append((drafted, draft_lengths.tolist(), budget, lengths.tolist()))
    assert decisions[0] == decisions[1]
    assert all(torch.equal(old, new) for old, new in zip(before, inputs, strict=True))


@every_policy
@pytest.mark.parametrize("shape", [(0, 7), (0, 0), (3, 0)])
def test_empty_batches_draft_and_verify_nothing(spec: str, shape: tuple[int, int]) -> None:
    policy = make_policy(spec)
    survival = torch.empty(shape, dtype=torch.float64)
    capacity = torch.zeros(shape[0], dtype=torch.int32)
    batch = make_batch(survival, capacity)
    assert policy.draft_budget(pre_draft(batch), step_costs()).num_tokens == 0
    assert policy.draft_lengths(survival, capacity, 0).tolist() == [0] * shape[0]
    assert policy.verify_budget(batch, step_costs()) == 0
    assert policy.verify_lengths(survival, capacity, 0).tolist() == [0] * shape[0]


@every_policy
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_impossible_survivals_do_not_crash(spec: str, bad: float) -> None:
    policy = make_policy(spec)
    survival = torch.tensor([[0.9, bad, bad], [bad, 0.2, 0.1]], dtype=torch.float64)
    capacity = torch.tensor([3, 2], dtype=torch.int32)
    budget = policy.verify_budget(make_batch(survival, capacity), step_costs())
    assert 0 <= budget <= 5
    lengths = policy.verify_lengths(survival, capacity, budget)
    assert ((lengths >= 0) & (lengths <= capacity)).all()


@pytest.mark.parametrize("spec", [spec for spec in SPECS if not make_policy(spec).needs_costs])
def test_policies_that_need_no_costs_take_none(spec: str) -> None:
    batch = make_batch(torch.full((2, 3), 0.5, dtype=torch.float64), torch.tensor([3, 1]))
    assert 0 <= make_policy(spec).verify_budget(batch, None) <= 4


# Sharing out runs on the device between two steps; reading a value back would stop the
# engine's asynchronous scheduling. Meta tensors have shapes but no values, so any read of
# one raises, whatever it is spelled.


def lengths_on_meta(policy: Policy, decide: str) -> torch.Tensor:
    survival = torch.empty(5, 7, device="meta")
    capacity = torch.empty(5, dtype=torch.int32, device="meta")
    lengths: torch.Tensor = getattr(policy, decide)(survival, capacity, 9)
    return lengths


@every_policy
def test_sharing_out_reads_nothing_back_to_the_host(spec: str) -> None:
    for decide in ("draft_lengths", "verify_lengths"):
        lengths = lengths_on_meta(make_policy(spec), decide)
        assert lengths.device.type == "meta"
        assert lengths.shape == (5,)


# Policies that run both drafters choose one chain per request, on the device as well.


def drafts_on(device: str, num_reqs: int = 5) -> DraftBatch:
    return DraftBatch(
        model_survival=torch.full((num_reqs, 7), 0.5, device=device).cumprod(dim=1),
        ngram_survival=torch.full((num_reqs, 16), 0.9, device=device).cumprod(dim=1),
        num_sampling=torch.full((), num_reqs, device=device),
        num_base_tokens=num_reqs,
        num_drafted=7 * num_reqs,
        max_budget=60,
    )


@every_choosing_policy
def test_choosing_reads_nothing_back_to_the_host(spec: str) -> None:
    costs = step_costs()
    on_meta = StepCosts(costs.draft_ms.to("meta"), costs.verify_ms.to("meta"))
    choice = make_policy(spec).choose_chains(drafts_on("meta"), on_meta)
    assert choice.use_ngram.device.type == "meta"
    assert choice.price.device.type == "meta"
    assert_choice_is_well_formed(choice, num_reqs=5)


@every_choosing_policy
@pytest.mark.parametrize("num_reqs", [0, 1, 5])
def test_a_choice_takes_every_chain_from_one_of_the_two(spec: str, num_reqs: int) -> None:
    batch, costs = drafts_on("cpu", num_reqs), step_costs()
    before = [t.clone() for t in (batch.model_survival, batch.ngram_survival, costs.verify_ms)]
    choice = make_policy(spec).choose_chains(batch, costs)
    assert_choice_is_well_formed(choice, num_reqs)
    assert 0 <= int(choice.budget) <= 60
    padded = torch.nn.functional.pad(batch.model_survival, (0, 9))
    expected = torch.where(choice.use_ngram[:, None], batch.ngram_survival, padded)
    assert torch.equal(choice.survival, expected)
    after = (batch.model_survival, batch.ngram_survival, costs.verify_ms)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@every_choosing_policy
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_choosing_among_impossible_survivals_does_not_crash(spec: str, bad: float) -> None:
    batch = drafts_on("cpu")
    batch.model_survival[1, 3:] = bad
    batch.ngram_survival[2] = bad
    choice = make_policy(spec).choose_chains(batch, step_costs())
    assert_choice_is_well_formed(choice, num_reqs=5)
    assert 0 <= int(choice.budget) <= 60


def assert_choice_is_well_formed(choice: ChainChoice, num_reqs: int) -> None:
    assert choice.use_ngram.dtype == torch.bool
    assert choice.use_ngram.shape == (num_reqs,)
    assert choice.survival.shape == (num_reqs, 16)
    assert choice.budget.shape == choice.price.shape == ()


HOST_READS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0, 0].item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "bool": lambda x: bool((x > 0).any()),
    "int": lambda x: int(x.sum()),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "boolean index": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x + 1),
}


@pytest.mark.parametrize("read", HOST_READS.values(), ids=HOST_READS.keys())
def test_the_check_above_notices_every_kind_of_read(
    read: Callable[[torch.Tensor], object],
) -> None:
    class Reading(Policy):
        name, drafter = "reading", Drafter.MODEL

        def verify_budget(self, batch: VerifyBatch, costs: StepCosts | None) -> int:
            return 0

        def verify_lengths(
            self, survival: torch.Tensor, capacity: torch.Tensor, budget: int
        ) -> torch.Tensor:
            read(survival)
            return capacity

    with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
        lengths_on_meta(Reading(), "verify_lengths")
