from __future__ import annotations

from collections.abc import Callable

import pytest

from specbench.records import RequestRecord, StepRecord


@pytest.fixture
def make_request() -> Callable[..., RequestRecord]:
    def make(
        chunk_times_s: tuple[float, ...] = (),
        chunk_tokens: tuple[int, ...] = (),
        **fields: object,
    ) -> RequestRecord:
        values: dict[str, object] = {
            "request_id": "r",
            "item_id": "i",
            "turn": 0,
            "policy": "ar",
            "round_index": 0,
            "warmup": False,
            "num_prompt_tokens": 3,
            "intended_s": 0.0,
            "sent_s": 0.0,
            "finished_s": chunk_times_s[-1] if chunk_times_s else 1.0,
            "chunk_times_s": chunk_times_s,
            "chunk_tokens": chunk_tokens,
            "output_token_ids": tuple(range(sum(chunk_tokens))),
            "finish_reason": "length",
            **fields,
        }
        return RequestRecord(**values)  # type: ignore[arg-type]

    return make


@pytest.fixture
def make_step() -> Callable[..., StepRecord]:
    def make(
        accepted: tuple[int, ...] = (),
        verified: tuple[int, ...] = (),
        num_undrafted: int = 0,
        **fields: object,
    ) -> StepRecord:
        num_decoding = len(verified) + num_undrafted
        values: dict[str, object] = {
            "num_requests": num_decoding,
            "num_decoding": num_decoding,
            "num_prompt_tokens": 0,
            "num_verified_tokens": sum(verified),
            "num_accepted_tokens": sum(accepted),
            "num_emitted_tokens": sum(accepted) + num_decoding,
            "num_drafted_tokens": sum(verified),
            "num_requests_verified": len(verified),
            "step_ms": 10.0,
            "verify_ms": 6.0,
            "draft_ms": 2.0,
            "decide_ms": 1.0,
            "context_tokens": 50.0,
            "accepted_per_request": accepted,
            "verified_per_request": verified,
            **fields,
        }
        return StepRecord(**values)  # type: ignore[arg-type]

    return make
