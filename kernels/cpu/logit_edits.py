"""In-place changes of logits rows: temperature, min-p, penalties, bias, bad words, grammar.

Logits arrive flat (see rows.py): row i is ``flat[i * stride : i * stride + vocab_size]``, float32
or bfloat16 bits; arithmetic is float32 and is rounded once, when stored. ``idx_mapping[i]`` is
the request that row i belongs to; rows of request -1 (padding) are left alone. Parallel over rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from specbench.kernels.cpu.compilation import parallel, vectorised
from specbench.kernels.cpu.floats import Array, narrow, widen
from specbench.kernels.cpu.rows import NEGATIVE_INFINITY, row_max

ONE = np.float32(1.0)
ZERO = np.float32(0.0)


@parallel
def divide_by_temperature(
    flat: Array,
    stride: int,
    num_rows: int,
    vocab_size: int,
    idx_mapping: Array,
    temperatures: Array,
) -> None:
    """x /= temperature of the row's request; 0 (greedy) and 1 change nothing."""
    for i in prange(num_rows):
        req = idx_mapping[i]
        temperature = temperatures[req] if req >= 0 else ZERO
        if temperature != ZERO and temperature != ONE:
            row = flat[i * stride : i * stride + vocab_size]
            for v in range(np.uint64(vocab_size)):
                row[v] = narrow(widen(row[v]) / temperature, row)


@parallel
def mask_below_min_p(
    flat: Array, stride: int, num_rows: int, vocab_size: int, idx_mapping: Array, min_p: Array
) -> None:
    """-inf where the probability is under ``min_p`` times the row's largest; 0 changes nothing."""
    for i in prange(num_rows):
        req = idx_mapping[i]
        fraction = min_p[req] if req >= 0 else ZERO
        if fraction != ZERO:
            row = flat[i * stride : i * stride + vocab_size]
            threshold = np.float32(row_max(row) + np.log(np.float32(fraction)))
            for v in range(np.uint64(vocab_size)):
                if widen(row[v]) < threshold:
                    row[v] = narrow(NEGATIVE_INFINITY, row)


@vectorised()
def _penalise(
    row: Array, counts: Array, prompt_mask: Array, repetition: Any, frequency: Any, presence: Any
) -> None:
    """Apply the three penalties to one row.

    Repetition divides a positive logit, and multiplies another, by the penalty if the token is in
    the prompt or the output; frequency subtracts per occurrence in the output; presence once.
    """
    inverse = np.float32(ONE / repetition)
    for v in range(row.shape[0]):
        x = widen(row[v])
        count = np.float32(counts[v])
        present = ONE if counts[v] > 0 else ZERO
        if repetition != ONE and (counts[v] > 0 or (prompt_mask[v >> 5] >> (v & 31)) & 1):
            x = np.float32(x * (inverse if x > ZERO else repetition))
        x = np.float32(x - np.float32(frequency * count))
        row[v] = narrow(np.float32(x - np.float32(presence * present)), row)


@parallel
def apply_penalties(
    flat: Array,
    stride: int,
    num_rows: int,
    vocab_size: int,
    idx_mapping: Array,
    token_ids: Array,
    local_positions: Array,
    repetition: Array,
    frequency: Array,
    presence: Array,
    prompt_masks: Array,
    output_counts: Array,
) -> None:
    """Penalise each row by its request's prompt, output and earlier drafts of this step.

    Args:
        token_ids: [num_rows] input token of each row; those of a request's rows 1..p count as
            output for its row p.
        local_positions: [num_rows] p, the row's place within its request.
        repetition, frequency, presence: [max_num_reqs] float32; 1, 0, 0 change nothing.
        prompt_masks: [max_num_reqs, ceil(vocab_size / 32)] int32 bit sets.
        output_counts: [max_num_reqs, vocab_size] int32.
    """
    for i in prange(num_rows):
        req = idx_mapping[i]
        if req >= 0 and (repetition[req] != ONE or frequency[req] != ZERO or presence[req] != ZERO):
            counts = output_counts[req].copy()
            first = np.int64(i) - local_positions[i]  # prange counts unsigned
            for k in range(local_positions[i]):
                token = token_ids[first + k + 1]
                if 0 <= token < vocab_size:
                    counts[token] += 1
            row = flat[i * stride : i * stride + vocab_size]
            _penalise(
                row, counts, prompt_masks[req], repetition[req], frequency[req], presence[req]
            )


@vectorised()
def count_tokens(
    idx_mapping: Array,
    all_token_ids: Array,
    prompt_lens: Array,
    prefill_lens: Array,
    prompt_masks: Array,
    output_counts: Array,
) -> None:
    """Add each request's prompt tokens to its bit set and later prefill tokens to its counts.

    Args:
        idx_mapping: [num_reqs].
        all_token_ids: [max_num_reqs, max_model_len].
        prompt_lens, prefill_lens: [max_num_reqs]; a resumed request's prefill also covers
            output, from prompt_len on.
        prompt_masks, output_counts: as in :func:`apply_penalties`; the caller has cleared them.
    """
    for i in range(idx_mapping.shape[0]):
        req = idx_mapping[i]
        prefill_len = prefill_lens[req]
        for position in range(min(prompt_lens[req], prefill_len)):
            token = all_token_ids[req, position]
            prompt_masks[req, token >> 5] |= np.int32(np.uint32(1) << np.uint32(token & 31))
        for position in range(prompt_lens[req], prefill_len):
            output_counts[req, all_token_ids[req, position]] += 1


