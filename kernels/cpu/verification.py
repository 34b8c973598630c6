"""Which draft tokens are accepted: vLLM's rejection sampling as compiled loops.

Three rules: greedy (the draft equals the target's argmax), the ratio test (Leviathan, Kalman,
Matias: Fast Inference from Transformers via Speculative Decoding, 2023) and block verification
(Sun et al.: Block Verification Accelerates Speculative Decoding, 2024, arXiv:2403.10444). Row k of
a request holds the target's logits for the token that row k + 1 of ``draft_sampled`` proposes; a
draft of -1 is a placeholder and never accepted. Logits are float32, or bfloat16 bits (floats.py).

The token-by-token rules reduce a row over the vocabulary only when they reach it: most rows of a
step lie behind a rejection. Sums and logarithms are in double precision, so a decision can differ
from a GPU's only where float32 rounding makes it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import prange

from specbench.kernels.cpu.compilation import parallel, vectorised
from specbench.kernels.cpu.floats import Array, widen
from specbench.kernels.cpu.philox import acceptance_uniform
from specbench.kernels.cpu.rows import row_argmax, row_max_sumexp


class TargetRows(NamedTuple):
    """The target's logits, temperature applied.

    Attributes:
        flat: logits; row i starts at i * stride.
        stride: elements from row to row.
        vocab_size: tokens of a row that count.
    """

    flat: Array
    stride: int
    vocab_size: int


class DraftRows(NamedTuple):
    """The drafter's logits, before temperature.

    Attributes:
        flat: logits; step s of request r starts at r * request_stride + s * step_stride.
        request_stride: elements from request to request.
        step_stride: elements from step to step.
        known: False if there are no logits: every draft counts as certain.
    """

    flat: Array
    request_stride: int
    step_stride: int
    known: bool


class Requests(NamedTuple):
    """The requests of a step.

    Attributes:
        draft_sampled: [num_rows].
        cu_num_logits: [num_reqs + 1].
        idx_mapping: [num_reqs].
        temperature: [max_num_reqs].
    """

    draft_sampled: Array
    cu_num_logits: Array
    idx_mapping: Array
    temperature: Array


class BlockTerms(NamedTuple):
    """What block verification precomputes; empty arrays otherwise.

    Attributes:
        target_lse: [num_rows] logsumexp of the target's logits.
        draft_lse: [num_rows] logsumexp of the drafter's logits over temperature.
        joint_log_p: [num_rows] log of the running joint ratio, this row's draft included.
        residual_mass: [num_rows]; used if the drafter's logits are known.
    """

    target_lse: Array
    draft_lse: Array
    joint_log_p: Array
    residual_mass: Array


@vectorised()
def target_row(target: TargetRows, row: Any) -> Any:
    """The target's logits of a row [vocab_size]."""
    start = row * target.stride
    return target.flat[start : start + target.vocab_size]


@vectorised()
def draft_row(draft: DraftRows, request: Any, step: Any, vocab_size: Any) -> Any:
    """The drafter's logits of a request's step [vocab_size]."""
    start = request * draft.request_stride + step * draft.step_stride
    return draft.flat[start : start + vocab_size]


@vectorised()
def row_log_sum_exp(row: Array, temperature: Any) -> Any:
    """Logarithm of the sum of exp(x / temperature), float64."""
    maximum, sumexp = row_max_sumexp(row, temperature)
    return np.float64(maximum) + math.log(sumexp)


@parallel
def fill_log_sum_exps(
    target_lse: Array, draft_lse: Array, target: TargetRows, draft: DraftRows, requests: Requests
) -> None:
    """Fill the logsumexps of all rows with a draft, of requests that sample.

    Args:
        target_lse: output [num_rows].
        draft_lse: output [num_rows], if the drafter's logits are known.
        target: the target's rows.
        draft: the drafter's rows.
        requests: the step's requests.
    """
    for b in prange(requests.idx_mapping.shape[0]):
        request = requests.idx_mapping[b]
        temperature = requests.temperature[request]
        first = requests.cu_num_logits[b]
        if temperature != 0.0:
            for step in range(requests.cu_num_logits[b + 1] - first - 1):
                row = first + step
                target_lse[row] = row_log_sum_exp(target_row(target, row), 1.0)
                if draft.known:
                    logits = draft_row(draft, request, step, target.vocab_size)
                    draft_lse[row] = row_log_sum_exp(logits, temperature)


