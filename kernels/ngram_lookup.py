"""N-gram lookup: continue each request with what followed its longest repeated suffix.

For one request with tokens t[0..length) the lookup takes the largest n in min_n..max_n
such that the last n tokens occur earlier in t, at their most recent earlier occurrence,
and proposes the tokens that followed it there (up to num_tokens, never past the end of
the text).
"""

from __future__ import annotations

import torch

from specbench.kernels.cpu.ngram_lookup import lookup_rows


def ngram_lookup_reference(
    token_ids: torch.Tensor,
    lengths: torch.Tensor,
    *,
    min_n: int,
    max_n: int,
    num_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Plain torch, one pass per n; correct and slow, and what the fast versions are held to.

    Args:
        token_ids: [num_reqs, max_len] int, row r valid up to lengths[r].
        lengths: [num_reqs] int; 0 marks a row without a proposal.
        min_n, max_n: shortest and longest suffix tried, 1 <= min_n <= max_n.
        num_tokens: longest continuation.

    Returns:
        (drafts [num_reqs, num_tokens] int64 padded with -1, counts [num_reqs] int32,
        match_lengths [num_reqs] int32, 0 without a match).
    """
    num_reqs, max_len = token_ids.shape
    device = token_ids.device
    columns = torch.arange(max_len, device=device)
    best_start = torch.full((num_reqs,), -1, dtype=torch.int64, device=device)
    match_lengths = torch.zeros(num_reqs, dtype=torch.int32, device=device)
    for n in range(min_n, max_n + 1):
        matches = torch.ones(num_reqs, max_len, dtype=torch.bool, device=device)
        for j in range(n):
            # Column p is where a match would end; its j-th last token is at p - j.
            suffix = token_ids.gather(1, (lengths[:, None] - 1 - j).clamp(min=0).long())
            matches &= (token_ids.roll(j, dims=1) == suffix) & (columns >= j)
        matches &= (columns[None] < lengths[:, None] - 1) & (columns >= n - 1)
        last_end = torch.where(matches, columns[None], -1).max(dim=1).values
        found = (last_end >= 0) & (lengths > n)
        best_start = torch.where(found, last_end + 1, best_start)
        match_lengths = torch.where(found, n, match_lengths).to(torch.int32)
    offsets = torch.arange(num_tokens, device=device)
    counts = (lengths - best_start).clamp(max=num_tokens)
    counts = torch.where(best_start >= 0, counts, 0).to(torch.int32)
    positions = (best_start[:, None] + offsets).clamp(min=0, max=max_len - 1)
    drafts = token_ids.gather(1, positions).long()
    return drafts.masked_fill(offsets[None] >= counts[:, None], -1), counts, match_lengths


def ngram_lookup(
    token_ids: torch.Tensor,
    lengths: torch.Tensor,
    *,
    min_n: int,
    max_n: int,
    num_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`ngram_lookup_reference`, compiled where the tensors are on a CPU."""
    if not 1 <= min_n <= max_n:
        raise ValueError(f"need 1 <= min_n <= max_n, got {min_n} and {max_n}")
    if token_ids.device.type != "cpu":
        return ngram_lookup_reference(
            token_ids, lengths, min_n=min_n, max_n=max_n, num_tokens=num_tokens
        )
    num_reqs = token_ids.shape[0]
    drafts = torch.empty(num_reqs, num_tokens, dtype=torch.int64)
    counts = torch.empty(num_reqs, dtype=torch.int32)
    match_lengths = torch.empty(num_reqs, dtype=torch.int32)
    lookup_rows(
        token_ids.numpy(),
        lengths.numpy(),
        min_n,
        max_n,
        drafts.numpy(),
        counts.numpy(),
        match_lengths.numpy(),
    )
    return drafts, counts, match_lengths
