"""The lookup against a search written from its definition, on random and edge-case texts."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.errors import EnvironmentProblem
from specbench.kernels import ngram_lookup as module
from specbench.kernels.cpu.ngram_lookup import longest_suffix_match, scan
from specbench.kernels.ngram_lookup import (
    NgramMatches,
    ngram_lookup,
    ngram_lookup_cpu,
    ngram_lookup_reference,
    ngram_lookup_triton,
)

FUNCTIONS = pytest.mark.parametrize("function", [ngram_lookup_cpu, ngram_lookup_reference])
# Fills the rows behind the texts: inside the alphabet of the random texts, so that a read behind
# a text's end finds false matches.
PADDING = 1


class Expected(NamedTuple):
    """Scalars of :class:`NgramMatches` for one request; drafts without padding."""

    drafts: list[int]
    counts: int
    match_lengths: int
    starts: int
    num_occurrences: int
    num_agreeing: int


def by_definition(text: list[int], min_n: int, max_n: int, num_tokens: int) -> Expected:
    for n in range(min(max_n, len(text) - 1), min_n - 1, -1):
        suffix = text[len(text) - n :]
        # Every place of the suffix but its own, each with the index of the token behind it.
        follows = [s + n for s in range(len(text) - n) if text[s : s + n] == suffix]
        if follows:
            start = follows[-1]
            agreeing = sum(text[f] == text[start] for f in follows)
            drafts = text[start : start + num_tokens]
            return Expected(drafts, len(drafts), n, start, len(follows), agreeing)
    return Expected([], 0, 0, -1, 0, 0)


def run(function: Any, texts: list[list[int]], *, dtype=torch.int32, **arguments) -> NgramMatches:
    width = max((len(text) for text in texts), default=0) + 2
    ids = torch.full((len(texts), width), PADDING, dtype=dtype)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = torch.tensor(text, dtype=dtype)
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.int32)
    return function(ids, lengths, **arguments)


def check(matches: NgramMatches, texts: list[list[int]], min_n: int, max_n: int) -> None:
    num_tokens = matches.drafts.shape[1]
    for i, text in enumerate(texts):
        expected = by_definition(text, min_n, max_n, num_tokens)
        padding = [-1] * (num_tokens - len(expected.drafts))
        assert matches.drafts[i].tolist() == expected.drafts + padding
        assert [field[i].item() for field in matches[1:]] == list(expected[1:])


@FUNCTIONS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@settings(max_examples=150)
@given(
    texts=st.lists(st.lists(st.integers(0, 3), max_size=40), min_size=1, max_size=4),
    min_n=st.integers(1, 3),
    extra=st.integers(0, 9),
    num_tokens=st.integers(1, 20),
)
def test_equals_definition(function, dtype, texts, min_n, extra, num_tokens):
    max_n = min_n + extra
    matches = run(function, texts, dtype=dtype, min_n=min_n, max_n=max_n, num_tokens=num_tokens)
    check(matches, texts, min_n, max_n)


@FUNCTIONS
@settings(max_examples=100)
@given(
    cycle=st.lists(st.integers(0, 2), min_size=1, max_size=7),
    head=st.lists(st.integers(0, 2), max_size=8),
    length=st.integers(1, 60),
    max_n=st.integers(1, 12),
)
def test_equals_definition_on_periodic_texts(function, cycle, head, length, max_n):
    text = (head + cycle * length)[:length]
    check(run(function, [text], min_n=1, max_n=max_n, num_tokens=16), [text], 1, max_n)


@FUNCTIONS
def test_prefers_the_longest_then_the_latest_match(function):
    longest = [1, 2, 3, 9, 9, 8, 2, 3, 7, 1, 2, 3]
    latest = [2, 3, 4, 5, 2, 3, 6, 2, 3]
    matches = run(function, [longest, latest], min_n=1, max_n=4, num_tokens=4)
    assert matches.drafts.tolist() == [[9, 9, 8, 2], [6, 2, 3, -1]]
    assert matches.match_lengths.tolist() == [3, 2]
    assert matches.starts.tolist() == [3, 6]


@FUNCTIONS
def test_counts_occurrences_and_those_that_agree(function):
    # 5 6 occurs four times before its last place: followed by 7, 8, 7 and 7.
    text = [5, 6, 7, 0, 5, 6, 8, 1, 5, 6, 7, 2, 5, 6, 7, 3, 5, 6]
    matches = run(function, [text], min_n=1, max_n=2, num_tokens=1)
    assert matches.num_occurrences.tolist() == [4]
    assert matches.num_agreeing.tolist() == [3]


@FUNCTIONS
def test_a_continuation_ends_with_the_text(function):
    # Period 3: the latest occurrence lies 3 tokens back. One token repeated: 1 back.
    matches = run(function, [[1, 2, 3] * 5, [4] * 9], min_n=1, max_n=4, num_tokens=8)
    assert matches.counts.tolist() == [3, 1]
    assert matches.drafts[0].tolist() == [1, 2, 3, -1, -1, -1, -1, -1]
    assert matches.drafts[1].tolist() == [4, -1, -1, -1, -1, -1, -1, -1]
    assert matches.starts.tolist() == [12, 8]
    assert matches.num_occurrences.tolist() == [3, 5]


@FUNCTIONS
def test_texts_without_a_match_propose_nothing(function):
    texts = [[], [5], [1, 2, 3, 4], [8, 9, 8]]  # the last one repeats one token, min_n is 2
    matches = run(function, texts, min_n=2, max_n=4, num_tokens=3)
    assert (matches.drafts == -1).all()
    assert (matches.starts == -1).all()
    for field in ("counts", "match_lengths", "num_occurrences", "num_agreeing"):
        assert getattr(matches, field).tolist() == [0] * 4, field


@FUNCTIONS
def test_what_lies_behind_the_length_is_ignored(function):
    # As in a chunked prefill: the row holds the whole prompt, the text is its first part.
    ids = torch.tensor([[1, 2, 3, 1, 2, 9, 1, 2, 3, 7, 1, 2, 3]], dtype=torch.int32)
    for length in range(ids.shape[1] + 1):
        lengths = torch.tensor([length])
        matches = function(ids, lengths, min_n=1, max_n=3, num_tokens=5)
        check(matches, [ids[0, :length].tolist()], 1, 3)


@FUNCTIONS
def test_rows_select_texts_and_padded_requests_get_nothing(function):
    state = torch.tensor([[1, 2, 1, 0], [3, 3, 3, 3], [5, 6, 5, 6]], dtype=torch.int32)
    rows = torch.tensor([2, -1, 0, 2, 1])
    lengths = torch.tensor([4, 4, 3, 3, 0])
    matches = function(state, lengths, min_n=1, max_n=2, num_tokens=2, rows=rows)
    assert matches.drafts.tolist() == [[5, 6], [-1, -1], [2, 1], [6, 5], [-1, -1]]
    assert matches.match_lengths.tolist() == [2, 0, 1, 1, 0]


@FUNCTIONS
def test_a_slice_of_a_wider_state_tensor_needs_no_copy(function):
    state = torch.randint(0, 3, (3, 50), dtype=torch.int32, generator=torch.manual_seed(0))
    lengths = torch.tensor([12, 20, 7])
    arguments = {"min_n": 1, "max_n": 6, "num_tokens": 8}
    whole = function(state, lengths, **arguments)
    bounded = function(state[:, :20], lengths, **arguments)
    assert all(torch.equal(a, b) for a, b in zip(whole, bounded, strict=True))


@FUNCTIONS
def test_no_requests_give_an_empty_result(function):
    ids, none = torch.zeros(3, 4, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    matches = function(ids, none, min_n=1, max_n=2, num_tokens=5, rows=none)
    assert matches.drafts.shape == (0, 5)
    assert all(field.shape == (0,) for field in matches[1:])


class Reads:
    """A text that counts how often it is read; the uncompiled scan runs on it."""

    def __init__(self, text: list[int]) -> None:
        self.text, self.num_reads = text, 0

    def __getitem__(self, index: int) -> int:
        self.num_reads += 1
        return self.text[index]


@pytest.mark.parametrize("max_n", [1, 8, 32])
@pytest.mark.parametrize(
    "text",
    [
        [0] * 2000,
        [0, 1] * 1000,
        ([0] * 31 + [1]) * 60 + [0] * 31,
        ([0] * 32 + [1]) * 60 + [0] * 32,
        list(range(2000)),
    ],
    ids=["one token", "two tokens", "near misses", "long near misses", "no repetition"],
)
def test_the_cpu_scan_is_linear_whatever_the_text_repeats(text, max_n):
    # A failed comparison shortens the state, which only grows by one per position: at most two
    # comparisons a position, three reads for the position itself, two for agreement.
    reads = Reads(text)
    scan.py_func(reads, len(text), max_n, np.zeros(max_n, np.int32), False)
    assert reads.num_reads <= 6 * len(text)


@settings(max_examples=150)
@given(
    text=st.lists(st.integers(0, 2), max_size=40),
    min_n=st.integers(1, 3),
    extra=st.integers(0, 9),
)
def test_longest_suffix_match_gives_length_and_place(text, min_n, extra):
    expected = by_definition(text, min_n, min_n + extra, 1)
    n, start = longest_suffix_match(np.array(text, np.int32), len(text), min_n, min_n + extra)
    assert n == expected.match_lengths
    assert start == (expected.starts - n if n else 0)


def test_cpu_tensors_take_the_compiled_version(monkeypatch):
    calls = []
    monkeypatch.setattr(module, "ngram_lookup_cpu", lambda *a, **k: calls.append((a, k)))
    run(ngram_lookup, [[1, 1]], min_n=1, max_n=2, num_tokens=3)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_n": 0}, "min_n"),
        ({"min_n": 3, "max_n": 2}, "min_n"),
        ({"num_tokens": 0}, "num_tokens"),
        ({"token_ids": torch.zeros(2, 3, dtype=torch.int32).t()}, "contiguous rows"),
        ({"token_ids": torch.zeros(2, 0, dtype=torch.int32)}, "max_len"),
        ({"token_ids": torch.zeros(2, 3)}, "int32 or int64"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, "one length per request"),
        ({"rows": torch.zeros(1, dtype=torch.int32)}, "one length per request"),
        ({"lengths": torch.zeros(2, 2, dtype=torch.int32)[:, 0]}, "must be contiguous"),
    ],
)
@pytest.mark.parametrize(
    "function", [ngram_lookup_cpu, ngram_lookup_reference, ngram_lookup_triton]
)
def test_refuses_what_it_would_misread(function, change, message):
    arguments = {
        "token_ids": torch.zeros(2, 3, dtype=torch.int32),
        "lengths": torch.zeros(2, dtype=torch.int32),
        "min_n": 1,
        "max_n": 2,
        "num_tokens": 1,
        **change,
    }
    with pytest.raises(ValueError, match=message):
        function(**arguments)


def test_without_triton_the_module_imports_and_says_what_a_gpu_needs(monkeypatch):
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import torch\n"
        "from specbench.kernels.ngram_lookup import ngram_lookup\n"
        "ids = torch.tensor([[7, 8, 7]])\n"
        "print(ngram_lookup(ids, torch.tensor([3]), min_n=1, max_n=1, num_tokens=1).drafts.item())"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "8"
    monkeypatch.setattr(module, "triton", None)
    with pytest.raises(EnvironmentProblem, match="pip install triton"):
        run(ngram_lookup_triton, [[1, 1]], min_n=1, max_n=2, num_tokens=3)
