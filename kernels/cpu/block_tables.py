"""Key-value cache block tables of vLLM's V2 runner as compiled loops.

One int32 table [max_num_reqs, max_num_blocks] per cache group, reached by address; the tables of
a step's requests are gathered into a second set, and every token gets the cache slot it writes.
Block 0 is vLLM's null block.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specbench.kernels.cpu.compilation import vectorised
from specbench.kernels.cpu.floats import Array
from specbench.kernels.cpu.pointers import bytes_at, int32_at

INT32_BYTES = 4


@vectorised()
def write_rows(
    out: Array, row_stride: int, rows: Array, starts: Array, values: Array, cu_lens: Array
) -> None:
    """Write ragged pieces into rows of one flat tensor.

    Args:
        out: in and out, the tensor's elements [num_rows * row_stride].
        row_stride: elements from one row to the next.
        rows: [num_writes] row of each piece.
        starts: [num_writes] first column of each piece.
        values: [cu_lens[-1]] the pieces, one after the other.
        cu_lens: [num_writes] end of each piece within values.
    """
    begin = 0
    for write in range(rows.shape[0]):
        base = np.int64(rows[write]) * row_stride + starts[write] - begin
        for i in range(begin, cu_lens[write]):
            out[base + i] = values[i]
        begin = cu_lens[write]


@vectorised()
def write_rows_of_groups(
    table_addresses: Array,
    row_strides: Array,
    rows: Array,
    starts: Array,
    values: Array,
    cu_lens: Array,
    group_ids: Array,
) -> None:
    """Write ragged pieces into int32 tables given by address, ``group_ids`` choosing the table."""
    begin = 0
    for write in range(rows.shape[0]):
        group = group_ids[write]
        first = np.int64(rows[write]) * np.int64(row_strides[group]) + starts[write]
        length = cu_lens[write] - begin
        out = int32_at(table_addresses[group] + first * INT32_BYTES, length)
        for i in range(length):
            out[i] = values[begin + i]
        begin = cu_lens[write]


@vectorised()
def gather_block_tables(
    idx_mapping: Array,
    src_addresses: Array,
    dst_addresses: Array,
    row_strides: Array,
    num_blocks: Array,
    num_reqs: int,
) -> None:
    """Copy the block tables of a step's requests, in batch order, and clear the rows behind.

    Args:
        idx_mapping: [>= num_reqs].
        src_addresses: [num_groups] tables by req_state_idx.
        dst_addresses: [num_groups] tables by batch_idx, as many rows as the source.
        row_strides: [num_groups] elements per row.
        num_blocks: [num_groups, max_num_reqs] valid entries of each source row.
        num_reqs: requests of this step.
    """
    for group in range(row_strides.shape[0]):
        stride = np.int64(row_strides[group])
        for batch_idx in range(num_reqs):
            req = np.int64(idx_mapping[batch_idx])
            length = num_blocks[group, req]
            src = int32_at(src_addresses[group] + INT32_BYTES * req * stride, length)
            dst = int32_at(dst_addresses[group] + INT32_BYTES * batch_idx * stride, length)
            for i in range(length):
                dst[i] = src[i]
        # The launch grid, and with it the padded batch size, does not reach a replacement:
        # clear every row a padded batch could use.
        num_rest = (num_blocks.shape[1] - num_reqs) * stride
        rest = int32_at(dst_addresses[group] + INT32_BYTES * num_reqs * stride, num_rest)
        for i in range(num_rest):
            rest[i] = 0


@vectorised()
def local_slot(
    position: Any,
    block_number: Any,
    block_size: Any,
    rank: Any,
    size: Any,
    interleave: Any,
    pad: Any,
) -> Any:
    """Return the cache slot of a position whose block is known, ``pad`` on another rank.

    With more than one rank a block covers ``block_size * size`` positions, dealt to the ranks in
    runs of ``interleave``.
    """
    offset = position % (block_size * size)
    if size == 1:
        return block_number * block_size + offset
    if offset // interleave % size != rank:
        return pad
    local_offset = offset // (interleave * size) * interleave + offset % interleave
    return block_number * block_size + local_offset


@vectorised()
def compute_slot_mappings(
    max_num_tokens: int,
    idx_mapping: Array,
    query_start_loc: Array,
    pos: Array,
    table_addresses: Array,
    row_strides: Array,
    block_sizes: Array,
    enabled: Array,
    sharded: Array,
    slot_mappings: Array,
    cp_rank: int,
    cp_size: int,
    cp_interleave: int,
    pad_slot: int,
) -> None:
    """Set the cache slot of every token in every group.

    Args:
        max_num_tokens: columns of slot_mappings; those behind the last token get pad_slot.
        idx_mapping: [num_reqs]; tokens of a request with index -1 get pad_slot.
        query_start_loc: [>= num_reqs + 1].
        pos: [num_tokens].
        table_addresses: [num_groups] block tables by req_state_idx.
        row_strides: [num_groups].
        block_sizes: [num_groups] tokens per block.
        enabled: [num_groups] whether the group stores tokens; all pad_slot if not.
        sharded: [num_groups] whether context parallelism shards the group.
        slot_mappings: output [num_groups, max_num_tokens].
        cp_rank: this rank of context parallelism.
        cp_size: number of ranks.
        cp_interleave: tokens per run dealt to a rank.
        pad_slot: the slot that is never written.
    """
    num_reqs = idx_mapping.shape[0]
    for group in range(row_strides.shape[0]):
        stride = np.int64(row_strides[group])
        block_size = np.int64(block_sizes[group])
        size = cp_size if sharded[group] else 1
        for batch_idx in range(num_reqs):
            req = np.int64(idx_mapping[batch_idx])
            start, end = query_start_loc[batch_idx], query_start_loc[batch_idx + 1]
            if req < 0 or not enabled[group]:
                slot_mappings[group, start:end] = pad_slot
                continue
            row = int32_at(table_addresses[group] + INT32_BYTES * req * stride, stride)
            for token in range(start, end):
                position = pos[token]
                block = np.int64(row[position // (block_size * size)])
                slot_mappings[group, token] = local_slot(
                    position, block, block_size, cp_rank, size, cp_interleave, pad_slot
                )
        slot_mappings[group, query_start_loc[num_reqs] : max_num_tokens] = pad_slot


@vectorised()
def apply_prompt_embeds(
    inputs_embeds: Array,
    embeds_addresses: Array,
    mask_addresses: Array,
    embeds_lens: Array,
    idx_mapping: Array,
    query_start_loc: Array,
    num_computed_tokens: Array,
) -> None:
    """Overlay user-given prompt embeddings onto the scheduled rows.

    Args:
        inputs_embeds: in and out, raw bytes [num_tokens, hidden_size * bytes per element].
        embeds_addresses: [max_num_reqs] contiguous embeddings in the same element type.
        mask_addresses: [max_num_reqs] one byte a row, non-zero: a token id, keep it; 0: no mask.
        embeds_lens: [max_num_reqs] rows of each request's embeddings; 0: none.
        idx_mapping: [num_reqs].
        query_start_loc: [>= num_reqs + 1].
        num_computed_tokens: [max_num_reqs].
    """
    row_bytes = inputs_embeds.shape[1]
    for batch_idx in range(idx_mapping.shape[0]):
        req = idx_mapping[batch_idx]
        num_computed = np.int64(num_computed_tokens[req])
        start = query_start_loc[batch_idx]
        num_rows = min(query_start_loc[batch_idx + 1] - start, embeds_lens[req] - num_computed)
        for i in range(num_rows):
            src_row = num_computed + i
            mask_address = mask_addresses[req]
            if mask_address != 0 and bytes_at(mask_address + src_row, 1)[0] != 0:
                continue
            src = bytes_at(embeds_addresses[req] + src_row * row_bytes, row_bytes)
            inputs_embeds[start + i, :] = src
