"""CPU twins of the V2 runner's batch bookkeeping kernels.

Every function stands in for the Triton kernel that ``OVERRIDES`` names, and names those of its
launch arguments that it uses (``binding.py`` passes them on). The compiled loops are in
``specbench.kernels.cpu``. The launch grid does not reach a twin: the number of requests is the
length of ``idx_mapping``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor, uint8

from specbench.kernels.cpu import batch, block_tables

_GPU = "vllm.v1.worker.gpu."


def _addresses(pointers: Tensor) -> Any:
    """View a uint64 tensor of pointers as int64 addresses, which compiled arithmetic keeps."""
    return pointers.numpy().view(np.int64)


def apply_write(
    output_ptr: Tensor,
    output_stride: Any,
    write_indices_ptr: Tensor,
    write_starts_ptr: Tensor,
    write_contents_ptr: Tensor,
    write_cu_lens_ptr: Tensor,
    write_group_ids_ptr: Tensor | None,
    MULTI_GROUP: bool,
) -> None:
    """Write staged pieces into one tensor, or into the int32 tables of several cache groups."""
    pieces = (
        write_indices_ptr.numpy(),
        write_starts_ptr.numpy(),
        write_contents_ptr.numpy(),
        write_cu_lens_ptr.numpy(),
    )
    if write_group_ids_ptr is not None and MULTI_GROUP:
        groups = write_group_ids_ptr.numpy()
        strides = output_stride.numpy()
        block_tables.write_rows_of_groups(_addresses(output_ptr), strides, *pieces, groups)
    else:
        # view, not reshape: a silent copy would lose the writes.
        block_tables.write_rows(output_ptr.view(-1).numpy(), output_stride, *pieces)


def gather_block_tables(
    batch_idx_to_req_idx: Tensor,
    src_block_table_ptrs: Tensor,
    dst_block_table_ptrs: Tensor,
    block_table_strides: Tensor,
    num_blocks_ptr: Tensor,
    num_reqs: int,
) -> None:
    """Copy the requests' block tables into batch order and clear the rows behind them."""
    block_tables.gather_block_tables(
        batch_idx_to_req_idx.numpy(),
        _addresses(src_block_table_ptrs),
        _addresses(dst_block_table_ptrs),
        block_table_strides.numpy(),
        num_blocks_ptr.numpy(),
        num_reqs,
    )


def compute_slot_mappings(
    max_num_tokens: int,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    pos: Tensor,
    block_table_ptrs: Tensor,
    block_table_strides: Tensor,
    block_sizes: Tensor,
    slot_mapping_enabled: Tensor,
    dcp_sharded: Tensor,
    slot_mappings_ptr: Tensor,
    cp_rank: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    PAD_ID: int,
) -> None:
    """Set every token's cache slot in every group, PAD_ID where it writes none."""
    block_tables.compute_slot_mappings(
        max_num_tokens,
        idx_mapping.numpy(),
        query_start_loc.numpy(),
        pos.numpy(),
        _addresses(block_table_ptrs),
        block_table_strides.numpy(),
        block_sizes.numpy(),
        slot_mapping_enabled.numpy(),
        dcp_sharded.numpy(),
        slot_mappings_ptr.numpy(),
        cp_rank,
        CP_SIZE,
        CP_INTERLEAVE,
        PAD_ID,
    )


def prepare_prefill_inputs(
    input_ids_ptr: Tensor,
    next_prefill_tokens_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    all_token_ids_ptr: Tensor,
    prefill_lens_ptr: Tensor,
    num_computed_tokens_ptr: Tensor,
) -> None:
    """Copy the scheduled and the look-ahead tokens of prefilling requests."""
    batch.prepare_prefill_inputs(
        input_ids_ptr.numpy(),
        next_prefill_tokens_ptr.numpy(),
        idx_mapping_ptr.numpy(),
        query_start_loc_ptr.numpy(),
        all_token_ids_ptr.numpy(),
        prefill_lens_ptr.numpy(),
        num_computed_tokens_ptr.numpy(),
    )


def prepare_pos_seq_lens(
    pos_ptr: Tensor,
    seq_lens_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    num_computed_tokens_ptr: Tensor,
    max_num_reqs: int,
) -> None:
    """Set token positions and sequence lengths."""
    batch.prepare_pos_seq_lens(
        pos_ptr.numpy(),
        seq_lens_ptr.numpy(),
        idx_mapping_ptr.numpy(),
        query_start_loc_ptr.numpy(),
        num_computed_tokens_ptr.numpy(),
        max_num_reqs,
    )


def combine_sampled_and_draft_tokens(
    input_ids_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    last_sampled_tokens_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    seq_lens_ptr: Tensor,
    prefill_len_ptr: Tensor,
    draft_tokens_ptr: Tensor,
    cu_num_logits_ptr: Tensor,
    logits_indices_ptr: Tensor,
    NUM_NEW_SAMPLED_TOKENS: int,
) -> None:
    """Place sampled and draft tokens in the input and list the rows that get logits."""
    batch.combine_sampled_and_draft_tokens(
        input_ids_ptr.numpy(),
        idx_mapping_ptr.numpy(),
        last_sampled_tokens_ptr.view(-1).numpy(),
        query_start_loc_ptr.numpy(),
        seq_lens_ptr.numpy(),
        prefill_len_ptr.numpy(),
        draft_tokens_ptr.numpy(),
        cu_num_logits_ptr.numpy(),
        logits_indices_ptr.numpy(),
        NUM_NEW_SAMPLED_TOKENS,
    )


