"""The lookup against a search written from the definition, on random and edge-case texts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.kernels.ngram_lookup import ngram_lookup, ngram_lookup_reference


def by_definition(
    text: list[int], min_n: int, max_n: int, num_tokens: int
) -> tuple[list[int], int]:
    for n in range(min(max_n, len(text) - 1), min_n - 1, -1):
        suffix = text[len(text) - n :]
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == suffix:
                return text[start + n : start + n + num_tokens], n
    return [], 0


def run(function, rows, min_n, max_n, num_tokens):
    width = max(len(r) for r in rows) + 2
    ids = torch.full((len(rows), width), 7, dtype=torch.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row, dtype=torch.int32)
    lengths = torch.tensor([len(r) for r in rows], dtype=torch.int32)
    return function(ids, lengths, min_n=min_n, max_n=max_n, num_tokens=num_tokens)


@pytest.mark.parametrize("function", [ngram_lookup, ngram_lookup_reference])
@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 3), max_size=24), min_size=1, max_size=4),
    min_n=st.integers(1, 3),
    extra=st.integers(0, 4),
    num_tokens=st.integers(1, 9),
)
def test_equals_definition(function, rows, min_n, extra, num_tokens):
    max_n = min_n + extra
    drafts, counts, match_lengths = run(function, rows, min_n, max_n, num_tokens)
    for i, row in enumerate(rows):
        expected, n = by_definition(row, min_n, max_n, num_tokens)
        assert drafts[i].tolist() == expected + [-1] * (num_tokens - len(expected))
        assert counts[i] == len(expected)
        assert match_lengths[i] == n


def test_padding_after_the_text_is_never_matched():
    # 7 is the padding value: a suffix ending in 7 must only match inside the text.
    drafts, counts, _ = run(ngram_lookup, [[1, 7, 2, 7]], 1, 3, 4)
    assert counts.tolist() == [2]
    assert drafts[0, :2].tolist() == [2, 7]


def test_empty_and_single_token_rows_propose_nothing():
    _, counts, match_lengths = run(ngram_lookup, [[], [5]], 1, 4, 3)
    assert counts.tolist() == [0, 0]
    assert match_lengths.tolist() == [0, 0]


def test_rejects_an_empty_range_of_lengths():
    with pytest.raises(ValueError, match="min_n"):
        run(ngram_lookup, [[1, 1]], 3, 2, 1)
