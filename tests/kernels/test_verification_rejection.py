"""Twins of the rejection kernels against the Triton kernels: decisions and resampled tokens."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from oracle import OraclePair, assert_same

HERE = "test_verification_rejection"
SAMPLER = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
MAX_REQS, STEPS = 9, 4


@dataclass
class Case:
    """Arguments of vLLM's rejection_sample for one random step."""

    target_logits: torch.Tensor
    draft_logits: torch.Tensor | None
    draft_sampled: torch.Tensor
    cu_num_logits: torch.Tensor
    pos: torch.Tensor
    idx_mapping: torch.Tensor
    expanded_idx_mapping: torch.Tensor
    expanded_local_pos: torch.Tensor
    temperature: torch.Tensor
    seed: torch.Tensor

    def arguments(self) -> tuple[Any, ...]:
        return (*vars(self).values(), STEPS)


def sample(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's rejection_sample, in a worker. Triton's interpreter has no log1p; numpy's fills in."""
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils as utils

    def log1p(x: Any) -> Any:
        from triton.language import core
        from triton.runtime.interpreter import TensorHandle

        return core.tensor(TensorHandle(np.log1p(x.handle.data), x.handle.dtype), x.dtype)

    utils.tldevice = SimpleNamespace(log1p=log1p)
    with np.errstate(divide="ignore", invalid="ignore"):
        return utils.rejection_sample(*args, **kwargs)


def random_case(
    seed: int,
    vocab_size: int = 1500,
    temperatures: tuple[float, ...] = (0.0, 1.0, 0.6),
    one_hot: bool = False,
    agreement: float = 0.8,
    num_drafts: tuple[int, ...] = (STEPS, 0, 2, STEPS, STEPS, 1),
) -> Case:
    """Drafts sampled from a drafter that resembles the target by ``agreement`` (1: equal)."""
    rng = np.random.default_rng(seed)
    num_reqs = len(num_drafts)
    cu = np.concatenate([[0], np.cumsum(np.array(num_drafts) + 1)])
    idx = rng.permutation(MAX_REQS)[:num_reqs]
    temperature = rng.choice(temperatures, MAX_REQS)
    target = rng.normal(0, 2.5, (cu[-1], vocab_size)).astype(np.float32)
    draft = rng.normal(0, 2.5, (MAX_REQS, STEPS, vocab_size)).astype(np.float32)
    sampled = np.zeros(cu[-1], np.int32)
    for b, req in enumerate(idx):
        heat = temperature[req] or 1.0
        for step in range(num_drafts[b]):
            row = cu[b] + step
            mixed = agreement * target[row] * heat + (1 - agreement) * draft[req, step]
            draft[req, step] = mixed
            noise = 0.0 if one_hot or temperature[req] == 0.0 else rng.gumbel(size=vocab_size)
            sampled[row + 1] = int(np.argmax(mixed / heat + noise))
    lengths = np.diff(cu)
    starts = rng.integers(0, 2000, num_reqs)
    steps = np.concatenate([np.arange(n) for n in lengths])
    return Case(
        target_logits=torch.from_numpy(target),
        draft_logits=None if one_hot else torch.from_numpy(draft),
        draft_sampled=torch.from_numpy(sampled),
        cu_num_logits=torch.tensor(cu, dtype=torch.int32),
        pos=torch.from_numpy(np.repeat(starts, lengths) + steps),
        idx_mapping=torch.from_numpy(idx),
        expanded_idx_mapping=torch.from_numpy(np.repeat(idx, lengths)),
        expanded_local_pos=torch.tensor(steps, dtype=torch.int32),
        temperature=torch.tensor(temperature, dtype=torch.float32),
        seed=torch.from_numpy(rng.integers(-(2**62), 2**62, MAX_REQS)),
    )


def check(pair: OraclePair, case: Case, **options: Any) -> torch.Tensor:
    """Compare tokens and counts; returns the counts. Entries behind a count are undefined."""
    reference, twin = pair.call(f"{HERE}:sample", *case.arguments(), **options)
    assert_same(reference.value[1], twin.value[1], where="num_sampled")
    for b, count in enumerate(twin.value[1].tolist()):
        assert 1 <= count <= int(case.cu_num_logits[b + 1] - case.cu_num_logits[b])
        assert_same(
            reference.value[0][b, :count], twin.value[0][b, :count], where=f"tokens of request {b}"
        )
    return twin.value[1]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("one_hot", [True, False])
@pytest.mark.parametrize("block", [True, False])
def test_mixed_temperatures(pair: OraclePair, seed: int, one_hot: bool, block: bool) -> None:
    case = random_case(seed, one_hot=one_hot)
    check(pair, case, use_block_verification=block)


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("one_hot", [True, False])
def test_every_outcome_occurs(pair: OraclePair, block: bool, one_hot: bool) -> None:
    """Rejection at the first and at the last position, and acceptance of all, at temperature 1."""
    counts: set[int] = set()
    for seed in range(6):
        case = random_case(
            seed,
            temperatures=(1.0,),
            one_hot=one_hot,
            agreement=0.75,
            num_drafts=(STEPS,) * 9,
            vocab_size=40,
        )
        counts |= set(check(pair, case, use_block_verification=block).tolist())
        if counts >= {1, STEPS, STEPS + 1}:
            return
    pytest.fail(f"the cases only reach these numbers of tokens: {sorted(counts)}")


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(7, torch.bfloat16), (1024, torch.float32), (9001, torch.bfloat16)],
)
def test_vocabulary_sizes_and_dtypes(pair: OraclePair, vocab_size: int, dtype: torch.dtype) -> None:
    case = random_case(11, vocab_size=vocab_size)
    assert case.draft_logits is not None
    case = replace(
        case, target_logits=case.target_logits.to(dtype), draft_logits=case.draft_logits.to(dtype)
    )
    check(pair, case, use_block_verification=vocab_size == 9001)
    check(pair, replace(case, draft_logits=None))


