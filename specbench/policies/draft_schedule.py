"""How many tokens to draft: the joint schedule of drafting and verifying (arXiv:2611.13442).

Before a drafter's single pass only predicted survivals are known. One sort over all
(request, position) slots orders them; a prefix of the order is drafted, and once drafting
has shown how confident the drafter is, the best of what was drafted is verified.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

# Candidates of a round. The first round spreads them over every number of tokens, the
# second between the neighbours of the best one.
MAX_CANDIDATES = 33


class Schedule(NamedTuple):
    """How many of the sorted slots to draft, and what is expected of them.

    Attributes:
        num_drafted: slots drafted, highest predicted survival first; 0 skips the drafter.
        num_verified: slots expected to be verified of those.
        goodput: expected tokens per millisecond of the step.
        gain_ms: time that the step is expected to save against emitting as many tokens
            without drafting.
    """

    num_drafted: int
    num_verified: int
    goodput: float
    gain_ms: float


def schedule_drafts(
    survival: torch.Tensor,
    capacity: torch.Tensor,
    *,
    num_sampling: int,
    draft_ms: torch.Tensor,
    verify_ms: torch.Tensor,
    resolution: float,
) -> Schedule:
    """Numbers of drafted and of verified tokens with the highest expected goodput.

    Drafting costs time, but what it shows has a value of its own: slots that turn out weak
    are not verified. It therefore pays to draft deeper than the expected verification, and
    how much deeper depends on ``resolution``.

    Args:
        survival: [num_reqs, num_steps] float64 predicted, non-increasing along a row.
        capacity: [num_reqs] int, tokens each request can draft.
        num_sampling: requests that emit a bonus token whatever is drafted.
        draft_ms: [max_drafted + 1] cost by drafted tokens.
        verify_ms: [max_budget + 1] cost of the target's pass by verified draft tokens.
        resolution: see :func:`expected_accepted`.
    """
    slots = _sorted_slots(survival, capacity)[: draft_ms.shape[0] - 1]
    low, high = 0, slots.shape[0]
    # No more can be verified than drafted; the table goes on for prompts and larger batches.
    verify_ms = verify_ms[: high + 1]
    while True:
        candidates = _spread(low, high)
        accepted = expected_accepted(slots, candidates, verify_ms.shape[0] - 1, resolution)
        cost_ms = draft_ms[candidates, None] + verify_ms
        goodput, budget = ((accepted + num_sampling) / cost_ms).max(dim=1)
        best = int(goodput.argmax())
        drafted = int(candidates[best])
        if candidates.shape[0] == high - low + 1:
            verified = int(budget[best])
            emitted = float(accepted[best, verified]) + num_sampling
            without_ms = float(draft_ms[0] + verify_ms[0])
            gain_ms = emitted / num_sampling * without_ms if num_sampling else 0.0
            return Schedule(
                drafted,
                min(verified, drafted),
                float(goodput[best]),
                max(0.0, gain_ms - float(cost_ms[best, verified])) if drafted else 0.0,
            )
        low = int(candidates[max(best - 1, 0)])
        high = int(candidates[min(best + 1, candidates.shape[0] - 1)])


def expected_accepted(
    slots: torch.Tensor, num_drafted: torch.Tensor, max_budget: int, resolution: float
) -> torch.Tensor:
    """Accepted tokens expected of the best B slots, once drafting has shown which they are.

    A slot predicted at a has, after drafting, a survival of mean a and of variance
    ``resolution`` x a(1 - a): the share of the outcome's variance that the drafter's
    confidence explains (resolution over uncertainty in Murphy's decomposition of the Brier
    score, doi:10.1175/1520-0450(1973)012<0595:ANVPOT>2.0.CO;2). Taken as the mixture with
    those two moments that is easiest to sum: fully revealed (1 or 0) with probability
    ``resolution``, unchanged otherwise. Then the option on a slot at price x is worth
    E[max(a' - x, 0)] = resolution a(1 - x) + (1 - resolution) max(a - x, 0).

    Args:
        slots: [num_slots] predicted survivals, highest first.
        num_drafted: [num_candidates] int64, how many of them are drafted.
        max_budget: largest B.
        resolution: 0 (drafting shows nothing) to 1 (it shows the outcome).

    Returns:
        [num_candidates, max_budget + 1]; constant in B once all that was drafted is taken.
    """
    total = pad(slots.cumsum(0), (1, 0))
    drafted = num_drafted[:, None].to(slots.dtype)
    budget = torch.arange(max_budget + 1, dtype=slots.dtype)
    revealed = resolution * total[num_drafted, None]
    certain = torch.minimum(budget, revealed)
    if resolution == 1.0:
        return certain
    depth = torch.minimum((budget - certain) / (1.0 - resolution), drafted)
    whole = depth.long()
    part = (depth - whole) * pad(slots, (0, 1))[whole]
    return certain + (1.0 - resolution) * (total[whole] + part)


def _sorted_slots(survival: torch.Tensor, capacity: torch.Tensor) -> torch.Tensor:
    """Usable slots, highest first; an impossible prediction counts as hopeless."""
    usable = torch.arange(survival.shape[1])[None, :] < capacity[:, None]
    slots = torch.where((survival >= 0) & (survival <= 1), survival, 0.0)[usable]
    return slots.sort(descending=True).values


def _spread(low: int, high: int) -> torch.Tensor:
    """Up to MAX_CANDIDATES whole numbers from low to high, both included."""
    count = min(MAX_CANDIDATES, high - low + 1)
    return torch.linspace(low, high, count, dtype=torch.float64).round().long()
