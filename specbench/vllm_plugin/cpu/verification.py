"""CPU twins of the V2 runner's verification kernels: rejection sampling of draft tokens.

Conventions as in ``specbench.vllm_plugin.cpu.batch``. The kernels hand statistics of vocabulary
blocks to each other through scratch tensors [num_logits, num_blocks]; these twins own all readers
and writers of the scratch and use it differently:

- ``target_local_max``, ``draft_local_max``: column 0 holds a row's logsumexp, filled (for block
  verification only) by the twin of ``_compute_cumulative_log_p_kernel``. Token-by-token rules
  reduce a row when they reach it, so the statistics kernel itself has nothing to do.
- ``local_residual_mass``: column 0 holds a row's whole residual mass.
- ``resampled_local_argmax``, ``resampled_local_max``: column 0 holds the drawn token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from specbench.kernels.cpu import batch, resampling, verification
from specbench.kernels.cpu.rows import flat_view, readable
from specbench.kernels.cpu.verification import BlockTerms, DraftRows, Requests, TargetRows

_SPEC = "vllm.v1.worker.gpu.spec_decode."
_NOTHING = np.empty(0, np.float32)
# Strided like a column of scratch: compiled code is specialised by layout, and takes seconds.
_NO_COLUMN = np.empty((1, 2), np.float32)[:, 0]
_NO_TERMS = BlockTerms(_NO_COLUMN, _NO_COLUMN, _NOTHING, _NO_COLUMN)


def _logits_rows(
    target_logits: Tensor, draft_logits: Tensor | None
) -> tuple[TargetRows, DraftRows]:
    """Describe both models' logits; tokens beyond the narrower vocabulary do not count."""
    vocab_size = target_logits.shape[-1]
    flat, (stride,) = flat_view(readable(target_logits))
    # Unknown draft logits: the same element type, so that no other specialisation is compiled.
    draft = DraftRows(flat[:0], 0, 0, False)
    if draft_logits is not None:
        vocab_size = min(vocab_size, draft_logits.shape[-1])
        draft_flat, (request_stride, step_stride) = flat_view(readable(draft_logits))
        draft = DraftRows(draft_flat, request_stride, step_stride, True)
    return TargetRows(flat, stride, vocab_size), draft


def _column(scratch: Tensor | None) -> Any:
    """Column 0 of a scratch tensor."""
    return _NO_COLUMN if scratch is None else scratch.numpy()[:, 0]


def compute_local_logits_stats() -> None:
    """Do nothing: the twins that need a row's statistics compute them (see the module)."""


def compute_cumulative_log_p(
    cumulative_log_p_ptr: Tensor,
    target_logits_ptr: Tensor,
    target_local_max_ptr: Tensor,
    draft_sampled_ptr: Tensor,
    draft_logits_ptr: Tensor | None,
    draft_local_max_ptr: Tensor,
    cu_num_logits_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    temp_ptr: Tensor,
) -> None:
    """Fill the logsumexps of all draft rows and their running joint ratio."""
    target, draft = _logits_rows(target_logits_ptr, draft_logits_ptr)
    requests = Requests(
        draft_sampled_ptr.numpy(),
        cu_num_logits_ptr.numpy(),
        idx_mapping_ptr.numpy(),
        temp_ptr.numpy(),
    )
    target_lse, draft_lse = _column(target_local_max_ptr), _column(draft_local_max_ptr)
    verification.fill_log_sum_exps(target_lse, draft_lse, target, draft, requests)
    terms = BlockTerms(target_lse, draft_lse, cumulative_log_p_ptr.numpy(), _NO_COLUMN)
    verification.fill_joint_log_p(terms, target, draft, requests)


