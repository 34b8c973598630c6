"""Twins of the input-batch kernels against the Triton kernels: mixed prefill and decode batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from oracle import OraclePair, assert_same

INPUT_BATCH = "vllm.v1.worker.gpu.input_batch"
MAX_REQS, MAX_LEN, STEPS, VOCAB = 11, 60, 5, 50
SEEDS = range(4)


@dataclass
class Batch:
    """One random step: decodes with 0..STEPS drafts, whole and chunked prefills, padding."""

    idx_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    cu_num_logits: torch.Tensor
    seq_lens: torch.Tensor
    prefill_len: torch.Tensor
    num_computed: torch.Tensor
    all_token_ids: torch.Tensor
    draft_tokens: torch.Tensor
    last_sampled: torch.Tensor
    num_tokens: int
    num_logits: int


def random_batch(seed: int, num_reqs: int = 7) -> Batch:
    rng = np.random.default_rng(seed)
    idx = rng.permutation(MAX_REQS)[:num_reqs]
    prefill = rng.integers(3, 30, MAX_REQS)
    computed = np.empty(MAX_REQS, np.int64)
    query_lens, num_logits = [], []
    for req in idx:
        if rng.random() < 0.4:
            computed[req] = rng.integers(0, prefill[req])
            query_lens.append(int(rng.integers(1, prefill[req] - computed[req] + 1)))
            num_logits.append(1)
        else:
            computed[req] = prefill[req] + rng.integers(0, 9)
            drafts = int(rng.choice([0, 1, STEPS, rng.integers(0, STEPS + 1)]))
            query_lens.append(1 + drafts)
            num_logits.append(1 + drafts)
    starts = np.concatenate([[0], np.cumsum(query_lens), [sum(query_lens)] * 2])
    seq_lens = np.zeros(num_reqs + 2, np.int32)
    seq_lens[:num_reqs] = computed[idx] + query_lens
    return Batch(
        idx_mapping=torch.tensor(idx, dtype=torch.int64),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        cu_num_logits=torch.tensor(np.concatenate([[0], np.cumsum(num_logits)]), dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens),
        prefill_len=torch.tensor(prefill, dtype=torch.int32),
        num_computed=torch.tensor(np.where(computed < 99, computed, 0), dtype=torch.int32),
        all_token_ids=ints(rng, VOCAB, (MAX_REQS, MAX_LEN), torch.int32),
        draft_tokens=ints(rng, VOCAB, (MAX_REQS, STEPS), torch.int64),
        last_sampled=ints(rng, VOCAB, (MAX_REQS, 1), torch.int64),
        num_tokens=sum(query_lens),
        num_logits=sum(num_logits),
    )


def ints(
    rng: np.random.Generator, high: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return torch.tensor(rng.integers(0, high, shape), dtype=dtype)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_lookahead", [1, 3])
def test_prepare_prefill_inputs(pair: OraclePair, seed: int, num_lookahead: int) -> None:
    batch = random_batch(seed)
    reference, twin = pair.call(
        f"{INPUT_BATCH}:prepare_prefill_inputs",
        torch.full((batch.num_tokens + 3,), -7, dtype=torch.int32),
        torch.full((num_lookahead, MAX_REQS), -7, dtype=torch.int32),
        batch.idx_mapping,
        batch.query_start_loc,
        batch.all_token_ids,
        batch.prefill_len,
        batch.num_computed,
    )
    assert (reference.args[0] != -7).any() or (seed == 0)
    assert_same(reference.args, twin.args)


@pytest.mark.parametrize("seed", SEEDS)
def test_prepare_pos_seq_lens(pair: OraclePair, seed: int) -> None:
    batch = random_batch(seed)
    reference, twin = pair.call(
        f"{INPUT_BATCH}:prepare_pos_seq_lens",
        batch.idx_mapping,
        batch.query_start_loc,
        batch.num_computed,
        torch.full((batch.num_tokens + 3,), -7, dtype=torch.int64),
        torch.full((MAX_REQS,), -7, dtype=torch.int32),
    )
    assert_same(reference.args, twin.args)
    assert_same(batch.seq_lens[:7], twin.args[4][:7])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_new", [0, 1])
def test_combine_sampled_and_draft_tokens(pair: OraclePair, seed: int, num_new: int) -> None:
    batch = random_batch(seed)
    cu_num_logits = batch.cu_num_logits
    if num_new == 0:  # every row with logits holds a draft
        cu_num_logits = cu_num_logits - torch.arange(8, dtype=torch.int32)
    reference, twin = pair.call(
        f"{INPUT_BATCH}:combine_sampled_and_draft_tokens",
        torch.full((batch.num_tokens + 3,), -7, dtype=torch.int32),
        batch.idx_mapping,
        batch.last_sampled,
        batch.query_start_loc,
        batch.seq_lens,
        batch.prefill_len,
        batch.draft_tokens,
        cu_num_logits,
        int(cu_num_logits[-1]),
        num_new,
    )
    assert_same(reference.value, twin.value)
    assert_same(reference.args, twin.args)


@pytest.mark.parametrize("seed", SEEDS)
def test_get_num_sampled_and_rejected(pair: OraclePair, seed: int) -> None:
    batch = random_batch(seed)
    num_logits = batch.cu_num_logits.diff()
    num_sampled = 1 + torch.arange(7, dtype=torch.int32) % num_logits
    reference, twin = pair.call(
        f"{INPUT_BATCH}:get_num_sampled_and_rejected",
        num_sampled,
        batch.seq_lens,
        batch.cu_num_logits,
        batch.idx_mapping,
        batch.prefill_len,
    )
    assert_same(reference.value, twin.value)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("with_counts", [True, False])
@pytest.mark.parametrize("with_queries", [True, False])
def test_post_update(pair: OraclePair, seed: int, with_counts: bool, with_queries: bool) -> None:
    batch = random_batch(seed)
    rng = np.random.default_rng(seed)
    idx_mapping = batch.idx_mapping.clone()
    idx_mapping[2] = -1
    num_sampled = ints(rng, STEPS + 2, (7,), torch.int32)
    num_sampled[0], num_sampled[1] = 0, STEPS + 1
    reference, twin = pair.call(
        f"{INPUT_BATCH}:post_update",
        idx_mapping,
        batch.num_computed,
        batch.last_sampled,
        torch.zeros(MAX_REQS, VOCAB, dtype=torch.int32) if with_counts else None,
        ints(rng, 5, (7, STEPS + 1), torch.int64),  # few tokens: repeats within one request
        num_sampled,
        ints(rng, STEPS, (7,), torch.int32),
        batch.query_start_loc if with_queries else None,
        batch.all_token_ids,
        batch.prefill_len,  # as total_len
    )
    assert_same(reference.args, twin.args)


@pytest.mark.parametrize("seed", SEEDS)
def test_post_update_num_computed_tokens(pair: OraclePair, seed: int) -> None:
    batch = random_batch(seed)
    reference, twin = pair.call(
        f"{INPUT_BATCH}:post_update_num_computed_tokens",
        batch.idx_mapping,
        batch.num_computed,
        batch.query_start_loc,
    )
    assert_same(reference.args, twin.args)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_expand_idx_mapping(pair: OraclePair, seed: int, dtype: torch.dtype) -> None:
    batch = random_batch(seed)
    reference, twin = pair.call(
        f"{INPUT_BATCH}:expand_idx_mapping",
        batch.idx_mapping.to(dtype),
        batch.num_logits,
        batch.cu_num_logits,
        STEPS + 1,
    )
    assert_same(reference.value, twin.value)


@pytest.mark.parametrize(("size", "interleave"), [(2, 1), (3, 4)])
def test_dcp_local_seq_lens(pair: OraclePair, size: int, interleave: int) -> None:
    seq_lens = torch.tensor([1, 5, 12, 13, 40, 999], dtype=torch.int32)
    total = torch.zeros(6, dtype=torch.int32)
    for rank in range(size):
        reference, twin = pair.call(
            "vllm.v1.worker.gpu.cp_utils:prepare_dcp_local_seq_lens",
            torch.full((9,), -7, dtype=torch.int32),
            seq_lens,
            6,
            size,
            rank,
            interleave,
            num_reqs_padded=8,
        )
        assert_same(reference.args[0], twin.args[0])
        assert_same(reference.value, twin.value)
        total += twin.value[:6]
    assert_same(seq_lens, total)  # every token is on exactly one rank
