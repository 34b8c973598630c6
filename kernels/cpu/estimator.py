"""vLLM's online acceptance estimator as compiled loops: logistic regression fitted while serving.

The acceptance probability of draft position k is sigmoid(slope * feature + intercept[k]), the
feature being the log-odds of the drafter's most likely token. Each refit takes one damped Newton
step on the counts gathered since the last one. The sums are kept in double precision here and
rounded to the state's float32 at the end.
"""

from __future__ import annotations

import math

import numpy as np
from numba import prange

from specbench.kernels.cpu.compilation import parallel, vectorised
from specbench.kernels.cpu.floats import Array
from specbench.kernels.cpu.rows import row_max_sumexp


@vectorised()
def accumulate(
    info: Array,
    grad: Array,
    counts: Array,
    idx_mapping: Array,
    num_sampled: Array,
    num_rejected: Array,
    features: Array,
    predictions: Array,
    num_reqs: int,
) -> None:
    """Add one step's graded drafts to the statistics of the Newton step.

    Accepted drafts count as label 1, the first rejected one as label 0; later ones are unseen.

    Args:
        info: in and out [num_steps, 3], per position sums of w f^2, w f, w with w = p (1 - p).
        grad: in and out [num_steps, 2], per position sums of r f, r with r = label - p.
        counts: in and out [num_steps] graded drafts.
        idx_mapping: [>= num_reqs]; a negative index is skipped.
        num_sampled: [>= num_reqs] accepted drafts and the bonus token.
        num_rejected: [>= num_reqs].
        features: [max_num_reqs, num_steps] f at draft time.
        predictions: [max_num_reqs, num_steps] p at draft time.
        num_reqs: requests of this step.
    """
    for step in range(counts.shape[0]):
        sums = np.zeros(6, np.float64)
        for batch_idx in range(num_reqs):
            req = idx_mapping[batch_idx]
            num_accepted = max(num_sampled[batch_idx] - 1, 0)
            num_graded = min(num_accepted + 1, num_accepted + num_rejected[batch_idx])
            if req < 0 or step >= num_graded:
                continue
            feature = np.float64(features[req, step])
            prediction = np.float64(predictions[req, step])
            weight = prediction * (1.0 - prediction)
            residual = (1.0 if step < num_accepted else 0.0) - prediction
            sums[0] += weight * feature * feature
            sums[1] += weight * feature
            sums[2] += weight
            sums[3] += residual * feature
            sums[4] += residual
            sums[5] += 1.0
        for column in range(3):
            info[step, column] += sums[column]
        for column in range(2):
            grad[step, column] += sums[3 + column]
        counts[step] += sums[5]


@vectorised()
def refit(
    slope: Array,
    intercepts: Array,
    info: Array,
    grad: Array,
    counts: Array,
    ridge: float,
    damping: float,
) -> None:
    """Take one damped Newton step for slope and intercepts and clear the statistics.

    The system (X'WX + ridge I) step = X'(y - p) has arrowhead shape: the slope couples to every
    intercept, the intercepts only to the slope. Eliminating the intercepts gives the slope's
    step, back-substitution theirs. A parameter seen n times moves n / (n + damping) of its step.
    Steps that are not a number, or would make the slope negative, are dropped.

    Args:
        slope: in and out [1].
        intercepts: in and out [num_steps].
        info: in, cleared [num_steps, 3] from accumulate.
        grad: in, cleared [num_steps, 2] from accumulate.
        counts: in, cleared [num_steps].
        ridge: added to the diagonal.
        damping: observations at which a step is halved.
    """
    schur, right, total = ridge, 0.0, 0.0
    for k in range(counts.shape[0]):
        diagonal = np.float64(info[k, 2]) + ridge
        coupling = np.float64(info[k, 1]) / diagonal
        schur += np.float64(info[k, 0]) - coupling * np.float64(info[k, 1])
        right += np.float64(grad[k, 0]) - coupling * np.float64(grad[k, 1])
        total += np.float64(counts[k])
    slope_step = right / schur * (total / (total + damping))
    if not slope[0] + slope_step >= 0.0:
        slope_step = 0.0
    slope[0] += slope_step
    for k in range(counts.shape[0]):
        seen = np.float64(counts[k])
        step = (np.float64(grad[k, 1]) - np.float64(info[k, 1]) * slope_step) / (
            np.float64(info[k, 2]) + ridge
        )
        step *= seen / (seen + damping)
        if not math.isnan(step):
            intercepts[k] += step
    info[:] = 0.0
    grad[:] = 0.0
    counts[:] = 0.0


@parallel
def row_statistics(
    maximum: Array,
    sumexp: Array,
    flat: Array,
    stride: int,
    vocab_size: int,
    idx_mapping: Array,
    temperature: Array,
    num_tokens: int,
) -> None:
    """Reduce each row of draft logits, over its request's temperature.

    Args:
        maximum: output [>= num_tokens]; -inf for a row without a request.
        sumexp: output [>= num_tokens] sum of exp(x - maximum); 0 for a row without a request.
        flat: logits, float32 or bfloat16 bits; row i starts at i * stride.
        stride: elements from row to row.
        vocab_size: tokens of a row.
        idx_mapping: [>= num_tokens] request row, negative for none.
        temperature: [max_num_reqs]; 0 (greedy) counts as 1.
        num_tokens: rows.
    """
    for row in prange(num_tokens):
        request = idx_mapping[row]
        maximum[row], sumexp[row] = -np.inf, 0.0
        if request >= 0:
            divisor = temperature[request] if temperature[request] > 0.0 else np.float32(1.0)
            logits = flat[row * stride : row * stride + vocab_size]
            maximum[row], sumexp[row] = row_max_sumexp(logits, divisor)


@vectorised()
def predict(
    features: Array,
    predictions: Array,
    confidence: Array,
    slope: Array,
    intercepts: Array,
    sumexp: Array,
    idx_mapping: Array,
    steps: Array,
    per_token_step: bool,
    num_tokens: int,
    num_steps: int,
    max_log_odds: float,
) -> None:
    """Turn the drafter's confidence at each row into an acceptance probability.

    With m the greatest logit, the feature is log(q / (1 - q)) of its token:
    -log(sum over all tokens of exp(x - m), less the 1 of the token itself), clamped.

    Args:
        features: output [max_num_reqs, num_steps].
        predictions: output [max_num_reqs, num_steps].
        confidence: output [num_reqs, num_steps], by batch position.
        slope: [1].
        intercepts: [num_steps].
        sumexp: [>= num_tokens] sum of exp(x - m) of each row.
        idx_mapping: [>= num_tokens]; rows with a negative index are skipped.
        steps: [>= num_tokens] draft position of each row, or [1] shared by all.
        per_token_step: whether steps is per row, num_steps consecutive rows per request.
        num_tokens: rows.
        num_steps: draft positions per request.
        max_log_odds: bound on the feature's magnitude.
    """
    for token in range(num_tokens):
        req = idx_mapping[token]
        if req < 0:
            continue
        step = steps[token] if per_token_step else steps[0]
        batch_idx = token // num_steps if per_token_step else token
        others = max(np.float64(sumexp[token]) - 1.0, 0.0)
        feature = max_log_odds if others == 0.0 else -math.log(others)
        feature = min(max(feature, -max_log_odds), max_log_odds)
        log_odds = np.float64(slope[0]) * feature + np.float64(intercepts[step])
        probability = 1.0 / (1.0 + math.exp(-log_odds))
        features[req, step] = feature
        predictions[req, step] = probability
        confidence[batch_idx, step] = probability
