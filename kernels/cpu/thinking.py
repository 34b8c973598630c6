"""Ending a reasoning section whose token budget is used up.

The model opens such a section with one token sequence and closes it with another. Where the last
opening lies after the last closing, the request is thinking; once it has thought for its budget
the logits are forced to emit the closing sequence, token by token.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specbench.kernels.cpu.compilation import vectorised
from specbench.kernels.cpu.floats import Array, narrow

# vLLM's forcing logit: far above any real one, and finite in every dtype used.
FORCED_LOGIT = np.float32(1.0e9)


@vectorised()
def marker_at(tokens: Array, position: Any, end: Any, marker: Array) -> Any:
    """Whether ``marker`` lies at ``position`` within tokens[:end] (compiled)."""
    if position + marker.shape[0] > end:
        return False
    for k in range(marker.shape[0]):  # noqa: SIM110 (numba compiles no generators)
        if tokens[position + k] != marker[k]:
            return False
    return True


@vectorised()
def last_marker(tokens: Array, start: Any, stop: Any, end: Any, marker: Array) -> Any:
    """Last position in [start, stop) where ``marker`` lies within tokens[:end]; -1 if none."""
    for position in range(stop - 1, start - 1, -1):
        if marker_at(tokens, position, end, marker):
            return position
    return -1


@vectorised()
def update_markers(
    req_ids: Array,
    budgets: Array,
    all_token_ids: Array,
    total_lens: Array,
    last_starts: Array,
    last_ends: Array,
    scan_positions: Array,
    start_marker: Array,
    end_marker: Array,
    block_size: int,
) -> None:
    """Find the last opening and closing marker among each request's committed tokens.

    Continues from the last scan. A first scan goes backwards in blocks and stops at the first
    block with a marker: older ones cannot matter.

    Args:
        req_ids: [num_reqs].
        budgets: [max_num_reqs] tokens, negative for none.
        all_token_ids: [max_num_reqs, max_model_len].
        total_lens: [max_num_reqs].
        last_starts, last_ends, scan_positions: [max_num_reqs], updated; -1 for no marker.
        start_marker, end_marker: token ids.
        block_size: of the first scan.
    """
    for b in range(req_ids.shape[0]):
        req = req_ids[b]
        if budgets[req] < 0:
            continue
        tokens, total_len = all_token_ids[req], total_lens[req]
        first, start, end = scan_positions[req], last_starts[req], last_ends[req]
        if first > total_len:  # the request was reset to a shorter one
            first, start, end = 0, -1, -1
        if first == 0 and start < 0 and end < 0:
            high = total_len
            while high > 0 and start < 0 and end < 0:
                low = max(high - block_size, 0)
                start = last_marker(tokens, low, high, total_len, start_marker)
                end = last_marker(tokens, low, high, total_len, end_marker)
                high = low
        else:
            start = max(start, last_marker(tokens, first, total_len, total_len, start_marker))
            end = max(end, last_marker(tokens, first, total_len, total_len, end_marker))
        last_starts[req] = start
        last_ends[req] = end
        longest = max(start_marker.shape[0], end_marker.shape[0])
        scan_positions[req] = max(total_len - (longest - 1), 0)


@vectorised()
def _forced_index(tokens: Array, num_tokens: Any, closing: Array) -> Any:
    """Which token of ``closing`` comes next: the longest prefix that the tokens end with."""
    for length in range(min(closing.shape[0] - 1, num_tokens), 0, -1):
        if marker_at(tokens, num_tokens - length, num_tokens, closing[:length]):
            return length
    return 0


@vectorised()
def force_end(
    flat: Array,
    stride: int,
    num_rows: int,
    idx_mapping: Array,
    budgets: Array,
    all_token_ids: Array,
    total_lens: Array,
    input_ids: Array,
    local_positions: Array,
    last_starts: Array,
    last_ends: Array,
    start_marker: Array,
    end_marker: Array,
    closing: Array,
) -> None:
    """Force the next closing token in every row whose request has used up its budget.

    Row p of a request follows its committed tokens and p drafts, which are the input tokens of
    its rows 1..p. Arguments as in :func:`update_markers` and rows.py.
    """
    for i in range(num_rows):
        req = idx_mapping[i]
        if req < 0 or budgets[req] < 0:
            continue
        num_drafts, total_len = local_positions[i], total_lens[req]
        num_tokens = total_len + num_drafts
        tokens = np.empty(num_tokens, np.int64)
        tokens[:total_len] = all_token_ids[req, :total_len]
        for k in range(num_drafts):
            tokens[total_len + k] = input_ids[i - num_drafts + 1 + k]
        # Drafts may complete a marker that began among the committed tokens.
        begin = max(total_len - start_marker.shape[0] + 1, 0)
        start = last_marker(tokens, begin, num_tokens, num_tokens, start_marker)
        begin = max(total_len - end_marker.shape[0] + 1, 0)
        end = last_marker(tokens, begin, num_tokens, num_tokens, end_marker)
        start = start if start >= 0 else last_starts[req]
        end = end if end >= 0 else last_ends[req]
        num_reasoning = num_tokens - (start + start_marker.shape[0])
        if start >= 0 and end < start and num_reasoning >= budgets[req]:
            token = closing[_forced_index(tokens, num_tokens, closing)]
            flat[i * stride + token] = narrow(FORCED_LOGIT, flat)
