"""The token after the accepted ones: a draw from the residual distribution, or the bonus token.

A rejected draft is replaced by a draw from max(p - q, 0), normalised; q is the drafter's
distribution, or certainty of the draft where its logits are unknown. The draw is a Gumbel-max
with the request's own noise (see random.py), over log max(p - q, 0) = a + log(1 - exp(b - a)) for
a = log p, b = log q.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import prange

from specbench.kernels.cpu.compilation import CONTRACT, REORDER, parallel, vectorised
from specbench.kernels.cpu.floats import Array, exp_nonpositive, narrow, widen
from specbench.kernels.cpu.random import (
    HIGH_WORD_DOMAIN,
    LOGIT_SLACK,
    MAX_NOISE_32,
    MAX_NOISE_64,
    fill_hashes,
    gumbel_argmax,
    hash_limit,
    noisy_value,
    stream,
)
from specbench.kernels.cpu.rows import BLOCK_SIZE, row_argmax
from specbench.kernels.cpu.verification import (
    BlockTerms,
    DraftRows,
    Requests,
    TargetRows,
    draft_row,
    target_row,
)

# exp_nonpositive errs by at most 4e-7 of its value: with this slack a difference of two
# exponentials is an upper bound.
EXP_SLACK = np.float32(1.0 + 2e-6)


@vectorised(CONTRACT)
def block_residual_bound(
    target: Array, draft: Array, target_lse: Any, draft_lse: Any, inverse_temperature: Any
) -> Any:
    """Upper bound of max(p - q, 0) over a block, float32 (compiled)."""
    bound = np.int32(0)
    for i in range(np.uint64(target.shape[0])):
        p = exp_nonpositive(min(widen(target[i]) - target_lse, np.float32(0.0)))
        scaled = widen(draft[i]) * inverse_temperature - draft_lse
        q = exp_nonpositive(min(scaled, np.float32(0.0)))
        # The bits of floats >= 0 are ordered as integers, whose maximum vectorises; below 0 all
        # are negative.
        bound = max(bound, np.float32(p * EXP_SLACK - q).view(np.int32))
    return np.int32(bound).view(np.float32)


@vectorised()
def residual_logit(
    target_logit: Any, draft_logit: Any, target_lse: Any, draft_lse: Any, temperature: Any
) -> Any:
    """log max(p - q, 0) of one token, in the float32 arithmetic of the GPU kernel (compiled)."""
    log_p = np.float32(target_logit - target_lse)
    log_q = np.float32(np.float32(draft_logit / temperature) - draft_lse)
    ratio = np.exp(np.float32(log_q - log_p))
    if not ratio < np.float32(1.0):
        return np.float32(-np.inf)
    return np.float32(log_p + np.float32(math.log1p(-np.float64(ratio))))


@vectorised()
def residual_argmax(
    target: Array,
    draft: Array,
    target_lse: Any,
    draft_lse: Any,
    temperature: Any,
    seed: Any,
    position: Any,
    fp64: Any,
) -> Any:
    """Draw from the residual distribution of two rows (compiled).

    As in random.gumbel_argmax most noise is never computed: a block's bound on p - q limits the
    hashes that can win. Blocks are visited from the one with the greatest bound on.

    Args:
        target: [vocab_size] row of the target.
        draft: [vocab_size] row of the drafter, before temperature.
        target_lse: float32, less the log of a joint ratio under block verification.
        draft_lse: float32.
        temperature: float32, > 0.
        seed: int64 of the request.
        position: int64.
        fp64: draw and add the noise in float64.

    Returns:
        (token, value); (0, -inf) if the residual has no mass.
    """
    num_blocks = (target.shape[0] + BLOCK_SIZE - 1) // BLOCK_SIZE
    bounds = np.empty(num_blocks, np.float32)
    for b in range(num_blocks):
        block = slice(b * BLOCK_SIZE, (b + 1) * BLOCK_SIZE)
        bounds[b] = block_residual_bound(
            target[block], draft[block], target_lse, draft_lse, np.float32(1.0) / temperature
        )
    state = stream(seed, position, HIGH_WORD_DOMAIN if fp64 else 0)
    max_noise = MAX_NOISE_64 if fp64 else MAX_NOISE_32
    hashes = np.empty(BLOCK_SIZE, np.uint32)
    token, best = np.int64(0), -np.inf
    first = np.argmax(bounds)
    for visit in range(num_blocks):
        b = (first + visit) % num_blocks
        if bounds[b] <= 0.0:
            continue
        gap = best - math.log(bounds[b])
        if gap > max_noise + LOGIT_SLACK * abs(best):
            continue
        # Nothing found yet: every token of the block is a candidate.
        limit = hash_limit(gap, best) if best > -np.inf else np.uint32(0xFFFFFFFF)
        start = b * BLOCK_SIZE
        size = min(BLOCK_SIZE, target.shape[0] - start)
        if fill_hashes(state, start, fp64, hashes[:size]) > limit:
            continue
        for i in range(size):
            if hashes[i] > limit:
                continue
            v = start + i
            logit = residual_logit(
                widen(target[v]), widen(draft[v]), target_lse, draft_lse, temperature
            )
            if logit == -np.inf:
                continue
            value = noisy_value(logit, v, seed, position, fp64)
            if value > best or (value == best and v < token):
                token, best = np.int64(v), value
    return token, best


@vectorised(REORDER)
def block_residual_mass(
    target: Array,
    draft: Array,
    target_lse: Any,
    draft_lse: Any,
    inverse_temperature: Any,
    joint: Any,
) -> Any:
    """Sum of max(joint * p - q, 0) over a block, float32 (compiled)."""
    total = np.float32(0.0)
    for i in range(np.uint64(target.shape[0])):
        p = exp_nonpositive(min(widen(target[i]) - target_lse, np.float32(0.0)))
        scaled = widen(draft[i]) * inverse_temperature - draft_lse
        q = exp_nonpositive(min(scaled, np.float32(0.0)))
        total += max(joint * p - q, np.float32(0.0))
    return total


@parallel
def residual_masses(
    out: Array,
    terms: BlockTerms,
    target: TargetRows,
    draft: DraftRows,
    rows: Array,
    row_request: Array,
    row_step: Array,
    temperature: Array,
) -> None:
    """Sum max(p' P(x) - Q(x), 0) over the vocabulary for each listed row.

    P and Q are the row's target and draft distributions, p' the joint ratio before it.

    Args:
        out: output [num_rows]; not part of ``terms``, whose arrays numba's parallel loops cannot
            write.
        terms: logsumexps and joint ratios filled.
        target: the target's rows.
        draft: the drafter's rows, known.
        rows: [n] rows behind the first of a request whose draft is not a placeholder.
        row_request: [num_rows].
        row_step: [num_rows].
        temperature: [max_num_reqs], > 0 for the listed rows.
    """
    for item in prange(rows.shape[0]):
        row = rows[item]
        request = row_request[row]
        logits = target_row(target, row)
        proposal = draft_row(draft, request, row_step[row], target.vocab_size)
        total = 0.0
        for start in range(0, target.vocab_size, BLOCK_SIZE):
            total += block_residual_mass(
                logits[start : start + BLOCK_SIZE],
                proposal[start : start + BLOCK_SIZE],
                np.float32(terms.target_lse[row]),
                np.float32(terms.draft_lse[row]),
                np.float32(1.0) / np.float32(temperature[request]),
                np.float32(math.exp(terms.joint_log_p[row - 1])),
            )
        out[row] = total


@vectorised()
def masked_argmax(row: Array, masked: Any, seed: Any, position: Any, fp64: Any) -> Any:
    """Draw from a row of logits with one token removed (compiled); (token, value)."""
    copy = row.copy()
    copy[masked] = narrow(np.float32(-np.inf), row)
    return gumbel_argmax(copy, 1.0, seed, position, fp64)


@parallel
def resample(
    tokens: Array,
    values: Array,
    target: TargetRows,
    draft: DraftRows,
    requests: Requests,
    row_request: Array,
    num_accepted: Array,
    target_lse: Array,
    draft_lse: Array,
    joint_log_p: Array,
    seeds: Array,
    pos: Array,
    fp64: bool,
    whole_block: bool,
) -> None:
    """Draw each request's token behind its accepted ones.

    A greedy request needs one only if all its drafts were accepted: the argmax.

    Args:
        tokens: output [num_reqs] int64.
        values: output [num_reqs] the winning noisy logits.
        target: the target's rows.
        draft: the drafter's rows.
        requests: the step's requests; their idx_mapping is not used.
        row_request: [num_rows] request row of each logits row; negative counts as greedy.
        num_accepted: [num_reqs].
        target_lse: [num_reqs] from verification.reject.
        draft_lse: [num_reqs] likewise.
        joint_log_p: [num_rows], if whole_block.
        seeds: [max_num_reqs].
        pos: [num_rows].
        fp64: draw and add the noise in float64.
        whole_block: the drafts were accepted by block verification.
    """
    for b in prange(num_accepted.shape[0]):
        row = np.int64(requests.cu_num_logits[b]) + num_accepted[b]
        is_bonus = row == requests.cu_num_logits[b + 1] - 1
        request = np.int64(row_request[row])
        temperature = np.float32(0.0)
        if request >= 0:
            temperature = np.float32(requests.temperature[request])
        logits = target_row(target, row)
        rejected = np.int64(-1) if is_bonus else np.int64(requests.draft_sampled[row + 1])
        if temperature == 0.0:
            if is_bonus:
                tokens[b] = row_argmax(logits)
                values[b] = widen(logits[tokens[b]])
        elif rejected < 0:
            tokens[b], values[b] = gumbel_argmax(logits, 1.0, seeds[request], pos[row], fp64)
        elif draft.known:
            joint = joint_log_p[row - 1] if whole_block and num_accepted[b] > 0 else 0.0
            tokens[b], values[b] = residual_argmax(
                logits,
                draft_row(draft, request, num_accepted[b], target.vocab_size),
                np.float32(target_lse[b] - joint),
                np.float32(draft_lse[b]),
                temperature,
                seeds[request],
                pos[row],
                fp64,
            )
        else:
            tokens[b], values[b] = masked_argmax(logits, rejected, seeds[request], pos[row], fp64)
