"""N-gram lookup on a CPU: one backward scan of the text per request."""

from __future__ import annotations

import numpy as np

from specbench.kernels.cpu.compilation import vectorised


@vectorised()
def lookup_rows(
    token_ids: np.ndarray,  # [num_reqs, max_len]
    lengths: np.ndarray,  # [num_reqs]
    min_n: int,
    max_n: int,
    drafts: np.ndarray,  # [num_reqs, num_tokens], written
    counts: np.ndarray,  # [num_reqs], written
    match_lengths: np.ndarray,  # [num_reqs], written
) -> None:
    """Fill drafts (-1 where nothing is proposed), counts and match lengths of every row.

    The scan visits candidate ends from the most recent backwards and keeps the first one
    of the greatest match length, so its cost is linear in the text except where the text
    repeats itself.
    """
    num_tokens = drafts.shape[1]
    for row in range(token_ids.shape[0]):
        length = lengths[row]
        text = token_ids[row]
        best_n = 0
        best_end = -1
        for end in range(length - 2, -1, -1):
            longest = min(max_n, end + 1)
            if longest <= best_n:
                break
            n = 0
            while n < longest and text[end - n] == text[length - 1 - n]:
                n += 1
            if n > best_n and n >= min_n:
                best_n = n
                best_end = end
                if best_n == max_n:
                    break
        count = min(num_tokens, length - 1 - best_end) if best_n > 0 else 0
        for i in range(num_tokens):
            drafts[row, i] = text[best_end + 1 + i] if i < count else -1
        counts[row] = count
        match_lengths[row] = best_n
