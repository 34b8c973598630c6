"""Cycle share: exact small cases and invariants."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.metrics.repetition import cycle_mask, cycle_share, pooled_cycle_share

BLOCKS = st.lists(st.integers(0, 9), min_size=1, max_size=12)
SEQUENCES = st.lists(st.integers(0, 3), max_size=60)


def _mask_by_definition(ids: list[int], max_period: int, min_repeats: int) -> list[bool]:
    """Brute force: every start, every period, grow the periodic stretch one token at a time."""
    marked = [False] * len(ids)
    for period in range(1, max_period + 1):
        for start in range(len(ids)):
            end = start + period
            while end < len(ids) and ids[end] == ids[end - period]:
                end += 1
            if end - start >= min_repeats * period:
                marked[start + period : end] = [True] * (end - start - period)
    return marked


@pytest.mark.parametrize(
    ("ids", "share"),
    [
        ([], 0.0),
        ([7], 0.0),
        ([7, 7], 0.0),
        ([7, 7, 7], 2 / 3),
        ([1, 2, 1, 2], 0.0),
        ([1, 2, 1, 2, 1], 0.0),
        ([1, 2, 1, 2, 1, 2], 4 / 6),
        # The loop cut short by the token limit: the started fourth copy counts as well.
        ([1, 2, 1, 2, 1, 2, 1], 5 / 7),
        ([9, 8, 1, 2, 3, 1, 2, 3, 1, 2, 3, 7], 6 / 12),
        # Two separate loops with different periods.
        ([1, 1, 1, 5, 2, 3, 2, 3, 2, 3], (2 + 4) / 10),
        # A gap in the middle: two copies on either side are no cycle.
        ([1, 2, 1, 2, 9, 1, 2, 1, 2], 0.0),
    ],
)
def test_cycle_share_of_known_sequences(ids: list[int], share: float) -> None:
    assert cycle_share(ids) == pytest.approx(share, abs=1e-12)


def test_mask_marks_every_repeat_but_the_first_occurrence() -> None:
    mask = cycle_mask([5, 1, 2, 1, 2, 1, 2, 6])
    assert mask.tolist() == [False, False, False, True, True, True, True, False]


def test_longest_period_is_found_and_a_longer_one_is_not() -> None:
    block = list(range(64))
    assert cycle_share(block * 3) == pytest.approx(2 / 3)
    assert cycle_share([*block, 64] * 3) == 0.0
    assert cycle_share([*block, 64] * 3, max_period=65) == pytest.approx(2 / 3)


def test_min_repeats_is_respected() -> None:
    assert cycle_share([1, 2] * 3, min_repeats=4) == 0.0
    assert cycle_share([1, 2] * 2, min_repeats=2) == pytest.approx(0.5)


@pytest.mark.parametrize("arguments", [{"max_period": 0}, {"min_repeats": 1}])
def test_meaningless_limits_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        cycle_share([1, 2, 3], **arguments)


def test_two_dimensional_input_is_refused() -> None:
    with pytest.raises(ValueError, match="one sequence"):
        cycle_mask(np.zeros((2, 3), dtype=np.int64))


@given(SEQUENCES, st.integers(1, 8), st.integers(2, 4))
def test_mask_equals_the_definition(ids: list[int], max_period: int, min_repeats: int) -> None:
    mask = cycle_mask(ids, max_period=max_period, min_repeats=min_repeats)
    assert mask.tolist() == _mask_by_definition(ids, max_period, min_repeats)


@given(st.lists(st.integers(0, 10**6), unique=True, max_size=200))
def test_zero_when_no_token_occurs_twice(ids: list[int]) -> None:
    assert cycle_share(ids) == 0.0


@given(BLOCKS, st.integers(3, 20))
def test_pure_loop_counts_all_but_the_first_block(block: list[int], repeats: int) -> None:
    share = cycle_share(block * repeats)
    assert (repeats - 1) / repeats <= share + 1e-12
    assert share < 1.0


@given(BLOCKS, st.integers(1, 8), st.integers(0, 20))
def test_monotone_in_the_number_of_repeats(block: list[int], repeats: int, lead: int) -> None:
    prefix = list(range(100, 100 + lead))
    fewer = cycle_share(prefix + block * repeats)
    more = cycle_share(prefix + block * (repeats + 1))
    assert more >= fewer - 1e-12


@given(SEQUENCES, st.permutations([11, 40_000, 3, 77]))
def test_invariant_under_relabelling(ids: list[int], labels: list[int]) -> None:
    assert cycle_share([labels[i] for i in ids]) == cycle_share(ids)


@given(SEQUENCES)
def test_reversal_keeps_the_amount_of_a_single_period(ids: list[int]) -> None:
    forward = cycle_share(ids, max_period=1)
    assert cycle_share(ids[::-1], max_period=1) == forward


def test_pooled_share_weights_by_tokens() -> None:
    loop, clean = [1] * 10, list(range(90))
    assert pooled_cycle_share([loop, clean]) == pytest.approx(9 / 100)


@given(st.lists(SEQUENCES, max_size=5))
def test_pooled_share_is_the_weighted_mean(sequences: list[list[int]]) -> None:
    total = sum(map(len, sequences))
    expected = sum(len(s) * cycle_share(s) for s in sequences) / total if total else 0.0
    assert pooled_cycle_share(sequences) == pytest.approx(expected, abs=1e-12)