@vectorised()
def fill_joint_log_p(
    terms: BlockTerms, target: TargetRows, draft: DraftRows, requests: Requests
) -> None:
    """Fill ``terms.joint_log_p``: running sum of log p - log q, capped at 0 after every token.

    A placeholder carries the last value on; greedy requests are left out.

    Args:
        terms: logsumexps filled.
        target: the target's rows.
        draft: the drafter's rows.
        requests: the step's requests.
    """
    for b in range(requests.idx_mapping.shape[0]):
        request = requests.idx_mapping[b]
        temperature = np.float64(requests.temperature[request])
        if temperature == 0.0:
            continue
        first = requests.cu_num_logits[b]
        log_p = 0.0
        for step in range(requests.cu_num_logits[b + 1] - first - 1):
            row = first + step
            token = requests.draft_sampled[row + 1]
            if token >= 0:
                log_p += np.float64(widen(target_row(target, row)[token])) - terms.target_lse[row]
                if draft.known:
                    logits = draft_row(draft, request, step, target.vocab_size)
                    log_q = np.float64(widen(logits[token])) / temperature - terms.draft_lse[row]
                    log_p -= log_q
                log_p = min(log_p, 0.0)
            terms.joint_log_p[row] = log_p


@vectorised()
def accept_greedy(
    sampled: Array,
    target: TargetRows,
    requests: Requests,
    b: Any,
    uniforms: Array,
    rates: Array,
    synthetic: Any,
) -> Any:
    """Accept drafts while they equal the argmax (or the draw is below its synthetic rate).

    The argmax takes the first rejected draft's place in ``sampled`` [num_steps + 1].

    Returns:
        The number of accepted drafts.
    """
    first = requests.cu_num_logits[b]
    num_drafts = requests.cu_num_logits[b + 1] - first - 1
    for i in range(num_drafts):
        token = requests.draft_sampled[first + i + 1]
        if synthetic and token >= 0 and uniforms[i] < rates[i]:
            sampled[i] = token
            continue
        best = row_argmax(target_row(target, first + i))
        sampled[i] = best
        if synthetic or token != best:
            return i
    return num_drafts


@vectorised()
def accept_by_ratio(
    sampled: Array,
    target: TargetRows,
    draft: DraftRows,
    requests: Requests,
    b: Any,
    uniforms: Array,
    rates: Array,
    synthetic: Any,
) -> Any:
    """Accept each draft x with probability min(1, p(x) / q(x)) (or at its synthetic rate).

    Returns:
        The number of accepted drafts, and target's and drafter's logsumexp of the last tested row.
    """
    request = requests.idx_mapping[b]
    temperature = np.float64(requests.temperature[request])
    first = requests.cu_num_logits[b]
    num_drafts = requests.cu_num_logits[b + 1] - first - 1
    target_lse, draft_lse = 0.0, 0.0
    for i in range(num_drafts):
        token = requests.draft_sampled[first + i + 1]
        if token < 0:
            return i, target_lse, draft_lse
        logits = target_row(target, first + i)
        target_lse = row_log_sum_exp(logits, 1.0)
        log_p, log_q = np.float64(widen(logits[token])) - target_lse, np.float64(0.0)
        if draft.known:
            proposal = draft_row(draft, request, i, target.vocab_size)
            draft_lse = row_log_sum_exp(proposal, temperature)
            log_q = np.float64(widen(proposal[token])) / temperature - draft_lse
        passed = log_p > math.log(uniforms[i]) + log_q
        if synthetic:
            passed = uniforms[i] < rates[i]
        sampled[i] = token
        if not passed:
            return i, target_lse, draft_lse
    return num_drafts, target_lse, draft_lse


