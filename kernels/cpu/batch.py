"""Batch bookkeeping of vLLM's V2 runner as compiled loops over numpy arrays.

Index spaces: ``batch_idx`` numbers the requests of one step; ``idx_mapping[batch_idx]`` is the
request's persistent row ``req_state_idx`` (-1, where a function allows it: no request). Token
rows of request b are ``query_start_loc[b]:query_start_loc[b + 1]``, its logits rows
``cu_num_logits[b]:cu_num_logits[b + 1]``. All functions write their results in place.
"""

from __future__ import annotations

from specbench.kernels.cpu.compilation import vectorised
from specbench.kernels.cpu.floats import Array


@vectorised()
def prepare_prefill_inputs(
    input_ids: Array,
    next_prefill_tokens: Array,
    idx_mapping: Array,
    query_start_loc: Array,
    all_token_ids: Array,
    prefill_lens: Array,
    num_computed_tokens: Array,
) -> None:
    """Copy each prefilling request's scheduled tokens and look-ahead tokens.

    Args:
        input_ids: output [num_tokens].
        next_prefill_tokens: output [num_lookahead, max_num_reqs]; 0 beyond the prefill.
        idx_mapping: [num_reqs].
        query_start_loc: [>= num_reqs + 1].
        all_token_ids: [max_num_reqs, max_model_len].
        prefill_lens: [max_num_reqs].
        num_computed_tokens: [max_num_reqs].
    """
    for batch_idx in range(idx_mapping.shape[0]):
        req = idx_mapping[batch_idx]
        prefill_len = prefill_lens[req]
        num_computed = num_computed_tokens[req]
        if num_computed >= prefill_len:
            continue
        start = query_start_loc[batch_idx]
        query_len = query_start_loc[batch_idx + 1] - start
        for i in range(query_len):
            input_ids[start + i] = all_token_ids[req, num_computed + i]
        for ahead in range(next_prefill_tokens.shape[0]):
            position = num_computed + query_len + ahead
            known = position < prefill_len
            next_prefill_tokens[ahead, req] = all_token_ids[req, position] if known else 0


@vectorised()
def prepare_pos_seq_lens(
    pos: Array,
    seq_lens: Array,
    idx_mapping: Array,
    query_start_loc: Array,
    num_computed_tokens: Array,
    max_num_reqs: int,
) -> None:
    """Set token positions [num_tokens] and sequence lengths [max_num_reqs], padding with 0."""
    num_reqs = idx_mapping.shape[0]
    for batch_idx in range(num_reqs):
        num_computed = num_computed_tokens[idx_mapping[batch_idx]]
        start = query_start_loc[batch_idx]
        query_len = query_start_loc[batch_idx + 1] - start
        seq_lens[batch_idx] = num_computed + query_len
        for i in range(query_len):
            pos[start + i] = num_computed + i
    for batch_idx in range(num_reqs, max_num_reqs):
        seq_lens[batch_idx] = 0


@vectorised()
def combine_sampled_and_draft_tokens(
    input_ids: Array,
    idx_mapping: Array,
    last_sampled_tokens: Array,
    query_start_loc: Array,
    seq_lens: Array,
    prefill_lens: Array,
    draft_tokens: Array,
    cu_num_logits: Array,
    logits_indices: Array,
    num_new_sampled_tokens: int,
) -> None:
    """Place last sampled and draft tokens at the end of each query; list the rows with logits.

    Args:
        input_ids: in and out [num_tokens]; slots of prompt tokens stay as they are.
        idx_mapping: [num_reqs].
        last_sampled_tokens: [max_num_reqs].
        query_start_loc: [>= num_reqs + 1].
        seq_lens: [>= num_reqs].
        prefill_lens: [max_num_reqs].
        draft_tokens: [max_num_reqs, num_speculative_steps].
        cu_num_logits: [num_reqs + 1].
        logits_indices: output [num_logits], the token row of each logits row.
        num_new_sampled_tokens: bonus tokens per request and step, 0 or 1.
    """
    for batch_idx in range(idx_mapping.shape[0]):
        req = idx_mapping[batch_idx]
        first_logit = cu_num_logits[batch_idx]
        num_logits = cu_num_logits[batch_idx + 1] - first_logit
        query_end = query_start_loc[batch_idx + 1]
        for i in range(num_logits):
            logits_indices[first_logit + i] = query_end - num_logits + i
        seq_len = seq_lens[batch_idx]
        if seq_len <= prefill_lens[req]:
            continue
        if num_new_sampled_tokens > 0 and seq_len - num_logits >= prefill_lens[req]:
            input_ids[query_end - num_logits] = last_sampled_tokens[req]
        num_drafts = num_logits - num_new_sampled_tokens
        for i in range(num_drafts):
            input_ids[query_end - num_drafts + i] = draft_tokens[req, i]


