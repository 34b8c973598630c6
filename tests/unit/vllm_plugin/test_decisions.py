"""What the shared decision object refuses, installs and hands to the policy."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from plugin_decisions import BLOCK, MAX_REQS, calibration, cost_table, make_decisions

from specbench.errors import UsageError
from specbench.policies import ChainChoice
from specbench.policies.hybrid import Hybrid
from specbench.vllm_plugin.installed import InstalledCalibration, InstalledCosts

CPU = torch.device("cpu")


@pytest.mark.parametrize("policy", ["ngram", "dspark:3", "hybrid"])
def test_without_a_drafter_only_plain_decoding_can_be_put_in_force(policy):
    decisions = make_decisions(num_slots=0, block_tokens=0)
    with pytest.raises(UsageError, match="started without a drafter"):
        decisions.switch(policy)
    decisions.switch("ar")
    assert decisions.policy.name == "ar"
    assert decisions.longest_chain == 0


@pytest.mark.parametrize("policy", ["dspark:3", "hybrid"])
def test_policies_that_draft_with_a_model_need_one(policy):
    with pytest.raises(UsageError, match="--drafter"):
        make_decisions(block_tokens=0).switch(policy)


def test_what_a_policy_weighs_must_have_been_installed():
    decisions = make_decisions(installed=False)
    with pytest.raises(UsageError, match="'dspark' needs step costs"):
        decisions.switch("dspark")
    with pytest.raises(UsageError, match="'hybrid' needs a calibration"):
        decisions.switch("hybrid")
    decisions.set_calibration(calibration())
    with pytest.raises(UsageError, match="'hybrid' needs step costs"):
        decisions.switch("hybrid")
    decisions.set_costs(cost_table())
    decisions.switch("hybrid")


def test_whoever_runs_both_drafters_needs_a_calibration(monkeypatch):
    """Also a policy of another distribution that does not say so: copies have no other price."""
    monkeypatch.setattr(Hybrid, "needs_calibration", False)
    with pytest.raises(UsageError, match="needs a calibration"):
        make_decisions(installed=False).switch("hybrid")


def test_a_refused_policy_leaves_the_one_in_force():
    decisions = make_decisions(installed=False)
    decisions.switch("ngram")
    with pytest.raises(UsageError):
        decisions.switch("dspark")
    assert decisions.policy.name == "ngram"


def test_costs_on_the_device_are_the_hosts():
    installed = InstalledCosts(cost_table(), 512, MAX_REQS * BLOCK, CPU)
    host, device = installed.on_host(130.0), installed.on_device(130.0)
    assert device.verify_ms.dtype == torch.float32
    assert device.draft_ms.shape[0] == MAX_REQS * BLOCK + 1
    torch.testing.assert_close(device.verify_ms.double(), host.verify_ms)
    assert device.verify_ms[1].item() == pytest.approx(10.0)
    assert installed.on_device(120.0) is device


def test_a_new_table_replaces_the_old_one():
    decisions = make_decisions()
    decisions.switch("dspark")
    survival = torch.full((2, BLOCK), 0.5, dtype=torch.float64)
    capacity = torch.full((2,), BLOCK)

    def budget():
        return decisions.verify_budget(
            survival, capacity, num_base_tokens=2, num_sampling=2, context_tokens=50.0
        )

    assert budget() == 2 * BLOCK
    table = cost_table()
    steep = table.contexts[0].verify.__class__(tokens=(1, 512), ms=(10.0, 51110.0))
    context = table.contexts[0].__class__(128, table.contexts[0].draft, steep)
    decisions.set_costs(table.__class__(contexts=(context,), padding="none"))
    assert budget() == 0


def test_temperatures_must_cover_the_drafters_block():
    with pytest.raises(UsageError, match="temperatures for 3 positions, the drafter drafts 7"):
        make_decisions().set_calibration(calibration((1.0, 1.1, 1.2)))


def test_confidences_are_tempered_only_if_the_calibration_says_so():
    confidence = torch.tensor([[0.8, 0.3]])
    raw = InstalledCalibration.install(calibration(), 2, CPU)
    assert raw.calibrated(confidence) is confidence
    tempered = InstalledCalibration.install(calibration((2.0, 2.0)), 2, CPU)
    expected = torch.sigmoid(torch.logit(confidence) / 2.0)
    torch.testing.assert_close(tempered.calibrated(confidence), expected)


@pytest.mark.parametrize(
    ("policy", "longest"),
    [("ar", 0), ("dspark", BLOCK), ("ngram:12", 12), ("hybrid", 16), ("forespark", BLOCK)],
)
def test_the_longest_chain_is_what_the_drafters_can_fill(policy, longest):
    decisions = make_decisions()
    decisions.switch(policy)
    assert decisions.longest_chain == longest


def test_chains_are_chosen_at_the_engines_costs():
    decisions = make_decisions()
    decisions.switch("hybrid")
    model = torch.tensor([[0.9, 0.8], [0.1, 0.0]])
    copied = torch.tensor([[0.2, 0.1], [0.7, 0.6]])
    choice = decisions.choose_chains(
        model, copied, num_sampling=torch.tensor(2), context_tokens=50.0
    )
    assert isinstance(choice, ChainChoice)
    assert choice.use_ngram.tolist() == [False, True]


def plan(decisions, samples=(True, True), slots=(1, 3), backlog_ms=0.0):
    return decisions.plan_drafts(
        np.array(slots),
        torch.tensor(slots, dtype=torch.int32),
        np.array(samples),
        context_tokens=50.0,
        backlog_ms=backlog_ms,
    )


def foresighted(**limits):
    decisions = make_decisions(**limits)
    decisions.switch("forespark")
    return decisions


def test_sizing_drafts_needs_a_drafter_that_can_and_its_acceptance():
    with pytest.raises(UsageError, match="cannot: it samples oddly"):
        make_decisions(why_whole_blocks="it samples oddly").switch("forespark")
    decisions = make_decisions()
    decisions.set_calibration(calibration(acceptance=None))
    with pytest.raises(UsageError, match="calibration of this drafter's acceptance"):
        decisions.switch("forespark")
    decisions.switch("hybrid")


def test_cheap_steps_draft_whole_blocks_of_those_that_emit():
    # 1 ms for 64 drafted tokens, 1 ms for 511 verified ones.
    found = plan(foresighted(), samples=(True, False))
    assert found.budget == BLOCK
    assert found.lengths.tolist() == [BLOCK, 0]
    assert found.lengths.dtype == torch.int32
    torch.testing.assert_close(found.survival[0], torch.full((BLOCK,), 0.8).cumprod(dim=0))


@pytest.mark.parametrize("staleness", [0, 1])
def test_what_was_rejected_is_drafted_less_by_the_host_a_step_later(staleness):
    decisions = foresighted(staleness=staleness)
    steep = cost_table()
    curve = steep.contexts[0].verify.__class__(tokens=(1, 512), ms=(10.0, 1032.0))
    context = steep.contexts[0].__class__(128, steep.contexts[0].draft, curve)
    decisions.set_costs(steep.__class__(contexts=(context,), padding="none"))
    slots, all_rejected = torch.tensor([1, 3]), torch.tensor([BLOCK, BLOCK])
    budgets = [plan(decisions).budget]
    for _ in range(8):
        decisions.observe(slots, torch.tensor([1, 1]), all_rejected)
        budgets.append(plan(decisions).budget)
    assert budgets[0] > 0
    assert budgets[1] < budgets[0] or staleness
    assert budgets[1] == budgets[0] or not staleness
    assert budgets[-1] == 0
    for slot in (1, 3):
        decisions.forget(slot)
    assert plan(decisions).budget == budgets[0]


def test_a_backlog_is_stored_once_it_has_held_up_as_much():
    decisions = foresighted()
    wanted = []
    own = decisions.policy.draft_budget

    def draft_budget(batch, costs):
        wanted.append(own(batch, costs))
        return wanted[-1]

    decisions.policy.draft_budget = draft_budget
    assert plan(decisions).budget == 2 * BLOCK
    gain_ms = wanted[0].gain_ms
    assert gain_ms > 0
    backlog_ms = 2.5 * gain_ms
    assert [plan(decisions, backlog_ms=backlog_ms).budget for _ in range(3)] == [0, 0, 2 * BLOCK]
    # Then it is gone, and a new one has to be earned again.
    assert plan(decisions, backlog_ms=backlog_ms).budget == 0
    assert plan(decisions, backlog_ms=0.0).budget == 2 * BLOCK


def test_verification_is_priced_by_what_was_drafted_and_bounded_by_it():
    decisions = foresighted()
    drafted = plan(decisions, samples=(True, False)).budget
    seen = []

    def verify_budget(batch, costs):
        seen.append((batch.num_drafted, batch.max_budget))
        return 0

    decisions.policy.verify_budget = verify_budget
    decisions.verify_budget(
        torch.ones(2, BLOCK, dtype=torch.float64),
        torch.full((2,), BLOCK),
        num_base_tokens=2,
        num_sampling=2,
        context_tokens=50.0,
    )
    assert seen == [(drafted, drafted)]


def test_a_step_cannot_verify_more_rows_of_logits_than_it_has():
    assert make_decisions().max_budget(3) == 997
    assert make_decisions(max_logits=2).max_budget(3) == 0


def test_propose_names_its_arguments_as_vllm_does():
    pytest.importorskip("vllm", reason="holds the method that is overridden")
    import vllm.v1.worker.cpu.shm  # noqa: F401  (must precede vllm.v1.worker.gpu)
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    from specbench.vllm_plugin.speculators import PolicyDSparkSpeculator, PolicyNgramSpeculator

    theirs = list(inspect.signature(BaseSpeculator.propose).parameters)
    for ours in (PolicyDSparkSpeculator, PolicyNgramSpeculator):
        parameters = inspect.signature(ours.propose).parameters.values()
        named = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert named == theirs[: len(named)]
        assert "num_sampled" in named
