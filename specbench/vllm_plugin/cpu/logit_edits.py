"""CPU twins of the kernels that change logits before sampling.

Conventions as in ``specbench.vllm_plugin.cpu.batch``; the number of rows is read from a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from specbench.kernels.cpu import logit_edits, thinking
from specbench.kernels.cpu.rows import editable, flat_view

_GPU = "vllm.v1.worker.gpu."


def temperature(
    logits_ptr: Tensor, expanded_idx_mapping_ptr: Tensor, temperature_ptr: Tensor, vocab_size: int
) -> None:
    """Divide each row by its request's temperature."""
    with editable(logits_ptr) as logits:
        flat, (stride,) = flat_view(logits)
        logit_edits.divide_by_temperature(
            flat,
            stride,
            logits.shape[0],
            vocab_size,
            expanded_idx_mapping_ptr.numpy(),
            temperature_ptr.numpy(),
        )


def min_p(
    logits_ptr: Tensor, expanded_idx_mapping_ptr: Tensor, min_p_ptr: Tensor, vocab_size: int
) -> None:
    """Mask tokens far less probable than the row's best."""
    with editable(logits_ptr) as logits:
        flat, (stride,) = flat_view(logits)
        logit_edits.mask_below_min_p(
            flat,
            stride,
            logits.shape[0],
            vocab_size,
            expanded_idx_mapping_ptr.numpy(),
            min_p_ptr.numpy(),
        )


def penalties(
    logits_ptr: Tensor,
    expanded_idx_mapping_ptr: Tensor,
    token_ids_ptr: Tensor,
    expanded_local_pos_ptr: Tensor,
    repetition_penalty_ptr: Tensor,
    frequency_penalty_ptr: Tensor,
    presence_penalty_ptr: Tensor,
    prompt_bin_mask_ptr: Tensor,
    output_bin_counts_ptr: Tensor,
    vocab_size: int,
) -> None:
    """Apply repetition, frequency and presence penalties."""
    with editable(logits_ptr) as logits:
        flat, (stride,) = flat_view(logits)
        logit_edits.apply_penalties(
            flat,
            stride,
            logits.shape[0],
            vocab_size,
            expanded_idx_mapping_ptr.numpy(),
            token_ids_ptr.numpy(),
            expanded_local_pos_ptr.numpy(),
            repetition_penalty_ptr.numpy(),
            frequency_penalty_ptr.numpy(),
            presence_penalty_ptr.numpy(),
            prompt_bin_mask_ptr.numpy(),
            output_bin_counts_ptr.numpy(),
        )


def bincount(
    expanded_idx_mapping_ptr: Tensor,
    all_token_ids_ptr: Tensor,
    prompt_len_ptr: Tensor,
    prefill_len_ptr: Tensor,
    prompt_bin_mask_ptr: Tensor,
    output_bin_counts_ptr: Tensor,
) -> None:
    """Collect the token statistics that penalties of new requests start from."""
    logit_edits.count_tokens(
        expanded_idx_mapping_ptr.numpy(),
        all_token_ids_ptr.numpy(),
        prompt_len_ptr.numpy(),
        prefill_len_ptr.numpy(),
        prompt_bin_mask_ptr.numpy(),
        output_bin_counts_ptr.numpy(),
    )


def bias(
    logits_ptr: Tensor,
    vocab_size: int,
    expanded_idx_mapping_ptr: Tensor,
    num_allowed_token_ids_ptr: Tensor,
    allowed_token_ids_ptr: Tensor,
    num_logit_bias_ptr: Tensor,
    bias_token_ids_ptr: Tensor,
    bias_ptr: Tensor,
    pos_ptr: Tensor,
    min_lens_ptr: Tensor,
    num_stop_token_ids_ptr: Tensor,
    restore_when_all_masked_ptr: Tensor,
    stop_token_ids_ptr: Tensor,
    CHECK_ALL_MASKED_ROWS: bool,
) -> None:
    """Apply allowed token ids, logit bias and the minimal output length."""
    with editable(logits_ptr) as logits:
        flat, (stride,) = flat_view(logits)
        logit_edits.apply_bias(
            flat,
            stride,
            logits.shape[0],
            vocab_size,
            expanded_idx_mapping_ptr.numpy(),
            num_allowed_token_ids_ptr.numpy(),
            allowed_token_ids_ptr.numpy(),
            num_logit_bias_ptr.numpy(),
            bias_token_ids_ptr.numpy(),
            bias_ptr.numpy(),
            pos_ptr.numpy(),
            min_lens_ptr.numpy(),
            num_stop_token_ids_ptr.numpy(),
            stop_token_ids_ptr.numpy(),
            restore_when_all_masked_ptr.numpy(),
            CHECK_ALL_MASKED_ROWS,
        )


