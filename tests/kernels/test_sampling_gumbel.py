"""Drawing tokens: the twins against the Triton kernels, and the parts against known answers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit
from oracle import OraclePair, assert_same

from specbench.kernels.cpu import random as noise
from specbench.kernels.cpu.rows import flat_view
from specbench.kernels.cpu.sampling import sample_rows

GUMBEL = "vllm.v1.worker.gpu.sample.gumbel:"
# Two candidates nearer than this may swap: logarithms differ in their last digit.
TIE = 1e-5
MAX_REQS = 7


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_logits(seed: int, rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    logits = torch.randn(rows, vocab, generator=generator(seed)) * (1 + seed % 4)
    if seed % 3 == 0:  # as after top-k: most of the row is masked
        logits[logits < logits.mean() + 1.0] = -torch.inf
    return logits.to(dtype)


def noisy_logits(logits: np.ndarray, temperature: float, seed: int, position: int) -> np.ndarray:
    """Logits / temperature plus Gumbel noise, from the definition of the hash in plain integers."""
    word = 0xFFFFFFFF

    def mix(h: np.ndarray, key: np.ndarray | int) -> np.ndarray:
        k = (key * 0xCC9E2D51) & word
        k = ((k << 15) | (k >> 17)) & word
        h = h ^ ((k * 0x1B873593) & word)
        h = ((h << 13) | (h >> 19)) & word
        return (h * 5 + 0xE6546B64) & word

    h = np.zeros(len(logits), np.uint64)
    for key in (
        seed & word,
        (seed >> 32) & word,
        position,
        np.arange(len(logits), dtype=np.uint64),
    ):
        h = mix(h, key)
    h ^= 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & word
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & word
    u = ((h ^ (h >> 16)) + 0.5) * 2.0**-32
    return logits / temperature - np.log(-np.log1p(-u))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1000), (3, 4097), (5, 1024), (4, 37)])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("use_fp64", [False, True])
def test_gumbel_sample(
    pair: OraclePair, dtype: torch.dtype, rows: int, vocab: int, seed: int, use_fp64: bool
) -> None:
    logits = random_logits(seed, rows, vocab, dtype)
    reqs = torch.randint(0, MAX_REQS, (rows,), generator=generator(seed), dtype=torch.int32)
    temperatures = torch.tensor([0.0, 1.0, 0.7, 1.3, 1.0, 0.0, 0.1])
    seeds = torch.randint(-(2**62), 2**62, (MAX_REQS,), generator=generator(seed))
    positions = torch.randint(0, 4000, (rows,), generator=generator(seed + 1))
    options = {
        "apply_temperature": seed % 2 == 0,
        "is_drafting": seed % 2 == 1,
        "use_fp64": use_fp64,
    }
    reference, twin = pair.call(
        GUMBEL + "gumbel_sample", logits, reqs, temperatures, seeds, positions, **options
    )
    for row in (reference.value != twin.value).nonzero().flatten().tolist():
        req = int(reqs[row])
        temperature = float(temperatures[req]) if options["apply_temperature"] else 1.0
        position = int(positions[row]) + (1 << 30) * options["is_drafting"]
        noisy = noisy_logits(logits[row].double().numpy(), temperature, int(seeds[req]), position)
        assert not use_fp64
        assert abs(noisy[reference.value[row]] - noisy[twin.value[row]]) < TIE
    assert_same(reference.args, twin.args)


def test_padding_rows_and_draft_cache(pair: OraclePair) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = random_logits(1, 5, 1000, dtype)
        reqs = torch.tensor([2, 0, -1, 5, -1], dtype=torch.int32)
        for columns in (torch.tensor(1), torch.tensor([0, 2, 1, 1, 0])):
            reference, twin = pair.call(
                GUMBEL + "gumbel_sample",
                logits,
                reqs,
                torch.full((MAX_REQS,), 0.8),
                torch.arange(MAX_REQS),
                torch.arange(5),
                apply_temperature=True,
                is_drafting=True,
                logits_cache=torch.zeros(MAX_REQS, 3, 1024, dtype=dtype),
                logits_cache_col=columns,
            )
            assert_same(reference.value, twin.value)
            cache = twin.kwargs["logits_cache"]
            assert_same(reference.kwargs["logits_cache"], cache)
            assert torch.equal(cache[2, columns.expand(5)[0], :1000], logits[0])


def test_all_masked_and_strided_rows(pair: OraclePair) -> None:
    wide = torch.full((3, 1100), -torch.inf)
    wide[1, 7] = wide[1, 1050] = 2.0  # the second lies outside the sliced row
    reference, twin = pair.call(
        GUMBEL + "gumbel_sample",
        wide[:, :1000],
        torch.arange(3, dtype=torch.int32),
        torch.tensor([1.0, 1.0, 0.0]),
        torch.arange(3),
        torch.arange(3),
        apply_temperature=False,
        is_drafting=False,
    )
    assert_same(reference.value, twin.value)
    assert twin.value.tolist() == [0, 7, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1000, 8200])
def test_temperature(pair: OraclePair, dtype: torch.dtype, vocab: int) -> None:
    logits = random_logits(3, 4, vocab, dtype)
    reqs = torch.tensor([1, 3, 3, 0], dtype=torch.int32)
    temperatures = torch.tensor([0.0, 1.0, 5.0, 0.7])
    reference, twin = pair.call(GUMBEL + "apply_temperature", logits, reqs, temperatures)
    assert_same(reference.args, twin.args)
    assert torch.equal(twin.args[0][0], logits[0])
    assert not torch.equal(twin.args[0][1], logits[1])


def test_trace_replay(pair: OraclePair) -> None:
    reference, twin = pair.call(
        "vllm.v1.worker.gpu.sample.trace_replay:apply_trace_tokens",
        torch.tensor([900, 901, 902, 903, 904]),
        torch.tensor([3, -1, 0, 1, 2], dtype=torch.int32),
        torch.arange(40, dtype=torch.int32).view(4, 10),
        torch.tensor([5, 0, 3, 2], dtype=torch.int32),  # trace lengths
        torch.tensor([6, 9, 12, 5], dtype=torch.int32),  # total lengths
        torch.tensor([4, 4, 4, 4], dtype=torch.int32),  # prompt lengths
    )
    assert_same(reference.args, twin.args)
    # Request 3 is past none of its two tokens; 0 takes its third; the others have run out.
    assert twin.args[0].tolist() == [31, 901, 2, 903, 904]


def draw(logits: torch.Tensor, seeds: np.ndarray, fp64: bool = False) -> tuple[np.ndarray, ...]:
    """Tokens and noisy logits of sample_rows at temperature 1 and position 11."""
    rows, vocab = logits.shape
    flat, (stride,) = flat_view(logits)
    tokens, values = np.empty((rows, 1), np.int64), np.empty((rows, 1))
    reqs, positions = np.arange(rows), np.full(rows, 11)
    ones = np.ones(rows, np.float32)
    sample_rows(tokens, values, flat, stride, vocab, reqs, ones, seeds, positions, 0, False, fp64)
    return tokens[:, 0], values[:, 0]


@pytest.mark.parametrize("scale", [0.0, 1.0, 5.0, 40.0])
def test_skipping_tokens_changes_nothing(scale: float) -> None:
    """Against noise for every token: the bound that passes tokens over is safe."""
    rows = 60
    logits = torch.randn(rows, 3000, generator=generator(5)) * scale
    seeds = np.arange(rows) * np.int64(0x1234567890ABCDEF)  # wraps: negative ones as well
    tokens, values = draw(logits, seeds)
    for row in range(rows):
        noisy = noisy_logits(logits[row].double().numpy(), 1.0, int(seeds[row]), 11)
        assert noisy.max() - noisy[tokens[row]] < TIE
        assert values[row] == pytest.approx(noisy.max(), abs=1e-4)


@pytest.mark.parametrize("fp64", [False, True])
def test_frequencies_follow_softmax(fp64: bool) -> None:
    """Chi-square of 40,000 draws over 8 tokens; 7 degrees of freedom, 99.99% quantile 29.9."""
    num_draws = 40_000
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0, 1.5, -torch.inf, 0.0])
    tokens, _ = draw(logits.expand(num_draws, -1), np.arange(num_draws) * 7919, fp64)
    observed = np.bincount(tokens, minlength=9)
    expected = torch.softmax(logits.double(), -1).numpy() * num_draws
    assert observed[7] == 0
    live = expected > 0
    assert ((observed - expected)[live] ** 2 / expected[live]).sum() < 29.9


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_non_finite_logits_yield_a_token_in_range(value: float) -> None:
    logits = torch.zeros(2, 700)
    logits[0, 600] = logits[0, 650] = value
    logits[1] = value
    tokens, _ = draw(logits, np.arange(2))
    assert tokens.tolist() == [600, 0]


@njit
def call_uniforms(bits: int, low: int, high: int) -> tuple[float, float]:
    return noise.uniform32(np.uint32(bits)), noise.uniform64(np.uint32(low), np.uint32(high))


def test_uniforms_stay_inside_the_unit_interval() -> None:
    least, largest = call_uniforms(0, 0, 0), call_uniforms(2**32 - 1, 2**32 - 1, 2**32 - 1)
    assert least == (2.0**-33, 2.0**-54)
    assert largest == (1.0, 1.0 - 2.0**-53)  # float32 rounds to 1: its noise is clamped
