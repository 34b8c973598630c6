"""Goodput and allocation: the arithmetic that policies share.

Notation follows docs/decisions and the DSpark paper: survival a_j is the probability that
the first j drafted tokens of a request are all accepted; goodput is expected emitted
tokens per millisecond of step time.
"""

from __future__ import annotations

import torch


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