@vectorised()
def keep_only(row: Array, allowed: Array) -> None:
    """-inf everywhere but at the allowed token ids (compiled)."""
    kept = np.empty(allowed.shape[0], row.dtype)
    for k in range(allowed.shape[0]):
        kept[k] = row[allowed[k]]
    row[:] = narrow(NEGATIVE_INFINITY, row)
    for k in range(allowed.shape[0]):
        row[allowed[k]] = kept[k]


@vectorised()
def forbid(row: Array, tokens: Array, keep_if_alone: Any) -> None:
    """-inf at the tokens; undone where finite, on request, if it leaves only -inf (compiled)."""
    before = np.empty(tokens.shape[0], row.dtype)
    for k in range(tokens.shape[0]):
        before[k] = row[tokens[k]]
    for k in range(tokens.shape[0]):
        row[tokens[k]] = narrow(NEGATIVE_INFINITY, row)
    if keep_if_alone and row_max(row) == NEGATIVE_INFINITY:
        for k in range(tokens.shape[0]):
            if np.isfinite(widen(before[k])):
                row[tokens[k]] = before[k]


@parallel
def apply_bias(
    flat: Array,
    stride: int,
    num_rows: int,
    vocab_size: int,
    idx_mapping: Array,
    num_allowed: Array,
    allowed: Array,
    num_biases: Array,
    bias_tokens: Array,
    biases: Array,
    positions: Array,
    min_lens: Array,
    num_stops: Array,
    stops: Array,
    restore: Array,
    check_restore: bool,
) -> None:
    """Allowed tokens, then logit bias, then no stop token before the minimal length.

    Args:
        num_allowed, num_biases, num_stops: [max_num_reqs] how much of each list below is used.
        allowed, bias_tokens, stops: [max_num_reqs, capacity] int32 token ids.
        biases: [max_num_reqs, capacity] float32.
        positions: [num_rows] position of the row's input token; its output is one later.
        min_lens: [max_num_reqs] prompt plus minimal output length, tokens.
        restore: [max_num_reqs] nonzero: keep stop tokens if nothing else is left.
        check_restore: whether any request of the batch has ``restore``.
    """
    for i in prange(num_rows):
        req = idx_mapping[i]
        if req >= 0:
            row = flat[i * stride : i * stride + vocab_size]
            if num_allowed[req] > 0:
                keep_only(row, allowed[req, : num_allowed[req]])
            for k in range(num_biases[req]):
                token = bias_tokens[req, k]
                row[token] = narrow(np.float32(widen(row[token]) + biases[req, k]), row)
            if num_stops[req] > 0 and positions[i] + 1 < min_lens[req]:
                forbid(row, stops[req, : num_stops[req]], check_restore and restore[req] != 0)


@vectorised()
def forbid_bad_words(
    flat: Array,
    stride: int,
    num_rows: int,
    idx_mapping: Array,
    word_tokens: Array,
    word_offsets: Array,
    num_words: Array,
    all_token_ids: Array,
    prompt_lens: Array,
    total_lens: Array,
    input_ids: Array,
    local_positions: Array,
) -> None:
    """-inf at the last token of every word whose other tokens the output now ends with.

    The output of row p of a request is what is committed plus the drafts before the row, which
    are the input tokens of its rows 1..p.

    Args:
        word_tokens: [max_num_reqs, capacity] the words' tokens, one after another.
        word_offsets: [max_num_reqs, max_words + 1] where each word starts.
        num_words: [max_num_reqs].
        all_token_ids: [max_num_reqs, max_model_len].
        prompt_lens, total_lens: [max_num_reqs] tokens.
        input_ids, local_positions: [num_rows].
    """
    for i in range(num_rows):
        req = idx_mapping[i]
        if req < 0:
            continue
        first_row = i - local_positions[i]
        prompt_len = prompt_lens[req]
        num_committed = total_lens[req] - prompt_len
        num_output = num_committed + local_positions[i]
        for w in range(num_words[req]):
            start = word_offsets[req, w]
            num_prefix = word_offsets[req, w + 1] - start - 1
            if num_prefix > num_output:
                continue
            matches = True
            for k in range(num_prefix):
                place = num_output - num_prefix + k
                if place >= num_committed:
                    actual = input_ids[first_row + place - num_committed + 1]
                else:
                    actual = all_token_ids[req, prompt_len + place]
                if actual != word_tokens[req, start + k]:
                    matches = False
                    break
            if matches:
                token = word_tokens[req, start + num_prefix]
                flat[i * stride + token] = narrow(NEGATIVE_INFINITY, flat)


@parallel
def apply_grammar(
    flat: Array,
    stride: int,
    vocab_size: int,
    targets: Array,
    cu_num_logits: Array,
    bitmasks: Array,
    rows_per_request: int,
) -> None:
    """-inf where a grammar's bit set has a 0.

    Args:
        targets: [num_masks] request * rows_per_request + place within the request; a place that
            the request has no row for is skipped.
        cu_num_logits: [num_reqs + 1] first row of each request.
        bitmasks: [num_masks, ceil(vocab_size / 32)] int32; bit t % 32 of word t // 32 allows t.
    """
    for m in prange(targets.shape[0]):
        req = targets[m] // rows_per_request
        place = targets[m] % rows_per_request
        first = cu_num_logits[req]
        if place < cu_num_logits[req + 1] - first:
            start = np.int64(first + place) * stride
            row = flat[start : start + vocab_size]
            for v in range(min(vocab_size, 32 * bitmasks.shape[1])):
                if not (bitmasks[m, v >> 5] >> (v & 31)) & 1:
                    row[v] = narrow(NEGATIVE_INFINITY, row)
