"""CPU twins of the V2 runner's drafter kernels: block drafters (DFlash, DSpark) and n-gram.

Conventions as in ``specbench.vllm_plugin.cpu.batch``.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from specbench.kernels.cpu import drafting

_SPEC = "vllm.v1.worker.gpu.spec_decode."


def prepare_dflash_inputs(
    out_input_ids_ptr: Tensor,
    out_query_positions_ptr: Tensor,
    out_query_start_loc_ptr: Tensor,
    out_seq_lens_ptr: Tensor,
    out_query_slot_mapping_ptr: Tensor,
    out_context_positions_ptr: Tensor,
    out_context_slot_mapping_ptr: Tensor,
    out_sample_indices_ptr: Tensor,
    out_sample_pos_ptr: Tensor,
    out_sample_idx_mapping_ptr: Tensor,
    out_temperature_ptr: Tensor,
    out_seeds_ptr: Tensor,
    target_positions_ptr: Tensor,
    target_query_start_loc_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    last_sampled_ptr: Tensor,
    next_prefill_tokens_ptr: Tensor,
    num_sampled_ptr: Tensor,
    num_rejected_ptr: Tensor,
    temperature_ptr: Tensor,
    seeds_ptr: Tensor,
    block_table_ptr: Tensor,
    parallel_drafting_token_id: int,
    block_size: int,
    num_query_per_req: int,
    num_speculative_steps: int,
    max_num_reqs: int,
    max_num_tokens: int,
    max_model_len: int,
    cp_rank: int,
    SAMPLE_FROM_ANCHOR: bool,
    PAD_SLOT_ID: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
) -> None:
    """Lay out a block drafter's context, queries and sampling rows for one step."""
    positions = target_positions_ptr.numpy()
    starts = target_query_start_loc_ptr.numpy()
    idx_mapping = idx_mapping_ptr.numpy()
    num_rejected = num_rejected_ptr.numpy()
    block_table = block_table_ptr.numpy()
    slot_rule = (cp_rank, CP_SIZE, CP_INTERLEAVE, PAD_SLOT_ID)
    drafting.block_contexts(
        out_context_positions_ptr.numpy(),
        out_context_slot_mapping_ptr.numpy(),
        positions,
        starts,
        num_rejected,
        block_table,
        idx_mapping.shape[0],
        block_size,
        *slot_rule,
    )
    drafting.block_queries(
        out_input_ids_ptr.numpy(),
        out_query_positions_ptr.numpy(),
        out_query_slot_mapping_ptr.numpy()[:max_num_tokens],
        out_seq_lens_ptr.numpy()[:max_num_reqs],
        positions,
        starts,
        idx_mapping,
        last_sampled_ptr.view(-1).numpy(),
        next_prefill_tokens_ptr.view(-1).numpy(),
        num_sampled_ptr.numpy(),
        num_rejected,
        block_table,
        parallel_drafting_token_id,
        block_size,
        num_query_per_req,
        max_model_len,
        *slot_rule,
    )
    num_samples = max_num_reqs * num_speculative_steps
    drafting.block_samples(
        out_sample_indices_ptr.numpy()[:num_samples],
        out_sample_pos_ptr.numpy()[:num_samples],
        out_sample_idx_mapping_ptr.numpy()[:num_samples],
        out_query_start_loc_ptr.numpy()[: max_num_reqs + 1],
        out_temperature_ptr.numpy(),
        out_seeds_ptr.numpy(),
        positions,
        starts,
        idx_mapping,
        num_rejected,
        temperature_ptr.numpy(),
        seeds_ptr.numpy(),
        num_query_per_req,
        num_speculative_steps,
        SAMPLE_FROM_ANCHOR,
    )


def ngram_scan(
    token_ids_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    total_len_ptr: Tensor,
    num_sampled_ptr: Tensor,
    scratch_ptr: Tensor,
    L: int,
    MIN_N: int,
    MAX_N: int,
    BLOCK_L: int,
) -> None:
    """Score each request's best n-gram match."""
    drafting.ngram_scan(
        token_ids_ptr.numpy(),
        idx_mapping_ptr.numpy(),
        total_len_ptr.numpy(),
        num_sampled_ptr.numpy(),
        scratch_ptr.numpy(),
        L,
        MIN_N,
        MAX_N,
        BLOCK_L,
    )


def ngram_finalize(
    token_ids_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    total_len_ptr: Tensor,
    num_sampled_ptr: Tensor,
    last_sampled_ptr: Tensor,
    scratch_ptr: Tensor,
    drafts_ptr: Tensor,
    L: int,
    N_BLOCKS: int,
) -> None:
    """Write each request's n-gram draft tokens."""
    drafting.ngram_finalize(
        token_ids_ptr.numpy(),
        idx_mapping_ptr.numpy(),
        total_len_ptr.numpy(),
        num_sampled_ptr.numpy(),
        last_sampled_ptr.view(-1).numpy(),
        scratch_ptr.numpy(),
        drafts_ptr.numpy(),
        L,
        N_BLOCKS,
    )


OVERRIDES: dict[str, Callable[..., None]] = {
    _SPEC + "dflash.speculator._prepare_dflash_inputs_kernel": prepare_dflash_inputs,
    _SPEC + "ngram.speculator._ngram_scan_kernel": ngram_scan,
    _SPEC + "ngram.speculator._ngram_finalize_kernel": ngram_finalize,
}
