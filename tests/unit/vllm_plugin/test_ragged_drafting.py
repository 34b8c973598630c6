"""How lengths become rows of one batch; what is drafted is tested on the engine."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="holds the speculator that is extended")
import vllm.v1.worker.cpu.shm  # noqa: F401  (must precede vllm.v1.worker.gpu)

from specbench.vllm_plugin.ragged_drafting import RaggedDSparkSpeculator, _rows

BLOCK = 7
SPECULATOR = SimpleNamespace(num_query_per_req=BLOCK, num_speculative_steps=BLOCK)
lengths = st.lists(st.integers(0, BLOCK), min_size=1, max_size=9).filter(any)


@settings(deadline=None)  # machine load must not fail a test
@given(lengths)
def test_rows_are_the_drafted_tokens_request_by_request(drafted):
    rows = _rows(torch.tensor(drafted, dtype=torch.int32), sum(drafted))
    expected = [(n, i) for n, length in enumerate(drafted) for i in range(length)]
    found = list(zip(rows.request.tolist(), rows.position.tolist(), strict=True))
    assert found == expected
    assert rows.start.tolist() == np.cumsum([0, *drafted]).tolist()


@given(lengths)
def test_the_hosts_stand_in_has_the_right_sum_and_covers_the_longest_query(drafted):
    budget = sum(drafted)
    offsets = RaggedDSparkSpeculator._stand_in_offsets(SPECULATOR, len(drafted), budget)
    queries = np.diff(offsets)
    assert offsets.dtype == np.int32
    assert offsets[0] == 0
    assert offsets[-1] == budget
    assert queries.min() >= 0
    assert max(drafted) <= queries.max() <= BLOCK


@settings(deadline=None)
@given(lengths)
def test_every_request_that_drafts_beyond_a_position_is_sampled_there(drafted):
    known = torch.tensor(drafted, dtype=torch.int32)
    exact = RaggedDSparkSpeculator._counts(SPECULATOR, known, sum(drafted))
    assert exact == [sum(n > i for n in drafted) for i in range(max(drafted))]
    # Where the host does not know the lengths: no read, and never too few.
    bound = RaggedDSparkSpeculator._counts(SPECULATOR, known.to("meta"), sum(drafted))
    assert len(bound) >= len(exact)
    for least, count in zip(exact, bound, strict=False):
        assert least <= count <= len(drafted)


def test_rows_are_laid_out_without_a_host_read():
    rows = _rows(torch.empty(4, dtype=torch.int32, device="meta"), 11)
    assert rows.request.shape == rows.position.shape == (11,)