def compute_local_residual_mass(
    local_residual_mass_ptr: Tensor,
    cumulative_log_p_ptr: Tensor,
    target_logits_ptr: Tensor,
    target_local_max_ptr: Tensor,
    draft_logits_ptr: Tensor,
    draft_local_max_ptr: Tensor,
    draft_sampled_ptr: Tensor,
    expanded_idx_mapping_ptr: Tensor,
    expanded_local_pos_ptr: Tensor,
    temp_ptr: Tensor,
) -> None:
    """Fill the residual mass of every draft row that block verification looks ahead to."""
    target, draft = _logits_rows(target_logits_ptr, draft_logits_ptr)
    steps, temperature = expanded_local_pos_ptr.numpy(), temp_ptr.numpy()
    row_request, sampled = expanded_idx_mapping_ptr.numpy(), draft_sampled_ptr.numpy()
    # A row has a draft if the next row belongs to the same request.
    wanted = (steps[:-1] > 0) & (steps[1:] > steps[:-1]) & (sampled[1:] >= 0)
    wanted &= temperature[row_request[:-1]] != 0.0
    residual_mass = _column(local_residual_mass_ptr)
    resampling.residual_masses(
        residual_mass,
        BlockTerms(
            _column(target_local_max_ptr),
            _column(draft_local_max_ptr),
            cumulative_log_p_ptr.numpy(),
            residual_mass,
        ),
        target,
        draft,
        np.flatnonzero(wanted),
        row_request,
        steps,
        temperature,
    )


def rejection(
    sampled_ptr: Tensor,
    rejected_steps_ptr: Tensor,
    target_rejected_logsumexp_ptr: Tensor,
    draft_rejected_logsumexp_ptr: Tensor,
    target_logits_ptr: Tensor,
    target_local_max_ptr: Tensor,
    draft_sampled_ptr: Tensor,
    draft_logits_ptr: Tensor | None,
    draft_local_max_ptr: Tensor,
    cu_num_logits_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    temp_ptr: Tensor,
    seed_ptr: Tensor,
    pos_ptr: Tensor,
    synthetic_conditional_rates_ptr: Tensor | None,
    cumulative_log_p_ptr: Tensor | None,
    local_residual_mass_ptr: Tensor | None,
    SYNTHETIC_MODE: bool,
    USE_BLOCK_VERIFICATION: bool,
) -> None:
    """Accept draft tokens: greedy, by ratio, at synthetic rates or by block verification."""
    target, draft = _logits_rows(target_logits_ptr, draft_logits_ptr)
    terms = _NO_TERMS
    if USE_BLOCK_VERIFICATION and cumulative_log_p_ptr is not None:
        terms = BlockTerms(
            _column(target_local_max_ptr),
            _column(draft_local_max_ptr),
            cumulative_log_p_ptr.numpy(),
            _column(local_residual_mass_ptr),
        )
    rates = synthetic_conditional_rates_ptr
    verification.reject(
        sampled_ptr.numpy(),
        rejected_steps_ptr.numpy(),
        target_rejected_logsumexp_ptr.numpy(),
        draft_rejected_logsumexp_ptr.numpy(),
        target,
        draft,
        Requests(
            draft_sampled_ptr.numpy(),
            cu_num_logits_ptr.numpy(),
            idx_mapping_ptr.numpy(),
            temp_ptr.numpy(),
        ),
        seed_ptr.numpy(),
        pos_ptr.numpy(),
        _NOTHING if rates is None else rates.numpy(),
        terms,
        SYNTHETIC_MODE,
        USE_BLOCK_VERIFICATION,
    )


