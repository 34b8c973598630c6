"""Inputs of block drafters and the n-gram drafter of vLLM's V2 runner as compiled loops.

Index spaces as in ``specbench.kernels.cpu.batch``. All functions write their results in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specbench.kernels.cpu.block_tables import local_slot
from specbench.kernels.cpu.compilation import vectorised
from specbench.kernels.cpu.floats import Array
from specbench.kernels.cpu.ngram_lookup import longest_suffix_match

NULL_BLOCK = 0  # vLLM's block 0 is never written


@vectorised()
def resident_slot(
    position: Any,
    table_row: Array,
    block_size: Any,
    rank: Any,
    size: Any,
    interleave: Any,
    pad_slot: Any,
) -> Any:
    """Return the slot of a position in one block-table row, pad_slot if its block is null.

    Positions behind the row's end use its last entry.
    """
    block = min(position // (block_size * size), table_row.shape[0] - 1)
    block_number = np.int64(table_row[block])
    if block_number == NULL_BLOCK:
        return pad_slot
    return local_slot(position, block_number, block_size, rank, size, interleave, pad_slot)


@vectorised()
def block_contexts(
    context_positions: Array,
    context_slots: Array,
    target_positions: Array,
    query_start_loc: Array,
    num_rejected: Array,
    block_table: Array,
    num_reqs: int,
    block_size: int,
    rank: int,
    size: int,
    interleave: int,
    pad_slot: int,
) -> None:
    """Set position and slot of each context token whose keys and values the drafter stores.

    Rejected tokens at the end of a query get position 0 and pad_slot.

    Args:
        context_positions: output [num_tokens].
        context_slots: output [num_tokens].
        target_positions: [num_tokens].
        query_start_loc: [>= num_reqs + 1] of the target batch.
        num_rejected: [num_reqs].
        block_table: [>= num_reqs, max_num_blocks] by batch_idx.
        num_reqs: requests of this step.
        block_size: tokens per block and rank.
        rank: this rank of context parallelism.
        size: number of ranks.
        interleave: tokens per run dealt to a rank.
        pad_slot: the slot that is never written.
    """
    for batch_idx in range(num_reqs):
        end = query_start_loc[batch_idx + 1]
        valid_end = end - num_rejected[batch_idx]
        for token in range(query_start_loc[batch_idx], valid_end):
            position = target_positions[token]
            context_positions[token] = position
            context_slots[token] = resident_slot(
                position, block_table[batch_idx], block_size, rank, size, interleave, pad_slot
            )
        for token in range(valid_end, end):
            context_positions[token] = 0
            context_slots[token] = pad_slot


@vectorised()
def block_queries(
    input_ids: Array,
    positions: Array,
    slots: Array,
    seq_lens: Array,
    target_positions: Array,
    query_start_loc: Array,
    idx_mapping: Array,
    last_sampled: Array,
    next_prefill_tokens: Array,
    num_sampled: Array,
    num_rejected: Array,
    block_table: Array,
    mask_token: int,
    block_size: int,
    num_queries: int,
    max_model_len: int,
    rank: int,
    size: int,
    interleave: int,
    pad_slot: int,
) -> None:
    """Lay out each request's query: the anchor token, then mask tokens, after its valid context.

    Args:
        input_ids: output [num_reqs * num_queries].
        positions: output [num_reqs * num_queries], clamped below max_model_len.
        slots: output [>= num_reqs * num_queries]; pad_slot behind the last query.
        seq_lens: output [max_num_reqs], context and query; 0 behind the last request.
        target_positions: [num_tokens].
        query_start_loc: [>= num_reqs + 1] of the target batch.
        idx_mapping: [num_reqs].
        last_sampled: [max_num_reqs] the anchor where a token was sampled.
        next_prefill_tokens: [>= max_num_reqs] the anchor inside a chunked prefill.
        num_sampled: [num_reqs].
        num_rejected: [num_reqs].
        block_table: [>= num_reqs, max_num_blocks] by batch_idx.
        mask_token: id of the token at the positions to predict.
        block_size: tokens per block and rank.
        num_queries: query tokens per request.
        max_model_len: longest sequence in tokens.
        rank: this rank of context parallelism.
        size: number of ranks.
        interleave: tokens per run dealt to a rank.
        pad_slot: the slot that is never written.
    """
    num_reqs = idx_mapping.shape[0]
    for batch_idx in range(num_reqs):
        req = idx_mapping[batch_idx]
        valid_end = query_start_loc[batch_idx + 1] - num_rejected[batch_idx]
        first = target_positions[valid_end - 1] + 1
        sampled = num_sampled[batch_idx] > 0
        anchor = np.int64(last_sampled[req]) if sampled else np.int64(next_prefill_tokens[req])
        for i in range(num_queries):
            row = batch_idx * num_queries + i
            input_ids[row] = anchor if i == 0 else mask_token
            positions[row] = min(first + i, max_model_len - 1)
            slots[row] = resident_slot(
                first + i, block_table[batch_idx], block_size, rank, size, interleave, pad_slot
            )
        seq_lens[batch_idx] = min(first + num_queries, max_model_len)
    seq_lens[num_reqs:] = 0
    slots[num_reqs * num_queries :] = pad_slot


@vectorised()
def block_samples(
    sample_indices: Array,
    sample_pos: Array,
    sample_idx_mapping: Array,
    query_start_loc_out: Array,
    temperature_out: Array,
    seeds_out: Array,
    target_positions: Array,
    query_start_loc: Array,
    idx_mapping: Array,
    num_rejected: Array,
    temperature: Array,
    seeds: Array,
    num_queries: int,
    num_steps: int,
    sample_from_anchor: bool,
) -> None:
    """List the query rows to sample from, with the position each of them predicts.

    With ``sample_from_anchor`` row i predicts position i + 1 of the query; otherwise the anchor
    row is skipped and a mask row predicts its own position.

    Args:
        sample_indices: output [max_num_reqs * num_steps] query rows; 0 behind the last.
        sample_pos: output, same shape, predicted positions; 0 behind the last.
        sample_idx_mapping: output, same shape, request rows; -1 behind the last.
        query_start_loc_out: output [max_num_reqs + 1] of the drafter's batch.
        temperature_out: output [max_num_reqs], rows of this step's requests.
        seeds_out: output [max_num_reqs], likewise.
        target_positions: [num_tokens].
        query_start_loc: [>= num_reqs + 1] of the target batch.
        idx_mapping: [num_reqs].
        num_rejected: [num_reqs].
        temperature: [max_num_reqs].
        seeds: [max_num_reqs].
        num_queries: query tokens per request.
        num_steps: draft tokens per request.
        sample_from_anchor: whether the anchor row is sampled.
    """
    num_reqs = idx_mapping.shape[0]
    skipped = 0 if sample_from_anchor else 1
    for batch_idx in range(num_reqs):
        req = idx_mapping[batch_idx]
        valid_end = query_start_loc[batch_idx + 1] - num_rejected[batch_idx]
        # Position of the query row plus one, or of the mask row itself: the same number.
        first_predicted = target_positions[valid_end - 1] + 2
        for i in range(num_queries - skipped):
            sample = batch_idx * num_steps + i
            sample_indices[sample] = batch_idx * num_queries + skipped + i
            sample_pos[sample] = first_predicted + i
            sample_idx_mapping[sample] = req
        query_start_loc_out[batch_idx] = batch_idx * num_queries
        temperature_out[req] = temperature[req]
        seeds_out[req] = seeds[req]
    query_start_loc_out[num_reqs:] = num_reqs * num_queries
    sample_indices[num_reqs * num_steps :] = 0
    sample_pos[num_reqs * num_steps :] = 0
    sample_idx_mapping[num_reqs * num_steps :] = -1


@vectorised()
def ngram_scan(
    token_ids: Array,
    idx_mapping: Array,
    total_len: Array,
    num_sampled: Array,
    scratch: Array,
    max_model_len: int,
    min_n: int,
    max_n: int,
    tokens_per_block: int,
) -> None:
    """Score each request's best n-gram match as n * (max_model_len + 1) + start + 1; 0: none.

    The kernel keeps the best score of every block of the text. Only their maximum is read, so
    here the block of the best match gets its score and all others get 0.

    Args:
        token_ids: [max_num_reqs, max_model_len].
        idx_mapping: [num_reqs].
        total_len: [max_num_reqs].
        num_sampled: [num_reqs]; requests without a sampled token propose nothing.
        scratch: output [>= num_reqs, num_blocks].
        max_model_len: longest sequence in tokens.
        min_n: shortest match in tokens.
        max_n: longest match in tokens.
        tokens_per_block: start positions per column of scratch.
    """
    for batch_idx in range(idx_mapping.shape[0]):
        scratch[batch_idx, :] = 0
        if num_sampled[batch_idx] <= 0:
            continue
        req = idx_mapping[batch_idx]
        n, start = longest_suffix_match(token_ids[req], total_len[req], min_n, max_n)
        if n > 0:
            scratch[batch_idx, start // tokens_per_block] = n * (max_model_len + 1) + start + 1


@vectorised()
def ngram_finalize(
    token_ids: Array,
    idx_mapping: Array,
    total_len: Array,
    num_sampled: Array,
    last_sampled: Array,
    scratch: Array,
    drafts: Array,
    max_model_len: int,
    num_blocks: int,
) -> None:
    """Turn the best score of each request into its draft tokens.

    Slots without a continuation repeat the last sampled token.

    Args:
        token_ids: [max_num_reqs, max_model_len].
        idx_mapping: [num_reqs].
        total_len: [max_num_reqs].
        num_sampled: [num_reqs].
        last_sampled: [max_num_reqs].
        scratch: [>= num_reqs, num_blocks] from ngram_scan.
        drafts: output [>= num_reqs, num_steps].
        max_model_len: longest sequence in tokens.
        num_blocks: columns of scratch.
    """
    for batch_idx in range(idx_mapping.shape[0]):
        req = idx_mapping[batch_idx]
        score = scratch[batch_idx, :num_blocks].max()
        num_known, start = 0, 0
        if score > 0 and num_sampled[batch_idx] > 0:
            n = (score - 1) // (max_model_len + 1)
            start = (score - 1) % (max_model_len + 1) + n
            num_known = total_len[req] - start
        for i in range(drafts.shape[1]):
            drafts[batch_idx, i] = token_ids[req, start + i] if i < num_known else last_sampled[req]
