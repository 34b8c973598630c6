"""CPU twins of vLLM's online acceptance estimator.

Conventions as in ``specbench.vllm_plugin.cpu.batch``. The statistics of vocabulary blocks travel
through scratch [num_tokens, num_blocks] that only these twins touch: column 0 of ``local_max``
and ``local_sumexp`` holds the whole row's maximum and sum of exponentials.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from specbench.kernels.cpu import estimator
from specbench.kernels.cpu.rows import flat_view, readable

_ESTIMATOR = "vllm.v1.worker.gpu.spec_decode.acceptance_estimator."


def accumulate(
    info_ptr: Tensor,
    grad_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    num_sampled_ptr: Tensor,
    num_rejected_ptr: Tensor,
    features_ptr: Tensor,
    pred_ptr: Tensor,
    counts_ptr: Tensor,
    num_reqs: int,
) -> None:
    """Add the last step's graded drafts to the statistics of the fit."""
    estimator.accumulate(
        info_ptr.numpy(),
        grad_ptr.numpy(),
        counts_ptr.numpy(),
        idx_mapping_ptr.numpy(),
        num_sampled_ptr.numpy(),
        num_rejected_ptr.numpy(),
        features_ptr.numpy(),
        pred_ptr.numpy(),
        num_reqs,
    )


def refit(
    slope_ptr: Tensor,
    intercepts_ptr: Tensor,
    info_ptr: Tensor,
    grad_ptr: Tensor,
    counts_ptr: Tensor,
    NUM_SPECULATIVE_STEPS: int,
    L2: float,
    DAMPING: float,
) -> None:
    """Take one damped Newton step and clear the statistics."""
    estimator.refit(
        slope_ptr.numpy(),
        intercepts_ptr.numpy(),
        info_ptr.numpy(),
        grad_ptr.numpy(),
        counts_ptr.numpy()[:NUM_SPECULATIVE_STEPS],
        L2,
        DAMPING,
    )


def local_max_sumexp(
    local_max_ptr: Tensor,
    local_sumexp_ptr: Tensor,
    logits_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    temperature_ptr: Tensor,
    num_tokens: int,
    vocab_size: int,
) -> None:
    """Reduce each row of draft logits over temperature to its maximum and sum of exponentials."""
    flat, (stride,) = flat_view(readable(logits_ptr))
    estimator.row_statistics(
        local_max_ptr.numpy()[:, 0],
        local_sumexp_ptr.numpy()[:, 0],
        flat,
        stride,
        vocab_size,
        idx_mapping_ptr.numpy(),
        temperature_ptr.numpy(),
        num_tokens,
    )


def predict(
    features_ptr: Tensor,
    pred_ptr: Tensor,
    conf_ptr: Tensor,
    slope_ptr: Tensor,
    intercepts_ptr: Tensor,
    local_sumexp_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    step_ptr: Tensor,
    num_tokens: int,
    per_token_step: bool,
    NUM_SPECULATIVE_STEPS: int,
    MAX_LOG_ODDS: float,
) -> None:
    """Predict the acceptance of each row's draft from the drafter's confidence."""
    estimator.predict(
        features_ptr.numpy(),
        pred_ptr.numpy(),
        conf_ptr.numpy(),
        slope_ptr.numpy(),
        intercepts_ptr.numpy(),
        local_sumexp_ptr.numpy()[:, 0],
        idx_mapping_ptr.numpy(),
        step_ptr.view(-1).numpy(),
        per_token_step,
        num_tokens,
        NUM_SPECULATIVE_STEPS,
        MAX_LOG_ODDS,
    )


OVERRIDES: dict[str, Callable[..., None]] = {
    _ESTIMATOR + "_accumulate_kernel": accumulate,
    _ESTIMATOR + "_refit_kernel": refit,
    _ESTIMATOR + "_local_max_sumexp_kernel": local_max_sumexp,
    _ESTIMATOR + "_predict_kernel": predict,
}
