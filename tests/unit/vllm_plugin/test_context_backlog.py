"""What a backlog of contexts keeps, drops and hands out."""

from __future__ import annotations

import pytest
import torch

from specbench.vllm_plugin import context_backlog
from specbench.vllm_plugin.context_backlog import ContextBacklog, ContextRows

PADDING = -1


def rows(*tokens: tuple[int, int, int]) -> ContextRows:
    """Each (owner, position, cache slot); the feature of a token is its position."""
    owners, positions, slots = torch.tensor(tokens, dtype=torch.int64).T
    return ContextRows(positions[:, None].float(), positions, slots[None], owners)


def backlog() -> ContextBacklog:
    return ContextBacklog(4, PADDING, torch.device("cpu"))


def stored(kept: ContextBacklog, max_tokens: int = 100) -> dict[int, float]:
    """What lies in each cache slot after everything was stored in turn."""
    cache: dict[int, float] = {}
    for chunk in kept.take(max_tokens):
        assert chunk.positions.shape[0] <= max_tokens
        named = [slot for slot in chunk.slots[0].tolist() if slot != PADDING]
        assert len(named) == len(set(named)), "a slot is written twice at once"
        cache.update(zip(chunk.slots[0].tolist(), chunk.features[:, 0].tolist(), strict=True))
    cache.pop(PADDING, None)
    return cache


def test_everything_comes_back_once_in_parts_of_bounded_size():
    kept = backlog()
    kept.add(rows((0, 0, 10), (0, 1, 11), (1, 0, 20)))
    kept.add(rows((0, 2, 12), (1, 1, PADDING)))
    assert kept.num_tokens == 5
    assert stored(kept, max_tokens=2) == {10: 0, 11: 1, 20: 0, 12: 2}
    assert kept.num_tokens == 0
    assert stored(kept) == {}


def test_what_lies_in_the_step_s_buffers_is_copied():
    kept, step = backlog(), rows((0, 3, 13))
    kept.add(step)
    step.slots.fill_(9)
    step.owners.fill_(2)
    assert stored(kept) == {13: 3}


def test_a_request_that_ended_costs_nothing_and_its_slot_serves_the_next():
    kept = backlog()
    kept.add(rows((0, 0, 10), (1, 0, 20)))
    kept.forget(0)
    kept.add(rows((0, 5, 30)))
    kept.drop_ended()
    assert kept.num_tokens == 2
    assert stored(kept) == {20: 0, 30: 5}


@pytest.mark.parametrize("max_tokens", [1, 3, 100])
def test_of_two_requests_that_had_a_block_the_later_one_counts(max_tokens):
    kept = backlog()
    kept.add(rows((0, 7, 10), (1, 1, 20)))
    # Request 0 has ended, but nobody took its slot; its block went to request 2.
    kept.add(rows((2, 3, 10), (1, 2, 21)))
    assert stored(kept, max_tokens) == {10: 3, 20: 1, 21: 2}


def test_it_is_full_by_memory(monkeypatch):
    monkeypatch.setattr(context_backlog, "MAX_BYTES", 8)
    kept = backlog()
    kept.add(rows((0, 0, 10), (0, 1, 11)))
    assert not kept.is_full
    kept.add(rows((0, 2, 12)))
    assert kept.is_full
    kept.forget(0)
    kept.drop_ended()
    assert not kept.is_full
