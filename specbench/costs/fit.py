"""From timed steps to a cost table: group, take medians, make monotone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from specbench.costs.table import ContextCosts, CostCurve, CostTable, FloatArray, Padding, validate
from specbench.errors import InputError

# Contexts grow while a profile run decodes, so one profiled length is a range. Profiled
# lengths are chosen at least a factor of two apart; half of that (on a log scale, 1.41)
# separates them and still holds a run that grows its context by 40%.
CONTEXT_BIN_RATIO = math.sqrt(2.0)

_SOURCE = "profile"


@dataclass(frozen=True)
class CostSample:
    """One timed step.

    Attributes:
        context_tokens: mean context length of the batch.
        num_tokens: tokens of the target's pass.
        num_drafted_tokens: tokens drafted in the step; 0 if the drafter was skipped.
        verify_ms, draft_ms: time of the target's pass and of drafting, in milliseconds.
    """

    context_tokens: float
    num_tokens: int
    num_drafted_tokens: int
    verify_ms: float
    draft_ms: float


def fit_cost_table(
    samples: Sequence[CostSample],
    fingerprint: dict[str, str],
    provenance: dict[str, Any],
    padding: Padding = "none",
    context_lengths: Sequence[int] | None = None,
) -> CostTable:
    """Fit both curves at every context length found in ``samples``.

    The first sample of every shape (context bin, pass size, drafted tokens) is dropped:
    a cold shape pays for allocation and kernel selection and was seen at 10 times its
    settled cost. The rest is reduced to one median per curve and size, and the medians
    are made monotone by isotonic regression weighted with their sample counts. Isotonic
    regression and not a running maximum: one size that was disturbed upwards would lift
    every larger size to its own height, whereas pooling shares the error out and stops
    at the first size that is truly dearer.

    Args:
        samples: in the order measured.
        fingerprint: identifies the engine configuration.
        provenance: extended with ``medians``: raw medians and counts of every group.
        padding: see :class:`CostTable`.
        context_lengths: the lengths that were meant to be profiled; every sample joins the
            nearest on a log scale. None finds the groups by gaps between the samples.

    Raises:
        InputError: a time is negative or not finite, a curve has fewer than 2 sizes, or
            the result does not pass :func:`validate`.
    """
    _check_samples(samples)
    lengths = [sample.context_tokens for sample in samples]
    bins = _nearest(lengths, context_lengths) if context_lengths else _context_bins(lengths)
    grouped: defaultdict[int, list[CostSample]] = defaultdict(list)
    for sample, index in zip(samples, bins, strict=True):
        grouped[index].append(sample)

    contexts, medians = [], []
    for index in sorted(grouped):
        warm = _without_first_of_shape(grouped[index])
        context_tokens = round(median(sample.context_tokens for sample in grouped[index]))
        verify = _medians((sample.num_tokens, sample.verify_ms) for sample in warm)
        draft = _medians((sample.num_drafted_tokens, sample.draft_ms) for sample in warm)
        where = f"{_SOURCE}, context {context_tokens}"
        contexts.append(
            ContextCosts(
                context_tokens,
                draft=_monotone_curve(draft, f"{where}, draft curve"),
                verify=_monotone_curve(verify, f"{where}, verify curve"),
            )
        )
        medians.append(
            {"context_tokens": context_tokens, "draft": _raw(draft), "verify": _raw(verify)}
        )
    table = CostTable(
        tuple(contexts), dict(fingerprint), {**provenance, "medians": medians}, padding
    )
    validate(table, _SOURCE)
    return table


def isotonic(values: Sequence[float], weights: Sequence[float]) -> FloatArray:
    """Weighted least-squares non-decreasing fit to ``values``: [n] to [n]."""
    # Imported here: scikit-learn takes over a second to import, and reading a table
    # does not need it.
    from sklearn.isotonic import IsotonicRegression

    positions = np.arange(len(values))
    fitted = IsotonicRegression().fit_transform(positions, values, sample_weight=weights)
    return np.asarray(fitted, dtype=np.float64)


_Medians = list[tuple[int, float, int]]  # (size, median ms, number of samples), by size


def _medians(points: Iterable[tuple[int, float]]) -> _Medians:
    by_size: defaultdict[int, list[float]] = defaultdict(list)
    for size, ms in points:
        by_size[size].append(ms)
    return [(size, median(times), len(times)) for size, times in sorted(by_size.items())]


def _raw(medians: _Medians) -> dict[str, list[Any]]:
    return {
        "tokens": [size for size, _, _ in medians],
        "median_ms": [ms for _, ms, _ in medians],
        "num_samples": [count for _, _, count in medians],
    }


def _monotone_curve(medians: _Medians, where: str) -> CostCurve:
    if len(medians) < 2:
        raise InputError(
            f"{where}: {len(medians)} size(s) left after dropping the first sample of every "
            f"shape, at least 2 are needed; profile more sizes, each at least twice"
        )
    fitted = isotonic([ms for _, ms, _ in medians], [count for _, _, count in medians])
    return CostCurve(tuple(size for size, _, _ in medians), tuple(float(ms) for ms in fitted))


def _without_first_of_shape(samples: Sequence[CostSample]) -> list[CostSample]:
    seen: set[tuple[int, int]] = set()
    warm = []
    for sample in samples:
        shape = (sample.num_tokens, sample.num_drafted_tokens)
        if shape in seen:
            warm.append(sample)
        seen.add(shape)
    return warm


def _context_bins(lengths: Sequence[float]) -> list[int]:
    """Bin number of every length; a bin starts where the ratio to its smallest member is passed."""
    numbers: dict[float, int] = {}
    start, number = -math.inf, -1
    for length in sorted(set(lengths)):
        if number < 0 or length > max(start, 1.0) * CONTEXT_BIN_RATIO:
            start, number = length, number + 1
        numbers[length] = number
    return [numbers[length] for length in lengths]


def _nearest(lengths: Sequence[float], nominal: Sequence[int]) -> list[int]:
    """Index into the sorted ``nominal`` nearest to every length, on a log scale."""
    log_nominal = np.log(np.maximum(sorted(nominal), 1))
    log_lengths = np.log(np.maximum(lengths, 1.0))
    distances = np.abs(log_lengths[:, None] - log_nominal[None, :])
    return [int(index) for index in distances.argmin(axis=1)]


def _check_samples(samples: Sequence[CostSample]) -> None:
    if not samples:
        raise InputError(f"{_SOURCE}: no samples; the profiled steps were not recorded")
    for index, sample in enumerate(samples):
        numbers = (sample.context_tokens, sample.verify_ms, sample.draft_ms)
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise InputError(
                f"{_SOURCE}, sample {index}: context and times must be finite and not negative, "
                f"got {sample}"
            )
