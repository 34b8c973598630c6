"""Per-request latencies, from what the client saw. All results in milliseconds.

The definitions follow vLLM's serving benchmark (``vllm/benchmarks/serve.py``), except that
a chunk may carry several tokens under speculation: what is a gap between chunks and what
is a gap between tokens are kept apart.
"""

from __future__ import annotations

from itertools import pairwise

from specbench.records import RequestRecord

MS_PER_S = 1000.0


def ttft_ms(request: RequestRecord) -> float | None:
    """Time to first token: hand-over to the engine until the first token arrived."""
    if not request.chunk_times_s:
        return None
    return (request.chunk_times_s[0] - request.sent_s) * MS_PER_S


def e2el_ms(request: RequestRecord) -> float:
    """End-to-end latency: hand-over until the last chunk; waiting in the client excluded."""
    return (request.finished_s - request.sent_s) * MS_PER_S


def queue_ms(request: RequestRecord) -> float:
    """Client-side wait between the intended and the actual hand-over."""
    return (request.sent_s - request.intended_s) * MS_PER_S


def tpot_ms(request: RequestRecord) -> float | None:
    """Time per output token after the first, (E2EL - TTFT) / (output tokens - 1).

    None below two tokens, where no time between tokens exists.
    """
    first = ttft_ms(request)
    if first is None or request.num_output_tokens < 2:
        return None
    return (e2el_ms(request) - first) / (request.num_output_tokens - 1)


def itl_per_chunk_ms(request: RequestRecord) -> list[float]:
    """Gaps between successive chunks (what vLLM's benchmark calls ITL); [num_chunks - 1]."""
    return [(later - earlier) * MS_PER_S for earlier, later in pairwise(request.chunk_times_s)]


def itl_per_token_ms(request: RequestRecord) -> list[float]:
    """Chunk gaps shared evenly by the tokens of the chunk that ended them.

    One entry for every token after the first chunk, so a gap of 30 ms that brought three
    tokens counts as three gaps of 10 ms. Tokens of the first chunk have no gap: their
    time is the TTFT.
    """
    gaps = itl_per_chunk_ms(request)
    return [
        gap / num_tokens
        for gap, num_tokens in zip(gaps, request.chunk_tokens[1:], strict=True)
        for _ in range(num_tokens)
    ]
