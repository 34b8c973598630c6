"""Vocabulary-sized reductions of logits rows: maximum, argmax, sum of exponentials.

A row is a one-dimensional array of float32, or of int16 holding bfloat16 bits (see floats.py).
Functions marked *compiled* are building blocks for other compiled code; the rest are called from
Python and run on several threads. Matrices arrive flat: row i starts at ``i * stride``, so that
padded and sliced matrices need no copy and rows are contiguous for the compiler.

Inner loops count with an unsigned integer: numba then drops its test for negative indices, which
makes bfloat16 loops three times as fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numba import prange

from specbench.kernels.cpu.compilation import REORDER, parallel, vectorised
from specbench.kernels.cpu.floats import Array, exp_nonpositive, key_value, ordered_key, widen

# Elements per step of the loops below: small enough for the first-level cache beside its
# scratch, large enough to fill the vector units; the Triton kernels use the same.
BLOCK_SIZE = 1024
NEGATIVE_INFINITY = np.float32(-np.inf)


@vectorised()
def block_max(block: Array) -> Any:
    """Largest value of a non-empty block, as float32 (compiled)."""
    best = ordered_key(block[0])
    for i in range(np.uint64(block.shape[0])):
        best = max(best, ordered_key(block[i]))
    return key_value(best)


@vectorised()
def first_index(block: Array, value: Any) -> Any:
    """Index of the first element equal to ``value`` (NaN equals NaN); 0 if none (compiled)."""
    for i in range(block.shape[0]):
        element = widen(block[i])
        if element == value or (value != value and element != element):
            return i
    return 0


@vectorised()
def row_max(row: Array) -> Any:
    """Largest value of a row, as float32; NaN if it holds a positive-signed NaN (compiled)."""
    return block_max(row)


@vectorised()
def row_argmax(row: Array) -> Any:
    """Index of the first largest value; that of a NaN, if NaN is the maximum (compiled)."""
    best = NEGATIVE_INFINITY
    best_start = 0
    for start in range(0, row.shape[0], BLOCK_SIZE):
        value = block_max(row[start : start + BLOCK_SIZE])
        if value != value:
            return start + first_index(row[start : start + BLOCK_SIZE], value)
        if value > best:
            best = value
            best_start = start
    return best_start + first_index(row[best_start : best_start + BLOCK_SIZE], best)


@vectorised(REORDER)
def block_sumexp(block: Array, maximum: Any, scale: Any) -> Any:
    """Sum of exp((x - maximum) * scale) over a block, float32 (compiled)."""
    total = np.float32(0.0)
    for i in range(np.uint64(block.shape[0])):
        total += exp_nonpositive((widen(block[i]) - maximum) * scale)
    return total


@vectorised()
def row_max_sumexp(row: Array, temperature: Any) -> Any:
    """Maximum m of x / temperature, and the sum of exp(x / temperature - m) (compiled).

    Returns:
        (float32, float64); logsumexp is m + log(sum). A row of -inf gives (-inf, 0).
    """
    maximum = row_max(row)
    if maximum == NEGATIVE_INFINITY:
        return maximum, 0.0
    scale = np.float32(1.0) / np.float32(temperature)
    total = 0.0
    for start in range(0, row.shape[0], BLOCK_SIZE):
        total += block_sumexp(row[start : start + BLOCK_SIZE], maximum, scale)
    return np.float32(maximum / np.float32(temperature)), total


@parallel
def argmax_rows(flat: Array, stride: int, num_columns: int, rows: Array, out: Array) -> None:
    """out[i] = argmax of row rows[i]."""
    for i in prange(rows.shape[0]):
        start = rows[i] * stride
        out[i] = row_argmax(flat[start : start + num_columns])


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """First index of the largest value of each row, as torch.argmax(-1), on all threads.

    torch's own is slow for bfloat16.

    Args:
        logits: [num_rows, vocab_size].

    Returns:
        int64 [num_rows].
    """
    flat, (stride,) = flat_view(readable(logits))
    out = np.empty(logits.shape[0], np.int64)
    argmax_rows(flat, stride, logits.shape[1], np.arange(logits.shape[0]), out)
    return torch.from_numpy(out)


def readable(logits: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a float32 copy of a kind the row kernels do not read."""
    supported = logits.dtype in (torch.float32, torch.bfloat16)
    if supported and (logits.shape[-1] == 1 or logits.stride(-1) == 1):
        return logits
    return logits.contiguous() if supported else logits.float().contiguous()


@contextmanager
def editable(logits: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor the row kernels can change in place; changes reach ``logits`` on exit."""
    view = readable(logits)
    yield view
    if view is not logits:
        logits.copy_(view)


def flat_view(tensor: torch.Tensor) -> tuple[Array, tuple[int, ...]]:
    """The memory a tensor spans as a flat array, without a copy, and its strides but the last.

    bfloat16 appears as int16. The last axis must be contiguous.
    """
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    if tensor.numel() == 0:
        return tensor.reshape(-1).numpy(), tensor.stride()[:-1]
    spanned = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((spanned,), (1,)).numpy(), tensor.stride()[:-1]
