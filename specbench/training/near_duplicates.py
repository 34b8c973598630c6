"""Find texts that nearly repeat another one, so that a test measures something new.

Two texts are near when the sets of their token 5-grams have a Jaccard similarity of at least
a threshold. Candidates come from MinHash signatures cut into bands (Broder 1997, "On the
resemblance and containment of documents"; banding as in Leskovec, Rajaraman, Ullman, "Mining
of Massive Datasets", chapter 3); every candidate is then compared exactly, so a text is
never removed by a hash collision. A near pair is missed if no band of theirs agrees: at a
similarity s with chance (1 - s**4)**32, which is 2 in 10,000 at 0.7 and less above.

What all texts share, such as a chat template's header, counts as similarity: under the default
target's template two unrelated prompts of four words come to 0.6. Pass templated prompts
through :func:`without_shared_ends` first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike

from specbench.errors import UsageError

THRESHOLD = 0.7
# Long enough that unrelated texts share few, short enough that one edit changes few.
SHINGLE_TOKENS = 5
# See the top of the module for what these two mean for the pairs that are missed.
NUM_BANDS = 32
ROWS_PER_BAND = 4

Hashes = npt.NDArray[np.uint64]


def distinct_indices(
    texts: Sequence[ArrayLike], *, threshold: float = THRESHOLD, seed: int = 0
) -> list[int]:
    """Which texts to keep so that none left is near another one left.

    Earlier texts win: a text goes if it is near one that was kept before it.

    Args:
        texts: each a sequence of token ids.
        threshold: Jaccard similarity from which on two texts are near, in (0, 1].
        seed: of the hash functions.

    Returns:
        Indices of the kept texts, ascending.

    Raises:
        UsageError: a threshold outside (0, 1].
    """
    kept = _Collection(threshold, seed)
    indices = []
    for index, text in enumerate(texts):
        shingles = _shingles(text)
        signature = kept.signature(shingles)
        if not kept.has_near(shingles, signature):
            kept.add(shingles, signature)
            indices.append(index)
    return indices


def near_duplicates(
    texts: Sequence[ArrayLike],
    references: Iterable[ArrayLike],
    *,
    threshold: float = THRESHOLD,
    seed: int = 0,
) -> npt.NDArray[np.bool_]:
    """Which texts are near one of the references; [num_texts].

    For clean splits pass the training prompts as ``texts`` and the test prompts as
    ``references``, and drop what is marked from the training data.

    Args and errors: as :func:`distinct_indices`.
    """
    collection = _Collection(threshold, seed)
    for reference in references:
        shingles = _shingles(reference)
        collection.add(shingles, collection.signature(shingles))
    marks = np.zeros(len(texts), dtype=np.bool_)
    for index, text in enumerate(texts):
        shingles = _shingles(text)
        marks[index] = collection.has_near(shingles, collection.signature(shingles))
    return marks


def without_shared_ends(*groups: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Cut off the tokens with which all texts begin and those with which all end.

    Args:
        groups: collections of texts, for example training and test prompts; what is cut is
            common to all texts of all groups.

    Returns:
        The groups with the shortened texts. A single text, or equal ones, stay whole: what
        they share is then no template but the text itself.
    """
    distinct = {tuple(text) for group in groups for text in group}
    if len(distinct) < 2:
        return [list(group) for group in groups]
    # The extremes of the sorted texts differ first where any two texts do.
    prefix = _num_equal(min(distinct), max(distinct))
    reversed_rests = {text[prefix:][::-1] for text in distinct}
    suffix = _num_equal(min(reversed_rests), max(reversed_rests))
    return [[text[prefix : len(text) - suffix] for text in group] for group in groups]


def _num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """Tokens at the front that two texts share."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def jaccard(left: ArrayLike, right: ArrayLike) -> float:
    """Jaccard similarity of two texts' sets of 5-grams; 1.0 for two empty texts."""
    return _jaccard(_shingles(left), _shingles(right))


class _Collection:
    """Texts filed under the bands of their signatures."""

    def __init__(self, threshold: float, seed: int) -> None:
        if not 0 < threshold <= 1:
            raise UsageError(
                f"similarity threshold is {threshold}; give a number above 0, at most 1"
            )
        self._threshold = threshold
        rng = np.random.default_rng(seed)
        self._salts: Hashes = rng.integers(
            0, 2**64, size=(NUM_BANDS * ROWS_PER_BAND, 1), dtype=np.uint64
        )
        self._texts: list[Hashes] = []
        self._buckets: dict[tuple[int, bytes], list[int]] = defaultdict(list)

    def signature(self, shingles: Hashes) -> Hashes:
        """MinHash: the smallest hash of any shingle under each function; [num_functions]."""
        if not shingles.size:
            return np.zeros(len(self._salts), dtype=np.uint64)
        smallest: Hashes = _mix(shingles[None, :] ^ self._salts).min(axis=1)
        return smallest

    def add(self, shingles: Hashes, signature: Hashes) -> None:
        """File a text."""
        for key in _band_keys(signature):
            self._buckets[key].append(len(self._texts))
        self._texts.append(shingles)

    def has_near(self, shingles: Hashes, signature: Hashes) -> bool:
        """Whether some filed text is near."""
        candidates: set[int] = set()
        for key in _band_keys(signature):
            candidates.update(self._buckets.get(key, ()))
        return any(
            _jaccard(shingles, self._texts[other]) >= self._threshold
            for other in sorted(candidates)
        )


def _band_keys(signature: Hashes) -> list[tuple[int, bytes]]:
    bands = signature.reshape(NUM_BANDS, ROWS_PER_BAND)
    return [(number, band.tobytes()) for number, band in enumerate(bands)]


def _shingles(text: ArrayLike) -> Hashes:
    """Sorted distinct hashes of a text's 5-grams; a shorter text is one shingle as a whole."""
    tokens = np.asarray(text, dtype=np.int64).astype(np.uint64)
    if not tokens.size:
        return np.empty(0, dtype=np.uint64)
    width = min(SHINGLE_TOKENS, tokens.size)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, width)
    hashes: Hashes = np.full(len(windows), width, dtype=np.uint64)
    for column in windows.T:
        hashes = _mix(hashes ^ column)
    return np.unique(hashes)


def _mix(values: Hashes) -> Hashes:
    """Scramble 64-bit numbers one to one: the finaliser of SplitMix64 (Steele et al. 2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _jaccard(left: Hashes, right: Hashes) -> float:
    if not left.size and not right.size:
        return 1.0
    num_common = np.intersect1d(left, right, assume_unique=True).size
    return float(num_common / (left.size + right.size - num_common))
