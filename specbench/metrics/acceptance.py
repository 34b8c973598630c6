"""How much of what was verified was kept, from the worker's step records.

A *draft* is one (request, step) pair in which at least one draft token was verified; a
*request-step* is one (request, step) pair that emitted a token, draft or not. Lengths
count the bonus token, the convention of vLLM's ``SpecDecodingStats``. Everything is None
where its denominator is zero.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbench.records import StepRecord


def num_drafts(steps: Sequence[StepRecord]) -> int:
    """(Request, step) pairs with verified draft tokens."""
    return sum(step.num_requests_verified for step in steps)


def num_request_steps(steps: Sequence[StepRecord]) -> int:
    """(Request, step) pairs that emitted at least one token."""
    return sum(step.num_decoding for step in steps)


def drafted_tokens(steps: Sequence[StepRecord]) -> int:
    """Tokens that drafters proposed, verified later or not."""
    return sum(step.num_drafted_tokens for step in steps)


def verified_tokens(steps: Sequence[StepRecord]) -> int:
    """Draft tokens that the target checked."""
    return sum(step.num_verified_tokens for step in steps)


def accepted_tokens(steps: Sequence[StepRecord]) -> int:
    """Verified tokens that were kept."""
    return sum(step.num_accepted_tokens for step in steps)


def unverified_tokens(steps: Sequence[StepRecord]) -> int:
    """Drafted tokens that the target never checked."""
    return drafted_tokens(steps) - verified_tokens(steps)


def undrafted_share(steps: Sequence[StepRecord]) -> float | None:
    """Share of steps, among those that emitted tokens, in which nothing was drafted."""
    emitting = [step for step in steps if step.num_decoding]
    if not emitting:
        return None
    return sum(not step.num_drafted_tokens for step in emitting) / len(emitting)


def acceptance_length(steps: Sequence[StepRecord]) -> float | None:
    """Tokens per draft, bonus included: 1 + accepted / drafts.

    Steps in which a request verified nothing are left out, as in vLLM. Under a drafter
    that often proposes nothing (n-gram lookup) this flatters: read it together with
    :func:`acceptance_length_per_step`.
    """
    drafts = num_drafts(steps)
    return 1 + accepted_tokens(steps) / drafts if drafts else None


def acceptance_length_per_step(steps: Sequence[StepRecord]) -> float | None:
    """Tokens per request-step, steps without a draft included: emitted / request-steps."""
    request_steps = num_request_steps(steps)
    if not request_steps:
        return None
    return sum(step.num_emitted_tokens for step in steps) / request_steps


def mean_verified(steps: Sequence[StepRecord]) -> float | None:
    """Verified draft tokens per request-step."""
    request_steps = num_request_steps(steps)
    return verified_tokens(steps) / request_steps if request_steps else None


def acceptance_rate_of_verified(steps: Sequence[StepRecord]) -> float | None:
    """Accepted over verified tokens: what the target thought of what it was shown."""
    verified = verified_tokens(steps)
    return accepted_tokens(steps) / verified if verified else None


def acceptance_rate_of_drafted(steps: Sequence[StepRecord]) -> float | None:
    """Accepted over drafted tokens: how much of the drafting was of use."""
    drafted = drafted_tokens(steps)
    return accepted_tokens(steps) / drafted if drafted else None


def acceptance_by_position(steps: Sequence[StepRecord]) -> list[float]:
    """Unconditional: share of all drafts in which position j was accepted; [max length].

    The denominator is every draft, also those too short to reach j (vLLM's per-position
    rate), so that 1 + the sum of the list is the acceptance length.
    """
    pairs = _pairs(steps)
    longest = max((verified for _, verified in pairs), default=0)
    return [
        sum(accepted >= position for accepted, _ in pairs) / len(pairs)
        for position in range(1, longest + 1)
    ]


def conditional_acceptance_by_position(steps: Sequence[StepRecord]) -> list[float | None]:
    """Share accepted at position j among drafts that verified j and kept j - 1; [max length].

    None at a position that no draft reached.
    """
    pairs = _pairs(steps)
    longest = max((verified for _, verified in pairs), default=0)
    rates: list[float | None] = []
    for position in range(1, longest + 1):
        reached = [acc for acc, ver in pairs if ver >= position and acc >= position - 1]
        kept = sum(accepted >= position for accepted in reached)
        rates.append(kept / len(reached) if reached else None)
    return rates


def _pairs(steps: Sequence[StepRecord]) -> list[tuple[int, int]]:
    """(accepted, verified) of every draft."""
    return [
        pair
        for step in steps
        for pair in zip(step.accepted_per_request, step.verified_per_request, strict=True)
        if pair[1] > 0
    ]