def bad_words(
    logits_ptr: Tensor,
    expanded_idx_mapping_ptr: Tensor,
    bad_word_token_ids_ptr: Tensor,
    bad_word_offsets_ptr: Tensor,
    num_bad_words_ptr: Tensor,
    all_token_ids_ptr: Tensor,
    prompt_len_ptr: Tensor,
    total_len_ptr: Tensor,
    input_ids_ptr: Tensor,
    expanded_local_pos_ptr: Tensor,
) -> None:
    """Mask the token that would complete a bad word."""
    with editable(logits_ptr) as logits:
        flat, (stride,) = flat_view(logits)
        logit_edits.forbid_bad_words(
            flat,
            stride,
            logits.shape[0],
            expanded_idx_mapping_ptr.numpy(),
            bad_word_token_ids_ptr.numpy(),
            bad_word_offsets_ptr.numpy(),
            num_bad_words_ptr.numpy(),
            all_token_ids_ptr.numpy(),
            prompt_len_ptr.numpy(),
            total_len_ptr.numpy(),
            input_ids_ptr.numpy(),
            expanded_local_pos_ptr.numpy(),
        )


def apply_grammar_bitmask(
    logits_ptr: Tensor,
    logits_indices_ptr: Tensor,
    cu_num_logits_ptr: Tensor,
    bitmask_ptr: Tensor,
    vocab_size: int,
    MASK_STRIDE: int,
) -> None:
    """Mask the tokens that a structured output's grammar does not allow."""
    with editable(logits_ptr) as logits:
        flat, (stride,) = flat_view(logits)
        logit_edits.apply_grammar(
            flat,
            stride,
            vocab_size,
            logits_indices_ptr.numpy(),
            cu_num_logits_ptr.numpy(),
            bitmask_ptr.numpy(),
            MASK_STRIDE,
        )


def update_committed_marker_cache(
    req_ids_ptr: Tensor,
    thinking_token_budget_ptr: Tensor,
    all_token_ids_ptr: Tensor,
    total_len_ptr: Tensor,
    cached_last_start_ptr: Tensor,
    cached_last_end_ptr: Tensor,
    cached_scan_pos_ptr: Tensor,
    reasoning_start_token_ids_ptr: Tensor,
    natural_reasoning_end_token_ids_ptr: Tensor,
    BLOCK: int,
) -> None:
    """Find where each request's reasoning last began and ended."""
    thinking.update_markers(
        req_ids_ptr.numpy(),
        thinking_token_budget_ptr.numpy(),
        all_token_ids_ptr.numpy(),
        total_len_ptr.numpy(),
        cached_last_start_ptr.numpy(),
        cached_last_end_ptr.numpy(),
        cached_scan_pos_ptr.numpy(),
        reasoning_start_token_ids_ptr.numpy(),
        natural_reasoning_end_token_ids_ptr.numpy(),
        BLOCK,
    )


def thinking_budget(
    logits_ptr: Tensor,
    expanded_idx_mapping_ptr: Tensor,
    thinking_token_budget_ptr: Tensor,
    all_token_ids_ptr: Tensor,
    total_len_ptr: Tensor,
    input_ids_ptr: Tensor,
    expanded_local_pos_ptr: Tensor,
    cached_last_start_ptr: Tensor,
    cached_last_end_ptr: Tensor,
    reasoning_start_token_ids_ptr: Tensor,
    natural_reasoning_end_token_ids_ptr: Tensor,
    reasoning_end_token_ids_ptr: Tensor,
) -> None:
    """Force the end of reasoning where its budget is used up."""
    with editable(logits_ptr) as logits:
        flat, (stride,) = flat_view(logits)
        thinking.force_end(
            flat,
            stride,
            logits.shape[0],
            expanded_idx_mapping_ptr.numpy(),
            thinking_token_budget_ptr.numpy(),
            all_token_ids_ptr.numpy(),
            total_len_ptr.numpy(),
            input_ids_ptr.numpy(),
            expanded_local_pos_ptr.numpy(),
            cached_last_start_ptr.numpy(),
            cached_last_end_ptr.numpy(),
            reasoning_start_token_ids_ptr.numpy(),
            natural_reasoning_end_token_ids_ptr.numpy(),
            reasoning_end_token_ids_ptr.numpy(),
        )


OVERRIDES: dict[str, Callable[..., Any]] = {
    _GPU + "sample.gumbel._temperature_kernel": temperature,
    _GPU + "sample.min_p._min_p_kernel": min_p,
    _GPU + "sample.penalties._penalties_kernel": penalties,
    _GPU + "sample.penalties._bincount_kernel": bincount,
    _GPU + "sample.logit_bias._bias_kernel": bias,
    _GPU + "sample.bad_words._bad_words_kernel": bad_words,
    _GPU + "structured_outputs._apply_grammar_bitmask_kernel": apply_grammar_bitmask,
    _GPU + "sample.thinking_budget._update_committed_marker_cache_kernel": (
        update_committed_marker_cache
    ),
    _GPU + "sample.thinking_budget._thinking_budget_kernel": thinking_budget,
}
