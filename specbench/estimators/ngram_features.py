"""From this step's n-gram matches to survivals, on the engine's device.

Tensors in, tensors out, nothing read back to the host: the functions run between the
sampler and the next step, and a read would stall asynchronous scheduling.
"""

from __future__ import annotations

import torch

from specbench.estimators.ngram_table import (
    ALL_AGREE,
    SINGLE_OCCURRENCE,
    SOME_DISAGREE,
    NgramTable,
    Stratification,
)

# Weight of the newest step in the running acceptance. Three steps then outweigh all before
# them (1 - 0.7^3 = 0.66), about as long as a copied passage takes to end.
RECENT_WEIGHT = 0.3


def update_recent(recent: torch.Tensor, matched: torch.Tensor, hit: torch.Tensor) -> torch.Tensor:
    """Running first-token acceptance of each request's n-gram chains, one step further.

    An exponential moving average over the steps in which the lookup found a match, of
    whether the first token it proposed is the one then emitted. That can be seen whichever
    chain was verified, so the value means the same under every policy.

    Args:
        recent: [num_reqs] float, NaN before a request's first match.
        matched: [num_reqs] bool, the lookup proposed something for the step just verified.
        hit: [num_reqs] bool, its first token was emitted; ignored without a match.

    Returns:
        [num_reqs] in the dtype of ``recent``; the first step with a match counts fully.
    """
    outcome = hit.to(recent.dtype)
    moved = recent + RECENT_WEIGHT * (outcome - recent)
    return torch.where(matched, torch.where(recent.isnan(), outcome, moved), recent)


def device_table(table: NgramTable, device: torch.device | str) -> torch.Tensor:
    """[num_strata, max_n + 1, num_positions] float32 on ``device``; once, when loading."""
    return torch.from_numpy(table.survival.copy()).to(device)


def strata_of(
    stratification: Stratification,
    num_occurrences: torch.Tensor,
    num_agreeing: torch.Tensor,
    *,
    recent_acceptance: torch.Tensor | None = None,
    in_prompt: torch.Tensor | None = None,
    temperatures: torch.Tensor | None = None,
) -> torch.Tensor:
    """Stratum of every request; twin of :meth:`Stratification.index`.

    Args:
        stratification: which features count.
        num_occurrences: [num_reqs] int, earlier occurrences of the matched n-gram.
        num_agreeing: [num_reqs] int, of those, continuing like the chain.
        recent_acceptance: [num_reqs] float in [0, 1], NaN while unknown.
        in_prompt: [num_reqs] bool, match lies in the prompt.
        temperatures: [num_reqs] float, sampling temperature of the request.

    Returns:
        [num_reqs] int64 in [0, num_strata).

    Raises:
        ValueError: an input that a feature needs was not given.
    """
    levels: dict[str, torch.Tensor] = {}
    for name in stratification.features:
        if name == "agreement":
            levels[name] = _agreement_level(num_occurrences, num_agreeing)
        elif name == "recent_acceptance":
            levels[name] = _recent_level(_given(recent_acceptance, name), stratification)
        elif name == "in_prompt":
            levels[name] = _given(in_prompt, name).long()
        else:
            levels[name] = (_given(temperatures, name) > 0).long()
    index = torch.zeros_like(num_occurrences, dtype=torch.int64)
    for name, num_levels in zip(stratification.features, stratification.num_levels, strict=True):
        index = index * num_levels + levels[name]
    return index


def survival_of(
    table: torch.Tensor,
    strata: torch.Tensor,
    match_lengths: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    """Calibrated survival of every proposed token.

    Args:
        table: [num_strata, max_n + 1, num_positions], see :class:`NgramTable`.
        strata: [num_reqs] int64.
        match_lengths: [num_reqs] int, 0 without a match; longer than max_n counts as max_n.
        counts: [num_reqs] int, proposed tokens.

    Returns:
        [num_reqs, num_positions] in the table's dtype; 0 from ``counts`` on.
    """
    num_positions = table.shape[2]
    rows = table[strata, match_lengths.long().clamp(min=0, max=table.shape[1] - 1)]
    positions = torch.arange(num_positions, device=table.device)
    return rows.masked_fill(positions >= counts[:, None], 0.0)


def _agreement_level(num_occurrences: torch.Tensor, num_agreeing: torch.Tensor) -> torch.Tensor:
    # Arithmetic on comparisons: one, all, some are consecutive levels by construction.
    is_several = num_occurrences >= 2
    is_split = is_several & (num_agreeing < num_occurrences)
    step_several, step_split = ALL_AGREE - SINGLE_OCCURRENCE, SOME_DISAGREE - ALL_AGREE
    return SINGLE_OCCURRENCE + step_several * is_several.long() + step_split * is_split.long()


def _recent_level(recent: torch.Tensor, stratification: Stratification) -> torch.Tensor:
    # NaN compares false with everything, itself included: unknown is level 0.
    recent = recent.float()
    level = (recent == recent).long()
    for edge in stratification.recent_edges:
        level = level + (recent >= edge).long()
    return level


def _given(values: torch.Tensor | None, feature: str) -> torch.Tensor:
    if values is None:
        raise ValueError(f"the strata use {feature!r}; pass it")
    return values