@vectorised()
def block_threshold(
    target: TargetRows, terms: BlockTerms, row: Any, following: Any, draft_known: Any
) -> Any:
    """Probability that block verification accepts the prefix that ends with this row's draft.

    With joint ratio p' and the next position's residual mass m (the sum of
    max(p' P(x) - Q(x), 0)), m / (m + 1 - p'); p' itself where no draft follows (-1). A certain
    draft x has m = p' (1 - P(x)).
    """
    joint = math.exp(terms.joint_log_p[row])
    if following < 0:
        return joint
    if draft_known:
        mass = np.float64(terms.residual_mass[row + 1])
    else:
        logit = np.float64(widen(target_row(target, row + 1)[following]))
        mass = np.float64(joint * (1.0 - math.exp(logit - terms.target_lse[row + 1])))
    rest = mass + 1.0 - joint
    return mass / rest if rest > 0.0 else 1.0


@vectorised()
def accept_block(
    sampled: Array,
    target: TargetRows,
    terms: BlockTerms,
    requests: Requests,
    b: Any,
    uniforms: Array,
    draft_known: Any,
) -> Any:
    """Accept the longest prefix whose draw passes its threshold.

    Returns:
        The number of accepted drafts, and target's and drafter's logsumexp of the rejected row
        (0 if none is rejected).
    """
    first = requests.cu_num_logits[b]
    num_drafts = requests.cu_num_logits[b + 1] - first - 1
    accepted = 0
    for i in range(num_drafts):
        row = first + i
        token = requests.draft_sampled[row + 1]
        if token < 0:
            break
        sampled[i] = token
        following = np.int64(requests.draft_sampled[row + 2]) if i < num_drafts - 1 else -1
        if uniforms[i] <= block_threshold(target, terms, row, following, draft_known):
            accepted = i + 1
    if accepted == num_drafts:
        return accepted, 0.0, 0.0
    rejected = first + accepted
    draft_lse = np.float64(terms.draft_lse[rejected]) if draft_known else 0.0
    return accepted, np.float64(terms.target_lse[rejected]), draft_lse


@parallel
def reject(
    sampled: Array,
    num_accepted: Array,
    target_lse: Array,
    draft_lse: Array,
    target: TargetRows,
    draft: DraftRows,
    requests: Requests,
    seeds: Array,
    pos: Array,
    rates: Array,
    terms: BlockTerms,
    synthetic: bool,
    whole_block: bool,
) -> None:
    """Decide for every request how many of its drafts are accepted.

    Args:
        sampled: output [num_reqs, num_steps + 1], accepted tokens and a greedy replacement.
        num_accepted: output [num_reqs].
        target_lse: output [num_reqs] logsumexp of the row where verification ended.
        draft_lse: output [num_reqs] likewise.
        target: the target's rows.
        draft: the drafter's rows.
        requests: the step's requests.
        seeds: [max_num_reqs].
        pos: [num_rows] position of each row, which keys its draw.
        rates: [num_steps] conditional acceptance rates, if synthetic.
        terms: filled, if whole_block.
        synthetic: accept at given rates instead of testing.
        whole_block: block verification instead of token by token.
    """
    for b in prange(num_accepted.shape[0]):
        request = requests.idx_mapping[b]
        first = requests.cu_num_logits[b]
        uniforms = np.empty(sampled.shape[1], np.float32)
        for i in range(requests.cu_num_logits[b + 1] - first - 1):
            uniforms[i] = acceptance_uniform(seeds[request], pos[first + i])
        target_lse[b], draft_lse[b] = 0.0, 0.0
        if requests.temperature[request] == 0.0:
            num_accepted[b] = accept_greedy(
                sampled[b], target, requests, b, uniforms, rates, synthetic
            )
        elif whole_block:
            num_accepted[b], target_lse[b], draft_lse[b] = accept_block(
                sampled[b], target, terms, requests, b, uniforms, draft.known
            )
        else:
            num_accepted[b], target_lse[b], draft_lse[b] = accept_by_ratio(
                sampled[b], target, draft, requests, b, uniforms, rates, synthetic
            )
