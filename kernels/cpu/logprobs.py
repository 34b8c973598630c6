"""What is reported about logits rows: log-probabilities, ranks, NaN counts, sampling masks.

Logits arrive flat (see rows.py) and are not changed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from specbench.kernels.cpu.compilation import parallel, vectorised
from specbench.kernels.cpu.floats import Array, widen
from specbench.kernels.cpu.rows import row_max_sumexp


@parallel
def log_softmax_at(out: Array, flat: Array, stride: int, vocab_size: int, token_ids: Array) -> None:
    """out[i, k] = log softmax(row i)[token_ids[i, k]], float32 [num_rows, num_tokens]."""
    for i in prange(out.shape[0]):
        row = flat[i * stride : i * stride + vocab_size]
        maximum, sumexp = row_max_sumexp(row, np.float32(1.0))
        log_sum = np.float32(np.log(sumexp))
        for k in range(out.shape[1]):
            out[i, k] = np.float32(widen(row[token_ids[i, k]]) - maximum) - log_sum


@vectorised()
def count_at_least(row: Array, value: Any) -> Any:
    """How many elements are at least ``value`` (compiled)."""
    count = np.int32(0)
    for v in range(np.uint64(row.shape[0])):
        count = np.int32(count + np.int32(widen(row[v]) >= value))
    return count


@parallel
def rank_rows(out: Array, flat: Array, stride: int, vocab_size: int, token_ids: Array) -> None:
    """out[i] = rank of token_ids[i] in row i: 1 for the largest, ties counted in full."""
    for i in prange(out.shape[0]):
        row = flat[i * stride : i * stride + vocab_size]
        out[i] = count_at_least(row, widen(row[token_ids[i]]))


@parallel
def count_nans(out: Array, flat: Array, stride: int, vocab_size: int) -> None:
    """out[i] = number of NaNs in row i."""
    for i in prange(out.shape[0]):
        row = flat[i * stride : i * stride + vocab_size]
        count = 0
        for v in range(np.uint64(vocab_size)):
            x = widen(row[v])
            count += x != x
        out[i] = count


@vectorised()
def fill_logprob_token_ids(
    out_token_ids: Array,
    out_valid: Array,
    sampled: Array,
    topk_ids: Array,
    idx_mapping: Array,
    num_custom: Array,
    custom_ids: Array,
    num_topk: int,
) -> None:
    """List the tokens whose log-probability each row reports: the sampled one, then its own.

    Args:
        out_token_ids: [num_rows, 1 + num_columns] int64, zeroed by the caller.
        out_valid: the same shape, bool, zeroed by the caller; True where a token was written.
        sampled: [num_rows].
        topk_ids: [num_rows, num_topk], used by requests without a list of their own.
        num_custom: [max_num_reqs] length of a request's own list.
        custom_ids: [max_num_reqs, capacity].
        num_topk: may be 0; then ``topk_ids`` is not read.
    """
    for i in range(out_token_ids.shape[0]):
        out_token_ids[i, 0] = sampled[i]
        out_valid[i, 0] = True
        req = idx_mapping[i]
        own = num_custom[req]
        for k in range(own if own > 0 else num_topk):
            out_token_ids[i, 1 + k] = custom_ids[req, k] if own > 0 else topk_ids[i, k]
            out_valid[i, 1 + k] = True


@vectorised()
def next_prompt_tokens(
    out: Array,
    query_start_loc: Array,
    idx_mapping: Array,
    num_computed: Array,
    all_token_ids: Array,
) -> None:
    """out[token row] = the request's token one position later (what its logits predict).

    Args:
        out: [num_tokens] int64.
        query_start_loc: [num_reqs + 1] first token row of each request.
        idx_mapping: [num_reqs].
        num_computed: [max_num_reqs] position of the request's first token row.
        all_token_ids: [max_num_reqs, max_model_len].
    """
    for b in range(idx_mapping.shape[0]):
        req = idx_mapping[b]
        start = query_start_loc[b]
        for k in range(query_start_loc[b + 1] - start):
            out[start + k] = all_token_ids[req, num_computed[req] + 1 + k]


@parallel
def compact_sampling_masks(
    flat: Array,
    stride: int,
    vocab_size: int,
    cu_num_logits: Array,
    num_sampled: Array,
    token_ids: Array,
    packed: Array,
    counts: Array,
    rows_per_request: int,
) -> None:
    """Which tokens each sampled row could have drawn: those with a finite logit.

    Args:
        cu_num_logits: [num_reqs + 1] first row of each request.
        num_sampled: [num_reqs] rows of each request that were sampled; the others get count 0.
        token_ids: output [num_reqs * rows_per_request, width], the first ``width`` such tokens.
        packed: output [.., ceil(vocab_size / 8)] uint8 bit set, lowest bit first.
        counts: output [..] int32.
    """
    for i in prange(counts.shape[0]):
        req = np.int64(i) // rows_per_request  # prange counts unsigned
        place = np.int64(i) % rows_per_request
        count = 0
        if place < num_sampled[req]:
            start = np.int64(cu_num_logits[req] + place) * stride
            packed[i, :] = 0
            for v in range(vocab_size):
                if np.isfinite(widen(flat[start + v])):
                    if count < token_ids.shape[1]:
                        token_ids[i, count] = v
                    packed[i, v >> 3] |= np.uint8(1 << (v & 7))
                    count += 1
        counts[i] = count
