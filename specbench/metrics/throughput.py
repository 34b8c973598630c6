"""Rates of a round. A round in which nothing took any time has no rate: None."""

from __future__ import annotations

from specbench.records import RequestRecord, RoundRecord


def succeeded(request: RequestRecord) -> bool:
    """Whether the request ran to its own end."""
    return request.error is None


def aborted(request: RequestRecord) -> bool:
    """Whether the client cut the request short because the round was stopped."""
    return request.finish_reason == "abort"


def failed(request: RequestRecord) -> bool:
    """Whether the engine refused the request or gave up on it."""
    return request.error is not None and not aborted(request)


def num_output_tokens(round_record: RoundRecord) -> int:
    """Tokens delivered in the round.

    Tokens of failed requests do not count, as in vLLM's benchmark. Those of aborted
    requests do: they were delivered within the time that the round is divided by.
    """
    return sum(r.num_output_tokens for r in round_record.requests if not failed(r))


def output_throughput(round_record: RoundRecord) -> float | None:
    """Output tokens per second: delivered tokens over first send to last finish."""
    if round_record.duration_s <= 0 or not any(not failed(r) for r in round_record.requests):
        return None
    return num_output_tokens(round_record) / round_record.duration_s


def request_throughput(round_record: RoundRecord) -> float | None:
    """Completed requests per second, over first send to last finish."""
    num_completed = sum(succeeded(r) for r in round_record.requests)
    if round_record.duration_s <= 0 or not num_completed:
        return None
    return num_completed / round_record.duration_s
