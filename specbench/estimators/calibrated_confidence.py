"""Temperatures applied to a drafter's confidences, on the engine's device."""

from __future__ import annotations

import torch


def apply_temperatures(confidence_probs: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """sigmoid(logit(c) / T): calibrated conditional acceptance; no host read.

    The engine hands out probabilities, so the sigmoid is undone first. In float32 a
    confidence above 1 - 6e-8 has already become 1 and stays 1; 0 stays 0.

    Args:
        confidence_probs: [num_reqs, num_positions] in [0, 1].
        temperatures: [at least num_positions], above 0; later ones are not used.

    Returns:
        [num_reqs, num_positions] float32, or float64 if that came in.
    """
    probs = (
        confidence_probs if confidence_probs.dtype == torch.float64 else confidence_probs.float()
    )
    scale = temperatures[: probs.shape[1]].to(probs.dtype)
    return torch.sigmoid(torch.logit(probs) / scale)
