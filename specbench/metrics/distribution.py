"""Location and tail of a sample of latencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Distribution:
    """Mean and percentiles of a sample, in the sample's unit."""

    mean: float
    median: float
    p90: float
    p99: float


def summarize(values: Sequence[float]) -> Distribution | None:
    """Mean, median, p90 and p99 of ``values``; None for an empty sample.

    Percentiles interpolate linearly between order statistics, as vLLM's benchmark does
    (``numpy.percentile``'s default).
    """
    if not values:
        return None
    median, p90, p99 = np.percentile(values, (50, 90, 99))
    return Distribution(float(np.mean(values)), float(median), float(p90), float(p99))
