"""Twins of the drafters' kernels against the Triton kernels: block layout and n-gram lookup."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from oracle import OraclePair, assert_same

HERE = "test_drafting_inputs"
MAX_REQS, MAX_TOKENS, MAX_LEN, STEPS = 6, 90, 64, 3
MASK_TOKEN = 77


def dflash_case(seed: int, sample_from_anchor: bool, block_size: int, **cp: int) -> dict[str, Any]:
    """Prepare inputs for decodes, a chunked prefill, null blocks and a row at its length limit."""
    from vllm.v1.worker.gpu.input_batch import InputBuffers
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import prepare_dflash_inputs

    rng = np.random.default_rng(seed)
    query_lens = np.array([STEPS + 1, 9, 1, STEPS + 1])
    num_rejected = torch.tensor([0, 0, 0, rng.integers(1, STEPS + 1)], dtype=torch.int32)
    starts = np.concatenate([[0], np.cumsum(query_lens), [query_lens.sum()]])
    # The third request ends at the longest possible sequence: its queries run over the limit.
    firsts = [int(rng.integers(0, 40)), 5, MAX_LEN - 2, 20]
    pos = np.concatenate([np.arange(f, f + n) for f, n in zip(firsts, query_lens, strict=True)])
    block_table = torch.from_numpy(rng.integers(0, 4, (MAX_REQS, MAX_LEN // block_size)))
    buffers = InputBuffers(MAX_REQS, MAX_TOKENS, torch.device("cpu"))
    buffers.seq_lens.fill_(-7)
    num_queries = STEPS if sample_from_anchor else STEPS + 1
    out: dict[str, torch.Tensor] = {
        "query_slots": torch.full((MAX_TOKENS,), -7),
        "context_positions": torch.full((MAX_TOKENS,), -7),
        "context_slots": torch.full((MAX_TOKENS,), -7),
        "sample_indices": torch.full((MAX_REQS * STEPS,), -7),
        "sample_pos": torch.full((MAX_REQS * STEPS,), -7),
        "sample_idx_mapping": torch.full((MAX_REQS * STEPS,), -7),
        "temperature": torch.full((MAX_REQS,), -7.0),
        "seeds": torch.full((MAX_REQS,), -7),
    }
    batch = SimpleNamespace(
        num_reqs=4,
        num_scheduled_tokens=query_lens,
        positions=torch.from_numpy(pos),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        idx_mapping=torch.from_numpy(rng.permutation(MAX_REQS)[:4]),
    )
    prepare_dflash_inputs(
        buffers,
        *out.values(),
        batch,
        num_sampled=torch.tensor([STEPS + 1, 0, 1, 1], dtype=torch.int32),
        num_rejected=num_rejected,
        last_sampled=torch.arange(100, 100 + MAX_REQS).view(-1, 1),
        next_prefill_tokens=torch.arange(200, 200 + MAX_REQS, dtype=torch.int32).view(1, -1),
        input_temperature=torch.rand(MAX_REQS, generator=torch.Generator().manual_seed(seed)),
        input_seeds=torch.arange(MAX_REQS) * 11,
        block_table=block_table.to(torch.int32),
        block_size=block_size,
        cp_rank=cp.get("rank", 0),
        cp_size=cp.get("size", 1),
        cp_interleave=cp.get("interleave", 1),
        parallel_drafting_token_id=MASK_TOKEN,
        num_query_per_req=num_queries,
        num_speculative_steps=STEPS,
        max_num_reqs=MAX_REQS,
        max_num_tokens=MAX_TOKENS,
        max_model_len=MAX_LEN,
        sample_from_anchor=sample_from_anchor,
    )
    return {
        **out,
        "input_ids": buffers.input_ids,
        "positions": buffers.positions,
        "starts": buffers.query_start_loc,
        "seq_lens": buffers.seq_lens,
    }


def ngram_case(texts: list[list[int]], min_n: int, max_n: int, **shape: int) -> torch.Tensor:
    """Propose for texts of different lengths; the second request sampled nothing."""
    from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

    steps, max_len = shape.get("steps", 4), shape.get("max_len", 40)
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(
            prompt_lookup_min=min_n, prompt_lookup_max=max_n, num_speculative_tokens=steps
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=9),
        model_config=SimpleNamespace(max_model_len=max_len),
    )
    token_ids = torch.full((9, max_len), -1, dtype=torch.int32)
    total_len = torch.zeros(9, dtype=torch.int32)
    rows = [8, 2, 5, 0, 3, 7, 1][: len(texts)]
    for row, text in zip(rows, texts, strict=True):
        token_ids[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
        total_len[row] = len(text)
    states = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=token_ids), total_len=SimpleNamespace(gpu=total_len)
    )
    from vllm.v1.worker.gpu.spec_decode.ngram import speculator as module

    module.HAS_TRITON = True  # the constructor's check; the twin needs no Triton
    drafter = NgramGPUSpeculator(config, torch.device("cpu"), states)
    drafter.scratch.fill_(2**40)
    num_sampled = torch.ones(len(texts), dtype=torch.int32)
    num_sampled[1:2] = 0
    batch = SimpleNamespace(num_reqs=len(texts), idx_mapping=torch.tensor(rows))
    unused: tuple[None, ...] = (None, None, None, None)
    last_sampled = torch.arange(500, 509).view(9, 1)
    return drafter.propose(batch, *unused, num_sampled, None, last_sampled, None, None, None)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sample_from_anchor", [True, False])
@pytest.mark.parametrize("block_size", [16, 4])
def test_prepare_dflash_inputs(
    pair: OraclePair, seed: int, sample_from_anchor: bool, block_size: int
) -> None:
    reference, twin = pair.call(f"{HERE}:dflash_case", seed, sample_from_anchor, block_size)
    assert_same(reference.value, twin.value)
    assert (twin.value["sample_idx_mapping"] >= 0).sum() == 4 * STEPS
    assert (twin.value["query_slots"] != -7).all()


@pytest.mark.parametrize("rank", [0, 1])
def test_prepare_dflash_inputs_under_context_parallelism(pair: OraclePair, rank: int) -> None:
    cp = {"rank": rank, "size": 2, "interleave": 2}
    reference, twin = pair.call(f"{HERE}:dflash_case", 0, True, 4, **cp)
    assert_same(reference.value, twin.value)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("min_n", "max_n"), [(1, 1), (2, 4), (3, 3), (1, 7)])
def test_ngram_on_random_texts(pair: OraclePair, seed: int, min_n: int, max_n: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = [1, 40, 39, 7, 2, 25, int(rng.integers(3, 40))]
    texts = [rng.integers(0, 3, length).tolist() for length in lengths]
    reference, twin = pair.call(f"{HERE}:ngram_case", texts, min_n, max_n)
    assert_same(reference.value, twin.value)


def test_ngram_prefers_the_longest_then_the_latest_match(pair: OraclePair) -> None:
    longest = [1, 2, 3, 9, 9, 8, 2, 3, 7, 1, 2, 3]
    latest = [2, 3, 4, 5, 2, 3, 6, 2, 3]
    unmatched = [1, 2, 3, 4]
    reference, twin = pair.call(f"{HERE}:ngram_case", [longest, longest, latest, unmatched], 2, 3)
    assert_same(reference.value, twin.value)
    assert twin.value[0].tolist() == [9, 9, 8, 2]
    assert (twin.value[1] == 502).all()  # nothing sampled: the last token repeats
    assert twin.value[2].tolist() == [6, 2, 3, 505]  # the continuation ends with the text
    assert (twin.value[3] == 500).all()


def test_ngram_over_many_scratch_blocks(pair: OraclePair) -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 40, length).tolist() for length in (300, 299, 150, 260)]
    shape = {"max_len": 300, "steps": 5}
    reference, twin = pair.call(f"{HERE}:ngram_case", texts, 1, 3, **shape)
    assert_same(reference.value, twin.value)