@vectorised()
def get_num_sampled_and_rejected(
    num_sampled: Array,
    num_rejected: Array,
    seq_lens: Array,
    cu_num_logits: Array,
    idx_mapping: Array,
    prefill_lens: Array,
) -> None:
    """Count sampled (in and out) and rejected (out) tokens; both 0 inside a chunked prefill."""
    for batch_idx in range(idx_mapping.shape[0]):
        if seq_lens[batch_idx] < prefill_lens[idx_mapping[batch_idx]]:
            num_sampled[batch_idx] = 0
            num_rejected[batch_idx] = 0
        else:
            num_logits = cu_num_logits[batch_idx + 1] - cu_num_logits[batch_idx]
            num_rejected[batch_idx] = num_logits - num_sampled[batch_idx]


@vectorised()
def post_update(
    idx_mapping: Array,
    num_computed_tokens: Array,
    last_sampled_tokens: Array,
    output_bin_counts: Array,
    sampled_tokens: Array,
    num_sampled: Array,
    num_rejected: Array,
    query_start_loc: Array,
    all_token_ids: Array,
    total_len: Array,
) -> None:
    """Append the sampled tokens to each request's state; rows with index -1 are skipped.

    Args:
        idx_mapping: [num_reqs].
        num_computed_tokens: in and out [max_num_reqs].
        last_sampled_tokens: output [max_num_reqs].
        output_bin_counts: in and out [max_num_reqs, vocab_size], or None.
        sampled_tokens: [num_reqs, num_speculative_steps + 1].
        num_sampled: [num_reqs].
        num_rejected: [num_reqs].
        query_start_loc: [>= num_reqs + 1], or None for queries of no tokens.
        all_token_ids: in and out [max_num_reqs, max_model_len].
        total_len: in and out [max_num_reqs].
    """
    for batch_idx in range(idx_mapping.shape[0]):
        req = idx_mapping[batch_idx]
        if req < 0:
            continue
        old_len = total_len[req]
        for i in range(num_sampled[batch_idx]):
            token = sampled_tokens[batch_idx, i]
            all_token_ids[req, old_len + i] = token
            last_sampled_tokens[req] = token
            if output_bin_counts is not None:
                output_bin_counts[req, token] += 1
        total_len[req] = old_len + max(num_sampled[batch_idx], 0)
        computed_delta = -num_rejected[batch_idx]
        if query_start_loc is not None:
            computed_delta += query_start_loc[batch_idx + 1] - query_start_loc[batch_idx]
        num_computed_tokens[req] += computed_delta


@vectorised()
def post_update_num_computed_tokens(
    idx_mapping: Array, num_computed_tokens: Array, query_start_loc: Array
) -> None:
    """Add each query's length to its request's computed tokens [max_num_reqs]."""
    for batch_idx in range(idx_mapping.shape[0]):
        query_len = query_start_loc[batch_idx + 1] - query_start_loc[batch_idx]
        num_computed_tokens[idx_mapping[batch_idx]] += query_len


