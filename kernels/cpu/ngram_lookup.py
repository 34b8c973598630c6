"""N-gram lookup on a CPU: one pass over each text, linear whatever the text repeats.

The text is read backwards, so that its suffixes become prefixes of a pattern, and every position
keeps the longest such prefix that ends there: the matching automaton of Knuth, Morris and Pratt,
"Fast Pattern Matching in Strings" (1977), for a pattern that is cut at max_n tokens.
"""

from __future__ import annotations

import numpy as np

from specbench.kernels.cpu.compilation import vectorised
from specbench.kernels.cpu.floats import Array


@vectorised()
def scan(
    text: Array, length: int, max_n: int, failure: Array, stop_at_max_n: bool
) -> tuple[int, int, int, int]:
    """Find the longest earlier copy of the last 1..max_n tokens, the latest among equals.

    Args:
        text: [>= length] tokens.
        length: tokens of the text; what lies behind them is never read.
        max_n: longest match in tokens.
        failure: scratch [>= max_n], overwritten.
        stop_at_max_n: end at the first match of max_n tokens; the counts are then 1.

    Returns:
        Match length (0: none), index of the first token after the copy, occurrences of the
        matched n-gram before its place at the end, and how many of those are followed by the
        token that follows the copy.
    """
    last = length - 1
    best_n, best_start, num_occurrences, num_agreeing = 0, -1, 0, 0
    failure[0] = 0
    n = 0
    for back in range(1, length):
        token = text[last - back]
        if n == max_n:
            n = failure[n - 1]
        while n > 0 and text[last - n] != token:
            n = failure[n - 1]
        if text[last - n] == token:
            n += 1
        if back < max_n:
            failure[back] = n
        if n > best_n:
            best_n, best_start = n, last - back + n
            num_occurrences, num_agreeing = 1, 1
            if stop_at_max_n and n == max_n:
                break
        elif n == best_n and n > 0:
            num_occurrences += 1
            if text[last - back + n] == text[best_start]:
                num_agreeing += 1
    return best_n, best_start, num_occurrences, num_agreeing


@vectorised()
def longest_suffix_match(text: Array, length: int, min_n: int, max_n: int) -> tuple[int, int]:
    """Find the longest earlier copy of the last min_n..max_n tokens, the latest among equals.

    Returns:
        Its length n and its first position; (0, 0) if there is none.
    """
    failure = np.empty(max_n, np.int32)
    n, start, _, _ = scan(text, length, max_n, failure, True)
    return (n, start - n) if n >= min_n else (0, 0)


@vectorised()
def lookup_rows(
    token_ids: Array,
    lengths: Array,
    rows: Array,
    min_n: int,
    max_n: int,
    drafts: Array,
    counts: Array,
    match_lengths: Array,
    starts: Array,
    num_occurrences: Array,
    num_agreeing: Array,
) -> None:
    """Look every request up.

    Args:
        token_ids: [max_num_reqs, max_len].
        lengths: [num_reqs]; 0 marks a request without a proposal.
        rows: [num_reqs] the row of token_ids that holds each text; negative: no request.
        min_n: shortest match in tokens.
        max_n: longest match in tokens.
        drafts: output [num_reqs, num_tokens], -1 where nothing is proposed.
        counts: output [num_reqs], proposed tokens.
        match_lengths: output [num_reqs], 0 without a match.
        starts: output [num_reqs], index of the first proposed token, -1 without a match.
        num_occurrences: output [num_reqs], earlier occurrences of the matched n-gram.
        num_agreeing: output [num_reqs], those of them that continue as the chosen one does.
    """
    num_tokens = drafts.shape[1]
    failure = np.empty(max_n, np.int32)
    for req in range(lengths.shape[0]):
        row = rows[req]
        length = min(lengths[req], token_ids.shape[1]) if row >= 0 else 0
        text = token_ids[max(row, 0)]
        n, start, occurrences, agreeing = scan(text, length, max_n, failure, False)
        if n < min_n:
            n, start, occurrences, agreeing = 0, -1, 0, 0
        count = min(num_tokens, length - start) if n > 0 else 0
        for i in range(num_tokens):
            drafts[req, i] = text[start + i] if i < count else -1
        counts[req] = count
        match_lengths[req] = n
        starts[req] = start
        num_occurrences[req] = occurrences
        num_agreeing[req] = agreeing
