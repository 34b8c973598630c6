"""The lookup's Triton kernels: under the interpreter against reference and twin, and compiled.

The interpreter needs a process of its own (oracle.py): the reference worker runs ``lookup`` with
the kernels, the twin worker with the compiled CPU version.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import OraclePair, assert_same

from specbench.kernels import ngram_lookup as module
from specbench.kernels.ngram_lookup import (
    NgramMatches,
    ngram_lookup_cpu,
    ngram_lookup_reference,
    ngram_lookup_triton,
)

HERE = "test_ngram_lookup_triton"


def lookup(
    token_ids: torch.Tensor, lengths: torch.Tensor, positions_per_block: int, **arguments: Any
) -> NgramMatches:
    """Run the kernels where Triton's interpreter is on, the CPU twin elsewhere."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        arguments["positions_per_block"] = positions_per_block
        return ngram_lookup_triton(token_ids, lengths, **arguments)
    return ngram_lookup_cpu(token_ids, lengths, **arguments)


def check(
    pair: OraclePair,
    token_ids: torch.Tensor,
    lengths: torch.Tensor,
    positions_per_block: int = 16,
    **arguments: Any,
) -> NgramMatches:
    """Hold kernels and twin to the reference; returns its result as a NamedTuple."""
    expected = ngram_lookup_reference(token_ids, lengths, **arguments)
    kernels, twin = pair.call(
        f"{HERE}:lookup", token_ids, lengths, positions_per_block, **arguments
    )
    assert_same(expected, NgramMatches(*kernels.value), where="Triton")
    assert_same(expected, NgramMatches(*twin.value), where="twin")
    return expected


@st.composite
def batches(draw: Any) -> dict[str, Any]:
    """State tensor, lengths and numbers; with and without rows, some rows padded."""
    width, num_rows = draw(st.integers(1, 40)), draw(st.integers(1, 4))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    alphabet = draw(st.integers(1, 4))
    values = draw(
        st.lists(
            st.lists(st.integers(0, alphabet), min_size=width, max_size=width),
            min_size=num_rows,
            max_size=num_rows,
        )
    )
    rows = draw(st.none() | st.lists(st.integers(-1, num_rows - 1), min_size=1, max_size=5))
    num_reqs = num_rows if rows is None else len(rows)
    lengths = draw(st.lists(st.integers(0, width), min_size=num_reqs, max_size=num_reqs))
    min_n = draw(st.integers(1, 3))
    return {
        "token_ids": torch.tensor(values, dtype=dtype),
        "lengths": torch.tensor(lengths, dtype=dtype),
        "rows": None if rows is None else torch.tensor(rows, dtype=dtype),
        "min_n": min_n,
        "max_n": min_n + draw(st.integers(0, 6)),
        "num_tokens": draw(st.integers(1, 9)),
        "positions_per_block": draw(st.sampled_from([4, 16, 64])),
    }


@settings(max_examples=50)
@given(batch=batches())
def test_equals_the_reference(pair: OraclePair, batch: dict[str, Any]) -> None:
    check(pair, **batch)


def test_the_best_of_many_blocks_wins_and_all_of_them_count(pair: OraclePair) -> None:
    # 1 2 3 in blocks 0, 2 and 5 (the latest wins; two of three continue with 9), 2 3 in block 6.
    text = torch.arange(100, 212)
    for place, continuation in ((3, 9), (40, 8), (82, 9)):
        text[place : place + 4] = torch.tensor([1, 2, 3, continuation])
    text[98:100] = torch.tensor([2, 3])
    text[-3:] = torch.tensor([1, 2, 3])
    matches = check(pair, text[None].int(), torch.tensor([112]), min_n=2, max_n=8, num_tokens=16)
    assert matches.match_lengths.tolist() == [3]
    assert matches.starts.tolist() == [85]
    assert matches.num_occurrences.tolist() == [3]
    assert matches.num_agreeing.tolist() == [2]


