"""Goodput and allocation: the arithmetic that policies share.

Notation follows docs/decisions and the DSpark paper: survival a_j is the probability that
the first j drafted tokens of a request are all accepted; goodput is expected emitted
tokens per millisecond of step time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad


def allocate_by_survival(
    survival: torch.Tensor, capacity: torch.Tensor, budget: int
) -> torch.Tensor:
    """Admit the ``budget`` largest survivals over all (request, position) slots.

    Args:
        survival: [num_reqs, num_steps], non-increasing along each row.
        capacity: [num_reqs] int, usable slots of each request.
        budget: slots to admit; at most ``capacity.sum()``.

    Returns:
        [num_reqs] admitted slots per request, in capacity's dtype; a prefix of each row.
    """
    num_reqs, num_steps = survival.shape
    steps = torch.arange(num_steps, device=survival.device)
    usable = steps[None, :] < capacity[:, None]
    flat = survival.masked_fill(~usable, -torch.inf).flatten()
    # A stable sort keeps ties in (request, position) order, so that a row whose
    # survivals are all equal is still admitted as a prefix.
    winners = torch.sort(flat, descending=True, stable=True).indices[:budget]
    admitted = torch.zeros_like(flat, dtype=torch.bool).index_fill_(0, winners, True)
    return (admitted.view(num_reqs, num_steps) & usable).sum(dim=1).to(capacity.dtype)


def goodput_optimal_budget(
    survival: torch.Tensor,
    capacity: torch.Tensor,
    num_sampling: int,
    cost_ms: torch.Tensor,
) -> int:
    """Budget B that maximises (num_sampling + sum of the B largest survivals) / cost_ms[B].

    Args:
        survival: [num_reqs, num_steps] float64.
        capacity: [num_reqs] int.
        num_sampling: requests that emit a bonus token whatever B is.
        cost_ms: [max_budget + 1] step cost as a function of B.

    Returns:
        The smallest maximiser.
    """
    num_steps = survival.shape[1]
    usable = torch.arange(num_steps)[None, :] < capacity[:, None]
    scores = torch.sort(survival[usable], descending=True).values[: cost_ms.shape[0] - 1]
    emitted = torch.cat([scores.new_zeros(1), scores.cumsum(0)]) + num_sampling
    return int(torch.argmax(emitted / cost_ms[: emitted.shape[0]].to(emitted.dtype)))


class GoodputOptima(NamedTuple):
    """Best budget of each of several candidate batches.

    Attributes:
        goodput: [num_candidates] expected tokens per millisecond at that budget.
        budget: [num_candidates] int64, the smallest maximiser.
    """

    goodput: torch.Tensor
    budget: torch.Tensor


def goodput_optima(
    survival: torch.Tensor, num_sampling: int | torch.Tensor, cost_ms: torch.Tensor
) -> GoodputOptima:
    """:func:`goodput_optimal_budget` for many batches at once, without host reads.

    Args:
        survival: [num_candidates, num_slots] float; unusable slots are 0.
        num_sampling: requests that emit a bonus token, an int or a 0-dim tensor.
        cost_ms: [max_budget + 1] positive step cost by verified tokens, on the same device.
    """
    slots = survival.sort(dim=1, descending=True).values
    max_budget = min(survival.shape[1], cost_ms.shape[0] - 1)
    accepted = pad(slots[:, :max_budget].cumsum(dim=1), (1, 0))
    cost_ms = cost_ms[: max_budget + 1].to(survival.dtype)
    goodput, budget = ((accepted + num_sampling) / cost_ms).max(dim=1)
    return GoodputOptima(goodput, budget)


def chain_value(survival: torch.Tensor, prices: torch.Tensor) -> torch.Tensor:
    """Sum over a chain of max(survival - price, 0): what it earns beyond its slots' price.

    Only the prefix whose survival exceeds the price counts: the rest of the chain would
    not be verified (arXiv:2611.05611).

    Args:
        survival: [num_reqs, num_steps].
        prices: [num_prices] expected tokens that a slot earns elsewhere in the batch.

    Returns:
        [num_prices, num_reqs] expected tokens.
    """
    return (survival - prices[:, None, None]).clamp(min=0).sum(dim=-1)


def marginal_price(slots: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
    """Price of a slot at ``budget``: half-way from the last slot admitted to the next one.

    Any price between the two admits exactly these slots. Goodput times the marginal cost
    lies between them where cost is linear, but not on a staircase: there it is 0 inside a
    stair and can exceed every survival at its edge. At the ends the missing neighbour is
    1 (no slot is dearer) or 0 (no slot is left).

    Args:
        slots: [num_slots] survivals, highest first.
        budget: 0-dim int64, 0 to num_slots.

    Returns:
        0-dim, expected tokens.
    """
    bounded = pad(pad(slots, (1, 0), value=1.0), (0, 1), value=0.0)
    neighbours = budget + torch.arange(2, device=slots.device)
    return bounded.index_select(0, neighbours).mean()
