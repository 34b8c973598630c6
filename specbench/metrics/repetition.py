"""How much of a model's output lies inside loops.

A small model decoding greedily falls into exact loops. Copying drafters predict a loop
almost perfectly, so looping output makes them look better than they are on a model that
does not loop; the share of such tokens therefore belongs beside every speed-up.

Feed *output* tokens only. Text copied from the prompt, as in code editing, is not a
cycle: it appears once in the output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

# Long enough for a looping sentence (20-40 tokens) or a short paragraph. A longer loop
# would need nearly 200 tokens to repeat three times, beyond the built-in output limits.
MAX_PERIOD_TOKENS = 64

# Two equal blocks in a row occur in ordinary prose ("very, very"); three rarely do.
MIN_REPEATS = 3


def cycle_mask(
    token_ids: Sequence[int] | NDArray[np.int64],
    *,
    max_period: int = MAX_PERIOD_TOKENS,
    min_repeats: int = MIN_REPEATS,
) -> NDArray[np.bool_]:
    """Mark the tokens that merely repeat a block already emitted.

    A stretch x[s:e] has period p if x[i] = x[i-p] for every i in [s+p, e). Where such a
    stretch holds at least ``min_repeats`` whole blocks (e - s >= min_repeats * p), every
    token after its first block, [s+p, e), is marked; a last copy that breaks off midway
    is part of the stretch. The marks of all periods 1..``max_period`` are united. This
    counts the runs (maximal repetitions) of string combinatorics with a larger minimum
    exponent; near-repeats that differ in one token, such as a counter, are not cycles.

    Args:
        token_ids: output tokens of one request, [num_tokens].
        max_period: longest block looked for, in tokens.
        min_repeats: whole blocks in a row that make a cycle, the first one included.

    Returns:
        One flag for every token, [num_tokens].

    Raises:
        ValueError: a limit is too small to mean anything, or the input has several rows.
    """
    if max_period < 1:
        raise ValueError("max_period must be at least 1")
    if min_repeats < 2:
        raise ValueError("min_repeats must be at least 2")
    ids = np.asarray(token_ids, dtype=np.int64)
    if ids.ndim != 1:
        raise ValueError("token_ids must be one sequence of tokens")
    mask = np.zeros(ids.size, dtype=np.bool_)
    for period in range(1, min(max_period, ids.size // min_repeats) + 1):
        starts, ends = _true_runs(ids[period:] == ids[:-period])
        long_enough = ends - starts >= (min_repeats - 1) * period
        for start, end in zip(starts[long_enough], ends[long_enough], strict=True):
            mask[start + period : end + period] = True
    return mask


def cycle_share(
    token_ids: Sequence[int] | NDArray[np.int64],
    *,
    max_period: int = MAX_PERIOD_TOKENS,
    min_repeats: int = MIN_REPEATS,
) -> float:
    """Share of the output tokens of one request that :func:`cycle_mask` marks, in [0, 1).

    An empty output holds no cycle: 0.0.
    """
    return pooled_cycle_share([token_ids], max_period=max_period, min_repeats=min_repeats)


def pooled_cycle_share(
    sequences: Iterable[Sequence[int] | NDArray[np.int64]],
    *,
    max_period: int = MAX_PERIOD_TOKENS,
    min_repeats: int = MIN_REPEATS,
) -> float:
    """Marked tokens of all requests over all their tokens: every token weighs the same.

    Cycles are looked for inside each request, never across two of them. Without any
    token the share is 0.0.
    """
    num_marked = num_tokens = 0
    for token_ids in sequences:
        mask = cycle_mask(token_ids, max_period=max_period, min_repeats=min_repeats)
        num_marked += int(mask.sum())
        num_tokens += mask.size
    return num_marked / num_tokens if num_tokens else 0.0


def _true_runs(flags: NDArray[np.bool_]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Half-open [start, end) of every maximal stretch of True; both arrays [num_runs]."""
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False))
    return edges[0::2], edges[1::2]
