"""N-gram lookup on a CPU: one backward scan of the text per request."""

from __future__ import annotations

from specbench.kernels.cpu.compilation import vectorised
from specbench.kernels.cpu.floats import Array


@vectorised()
def longest_suffix_match(text: Array, length: int, min_n: int, max_n: int) -> tuple[int, int]:
    """Find the longest earlier copy of the last min_n..max_n tokens, the latest among equals.

    Candidate ends are visited from the most recent backwards, so the cost is linear in the
    text except where the text repeats itself.

    Returns:
        Its length n and its first position; (0, 0) if there is none.
    """
    best_n, best_start = 0, 0
    for end in range(length - 2, min_n - 2, -1):
        longest = min(max_n, end + 1)
        if longest <= best_n:
            break
        n = 0
        while n < longest and text[end - n] == text[length - 1 - n]:
            n += 1
        if n >= min_n and n > best_n:
            best_n, best_start = n, end - n + 1
    return best_n, best_start


@vectorised()
def lookup_rows(
    token_ids: Array,
    lengths: Array,
    min_n: int,
    max_n: int,
    drafts: Array,
    counts: Array,
    match_lengths: Array,
) -> None:
    """Look every row up.

    Args:
        token_ids: [num_reqs, max_len].
        lengths: [num_reqs].
        min_n: shortest match in tokens.
        max_n: longest match in tokens.
        drafts: output [num_reqs, num_tokens], -1 where nothing is proposed.
        counts: output [num_reqs], proposed tokens.
        match_lengths: output [num_reqs], 0 without a match.
    """
    num_tokens = drafts.shape[1]
    for row in range(token_ids.shape[0]):
        text = token_ids[row]
        n, start = longest_suffix_match(text, lengths[row], min_n, max_n)
        count = min(num_tokens, lengths[row] - start - n) if n > 0 else 0
        for i in range(num_tokens):
            drafts[row, i] = text[start + n + i] if i < count else -1
        counts[row] = count
        match_lengths[row] = n