@vectorised()
def expand_idx_mapping(
    idx_mapping: Array,
    expanded_idx_mapping: Array,
    expanded_local_pos: Array,
    cu_num_logits: Array,
) -> None:
    """Give every logits row its request row and its position within the request."""
    for batch_idx in range(idx_mapping.shape[0]):
        start = cu_num_logits[batch_idx]
        for i in range(cu_num_logits[batch_idx + 1] - start):
            expanded_idx_mapping[start + i] = idx_mapping[batch_idx]
            expanded_local_pos[start + i] = i


@vectorised()
def dcp_local_seq_lens(
    out: Array, seq_lens: Array, size: int, rank: int, interleave: int, num_reqs: int
) -> None:
    """Count the tokens that one rank of a round-robin sharded cache holds.

    Tokens are dealt in runs of ``interleave`` to ``size`` ranks in turn.

    Args:
        out: output [max_num_reqs]; 0 from num_reqs on.
        seq_lens: [>= num_reqs].
        size: number of ranks.
        rank: this rank.
        interleave: tokens per run.
        num_reqs: requests of this step.
    """
    for batch_idx in range(num_reqs):
        seq_len = seq_lens[batch_idx]
        full_rounds = seq_len // (size * interleave)
        rest = seq_len % (size * interleave) - rank * interleave
        out[batch_idx] = full_rounds * interleave + min(max(rest, 0), interleave)
    for batch_idx in range(num_reqs, out.shape[0]):
        out[batch_idx] = 0


@vectorised()
def gather_draft_sampled(
    draft_sampled: Array,
    pos_out: Array,
    input_ids: Array,
    positions: Array,
    logits_indices: Array,
    row_request: Array,
    row_step: Array,
    prefill_lens: Array,
) -> None:
    """Copy token and position of each logits row; drafts inside a prefill become -1.

    Args:
        draft_sampled: output [num_rows].
        pos_out: output [num_rows].
        input_ids: [num_tokens].
        positions: [num_tokens].
        logits_indices: [num_rows] token row of each logits row.
        row_request: [num_rows].
        row_step: [num_rows].
        prefill_lens: [max_num_reqs].
    """
    for row in range(logits_indices.shape[0]):
        token_row = logits_indices[row]
        position = positions[token_row]
        pos_out[row] = position
        start = position - row_step[row]
        placeholder = row_step[row] > 0 and start < prefill_lens[row_request[row]]
        draft_sampled[row] = -1 if placeholder else input_ids[token_row]


@vectorised()
def flatten_sampled(flat: Array, sampled: Array, num_sampled: Array, cu_num_logits: Array) -> None:
    """Lay each request's sampled tokens [num_reqs, num_steps + 1] at its logits rows [num_rows]."""
    for b in range(num_sampled.shape[0]):
        for i in range(num_sampled[b]):
            flat[cu_num_logits[b] + i] = sampled[b, i]


@vectorised()
def insert_resampled(
    sampled: Array,
    num_sampled: Array,
    tokens: Array,
    cu_num_logits: Array,
    row_request: Array,
    temperature: Array,
) -> None:
    """Append each request's resampled token, unless a greedy rejection has left its own.

    Args:
        sampled: in and out [num_reqs, num_steps + 1].
        num_sampled: in: accepted drafts, out: one more [num_reqs].
        tokens: [num_reqs] from resampling.resample.
        cu_num_logits: [num_reqs + 1].
        row_request: [num_rows] request row of each logits row; negative counts as greedy.
        temperature: [max_num_reqs].
    """
    for b in range(num_sampled.shape[0]):
        row = cu_num_logits[b] + num_sampled[b]
        request = row_request[row]
        is_bonus = row == cu_num_logits[b + 1] - 1
        if is_bonus or (request >= 0 and temperature[request] != 0.0):
            sampled[b, num_sampled[b]] = tokens[b]
        num_sampled[b] += 1
