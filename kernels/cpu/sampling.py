"""Sampling a batch of logits rows, and keeping the rows a later step must see again.

Logits arrive flat (see rows.py). ``idx_mapping[i]`` is the request of row i, -1 for padding.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from specbench.kernels.cpu.compilation import parallel, vectorised
from specbench.kernels.cpu.floats import Array, widen
from specbench.kernels.cpu.random import gumbel_argmax
from specbench.kernels.cpu.rows import row_argmax

ONE = np.float32(1.0)
ZERO = np.float32(0.0)


@parallel
def sample_rows(
    tokens: Array,
    values: Array,
    flat: Array,
    stride: int,
    vocab_size: int,
    idx_mapping: Array,
    temperatures: Array,
    seeds: Array,
    positions: Array,
    salt: int,
    apply_temperature: bool,
    fp64: bool,
) -> None:
    """Draw one token a row: Gumbel-max, or the argmax at temperature 0 and for padding.

    Args:
        tokens, values: outputs [num_rows, num_blocks]. The first column gets the token and its
            noisy logit, the others of ``values`` -inf: one block has seen the whole row.
        temperatures, seeds: [max_num_reqs].
        positions: [num_rows] int64, to which ``salt`` is added.
        apply_temperature: divide by the temperature; otherwise that has been done already.
        fp64: noise in float64.
    """
    for i in prange(tokens.shape[0]):
        row = flat[i * stride : i * stride + vocab_size]
        req = idx_mapping[i]
        temperature = temperatures[req] if req >= 0 else ZERO
        values[i, :] = -np.inf
        if temperature == ZERO:
            token = row_argmax(row)
            tokens[i, 0] = token
            values[i, 0] = widen(row[token])
        else:
            divisor = temperature if apply_temperature else ONE
            token, value = gumbel_argmax(row, divisor, seeds[req], positions[i] + salt, fp64)
            tokens[i, 0] = token
            values[i, 0] = value


@parallel
def keep_rows(
    kept: Array,
    req_stride: int,
    column_stride: int,
    columns: Array,
    flat: Array,
    stride: int,
    vocab_size: int,
    idx_mapping: Array,
) -> None:
    """kept[request of row i, its column, :vocab_size] = row i.

    Args:
        kept: flat [max_num_reqs, num_columns, >= vocab_size], of the rows' dtype.
        req_stride, column_stride: of its first two axes.
        columns: [num_rows], or [1] for one column for all.
    """
    for i in prange(idx_mapping.shape[0]):
        req = np.int64(idx_mapping[i])
        if req >= 0:
            column = np.int64(columns[min(np.int64(i), columns.shape[0] - 1)])
            start = req * req_stride + column * column_stride
            kept[start : start + vocab_size] = flat[i * stride : i * stride + vocab_size]


@vectorised()
def replay_tokens(
    sampled: Array,
    idx_mapping: Array,
    traces: Array,
    trace_lens: Array,
    total_lens: Array,
    prompt_lens: Array,
) -> None:
    """Replace each request's sampled token by its recorded one, while the record lasts.

    Args:
        sampled, idx_mapping: [num_reqs].
        traces: [max_num_reqs, max_model_len] recorded output tokens.
        trace_lens, total_lens, prompt_lens: [max_num_reqs] tokens.
    """
    for b in range(idx_mapping.shape[0]):
        req = idx_mapping[b]
        if req >= 0:
            step = total_lens[req] - prompt_lens[req]
            if 0 <= step < trace_lens[req]:
                sampled[b] = traces[req, step]
