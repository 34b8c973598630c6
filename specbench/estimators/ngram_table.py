"""The calibrated survival table of n-gram chains, and the strata that index it.

Free of torch and scikit-learn: the engine reads tables without either, and puts the numbers
on its device through ``specbench.estimators.ngram_features``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from specbench.errors import InputError
from specbench.estimators.ngram_chains import NgramChains

IntArray = NDArray[np.int64]

# Known features, in the order in which they enter the stratum's index.
FEATURES = ("agreement", "recent_acceptance", "in_prompt", "sampling")
# More strata than this is no longer "a few discrete levels" but a damaged file.
MAX_STRATA = 4096

SINGLE_OCCURRENCE, ALL_AGREE, SOME_DISAGREE = range(3)


@dataclass(frozen=True)
class Stratification:
    """Discrete features that split chains beside their match length.

    ``agreement`` has three levels: one earlier occurrence; several that all continue alike;
    several that do not. ``recent_acceptance``: unknown, then one level more than there are
    edges, the highest at or above the last edge. ``in_prompt``: match in the response or
    prompt. ``sampling``: temperature 0 or above. The index counts mixed-radix, the last
    feature fastest.

    Attributes:
        features: a subset of :data:`FEATURES`, in that order; empty gives a single stratum.
        recent_edges: strictly increasing, within (0, 1]. The default asks whether at least
            half of what was recently proposed held: a plain split, not a tuned number.

    Raises:
        InputError: unknown, repeated or misordered feature, or bad edges.
    """

    features: tuple[str, ...] = ()
    recent_edges: tuple[float, ...] = (0.5,)

    def __post_init__(self) -> None:
        if self.features != tuple(name for name in FEATURES if name in self.features):
            raise InputError(
                f"strata features {', '.join(map(str, self.features)) or '(none)'}: each at most "
                f"once and in the order {', '.join(FEATURES)}"
            )
        edges = self.recent_edges
        in_range = all(0.0 < edge <= 1.0 for edge in edges)
        if not in_range or list(edges) != sorted(set(edges)):
            raise InputError(f"recent_edges must increase within (0, 1], got {edges}")
        if self.num_strata > MAX_STRATA:
            raise InputError(f"{self.num_strata} strata; at most {MAX_STRATA} make sense")

    @property
    def num_levels(self) -> tuple[int, ...]:
        """Levels of each feature, in the order of ``features``."""
        levels = {
            "agreement": 3,
            "recent_acceptance": 2 + len(self.recent_edges),
            "in_prompt": 2,
            "sampling": 2,
        }
        return tuple(levels[name] for name in self.features)

    @property
    def num_strata(self) -> int:
        """Product of the levels."""
        return prod(self.num_levels)

    def index(self, chains: NgramChains) -> IntArray:
        """[num_chains] stratum of every chain; the engine's twin is ``strata_of``.

        Raises:
            InputError: a feature's columns are missing.
        """
        result = np.zeros(len(chains), dtype=np.int64)
        for name, num_levels in zip(self.features, self.num_levels, strict=True):
            result = result * num_levels + self._level(name, chains)
        return result

    def _level(self, name: str, chains: NgramChains) -> IntArray:
        if name == "agreement" and chains.num_occurrences is not None:
            assert chains.num_agreeing is not None  # NgramChains takes both or neither
            is_unanimous = chains.num_agreeing >= chains.num_occurrences
            several = np.where(is_unanimous, ALL_AGREE, SOME_DISAGREE)
            level = np.where(chains.num_occurrences < 2, SINGLE_OCCURRENCE, several)
        elif name == "recent_acceptance" and chains.recent_acceptance is not None:
            # In float32, as on the device, so that a value on an edge falls the same way.
            recent = chains.recent_acceptance.astype(np.float32)
            passed = sum(
                ((recent >= np.float32(edge)).astype(np.int64) for edge in self.recent_edges),
                start=np.ones(len(chains), dtype=np.int64),
            )
            level = np.where(np.isnan(recent), 0, passed)
        elif name == "in_prompt" and chains.in_prompt is not None:
            level = chains.in_prompt.astype(np.int64)
        elif name == "sampling" and chains.temperature is not None:
            level = (chains.temperature > 0).astype(np.int64)
        else:
            raise InputError(
                f"strata use {name!r}, but the chains lack its columns; collect them or drop it"
            )
        return np.asarray(level, dtype=np.int64)


def available_features(chains: NgramChains) -> tuple[str, ...]:
    """Features whose columns the chains have, in the order of :data:`FEATURES`."""
    columns = {
        "agreement": chains.num_occurrences,
        "recent_acceptance": chains.recent_acceptance,
        "in_prompt": chains.in_prompt,
        "sampling": chains.temperature,
    }
    return tuple(name for name in FEATURES if columns[name] is not None)


@dataclass(frozen=True)
class NgramTable:
    """Survival of n-gram chains by stratum, match length and position.

    Attributes:
        survival: [num_strata, max_n + 1, num_positions] float32. Entry [s, m, j] is the
            probability that the first j + 1 tokens of the chain are all accepted. Rows
            below ``min_n`` are 0 (row 0: no match); non-decreasing in m, non-increasing
            in j.
        min_n, max_n: suffix lengths that the lookup tries.
        stratification: meaning of the first index.
    """

    survival: NDArray[np.float32]
    min_n: int
    max_n: int
    stratification: Stratification

    @property
    def num_positions(self) -> int:
        """Longest chain the table speaks about, in tokens."""
        return int(self.survival.shape[2])


def validate_table(table: NgramTable, source: str) -> None:
    """Raise InputError, naming ``source`` and the entry, unless the table keeps its promises."""
    if not 1 <= table.min_n <= table.max_n:
        raise InputError(f"{source}: need 1 <= min_n <= max_n, got {table.min_n} and {table.max_n}")
    survival, num_strata = table.survival, table.stratification.num_strata
    expected = (num_strata, table.max_n + 1)
    if survival.ndim != 3 or survival.shape[:2] != expected or survival.shape[2] < 1:
        raise InputError(
            f"{source}: survival has shape {list(survival.shape)}, expected "
            f"[{num_strata} strata, {table.max_n + 1} match lengths, at least 1 position]"
        )
    in_range = (survival >= 0) & (survival <= 1)
    _refuse(~in_range, source, "is not within 0 to 1")
    _refuse(survival[:, : table.min_n] != 0, source, "must be 0: no match is that short")
    _refuse(np.diff(survival, axis=1, prepend=0) < 0, source, "is below that of a shorter match")
    _refuse(np.diff(survival, axis=2, prepend=1) > 0, source, "exceeds the position before it")


def _refuse(is_bad: NDArray[np.bool_], source: str, what: str) -> None:
    if is_bad.any():
        stratum, match_length, position = (int(i) for i in np.argwhere(is_bad)[0])
        raise InputError(
            f"{source}: survival[{stratum}][{match_length}][{position}] {what}; calibrate again"
        )