def resample(
    resampled_local_argmax_ptr: Tensor,
    resampled_local_max_ptr: Tensor,
    target_logits_ptr: Tensor,
    target_rejected_logsumexp_ptr: Tensor,
    draft_logits_ptr: Tensor | None,
    draft_rejected_logsumexp_ptr: Tensor,
    rejected_step_ptr: Tensor,
    cu_num_logits_ptr: Tensor,
    expanded_idx_mapping_ptr: Tensor,
    draft_sampled_ptr: Tensor,
    temp_ptr: Tensor,
    seed_ptr: Tensor,
    pos_ptr: Tensor,
    cumulative_log_p_ptr: Tensor | None,
    USE_FP64: bool,
    USE_BLOCK_VERIFICATION: bool,
    WATERMARK: bool,
) -> None:
    """Draw each request's token behind its accepted drafts.

    Raises:
        NotImplementedError: if watermarking is asked for.
    """
    if WATERMARK:
        raise NotImplementedError(
            "watermarking is not supported by the V2 model runner on a CPU: "
            "start the engine without a watermark key"
        )
    target, draft = _logits_rows(target_logits_ptr, draft_logits_ptr)
    row_request = expanded_idx_mapping_ptr.numpy()
    block = USE_BLOCK_VERIFICATION and cumulative_log_p_ptr is not None
    resampling.resample(
        _column(resampled_local_argmax_ptr),
        _column(resampled_local_max_ptr),
        target,
        draft,
        Requests(
            draft_sampled_ptr.numpy(), cu_num_logits_ptr.numpy(), row_request, temp_ptr.numpy()
        ),
        row_request,
        rejected_step_ptr.numpy(),
        target_rejected_logsumexp_ptr.numpy(),
        draft_rejected_logsumexp_ptr.numpy(),
        cumulative_log_p_ptr.numpy() if cumulative_log_p_ptr is not None else _NOTHING,
        seed_ptr.numpy(),
        pos_ptr.numpy(),
        USE_FP64,
        block,
    )


def insert_resampled(
    sampled_ptr: Tensor,
    num_sampled_ptr: Tensor,
    resampled_local_argmax_ptr: Tensor,
    cu_num_logits_ptr: Tensor,
    expanded_idx_mapping_ptr: Tensor,
    temp_ptr: Tensor,
) -> None:
    """Append the drawn token and count it."""
    batch.insert_resampled(
        sampled_ptr.numpy(),
        num_sampled_ptr.numpy(),
        _column(resampled_local_argmax_ptr),
        cu_num_logits_ptr.numpy(),
        expanded_idx_mapping_ptr.numpy(),
        temp_ptr.numpy(),
    )


def flatten_sampled(
    flat_sampled_ptr: Tensor,
    sampled_ptr: Tensor,
    num_sampled_ptr: Tensor,
    cu_num_logits_ptr: Tensor,
) -> None:
    """Lay the sampled tokens at their logits rows."""
    batch.flatten_sampled(
        flat_sampled_ptr.numpy(),
        sampled_ptr.numpy(),
        num_sampled_ptr.numpy(),
        cu_num_logits_ptr.numpy(),
    )


def gather_draft_sampled(
    draft_sampled_ptr: Tensor,
    pos_ptr: Tensor,
    input_ids_ptr: Tensor,
    positions_ptr: Tensor,
    logits_indices_ptr: Tensor,
    expanded_idx_mapping_ptr: Tensor,
    expanded_local_pos_ptr: Tensor,
    prefill_len_ptr: Tensor,
    num_logits: int,
) -> None:
    """Copy token and position of each logits row."""
    batch.gather_draft_sampled(
        draft_sampled_ptr.numpy(),
        pos_ptr.numpy(),
        input_ids_ptr.numpy(),
        positions_ptr.numpy(),
        logits_indices_ptr.numpy()[:num_logits],
        expanded_idx_mapping_ptr.numpy(),
        expanded_local_pos_ptr.numpy(),
        prefill_len_ptr.numpy(),
    )


_UTILS = _SPEC + "rejection_sampler_utils."
OVERRIDES: dict[str, Callable[..., None]] = {
    _SPEC + "rejection_sampler._flatten_sampled_kernel": flatten_sampled,
    _SPEC + "rejection_sampler._gather_draft_sampled_kernel": gather_draft_sampled,
    _UTILS + "_compute_local_logits_stats_kernel": compute_local_logits_stats,
    _UTILS + "_compute_cumulative_log_p_kernel": compute_cumulative_log_p,
    _UTILS + "_compute_local_residual_mass_kernel": compute_local_residual_mass,
    _UTILS + "_rejection_kernel": rejection,
    _UTILS + "_resample_kernel": resample,
    _UTILS + "_insert_resampled_kernel": insert_resampled,
}
