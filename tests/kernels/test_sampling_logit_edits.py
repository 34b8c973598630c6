"""Changes of logits before sampling: each twin against its Triton kernel."""

from __future__ import annotations

import pytest
import torch
from oracle import OraclePair, assert_same

SAMPLE = "vllm.v1.worker.gpu.sample."
DTYPES = [torch.float32, torch.bfloat16]
MAX_REQS = 6
VOCAB = 1000


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def integers(seed: int, low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=generator(seed), dtype=torch.int32)


def expanded(lengths: list[int], reqs: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a speculative batch: the request of each row and its place within it."""
    idx_mapping = torch.tensor(reqs, dtype=torch.int32).repeat_interleave(torch.tensor(lengths))
    places = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths])
    return idx_mapping, places


def logits_of(seed: int, rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    logits = torch.randn(rows, vocab, generator=generator(seed)) * 4
    logits[:, seed % vocab :: 13] = -torch.inf
    return logits.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1000, 4097])
def test_min_p(pair: OraclePair, dtype: torch.dtype, vocab: int) -> None:
    logits = logits_of(1, 5, vocab, dtype)
    reqs = torch.tensor([3, 0, 2, 1, 3], dtype=torch.int32)
    min_p = torch.tensor([0.0, 0.5, 1.0, 0.01])
    reference, twin = pair.call(SAMPLE + "min_p:apply_min_p", logits, reqs, min_p)
    assert_same(reference.args, twin.args)
    kept = (twin.args[0] > -torch.inf).sum(-1)
    assert kept[2] == 1
    assert kept[1] == (logits[1] > -torch.inf).sum()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(4))
def test_penalties(pair: OraclePair, dtype: torch.dtype, seed: int) -> None:
    vocab = [VOCAB, 4097, 8200, 33][seed]
    idx_mapping, places = expanded([3, 1, 4, 2], [4, 0, 2, 1])
    rows = len(places)
    token_ids = integers(seed, 0, vocab, rows)
    token_ids[1] = token_ids[2]  # a draft that repeats
    reference, twin = pair.call(
        SAMPLE + "penalties:apply_penalties",
        logits_of(seed, rows, vocab, dtype),
        idx_mapping,
        token_ids,
        places,
        torch.tensor([1.0, 1.3, 0.8, 1.0, 2.0, 1.0]),
        torch.tensor([0.0, 0.0, 0.5, 0.0, -0.7, 0.0]),
        torch.tensor([0.0, 0.9, 0.0, 0.0, -1.1, 0.0]),
        integers(seed, -(2**31), 2**31 - 1, MAX_REQS, (vocab + 31) // 32),
        integers(seed + 9, -3, 3, MAX_REQS, vocab).clamp(min=0),
    )
    assert_same(reference.args, twin.args)


def test_bincount(pair: OraclePair) -> None:
    prompt_lens = torch.tensor([5, 0, 1030, 1024, 9, 3], dtype=torch.int32)
    prefill_lens = torch.tensor([5, 1, 1500, 1024, 20, 3], dtype=torch.int32)
    reference, twin = pair.call(
        SAMPLE + "penalties:bincount",
        torch.tensor([2, 4, 0, 3, 1]),
        integers(0, 0, VOCAB, MAX_REQS, 1600),
        prompt_lens,
        prefill_lens,
        torch.full((MAX_REQS, 32), 7, dtype=torch.int32),
        torch.full((MAX_REQS, VOCAB), 7, dtype=torch.int32),
        1500,
    )
    assert_same(reference.args, twin.args)
    counts = twin.args[5]
    assert counts.sum(-1).tolist() == [0, 1, 470, 0, 11, 7 * VOCAB]


def bias_arguments(seed: int, rows: int, reqs: torch.Tensor, vocab: int) -> list[torch.Tensor]:
    """Arguments of apply_logit_bias after the logits; every list is of distinct tokens."""

    def lists(offset: int) -> torch.Tensor:
        draws = [torch.randperm(vocab, generator=generator(seed + offset + r)) for r in range(6)]
        return torch.stack(draws)[:, :16].int()

    return [
        reqs,
        torch.randint(0, 30, (rows,), generator=generator(seed)),
        torch.tensor([0, 3, 16, 0, 0, 1], dtype=torch.int32),
        lists(10),
        torch.tensor([0, 2, 16, 5, 0, 0], dtype=torch.int32),
        lists(20),
        torch.randn(MAX_REQS, 16, generator=generator(seed)) * 10,
        torch.tensor([0, 15, 100, 15, 20, 100], dtype=torch.int32),
        torch.tensor([0, 2, 1, 16, 3, 1], dtype=torch.int32),
        torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.int32),
        lists(30),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(3))
def test_logit_bias(pair: OraclePair, dtype: torch.dtype, seed: int) -> None:
    vocab = [VOCAB, 4097, 8200][seed]
    reqs, _ = expanded([2, 1, 3, 2, 1, 2], [1, 0, 2, 3, 4, 5])
    arguments = bias_arguments(seed, len(reqs), reqs, vocab)
    reference, twin = pair.call(
        SAMPLE + "logit_bias:apply_logit_bias",
        logits_of(seed, len(reqs), vocab, dtype),
        *arguments,
        check_all_masked_rows=seed % 2 == 0,
    )
    assert_same(reference.args, twin.args)


@pytest.mark.parametrize("restore", [True, False])
def test_stop_token_left_alone_survives_on_request(pair: OraclePair, restore: bool) -> None:
    logits = torch.full((2, 50), -torch.inf)
    logits[0, 7] = logits[1, 7] = 3.0
    logits[1, 8] = 1.0
    none = torch.zeros(1, dtype=torch.int32)
    list_of = torch.tensor([[7, 9]], dtype=torch.int32)
    reference, twin = pair.call(
        SAMPLE + "logit_bias:apply_logit_bias",
        logits,
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int64),
        none,
        list_of,
        none,
        list_of,
        torch.zeros(1, 2),
        torch.tensor([5], dtype=torch.int32),
        torch.tensor([2], dtype=torch.int32),
        torch.tensor([int(restore)], dtype=torch.int32),
        list_of,
        check_all_masked_rows=True,
    )
    assert_same(reference.args, twin.args)
    assert twin.args[0][:, 7].tolist() == [3.0 if restore else -torch.inf, -torch.inf]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(3))
def test_bad_words(pair: OraclePair, dtype: torch.dtype, seed: int) -> None:
    vocab = 5  # few tokens, so that prefixes match by chance
    idx_mapping, places = expanded([4, 1, 2, 3], [3, 1, 0, 2])
    num_words = [4, 1, 0, 7, 0, 0]
    offsets = torch.zeros(MAX_REQS, 8, dtype=torch.int32)
    lengths = integers(seed, 1, 4, MAX_REQS, 7)
    offsets[:, 1:] = lengths.cumsum(-1)
    reference, twin = pair.call(
        SAMPLE + "bad_words:apply_bad_words",
        torch.randn(10, vocab, generator=generator(seed)).to(dtype),
        idx_mapping,
        integers(seed + 1, 0, vocab, MAX_REQS, 32),
        offsets,
        torch.tensor(num_words, dtype=torch.int32),
        integers(seed + 2, 0, vocab, MAX_REQS, 64),
        torch.tensor([9, 3, 4, 20, 1, 1], dtype=torch.int32),
        torch.tensor([10, 3, 30, 22, 1, 1], dtype=torch.int32),
        integers(seed + 3, 0, vocab, 10),
        places,
        max(num_words),
    )
    assert_same(reference.args, twin.args)
    assert (twin.args[0] == -torch.inf).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1000, 8224])
def test_grammar_bitmask(pair: OraclePair, dtype: torch.dtype, vocab: int) -> None:
    # Three requests with 3, 1 and 2 rows; the masks cover more places than request 0 has left.
    targets = torch.tensor([0, 1, 2, 3, 8, 9], dtype=torch.int32)
    masks = integers(1, -(2**31), 2**31 - 1, 6, (vocab + 31) // 32)
    logits = logits_of(2, 6, vocab, dtype)
    reference, twin = pair.launch(
        "vllm.v1.worker.gpu.structured_outputs._apply_grammar_bitmask_kernel",
        (6, -(-vocab // 8192)),
        logits,
        logits.stride(0),
        targets,
        torch.tensor([0, 3, 4, 6], dtype=torch.int32),
        masks,
        masks.stride(0),
        vocab,
        MASK_STRIDE=4,
        BLOCK_SIZE=8192,
    )
    assert_same(reference.args, twin.args)
    assert torch.equal(twin.args[0][3], logits[3])  # request 1 has no mask
    assert not torch.equal(twin.args[0][4], logits[4])


@pytest.mark.parametrize("seed", range(12))
def test_thinking_budget(pair: OraclePair, seed: int) -> None:
    vocab = 4  # few tokens, so that markers occur by chance
    idx_mapping, places = expanded([3, 1, 4, 1], [3, 0, 2, 1])
    markers = [integers(seed + k, 0, vocab, n) for k, n in enumerate((1 + seed % 2, 2, 3))]
    total_lens = torch.tensor([1030, 6, 60, 2, 9, 9], dtype=torch.int32)
    scanned = torch.tensor([0, 3, 70, 0, 0, 0], dtype=torch.int32)
    reference, twin = pair.call(
        SAMPLE + "thinking_budget:apply_thinking_budget",
        torch.zeros(9, vocab),
        torch.tensor([3, 0, 2, 1], dtype=torch.int32),
        idx_mapping,
        torch.tensor([5, 0, 1, 0, -1, -1], dtype=torch.int32),
        integers(seed + 5, 0, vocab, MAX_REQS, 1100),
        total_lens,
        integers(seed + 6, 0, vocab, 9),
        places,
        torch.tensor([-1, 1, 50, -1, -1, -1], dtype=torch.int32),
        torch.tensor([-1, -1, 20, -1, -1, -1], dtype=torch.int32),
        scanned,
        *markers,
    )
    assert_same(reference.args, twin.args)


def test_thinking_budget_forces_the_closing_sequence(pair: OraclePair) -> None:
    tokens = torch.tensor([[1, 7, 7, 7, 2, 0, 0]], dtype=torch.int32)  # 1 opens, 2 3 closes
    reference, twin = pair.call(
        SAMPLE + "thinking_budget:apply_thinking_budget",
        torch.zeros(2, 9),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        torch.tensor([3], dtype=torch.int32),
        tokens,
        torch.tensor([4], dtype=torch.int32),
        torch.tensor([7, 2], dtype=torch.int32),  # the last committed token and one draft
        torch.tensor([0, 1], dtype=torch.int32),
        *(torch.full((1,), value, dtype=torch.int32) for value in (-1, -1, 0)),
        torch.tensor([1], dtype=torch.int32),
        torch.tensor([2, 3], dtype=torch.int32),
        torch.tensor([2, 3], dtype=torch.int32),
    )
    assert_same(reference.args, twin.args)
    assert twin.args[0].argmax(-1).tolist() == [2, 3]
