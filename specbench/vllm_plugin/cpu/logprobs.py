"""CPU twins of the kernels that report about logits: log-probabilities, ranks, NaNs, masks.

Conventions as in ``specbench.vllm_plugin.cpu.batch``; the number of rows is read from a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from specbench.kernels.cpu import logprobs
from specbench.kernels.cpu.rows import flat_view, readable

_GPU = "vllm.v1.worker.gpu."


def topk_log_softmax(
    output_ptr: Tensor, logits_ptr: Tensor, topk_ids_ptr: Tensor, vocab_size: int
) -> None:
    """Log-probabilities of the listed tokens."""
    flat, (stride,) = flat_view(readable(logits_ptr))
    logprobs.log_softmax_at(output_ptr.numpy(), flat, stride, vocab_size, topk_ids_ptr.numpy())


def ranks(output_ptr: Tensor, logits_ptr: Tensor, token_ids_ptr: Tensor, vocab_size: int) -> None:
    """Rank of one token in each row."""
    flat, (stride,) = flat_view(readable(logits_ptr))
    logprobs.rank_rows(output_ptr.numpy(), flat, stride, vocab_size, token_ids_ptr.numpy())


def fill_logprob_token_ids(
    out_token_ids_ptr: Tensor,
    out_valid_mask_ptr: Tensor,
    sampled_token_ids_ptr: Tensor,
    topk_indices_ptr: Tensor,
    expanded_idx_mapping_ptr: Tensor,
    num_per_req_token_ids_ptr: Tensor,
    per_req_token_ids_ptr: Tensor,
    NUM_TOPK: int,
) -> None:
    """List the tokens whose log-probabilities each row reports."""
    logprobs.fill_logprob_token_ids(
        out_token_ids_ptr.numpy(),
        out_valid_mask_ptr.numpy(),
        sampled_token_ids_ptr.numpy(),
        topk_indices_ptr.numpy(),
        expanded_idx_mapping_ptr.numpy(),
        num_per_req_token_ids_ptr.numpy(),
        per_req_token_ids_ptr.numpy(),
        NUM_TOPK,
    )


def prompt_logprobs_token_ids(
    prompt_logprobs_token_ids_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    num_computed_tokens_ptr: Tensor,
    all_token_ids_ptr: Tensor,
) -> None:
    """The prompt token that each token row predicts."""
    logprobs.next_prompt_tokens(
        prompt_logprobs_token_ids_ptr.numpy(),
        query_start_loc_ptr.numpy(),
        idx_mapping_ptr.numpy(),
        num_computed_tokens_ptr.numpy(),
        all_token_ids_ptr.numpy(),
    )


def num_nans(logits_ptr: Tensor, num_nans_ptr: Tensor, vocab_size: int) -> None:
    """Count NaNs in each row."""
    flat, (stride,) = flat_view(readable(logits_ptr))
    logprobs.count_nans(num_nans_ptr.numpy(), flat, stride, vocab_size)


def compact_sampling_mask(
    logits_ptr: Tensor,
    cu_num_logits_ptr: Tensor,
    num_sampled_tokens_ptr: Tensor,
    token_ids_ptr: Tensor,
    packed_mask_ptr: Tensor,
    counts_ptr: Tensor,
    vocab_size: int,
    max_num_kept: int,
    ROWS_PER_REQUEST: int,
) -> None:
    """Record which tokens each sampled row could have drawn."""
    flat, (stride,) = flat_view(readable(logits_ptr))
    logprobs.compact_sampling_masks(
        flat,
        stride,
        vocab_size,
        cu_num_logits_ptr.numpy(),
        num_sampled_tokens_ptr.numpy(),
        token_ids_ptr.numpy()[:, :max_num_kept],
        packed_mask_ptr.numpy(),
        counts_ptr.numpy(),
        ROWS_PER_REQUEST,
    )


OVERRIDES: dict[str, Callable[..., Any]] = {
    _GPU + "sample.logprob._topk_log_softmax_kernel": topk_log_softmax,
    _GPU + "sample.logprob._ranks_kernel": ranks,
    _GPU + "sample.logprob._fill_logprob_token_ids_kernel": fill_logprob_token_ids,
    _GPU + "sample.prompt_logprob._prompt_logprobs_token_ids_kernel": prompt_logprobs_token_ids,
    _GPU + "metrics.logits._num_nans_kernel": num_nans,
    _GPU + "sample.output._compact_sampling_mask_kernel": compact_sampling_mask,
}
