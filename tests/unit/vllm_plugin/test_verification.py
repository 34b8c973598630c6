"""The manager under a policy, constructed for real on stand-in request states."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plugin_decisions import BLOCK, MAX_REQS, SLOTS, make_decisions

from specbench.vllm_plugin.step_log import StepLog

pytest.importorskip("vllm", reason="extends vLLM's manager, which is not installed")

REQ_IDS = ["a", "b", "c"]


class Clock:
    def mark(self) -> int:
        return 0


def make_manager(policy: str, staleness: int):
    import vllm.v1.worker.cpu.shm  # noqa: F401  (stands in for CUDA streams; must come first)

    from specbench.vllm_plugin.chains import DraftChains
    from specbench.vllm_plugin.speculators import PolicyDrafting
    from specbench.vllm_plugin.verification import PolicyVerification

    decisions = make_decisions()
    decisions.switch(policy)
    drafting = PolicyDrafting()
    drafting.decisions = decisions
    drafting.chains = DraftChains(MAX_REQS, SLOTS, torch.device("cpu"))
    drafting.ngram = SimpleNamespace(forget=lambda slot: None)
    states = SimpleNamespace(
        num_speculative_steps=SLOTS,
        device=torch.device("cpu"),
        max_num_reqs=MAX_REQS,
        max_num_batched_tokens=512,
        req_id_to_index={name: index for index, name in enumerate(REQ_IDS)},
        num_computed_tokens_np=np.full(MAX_REQS, 50, dtype=np.int32),
        prefill_len=SimpleNamespace(np=np.full(MAX_REQS, 20, dtype=np.int32)),
    )
    return PolicyVerification(
        states,
        torch.zeros(MAX_REQS + 1, dtype=torch.int32),
        1,
        max_total_logits=1000,
        decisions=decisions,
        step_log=StepLog(Clock()),
        drafting=drafting,
        staleness=staleness,
    )


def lengths_of(manager) -> list[int]:
    """Draft tokens of each request when all slots of all requests are scheduled."""
    scheduled = dict.fromkeys(REQ_IDS, 1 + SLOTS)
    manager.get_num_tokens(scheduled, {name: [-1] * SLOTS for name in REQ_IDS})
    offsets, _, _ = manager.reallocate_drafts(REQ_IDS, torch.arange(len(REQ_IDS)))
    return (offsets.diff() - 1).tolist()


@pytest.mark.parametrize(
    ("policy", "longest"),
    [("dspark", BLOCK), ("dspark:12", BLOCK), ("ngram", 7), ("ngram:12", 12), ("hybrid", SLOTS)],
)
@pytest.mark.parametrize("staleness", [0, 1])
def test_slots_that_no_drafter_fills_are_never_verified(
    policy: str, longest: int, staleness: int
) -> None:
    """As at a request's first decode step, whose survivals are not known yet and count as 1."""
    manager = make_manager(policy, staleness)
    for slot in range(len(REQ_IDS)):
        manager.add_request(slot)
    assert lengths_of(manager) == [longest] * len(REQ_IDS)


def test_the_budget_goes_to_the_highest_survivals() -> None:
    manager = make_manager("dspark:2", 0)
    survival = manager.drafting.chains.survival
    survival[:3, :3] = torch.tensor([[0.9, 0.8, 0.7], [0.2, 0.1, 0.0], [0.5, 0.4, 0.3]])
    batch = SimpleNamespace(num_reqs=3, idx_mapping=torch.arange(3))
    manager.record_confidences(torch.zeros(MAX_REQS, SLOTS), batch)
    assert lengths_of(manager) == [2, 2, 2]
    manager.decisions.switch("dspark")
    assert lengths_of(manager)[0] >= lengths_of(manager)[1]
