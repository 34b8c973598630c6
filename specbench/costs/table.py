"""Step-cost tables: what drafting and verifying cost on the engine that runs.

The cost of a step is modelled as ``draft(D) + verify(T)``: D tokens drafted, T tokens in
the target's pass (drafts under verification and all others), both at a context length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from specbench.errors import InputError

Padding = Literal["none"] | tuple[int, ...]
FloatArray = NDArray[np.float64]

# Far above any step an engine can batch (vLLM's max_num_batched_tokens is in the thousands);
# bounds the memory of a dense table to 80 MB per curve.
MAX_TOKENS = 10_000_000
# One hour. A longer step is a unit mistake, such as nanoseconds.
MAX_MS = 3_600_000.0
# The spread below which TensorRT-LLM's DSpark profiler refuses a table as noise.
FLAT_SPREAD = 0.02


@dataclass(frozen=True)
class CostCurve:
    """Measured cost by number of tokens.

    Attributes:
        tokens: strictly increasing sizes.
        ms: cost of each size in milliseconds, non-decreasing.
    """

    tokens: tuple[int, ...]
    ms: tuple[float, ...]

    def at(self, sizes: FloatArray) -> FloatArray:
        """Cost at any sizes: [n] tokens to [n] ms.

        Linear between measured sizes, constant below the first, extrapolated above the
        last by :meth:`last_slope`.
        """
        inside = np.interp(sizes, self.tokens, self.ms)
        beyond = np.maximum(sizes - self.tokens[-1], 0.0)
        return np.asarray(inside + beyond * self.last_slope(), dtype=np.float64)

    def last_slope(self) -> float:
        """Milliseconds per token past the last size.

        Taken from the last size that costs less than the last one, not blindly from the
        last two: isotonic fitting pools noisy neighbours into equal values, and a slope
        of zero at the end would make every token beyond look free.
        """
        for tokens, ms in zip(reversed(self.tokens), reversed(self.ms), strict=True):
            if ms < self.ms[-1]:
                return (self.ms[-1] - ms) / (self.tokens[-1] - tokens)
        return 0.0


@dataclass(frozen=True)
class ContextCosts:
    """Both curves at one context length.

    Attributes:
        context_tokens: context length they were measured at; 0 if it is not known.
        draft: by drafted tokens of the step; 0 tokens is the cost of skipping the drafter.
        verify: by tokens of the target's pass.
    """

    context_tokens: int
    draft: CostCurve
    verify: CostCurve


@dataclass(frozen=True)
class CostTable:
    """Step costs of one engine configuration.

    Attributes:
        contexts: one entry per profiled context length, increasing.
        fingerprint: everything the costs depend on (model, dtype, threads, ...), as text.
        provenance: how it was made; free, JSON-serialisable.
        padding: sizes of captured graphs up to which the engine pads the target's pass,
            increasing, or "none".
    """

    contexts: tuple[ContextCosts, ...]
    fingerprint: dict[str, str] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    padding: Padding = "none"

    def dense(
        self, context_tokens: float, max_tokens: int, max_drafted_tokens: int
    ) -> tuple[FloatArray, FloatArray]:
        """Tables to index by size, at a context length.

        Between two profiled contexts both curves are blended linearly; outside, the
        nearest profiled context holds.

        Returns:
            draft_ms [max_drafted_tokens + 1] and verify_ms [max_tokens + 1], float64, both
            non-decreasing; verify_ms is positive.

        Raises:
            ValueError: a size is negative or above ``MAX_TOKENS``.
        """
        for size in (max_tokens, max_drafted_tokens):
            if not 0 <= size <= MAX_TOKENS:
                raise ValueError(f"table size {size} is outside 0..{MAX_TOKENS}")
        draft_sizes = np.arange(max_drafted_tokens + 1, dtype=np.float64)
        verify_sizes = np.arange(max_tokens + 1, dtype=np.float64)
        draft_ms = np.zeros_like(draft_sizes)
        verify_ms = np.zeros_like(verify_sizes)
        for context, weight in self._blend(context_tokens):
            draft_ms += weight * context.draft.at(draft_sizes)
            verify_ms += weight * _padded_cost(context.verify, verify_sizes, self.padding)
        # Interpolation is monotone in exact arithmetic; rounding may break it by an ulp.
        return np.maximum.accumulate(draft_ms), np.maximum.accumulate(verify_ms)

    def _blend(self, context_tokens: float) -> list[tuple[ContextCosts, float]]:
        """The one or two profiled contexts around ``context_tokens``, weights summing to 1."""
        lengths = [context.context_tokens for context in self.contexts]
        above = int(np.searchsorted(lengths, context_tokens))
        if above == 0:
            return [(self.contexts[0], 1.0)]
        if above == len(lengths):
            return [(self.contexts[-1], 1.0)]
        low, high = lengths[above - 1], lengths[above]
        share = (context_tokens - low) / (high - low)
        return [(self.contexts[above - 1], 1.0 - share), (self.contexts[above], share)]


def _padded_cost(curve: CostCurve, sizes: FloatArray, padding: Padding) -> FloatArray:
    """Cost of a pass that runs padded to the next captured size; linear above the largest.

    Passes above the largest captured size run without a graph. That is a jump, so no
    value there is blended with one measured below it.
    """
    if padding == "none":
        return curve.at(sizes)
    captured = np.asarray(padding, dtype=np.float64)
    limit = padding[-1]
    next_captured = captured[np.minimum(np.searchsorted(captured, sizes), len(captured) - 1)]
    cost = curve.at(next_captured)
    beyond = sizes > limit
    cost[beyond] = curve.at(np.maximum(sizes[beyond], _first_above(curve, limit)))
    return cost


def _first_above(curve: CostCurve, limit: int) -> int:
    """Smallest measured size above ``limit``; ``limit`` itself if nothing was measured there."""
    return next((tokens for tokens in curve.tokens if tokens > limit), limit)


def breakpoints(curve: CostCurve, padding: Padding) -> CostCurve:
    """The curve whose plain linear interpolation equals the padded cost within its range.

    A stair becomes two points of equal cost. Used where a reader knows no padding.
    """
    if padding == "none":
        return curve
    sizes: list[int] = []
    previous = 0
    for captured in padding:
        sizes.extend({previous + 1, captured})
        previous = captured
    above = [tokens for tokens in curve.tokens if tokens > padding[-1]]
    sizes.extend([padding[-1] + 1, *above] if above else [])
    tokens = sorted(set(sizes))
    cost = _padded_cost(curve, np.asarray(tokens, dtype=np.float64), padding)
    return CostCurve(tuple(tokens), tuple(float(ms) for ms in cost))


def validate(table: CostTable, source: str) -> None:
    """Refuse a table that would mislead a policy.

    Args:
        table: what to check.
        source: file name or description that messages start with.

    Raises:
        InputError: names source, context, curve and index, and says what to do.
    """
    if not table.contexts:
        raise InputError(f"{source}: no context length in it; profile again")
    lengths = [context.context_tokens for context in table.contexts]
    _check_increasing(lengths, f"{source}, context lengths", minimum=0)
    if table.padding != "none":
        _check_increasing(table.padding, f"{source}, padding", minimum=1)
        if not table.padding:
            raise InputError(f'{source}: padding is an empty list; use "none" without graphs')
    for context in table.contexts:
        where = f"{source}, context {context.context_tokens}"
        _check_curve(context.draft, f"{where}, draft curve", verify=False)
        _check_curve(context.verify, f"{where}, verify curve", verify=True)


def _check_curve(curve: CostCurve, where: str, *, verify: bool) -> None:
    if len(curve.tokens) != len(curve.ms):
        raise InputError(f"{where}: {len(curve.tokens)} sizes but {len(curve.ms)} costs")
    if len(curve.tokens) < 2:
        raise InputError(
            f"{where}: {len(curve.tokens)} point(s), at least 2 are needed; profile more sizes"
        )
    _check_increasing(curve.tokens, where, minimum=1 if verify else 0)
    for index, ms in enumerate(curve.ms):
        _check_cost(ms, f"{where}, index {index} ({curve.tokens[index]} tokens)", verify=verify)
        if index and ms < curve.ms[index - 1]:
            raise InputError(
                f"{where}, index {index}: {curve.tokens[index]} tokens cost {ms:g} ms, less than "
                f"the {curve.ms[index - 1]:g} ms of {curve.tokens[index - 1]} tokens; "
                f"profile again with more repeats"
            )
    _check_not_flat(curve, where)


def _check_cost(ms: float, where: str, *, verify: bool) -> None:
    if not math.isfinite(ms):
        raise InputError(f"{where}: cost {ms} is not a finite number; profile again")
    if ms < 0:
        raise InputError(f"{where}: cost {ms:g} ms is negative; profile again")
    if verify and ms == 0:
        raise InputError(f"{where}: a target pass cannot cost 0 ms; profile again")
    if ms > MAX_MS:
        raise InputError(f"{where}: {ms:g} ms is over an hour; costs are in milliseconds")


def _check_not_flat(curve: CostCurve, where: str) -> None:
    first, last = curve.ms[0], curve.ms[-1]
    # Sizes that do not even double may truly cost the same (a memory-bound step).
    covers_doubling = curve.tokens[-1] >= 2 * max(curve.tokens[0], 1)
    if covers_doubling and last - first <= FLAT_SPREAD * first:
        raise InputError(
            f"{where}: flat, {curve.tokens[0]} to {curve.tokens[-1]} tokens cost {first:g} to "
            f"{last:g} ms (under {FLAT_SPREAD:.0%} apart); every further token would look free "
            f"and all would be taken; profile larger sizes on an idle machine"
        )


def _check_increasing(sizes: Sequence[int], where: str, *, minimum: int) -> None:
    for index, size in enumerate(sizes):
        if not minimum <= size <= MAX_TOKENS:
            raise InputError(
                f"{where}, index {index}: size {size} is outside {minimum}..{MAX_TOKENS}; "
                f"remove or correct it"
            )
        if index and size == sizes[index - 1]:
            raise InputError(f"{where}, index {index}: size {size} appears twice; keep one")
        if index and size < sizes[index - 1]:
            raise InputError(
                f"{where}, index {index}: size {size} follows {sizes[index - 1]}; sort by size"
            )
