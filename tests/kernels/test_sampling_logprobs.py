"""Reports about logits: each twin against its Triton kernel."""

from __future__ import annotations

import pytest
import torch
from oracle import OraclePair, assert_same

SAMPLE = "vllm.v1.worker.gpu.sample."
DTYPES = [torch.float32, torch.bfloat16]


def logits_of(rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 5
    logits[:, 5::7] = -torch.inf
    return logits.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "num_logprobs"), [(1000, 5), (4097, 0), (2050, 2050)])
def test_topk_scores(pair: OraclePair, dtype: torch.dtype, vocab: int, num_logprobs: int) -> None:
    logits = logits_of(3, vocab, torch.float32)
    # A masked token is not sampled; the kernel would count its own padding into the rank.
    sampled = torch.tensor([0, 6, vocab - 2])
    if dtype == torch.bfloat16:
        # Distinct values, or top-k may order ties either way.
        logits = torch.stack([torch.randperm(vocab) for _ in range(3)]).remainder(256).to(dtype)
        num_logprobs = 0
    reference, twin = pair.call(
        SAMPLE + "logprob:compute_topk_scores", logits, num_logprobs, sampled
    )
    assert_same(reference.value.logprobs, twin.value.logprobs, rtol=1e-6, atol=2e-6)
    assert_same(reference.value.selected_token_ranks, twin.value.selected_token_ranks)
    assert_same(reference.value.logprob_token_ids, twin.value.logprob_token_ids)
    expected = torch.log_softmax(logits.double(), -1).gather(1, sampled[:, None])[:, 0]
    torch.testing.assert_close(twin.value.logprobs[:, 0].double(), expected, rtol=1e-6, atol=2e-6)


def test_fully_masked_row_gives_nan_as_on_a_gpu(pair: OraclePair) -> None:
    logits = torch.full((1, 100), -torch.inf)
    reference, twin = pair.call(
        SAMPLE + "logprob:compute_token_logprobs", logits, torch.tensor([[3]])
    )
    assert_same(reference.value, twin.value)
    assert twin.value.isnan().all()


@pytest.mark.parametrize("num_topk", [0, 3])
def test_requests_own_token_lists(pair: OraclePair, num_topk: int) -> None:
    kernel = SAMPLE + "logprob._fill_logprob_token_ids_kernel"
    reqs = torch.tensor([2, 0, 1, 0], dtype=torch.int32)
    own = torch.arange(60, dtype=torch.int32).view(3, 20)
    token_ids = torch.zeros(4, 8, dtype=torch.int64)
    valid = torch.zeros(4, 8, dtype=torch.bool)
    topk = torch.arange(100, 112, dtype=torch.int32).view(4, 3)
    reference, twin = pair.launch(
        kernel,
        (4,),
        token_ids,
        token_ids.stride(0),
        valid,
        valid.stride(0),
        torch.tensor([9, 8, 7, 6]),
        topk,
        topk.stride(0),
        reqs,
        torch.tensor([0, 7, 2], dtype=torch.int32),
        own,
        own.stride(0),
        NUM_TOPK=num_topk,
        PADDED_COLS=8,
    )
    assert_same(reference.args, twin.args)
    assert twin.args[0][0, :4].tolist() == [9, 40, 41, 0]
    assert twin.args[2].sum(-1).tolist() == [3, 1 + num_topk, 8, 1 + num_topk]


def test_prompt_token_ids(pair: OraclePair) -> None:
    reference, twin = pair.call(
        SAMPLE + "prompt_logprob:get_prompt_logprobs_token_ids",
        2063,
        torch.tensor([0, 3, 3, 2060, 2063], dtype=torch.int32),
        torch.tensor([1, 3, 0, 2], dtype=torch.int32),
        torch.tensor([40, 7, 0, 99], dtype=torch.int32),
        torch.randint(0, 9999, (4, 2200), dtype=torch.int32),
    )
    assert_same(reference.value, twin.value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1000, 8193])
def test_num_nans(pair: OraclePair, dtype: torch.dtype, vocab: int) -> None:
    logits = logits_of(4, vocab, dtype)
    logits[1, 3::5] = torch.nan
    logits[3, -1] = -torch.nan
    reference, twin = pair.call("vllm.v1.worker.gpu.metrics.logits:get_num_nans", logits)
    assert_same(reference.value, twin.value)
    assert twin.value.tolist() == [0, len(range(3, vocab, 5)), 0, 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows_per_request", [1, 3])
def test_sampling_masks(pair: OraclePair, dtype: torch.dtype, rows_per_request: int) -> None:
    vocab, width = 1003, 200
    starts = torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    num_sampled = torch.tensor([3, 0, 2], dtype=torch.int32).clamp(max=rows_per_request)
    logits = torch.full((6, vocab), -torch.inf)
    logits[0::2] = logits_of(3, vocab, torch.float32)  # wider than the compact row
    logits[1::2, 17:40] = 1.0
    logits[1, 20], logits[1, 21] = torch.inf, torch.nan
    num_rows = 3 * rows_per_request
    token_ids = torch.full((num_rows, width), -7, dtype=torch.int32)
    packed = torch.full((num_rows, (vocab + 7) // 8), 77, dtype=torch.uint8)
    logits = logits.to(dtype)
    reference, twin = pair.launch(
        SAMPLE + "output._compact_sampling_mask_kernel",
        (num_rows,),
        logits,
        *logits.stride(),
        starts,
        num_sampled,
        token_ids,
        token_ids.stride(0),
        packed,
        packed.stride(0),
        torch.full((num_rows,), -7, dtype=torch.int32),
        vocab,
        width,
        ROWS_PER_REQUEST=rows_per_request,
        BLOCK_SIZE=8192,
    )
    assert_same(reference.args, twin.args)
    assert twin.args[9][0] == torch.isfinite(logits[0]).sum()
