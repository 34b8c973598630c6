"""N-gram lookup: continue each request with what followed its longest repeated suffix.

For a text t[0..length) the lookup takes the largest n in min_n..max_n such that the last n tokens
also occur earlier, at their most recent earlier occurrence, and proposes the tokens that followed
it there, up to num_tokens. An occurrence may overlap the suffix, but ends before the last token,
so that at least one token follows.

Only tokens that exist are proposed: a continuation that reaches the end of the text ends there.
In a text that repeats with period p the most recent occurrence lies p tokens back, so p tokens are
proposed and the copy is not copied on.

Beside the proposal stands what says how much to trust it: the match length, how often the matched
n-gram occurs, and how many of its occurrences continue with the same token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from specbench.errors import EnvironmentProblem
from specbench.kernels.cpu.ngram_lookup import lookup_rows

try:
    import triton
    import triton.language as tl
except ImportError:  # vLLM's CPU build comes without Triton, and nothing here needs it there
    triton = tl = None

# End positions per program of both kernels. 512 are 4 for each thread of Triton's default of 4
# warps, and make 64 programs of a text of 32k tokens: a single request occupies half of a large
# GPU, and the block maxima that every program of the second kernel reads stay few.
POSITIONS_PER_BLOCK = 512


class NgramMatches(NamedTuple):
    """What the lookup found for each request.

    Attributes:
        drafts: [num_reqs, num_tokens] int64 continuation, -1 behind its end.
        counts: [num_reqs] int32 tokens of the continuation, 0 without a match.
        match_lengths: [num_reqs] int32 tokens of the matched suffix, 0 without a match.
        starts: [num_reqs] int32 index in the text of the first continuation token, -1 without.
        num_occurrences: [num_reqs] int32 earlier occurrences of the matched n-gram, the chosen
            one included, 0 without a match.
        num_agreeing: [num_reqs] int32 those of them that are followed by the same token as the
            chosen one, itself included.
    """

    drafts: torch.Tensor
    counts: torch.Tensor
    match_lengths: torch.Tensor
    starts: torch.Tensor
    num_occurrences: torch.Tensor
    num_agreeing: torch.Tensor

    @classmethod
    def empty(cls, num_reqs: int, num_tokens: int, device: torch.device) -> NgramMatches:
        """Uninitialised result for the fast versions to fill."""
        drafts = torch.empty(num_reqs, num_tokens, dtype=torch.int64, device=device)
        per_request = torch.empty(5, num_reqs, dtype=torch.int32, device=device)
        return cls(drafts, *per_request.unbind())


def ngram_lookup_reference(
    token_ids: torch.Tensor,
    lengths: torch.Tensor,
    *,
    min_n: int,
    max_n: int,
    num_tokens: int,
    rows: torch.Tensor | None = None,
) -> NgramMatches:
    """:func:`ngram_lookup` in plain torch: slow, on any device, what the fast versions must equal.

    Every position is tried as the end of an occurrence, one suffix token after the other.
    """
    _check(token_ids, lengths, rows, min_n, max_n, num_tokens)
    lengths, max_len = lengths.long().clamp(max=token_ids.shape[1]), token_ids.shape[1]
    if rows is not None:
        token_ids = token_ids[rows.clamp(min=0).long()]
        lengths = torch.where(rows >= 0, lengths, 0)
    ends = torch.arange(max_len, device=token_ids.device)[None]
    alive = ends < lengths[:, None] - 1
    suffix_lengths = torch.zeros_like(token_ids, dtype=torch.int64)
    for j in range(max_n):
        suffix_token = token_ids.gather(1, (lengths[:, None] - 1 - j).clamp(min=0))
        alive = alive & (token_ids.roll(j, dims=1) == suffix_token) & (ends >= j)
        suffix_lengths += alive
    longest = suffix_lengths.max(dim=1).values
    longest = torch.where(longest >= min_n, longest, 0)
    found = longest > 0
    occurs = found[:, None] & (suffix_lengths == longest[:, None])
    starts = torch.where(occurs, ends + 1, -1).max(dim=1).values
    next_tokens = token_ids.roll(-1, dims=1)
    chosen = token_ids.gather(1, starts.clamp(min=0)[:, None])
    counts = torch.where(found, (lengths - starts).clamp(max=num_tokens), 0)
    offsets = torch.arange(num_tokens, device=token_ids.device)[None]
    drafts = token_ids.gather(1, (starts[:, None] + offsets).clamp(min=0, max=max_len - 1)).long()
    return NgramMatches(
        drafts.masked_fill(offsets >= counts[:, None], -1),
        *(
            values.to(torch.int32)
            for values in (
                counts,
                longest,
                starts,
                occurs.sum(dim=1),
                (occurs & (next_tokens == chosen)).sum(dim=1),
            )
        ),
    )


def _jit(function: Callable[..., Any]) -> Any:
    """Declare a kernel; without Triton it stays a function that nothing calls.

    Triton resolves names in annotations as well and knows only its own: every argument that is
    not a constant is annotated as a tensor, be it pointer, number or block.
    """
    return function if triton is None else triton.jit(function)


@_jit
def _load_request(
    token_ids: tl.tensor,
    token_ids_stride: tl.tensor,
    lengths: tl.tensor,
    rows: tl.tensor,
    req: tl.tensor,
    max_len: tl.tensor,
    HAS_ROWS: tl.constexpr,
) -> tl.tuple:
    # Returns the pointer to a request's first token and its length, 0 for a padded row.
    length = tl.minimum(tl.load(lengths + req), max_len).to(tl.int32)
    row = req.to(tl.int64)
    if HAS_ROWS:
        row = tl.load(rows + req).to(tl.int64)
        length = tl.where(row >= 0, length, 0)
    return token_ids + tl.maximum(row, 0) * token_ids_stride, length


@_jit
def _common_suffix_lengths(
    text: tl.tensor, length: tl.tensor, ends: tl.tensor, max_n: tl.tensor
) -> tl.tensor:
    # For each end position before the last token: how many tokens up to it equal those up to the
    # text's end, at most max_n. Stops when no position of the block matches any further, which
    # in most texts is after a few tokens.
    alive = ends < length - 1
    n = tl.zeros_like(ends)
    num_alive = tl.sum(alive.to(tl.int32), axis=0)
    j = tl.zeros_like(length)
    while (j < max_n) & (num_alive > 0):
        # While a position is alive, j is at most its end and so less than the length.
        suffix_token = tl.load(text + length - 1 - j)
        inside = alive & (ends >= j)
        alive = inside & (tl.load(text + ends - j, mask=inside, other=-1) == suffix_token)
        n += alive.to(tl.int32)
        num_alive = tl.sum(alive.to(tl.int32), axis=0)
        j += 1
    return n


@_jit
def _scan_kernel(
    token_ids: tl.tensor,  # [max_num_reqs, max_len] int32 or int64
    token_ids_stride: tl.tensor,
    lengths: tl.tensor,  # [num_reqs]
    rows: tl.tensor,  # [num_reqs], or anything without HAS_ROWS
    block_scores: tl.tensor,  # [num_reqs, num_blocks] int64 (output)
    num_occurrences: tl.tensor,  # [num_reqs] int32 (output: zeroed for the next kernel)
    num_agreeing: tl.tensor,  # [num_reqs] int32 (output: likewise)
    max_len: tl.tensor,
    min_n: tl.tensor,
    max_n: tl.tensor,
    HAS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # One program per request and block of end positions. A match of n tokens that ends at e has
    # the score n * max_len + e: the greatest is the longest match, the latest among equals. A
    # match has n >= 1, so 0 means none.
    req = tl.program_id(0)
    block = tl.program_id(1)
    if block == 0:
        tl.store(num_occurrences + req, 0)
        tl.store(num_agreeing + req, 0)
    text, length = _load_request(token_ids, token_ids_stride, lengths, rows, req, max_len, HAS_ROWS)
    best = tl.zeros((), tl.int64)
    if block * BLOCK < length - 1:
        ends = block * BLOCK + tl.arange(0, BLOCK)
        n = _common_suffix_lengths(text, length, ends, max_n)
        scores = n.to(tl.int64) * max_len + ends
        best = tl.max(tl.where(n >= min_n, scores, 0), axis=0)
    tl.store(block_scores + req.to(tl.int64) * tl.num_programs(1) + block, best)


@_jit
def _propose_kernel(
    token_ids: tl.tensor,  # [max_num_reqs, max_len] int32 or int64
    token_ids_stride: tl.tensor,
    lengths: tl.tensor,  # [num_reqs]
    rows: tl.tensor,  # [num_reqs], or anything without HAS_ROWS
    block_scores: tl.tensor,  # [num_reqs, num_blocks] int64 from _scan_kernel
    drafts: tl.tensor,  # [num_reqs, num_tokens] int64 (output)
    counts: tl.tensor,  # [num_reqs] int32 (output)
    match_lengths: tl.tensor,  # [num_reqs] int32 (output)
    starts: tl.tensor,  # [num_reqs] int32 (output)
    num_occurrences: tl.tensor,  # [num_reqs] int32 (added to)
    num_agreeing: tl.tensor,  # [num_reqs] int32 (added to)
    max_len: tl.tensor,
    num_tokens: tl.tensor,
    HAS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_TOKENS_POW2: tl.constexpr,
    NUM_BLOCKS_POW2: tl.constexpr,
) -> None:
    # Same grid. Every program finds the request's best score; the first one writes the proposal,
    # and those whose block holds a match as long count the occurrences in it.
    req = tl.program_id(0)
    block = tl.program_id(1)
    num_blocks = tl.num_programs(1)
    text, length = _load_request(token_ids, token_ids_stride, lengths, rows, req, max_len, HAS_ROWS)
    scores = block_scores + req.to(tl.int64) * num_blocks
    all_blocks = tl.arange(0, NUM_BLOCKS_POW2)
    best = tl.max(tl.load(scores + all_blocks, mask=all_blocks < num_blocks, other=0), axis=0)
    n = (best // max_len).to(tl.int32)
    start = (best % max_len).to(tl.int32) + 1
    if block == 0:
        count = tl.where(n > 0, tl.minimum(num_tokens, length - start), 0)
        offsets = tl.arange(0, NUM_TOKENS_POW2)
        tokens = tl.load(text + start + offsets, mask=offsets < count, other=-1)
        tl.store(
            drafts + req.to(tl.int64) * num_tokens + offsets,
            tokens.to(tl.int64),
            mask=offsets < num_tokens,
        )
        tl.store(counts + req, count)
        tl.store(match_lengths + req, n)
        tl.store(starts + req, tl.where(n > 0, start, -1))
    if (n > 0) & ((tl.load(scores + block) // max_len).to(tl.int32) == n):
        ends = block * BLOCK + tl.arange(0, BLOCK)
        occurs = _common_suffix_lengths(text, length, ends, n) == n
        next_tokens = tl.load(text + ends + 1, mask=occurs, other=-1)
        agrees = occurs & (next_tokens == tl.load(text + start))
        tl.atomic_add(num_occurrences + req, tl.sum(occurs.to(tl.int32), axis=0))
        tl.atomic_add(num_agreeing + req, tl.sum(agrees.to(tl.int32), axis=0))


def ngram_lookup_triton(
    token_ids: torch.Tensor,
    lengths: torch.Tensor,
    *,
    min_n: int,
    max_n: int,
    num_tokens: int,
    rows: torch.Tensor | None = None,
    positions_per_block: int = POSITIONS_PER_BLOCK,
) -> NgramMatches:
    """:func:`ngram_lookup` as two Triton kernels.

    Both are launched on a grid that follows from shapes alone, and nothing is read back: the call
    can be captured in a CUDA graph. Each text is read once, a block of it with a match as long as
    the chosen one once more.

    Args:
        positions_per_block: end positions per program, a power of two.

    Raises:
        EnvironmentProblem: Triton is not installed.
    """
    _check(token_ids, lengths, rows, min_n, max_n, num_tokens)
    if triton is None:
        raise EnvironmentProblem("the n-gram lookup on a GPU needs Triton: pip install triton")
    num_reqs, max_len = lengths.shape[0], token_ids.shape[1]
    matches = NgramMatches.empty(num_reqs, num_tokens, token_ids.device)
    if num_reqs == 0:
        return matches
    num_blocks = triton.cdiv(max_len, positions_per_block)
    block_scores = torch.empty(num_reqs, num_blocks, dtype=torch.int64, device=token_ids.device)
    texts = (token_ids, token_ids.stride(0), lengths, lengths if rows is None else rows)
    _scan_kernel[(num_reqs, num_blocks)](
        *texts,
        block_scores,
        matches.num_occurrences,
        matches.num_agreeing,
        max_len,
        min_n,
        max_n,
        HAS_ROWS=rows is not None,
        BLOCK=positions_per_block,
    )
    _propose_kernel[(num_reqs, num_blocks)](
        *texts,
        block_scores,
        *matches,
        max_len,
        num_tokens,
        HAS_ROWS=rows is not None,
        BLOCK=positions_per_block,
        NUM_TOKENS_POW2=triton.next_power_of_2(num_tokens),
        NUM_BLOCKS_POW2=triton.next_power_of_2(num_blocks),
    )
    return matches


def ngram_lookup_cpu(
    token_ids: torch.Tensor,
    lengths: torch.Tensor,
    *,
    min_n: int,
    max_n: int,
    num_tokens: int,
    rows: torch.Tensor | None = None,
) -> NgramMatches:
    """:func:`ngram_lookup` as one compiled pass over each text; tensors on the CPU."""
    _check(token_ids, lengths, rows, min_n, max_n, num_tokens)
    num_reqs = lengths.shape[0]
    matches = NgramMatches.empty(num_reqs, num_tokens, token_ids.device)
    if rows is None:
        rows = torch.arange(num_reqs, dtype=torch.int32)
    lookup_rows(
        token_ids.numpy(),
        lengths.numpy(),
        rows.numpy(),
        min_n,
        max_n,
        *(output.numpy() for output in matches),
    )
    return matches


def ngram_lookup(
    token_ids: torch.Tensor,
    lengths: torch.Tensor,
    *,
    min_n: int,
    max_n: int,
    num_tokens: int,
    rows: torch.Tensor | None = None,
) -> NgramMatches:
    """Propose for each request what followed its longest repeated suffix (see the module).

    The cost is linear in the texts' lengths. On a GPU, each block of ``token_ids`` behind a text's
    end costs an idle program: where a bound on the lengths is known, pass ``token_ids[:, :bound]``.

    Args:
        token_ids: [num_reqs, max_len] int32 or int64, or [max_num_reqs, max_len] with ``rows``;
            any stride between rows, none within.
        lengths: [num_reqs] int, tokens of each text, at most max_len; what lies behind them is
            ignored. 0 marks a request without a proposal.
        min_n: shortest suffix that counts as a match, in tokens, at least 1.
        max_n: longest suffix looked for, at least min_n.
        num_tokens: longest continuation, at least 1.
        rows: [num_reqs] int, the row of ``token_ids`` with each request's text, so that callers
            need not copy rows out of a large state tensor; negative marks a padded request, which
            gets no proposal. By default request i has row i.

    Raises:
        ValueError: shapes, dtypes or numbers do not fit.
    """
    device = token_ids.device.type
    # Torch calls AMD's devices "cuda" too.
    lookup = {"cpu": ngram_lookup_cpu, "cuda": ngram_lookup_triton}.get(
        device, ngram_lookup_reference
    )
    return lookup(token_ids, lengths, min_n=min_n, max_n=max_n, num_tokens=num_tokens, rows=rows)


def _check(
    token_ids: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor | None,
    min_n: int,
    max_n: int,
    num_tokens: int,
) -> None:
    """Refuse what a kernel would read out of bounds or misread; looks at no tensor's content."""
    if not 1 <= min_n <= max_n:
        raise ValueError(f"need 1 <= min_n <= max_n, got {min_n} and {max_n}")
    if num_tokens < 1:
        raise ValueError(f"need num_tokens >= 1, got {num_tokens}")
    if token_ids.dim() != 2 or token_ids.shape[1] < 1 or token_ids.stride(1) != 1:
        raise ValueError(
            f"token_ids must be [rows, max_len] with contiguous rows, got {tuple(token_ids.shape)}"
        )
    if token_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"token_ids must be int32 or int64, got {token_ids.dtype}")
    num_reqs = token_ids.shape[0] if rows is None else rows.shape[0]
    if lengths.shape != (num_reqs,):
        raise ValueError(f"need one length per request ({num_reqs}), got {tuple(lengths.shape)}")
    if not (lengths.is_contiguous() and (rows is None or rows.is_contiguous())):
        raise ValueError("lengths and rows must be contiguous")