def test_padded_logits_and_a_narrower_draft_vocabulary(pair: OraclePair) -> None:
    case = random_case(3, vocab_size=1200)
    assert case.draft_logits is not None
    target = torch.full((case.target_logits.shape[0], 1300), 99.0)
    target[:, :1200] = case.target_logits
    draft = torch.full((MAX_REQS + 1, STEPS + 2, 1250), 99.0)
    draft[:MAX_REQS, :STEPS, :1200] = case.draft_logits
    case = replace(
        case, target_logits=target[:, :1201], draft_logits=draft[:MAX_REQS, :STEPS, :1200]
    )
    check(pair, case)


def test_masked_tokens(pair: OraclePair) -> None:
    """Most target logits are -inf, as after top-k; the drafter knows nothing of it."""
    case = random_case(4, temperatures=(1.0,))
    least = case.target_logits.topk(5, dim=-1).values[:, -1:]
    masked = case.target_logits.masked_fill(case.target_logits < least, -torch.inf)
    check(pair, replace(case, target_logits=masked))
    check(pair, replace(case, target_logits=masked, draft_logits=None))


def test_an_equal_drafter_is_always_accepted(pair: OraclePair) -> None:
    case = random_case(5, temperatures=(1.0,), agreement=1.0)
    # log p > log u + log q holds for every u below 1 even after rounding here.
    counts = check(pair, case)
    assert_same(counts, case.cu_num_logits.diff())


@pytest.mark.parametrize("one_hot", [True, False])
@pytest.mark.parametrize("block", [True, False])
def test_placeholders_end_verification(pair: OraclePair, one_hot: bool, block: bool) -> None:
    case = random_case(6, one_hot=one_hot, agreement=1.0)
    for row in (1, 7, 8, 13, 19):
        if case.expanded_local_pos[row] > 0:
            case.draft_sampled[row] = -1
    check(pair, case, use_block_verification=block)


@pytest.mark.parametrize("one_hot", [True, False])
@pytest.mark.parametrize("rates", [(1.0, 1.0, 1.0, 1.0), (0.9, 0.5, 0.7, 0.2), (0.0,) * 4])
def test_synthetic_rates(pair: OraclePair, one_hot: bool, rates: tuple[float, ...]) -> None:
    for seed in range(3):
        case = random_case(seed, one_hot=one_hot)
        counts = check(pair, case, synthetic_conditional_rates=torch.tensor(rates))
        if rates[0] == 0.0:
            assert (counts == 1).all()


@pytest.mark.parametrize("one_hot", [True, False])
def test_noise_in_double_precision(pair: OraclePair, one_hot: bool) -> None:
    check(pair, random_case(2, one_hot=one_hot), use_fp64=True)


def test_watermarking_is_refused_by_name() -> None:
    from specbench.vllm_plugin.cpu.verification import resample

    arguments: dict[str, Any] = dict.fromkeys(inspect.signature(resample).parameters)
    with pytest.raises(NotImplementedError, match="watermark"):
        resample(**{**arguments, "WATERMARK": True})


@pytest.mark.parametrize("seed", range(3))
def test_gather_draft_sampled(pair: OraclePair, seed: int) -> None:
    case = random_case(seed)
    rng = np.random.default_rng(seed)
    num_rows = case.pos.shape[0]
    indices = torch.from_numpy(np.sort(rng.permutation(num_rows + 9)[:num_rows]))
    positions = torch.zeros(num_rows + 9, dtype=torch.int64)
    positions[indices] = case.pos
    # Some requests are still inside their prefill: their drafts are placeholders.
    prefill = torch.zeros(MAX_REQS, dtype=torch.int32)
    prefill[case.idx_mapping[:3]] = 5000
    reference, twin = pair.call(
        f"{SAMPLER}:gather_draft_sampled",
        torch.arange(num_rows + 9, dtype=torch.int32) + 100,
        positions,
        indices,
        case.expanded_idx_mapping,
        case.expanded_local_pos,
        prefill,
    )
    assert_same(reference.value, twin.value)
    assert (twin.value[0] == -1).any()


def test_flatten_sampled(pair: OraclePair) -> None:
    case = random_case(0)
    num_reqs = case.idx_mapping.shape[0]
    counts = 1 + torch.arange(num_reqs, dtype=torch.int32) % case.cu_num_logits.diff()
    reference, twin = pair.launch(
        f"{SAMPLER}._flatten_sampled_kernel",
        (num_reqs,),
        torch.full((case.pos.shape[0],), -7),
        torch.arange(num_reqs * (STEPS + 1)).view(num_reqs, STEPS + 1),
        STEPS + 1,
        counts,
        case.cu_num_logits,
        num_warps=1,
    )
    assert_same(reference.args[0], twin.args[0])
