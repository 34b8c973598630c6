"""Row reductions against PyTorch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numba import njit, prange

from specbench.kernels.cpu import rows
from specbench.kernels.cpu.compilation import parallel
from specbench.kernels.cpu.floats import exp_nonpositive, narrow

# Powers of two above and beside the block size, and sizes with remainders.
VOCABS = [1, 7, 1000, 1024, 1025, 4097]


@parallel
def max_sumexp(
    flat: rows.Array, stride: int, vocab: int, temperature: float, out: rows.Array
) -> None:
    for i in prange(out.shape[0]):
        row = flat[i * stride : i * stride + vocab]
        out[i, 0], out[i, 1] = rows.row_max_sumexp(row, temperature)


@njit
def exp_all(x: rows.Array, out: rows.Array) -> None:
    for i in range(x.shape[0]):
        out[i] = exp_nonpositive(x[i])


@njit
def narrow_all(x: rows.Array, out: rows.Array) -> None:
    for i in range(x.shape[0]):
        out[i] = narrow(x[i], out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", VOCABS)
def test_argmax(dtype: torch.dtype, vocab: int) -> None:
    # Few distinct values: most rows have ties, and the first must win.
    logits = torch.randint(-3, 3, (5, vocab), generator=torch.Generator().manual_seed(vocab))
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert rows.argmax(logits.to(dtype)).tolist() == expected


def test_argmax_of_a_slice_and_of_a_transposed_matrix() -> None:
    wide = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rows.argmax(wide[:, 3:20]), wide[:, 3:20].argmax(-1))
    assert torch.equal(rows.argmax(wide.T), wide.T.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_treats_both_zeros_as_equal(dtype: torch.dtype) -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0, -2.0]], dtype=dtype)
    assert rows.argmax(logits).tolist() == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
def test_logsumexp(dtype: torch.dtype, vocab: int, temperature: float) -> None:
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab)) * 5
    logits[0, : vocab // 2] = -torch.inf
    logits = logits.to(dtype)
    flat, (stride,) = rows.flat_view(logits)
    out = np.empty((5, 2))
    max_sumexp(flat, stride, vocab, temperature, out)
    expected = torch.logsumexp(logits.double() / float(np.float32(temperature)), -1).numpy()
    np.testing.assert_allclose(out[:, 0] + np.log(out[:, 1]), expected, rtol=2e-7, atol=2e-6)


def test_logsumexp_of_a_masked_row() -> None:
    out = np.empty((1, 2))
    max_sumexp(np.full(9, -np.inf, np.float32), 9, 9, 1.0, out)
    assert out.tolist() == [[-np.inf, 0.0]]


def test_exp_accuracy() -> None:
    x = np.linspace(-86.9, 0.0, 1_000_003).astype(np.float32)
    out = np.empty_like(x)
    exp_all(x, out)
    assert np.abs(out / np.exp(x.astype(np.float64)) - 1).max() < 4e-7
    assert out[-1] == 1.0


@settings(deadline=None, max_examples=50)
@given(arrays(np.float32, 64, elements=st.floats(width=32, allow_nan=False)))
def test_rounding_to_bfloat16_is_torchs(x: np.ndarray) -> None:
    out = np.empty(64, np.int16)
    narrow_all(x, out)
    assert torch.equal(torch.from_numpy(out), torch.from_numpy(x).bfloat16().view(torch.int16))


def test_editable_writes_back_what_had_to_be_copied() -> None:
    for logits in (torch.ones(3, 4, dtype=torch.float16), torch.ones(4, 3).T, torch.ones(3, 4)):
        with rows.editable(logits) as view:
            view[1, 2] = 5.0
        assert logits[1, 2] == 5.0
        assert logits.sum() == 16.0
