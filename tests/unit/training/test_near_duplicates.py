"""Near duplicates: the exact Jaccard rule on everything that shares a band."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.errors import UsageError
from specbench.training.near_duplicates import (
    distinct_indices,
    jaccard,
    near_duplicates,
    without_shared_ends,
)


def text(seed: int, length: int = 200) -> list[int]:
    return np.random.default_rng(seed).integers(1000, size=length).tolist()


def edited(tokens: list[int], num_changes: int, seed: int = 99) -> list[int]:
    changed = list(tokens)
    for place in np.random.default_rng(seed).choice(len(tokens), num_changes, replace=False):
        changed[place] += 1000
    return changed


def brute_force_jaccard(left: list[int], right: list[int]) -> float:
    def shingles(tokens: list[int]) -> set[tuple[int, ...]]:
        if not tokens:
            return set()
        width = min(5, len(tokens))
        return {tuple(tokens[i : i + width]) for i in range(len(tokens) - width + 1)}

    a, b = shingles(left), shingles(right)
    return len(a & b) / len(a | b) if a | b else 1.0


@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.lists(st.integers(0, 3), max_size=40),
)
def test_jaccard_equals_sets_of_tuples(left: list[int], right: list[int]) -> None:
    assert jaccard(left, right) == brute_force_jaccard(left, right)


def test_the_earlier_of_two_near_texts_stays() -> None:
    first, other = text(1), text(2)
    near = edited(first, 3)
    assert jaccard(first, near) > 0.7
    assert distinct_indices([first, other, near, first]) == [0, 1]
    assert distinct_indices([near, other, first]) == [0, 1]


def test_threshold_decides_exactly() -> None:
    first = text(1)
    near = edited(first, 5)
    similarity = jaccard(first, near)
    assert 0.7 < similarity < 0.9
    assert distinct_indices([first, near], threshold=similarity) == [0]
    assert distinct_indices([first, near], threshold=similarity + 1e-9) == [0, 1]


def test_half_shared_text_is_not_near() -> None:
    common = text(1, 100)
    texts = [common + text(seed, 100) for seed in range(2, 12)]
    assert distinct_indices(texts) == list(range(10))


def test_training_texts_near_a_test_text_are_marked() -> None:
    test = [text(seed) for seed in range(5)]
    train = [text(10), edited(test[3], 4), text(11), test[0], test[1][:100]]
    assert near_duplicates(train, test).tolist() == [False, True, False, True, False]
    assert near_duplicates(train, []).tolist() == [False] * 5
    assert near_duplicates([], test).shape == (0,)


def test_near_pairs_are_found_as_often_as_stated() -> None:
    """At similarities of 0.72 and more, a miss has a chance of at most 1 in 10,000."""
    references = [text(seed) for seed in range(300)]
    copies = [edited(tokens, 6, seed) for seed, tokens in enumerate(references)]
    near = [jaccard(a, b) >= 0.72 for a, b in zip(references, copies, strict=True)]
    marks = near_duplicates(copies, references)
    assert sum(near) > 200
    assert marks[near].all()


def test_short_and_empty_texts() -> None:
    assert distinct_indices([[], [1], [1], [1, 2], [2, 1], []]) == [0, 1, 3, 4]


@given(st.lists(st.lists(st.integers(0, 1), max_size=12), max_size=12), st.integers(0, 5))
def test_no_two_kept_texts_are_equal_and_every_dropped_one_has_a_kept_neighbour(
    texts: list[list[int]], seed: int
) -> None:
    kept = distinct_indices(texts, seed=seed)
    assert len({tuple(texts[i]) for i in kept}) == len(kept)
    for index in set(range(len(texts))) - set(kept):
        assert any(jaccard(texts[index], texts[k]) >= 0.7 for k in kept if k < index)


def test_a_template_around_short_texts_no_longer_makes_them_near() -> None:
    header, footer = text(1, 40), text(2, 10)
    train, test = ([header + text(seed, 4) + footer for seed in seeds] for seeds in ([3, 4], [5]))
    assert near_duplicates(train, test).tolist() == [True, True]
    bare_train, bare_test = without_shared_ends(train, test)
    assert bare_train == [text(3, 4), text(4, 4)]
    assert bare_test == [text(5, 4)]
    assert near_duplicates(bare_train, bare_test).tolist() == [False, False]


@given(st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=1, max_size=6))
def test_shared_ends_are_cut_once_and_in_full(texts: list[list[int]]) -> None:
    (cut,) = without_shared_ends(texts)
    if len({tuple(tokens) for tokens in texts}) == 1:
        assert cut == texts
        return
    num_cut = {len(before) - len(after) for before, after in zip(texts, cut, strict=True)}
    assert len(num_cut) == 1
    # Texts that differed still do, and nothing shared by all is left at either end.
    assert len({tuple(tokens) for tokens in cut}) == len({tuple(tokens) for tokens in texts})
    for end in (0, -1):
        assert any(not tokens for tokens in cut) or len({tokens[end] for tokens in cut}) > 1


def test_same_seed_same_answer() -> None:
    texts = [text(seed % 40, 30) for seed in range(80)]
    assert distinct_indices(texts, seed=7) == distinct_indices(texts, seed=7) == list(range(40))


@pytest.mark.parametrize("threshold", [0.0, -1.0, 1.1])
def test_impossible_thresholds_are_refused(threshold: float) -> None:
    with pytest.raises(UsageError, match="above 0, at most 1"):
        distinct_indices([], threshold=threshold)
    with pytest.raises(UsageError, match="above 0, at most 1"):
        near_duplicates([], [], threshold=threshold)