def get_num_sampled_and_rejected(
    num_sampled_ptr: Tensor,
    num_rejected_ptr: Tensor,
    seq_lens_ptr: Tensor,
    cu_num_logits_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    prefill_len_ptr: Tensor,
) -> None:
    """Count the sampled and the rejected tokens of each request."""
    batch.get_num_sampled_and_rejected(
        num_sampled_ptr.numpy(),
        num_rejected_ptr.numpy(),
        seq_lens_ptr.numpy(),
        cu_num_logits_ptr.numpy(),
        idx_mapping_ptr.numpy(),
        prefill_len_ptr.numpy(),
    )


def post_update(
    idx_mapping_ptr: Tensor,
    num_computed_tokens_ptr: Tensor,
    last_sampled_tokens_ptr: Tensor,
    output_bin_counts_ptr: Tensor | None,
    sampled_tokens_ptr: Tensor,
    num_sampled_ptr: Tensor,
    num_rejected_ptr: Tensor,
    query_start_loc_ptr: Tensor | None,
    all_token_ids_ptr: Tensor,
    total_len_ptr: Tensor,
) -> None:
    """Append the sampled tokens to the requests' states."""
    batch.post_update(
        idx_mapping_ptr.numpy(),
        num_computed_tokens_ptr.numpy(),
        last_sampled_tokens_ptr.view(-1).numpy(),
        None if output_bin_counts_ptr is None else output_bin_counts_ptr.numpy(),
        sampled_tokens_ptr.numpy(),
        num_sampled_ptr.numpy(),
        num_rejected_ptr.numpy(),
        None if query_start_loc_ptr is None else query_start_loc_ptr.numpy(),
        all_token_ids_ptr.numpy(),
        total_len_ptr.numpy(),
    )


def post_update_num_computed_tokens(
    idx_mapping_ptr: Tensor, num_computed_tokens_ptr: Tensor, query_start_loc_ptr: Tensor
) -> None:
    """Add the query lengths to the requests' computed tokens."""
    batch.post_update_num_computed_tokens(
        idx_mapping_ptr.numpy(), num_computed_tokens_ptr.numpy(), query_start_loc_ptr.numpy()
    )


def expand_idx_mapping(
    idx_mapping_ptr: Tensor,
    expanded_idx_mapping_ptr: Tensor,
    expanded_local_pos_ptr: Tensor,
    cu_num_logits_ptr: Tensor,
) -> None:
    """Repeat each request's row for its logits rows and number them."""
    batch.expand_idx_mapping(
        idx_mapping_ptr.numpy(),
        expanded_idx_mapping_ptr.numpy(),
        expanded_local_pos_ptr.numpy(),
        cu_num_logits_ptr.numpy(),
    )


def dcp_local_seq_lens(
    out_ptr: Tensor,
    seq_lens_ptr: Tensor,
    dcp_size: int,
    dcp_rank: int,
    cp_interleave: int,
    num_reqs: int,
    max_num_reqs: int,
) -> None:
    """Count the tokens this rank of decode context parallelism holds of each request."""
    batch.dcp_local_seq_lens(
        out_ptr.numpy()[:max_num_reqs],
        seq_lens_ptr.numpy(),
        dcp_size,
        dcp_rank,
        cp_interleave,
        num_reqs,
    )


def apply_prompt_embeds(
    inputs_embeds_ptr: Tensor,
    embeds_ptrs_ptr: Tensor,
    mask_ptrs_ptr: Tensor,
    embeds_lens_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    num_computed_tokens_ptr: Tensor,
    hidden_size: int,
) -> None:
    """Overlay user-given prompt embeddings onto the input embeddings."""
    block_tables.apply_prompt_embeds(
        # Raw bytes serve every element type, bfloat16 included, which numpy lacks.
        inputs_embeds_ptr[:, :hidden_size].view(uint8).numpy(),
        _addresses(embeds_ptrs_ptr),
        _addresses(mask_ptrs_ptr),
        embeds_lens_ptr.numpy(),
        idx_mapping_ptr.numpy(),
        query_start_loc_ptr.numpy(),
        num_computed_tokens_ptr.numpy(),
    )


OVERRIDES: dict[str, Callable[..., None]] = {
    _GPU + "buffer_utils._apply_write_kernel": apply_write,
    _GPU + "block_table._gather_block_tables_kernel": gather_block_tables,
    _GPU + "block_table._compute_slot_mappings_kernel": compute_slot_mappings,
    _GPU + "input_batch._prepare_prefill_inputs_kernel": prepare_prefill_inputs,
    _GPU + "input_batch._prepare_pos_seq_lens_kernel": prepare_pos_seq_lens,
    _GPU + "input_batch._combine_sampled_and_draft_tokens_kernel": combine_sampled_and_draft_tokens,
    _GPU + "input_batch._get_num_sampled_and_rejected_kernel": get_num_sampled_and_rejected,
    _GPU + "input_batch._post_update_kernel": post_update,
    _GPU + "input_batch._post_update_num_computed_tokens_kernel": post_update_num_computed_tokens,
    _GPU + "input_batch._expand_idx_mapping_kernel": expand_idx_mapping,
    _GPU + "cp_utils._dcp_local_seq_lens_kernel": dcp_local_seq_lens,
    _GPU + "model_states.prompt_embeds._apply_prompt_embeds_kernel": apply_prompt_embeds,
}
