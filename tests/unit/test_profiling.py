"""Which batches the cost profile measures."""

from __future__ import annotations

import pytest

from specbench.profiling import MAX_PREFILL_TOKENS, batch_sizes, cost_fingerprint


@pytest.mark.parametrize(
    ("max_num_seqs", "context", "expected"),
    [
        (16, 128, [1, 2, 4, 8, 16]),
        (12, 128, [1, 2, 4, 8, 12]),
        (1, 128, [1]),
        (16, 1024, [1, 4, 16]),
        (64, 1024, [1, 4, 16]),
        (4, 100_000, [1]),
    ],
)
def test_batch_sizes(max_num_seqs, context, expected):
    assert batch_sizes(max_num_seqs, context) == expected
    assert len(expected) == 1 or max(expected) * context <= MAX_PREFILL_TOKENS


def test_fingerprint_moves_with_what_moves_the_costs():
    facts = {"model_fingerprint": "a", "threads": 1, "max_model_len": 2048}
    base = cost_fingerprint(facts)
    assert cost_fingerprint({**facts, "threads": 2}) != base
    assert cost_fingerprint({**facts, "max_model_len": 512}) == base
    assert all(isinstance(value, str) for value in base.values())