def test_matches_across_block_borders(pair: OraclePair) -> None:
    # The copy of the last 20 tokens covers two or three blocks, one row for each alignment.
    suffix = torch.arange(500, 520)
    texts = torch.arange(100, 180).repeat(16, 1)
    for shift, text in enumerate(texts):
        text[5 + shift : 25 + shift] = suffix
        text[-20:] = suffix
    lengths = torch.full((16,), 80)
    matches = check(pair, texts, lengths, min_n=1, max_n=32, num_tokens=16)
    assert matches.match_lengths.tolist() == [20] * 16
    assert matches.starts.tolist() == list(range(25, 41))


@pytest.mark.parametrize("max_n", [16, 32])
def test_periodic_texts(pair: OraclePair, max_n: int) -> None:
    periods = [1, 3, 16, 17]
    texts = torch.stack([torch.arange(60) % period for period in periods])
    arguments = {"min_n": 1, "max_n": max_n, "num_tokens": 16}
    matches = check(pair, texts, torch.tensor([60, 59, 58, 57]), **arguments)
    assert matches.counts.tolist() == [1, 3, 16, 16]
    once_around = check(pair, texts, torch.tensor([2, 4, 17, 18]), **arguments)
    assert once_around.match_lengths.tolist() == [1] * 4
    not_quite = check(pair, texts, torch.tensor(periods), **arguments)
    assert not_quite.counts.tolist() == [0] * 4


def test_a_slice_of_the_state_and_a_length_beyond_it(pair: OraclePair) -> None:
    state = torch.randint(0, 3, (3, 50), dtype=torch.int32, generator=torch.manual_seed(1))
    lengths = torch.tensor([12, 20, 50])  # the last one is read as the slice's width
    matches = check(pair, state[:, :33], lengths, min_n=1, max_n=6, num_tokens=8)
    assert (matches.starts <= 33).all()


def test_no_requests(pair: OraclePair) -> None:
    none = torch.zeros(0, dtype=torch.int32)
    state = torch.zeros(2, 8, dtype=torch.int32)
    matches = check(pair, state, none, rows=none, min_n=1, max_n=2, num_tokens=4)
    assert matches.drafts.shape == (0, 4)


TYPES = {
    "token_ids": "*i32",
    "lengths": "*i32",
    "rows": "*i32",
    "block_scores": "*i64",
    "drafts": "*i64",
    **dict.fromkeys(NgramMatches._fields[1:], "*i32"),
}
# Triton turns an integer argument that is 1 into a constant; all of these can be.
ONES = ("token_ids_stride", "max_len", "min_n", "max_n", "num_tokens")


@pytest.mark.parametrize("token_type", ["*i32", "*i64"])
@pytest.mark.parametrize("has_rows", [True, False])
@pytest.mark.parametrize("ones", [(), ONES], ids=["any numbers", "numbers of 1"])
@pytest.mark.parametrize("kernel", ["_scan_kernel", "_propose_kernel"])
def test_compiles_for_a_gpu(
    kernel: str, ones: tuple[str, ...], has_rows: bool, token_type: str
) -> None:
    """No GPU is needed to compile for one (compute capability 9.0)."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: the kernels cannot be compiled")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(module, kernel)
    constants = {
        "HAS_ROWS": has_rows,
        "BLOCK": module.POSITIONS_PER_BLOCK,
        "NUM_TOKENS_POW2": 16,
        "NUM_BLOCKS_POW2": 64,
        **dict.fromkeys(ones, 1),
    }
    constants = {name: constants[name] for name in function.arg_names if name in constants}
    types = {**TYPES, "token_ids": token_type}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in function.arg_names
    }
    compiled = triton.compile(
        ASTSource(function, signature, constexprs=constants), target=GPUTarget("cuda", 90, 32)
    )
    assert compiled.asm["cubin"]
