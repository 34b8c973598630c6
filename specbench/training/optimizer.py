"""Optimisers of a drafter: Muon for its matrices, AdamW for everything else.

Muon orthogonalises the momentum of a weight matrix (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/). It needs fewer steps than AdamW for the same
loss, which counts here because data is made at the price of decoding; embeddings, output
layers, norms and vectors stay with AdamW as its authors advise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from specbench.errors import InputError, UsageError

# Names of parameters that look like matrices but are tables of vectors.
TABLE_NAMES = ("lm_head", "markov_w1", "markov_w2", "embed_tokens", "confidence")
# Muon scales its update so that AdamW's learning rates carry over (Liu et al. 2025,
# arXiv:2502.16982).
MUON_ADJUSTMENT = "match_rms_adamw"
BETAS = (0.9, 0.95)
MAX_GRADIENT_NORM = 1.0
OPTIMIZER_NAMES = ("muon", "adamw")
# The first step has progress 0; a rate of 0 would waste it.
FIRST_PROGRESS = 1e-3


@dataclass(frozen=True)
class OptimizerSpec:
    """How weights are moved.

    Attributes:
        name: "muon" (Muon and AdamW) or "adamw" (AdamW alone).
        learning_rate: peak, of both.
        weight_decay: decoupled, on matrices only.
        warmup_share: part of the training over which the rate rises from 0.
        final_share: rate at the end, as a part of the peak.

    Raises:
        UsageError: an unknown name or a value out of range.
    """

    name: str = "muon"
    learning_rate: float = 1.5e-3
    weight_decay: float = 0.01
    warmup_share: float = 0.02
    final_share: float = 0.02

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZER_NAMES:
            raise UsageError(f"optimizer {self.name!r} is unknown; give muon or adamw")
        if not 0 < self.learning_rate < math.inf:
            raise UsageError(f"learning rate is {self.learning_rate}; give a number above 0")
        if not 0 <= self.weight_decay < math.inf:
            raise UsageError(f"weight decay is {self.weight_decay}; give 0 or more")
        if not (0 <= self.warmup_share < 1 and 0 <= self.final_share <= 1):
            raise UsageError("warm-up and final share of the learning rate lie between 0 and 1")

    def rate_at(self, progress: float) -> float:
        """Learning rate at a share of the training, 0 to 1: linear rise, then a cosine."""
        if progress < self.warmup_share:
            risen = max(progress, FIRST_PROGRESS) / self.warmup_share
            return self.learning_rate * min(1.0, risen)
        share = min(1.0, (progress - self.warmup_share) / (1.0 - self.warmup_share))
        cosine = 0.5 * (1.0 + math.cos(math.pi * share))
        return self.learning_rate * (self.final_share + (1.0 - self.final_share) * cosine)


class DrafterOptimizer:
    """One or two torch optimisers behind one step.

    Args:
        parameters: names and trainable parameters.
        spec: which optimisers, and the schedule.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], spec: OptimizerSpec) -> None:
        self.spec = spec
        named = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
        self._parameters = [parameter for _, parameter in named]
        matrices = [p for name, p in named if _is_matrix(name, p) and spec.name == "muon"]
        kept = {id(parameter) for parameter in matrices}
        others = [p for p in self._parameters if id(p) not in kept]
        decayed = [p for p in others if p.ndim == 2]
        plain = [p for p in others if p.ndim != 2]
        self._optimizers: list[torch.optim.Optimizer] = []
        if others:
            groups = [
                {"params": decayed, "weight_decay": spec.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ]
            self._optimizers.append(
                torch.optim.AdamW(
                    [group for group in groups if group["params"]],
                    lr=spec.learning_rate,
                    betas=BETAS,
                    fused=True,
                )
            )
        if matrices:
            self._optimizers.append(
                torch.optim.Muon(
                    matrices,
                    lr=spec.learning_rate,
                    weight_decay=spec.weight_decay,
                    adjust_lr_fn=MUON_ADJUSTMENT,
                )
            )

    def step(self, progress: float) -> float:
        """Clip, move the weights at the rate of this progress, forget the gradients.

        Returns:
            The gradient's norm before clipping.

        Raises:
            InputError: the gradient is not finite; the weights are as they were.
        """
        norm = float(nn.utils.clip_grad_norm_(self._parameters, MAX_GRADIENT_NORM))
        if not math.isfinite(norm):
            raise InputError(
                "training diverged: the gradient is no longer finite; "
                "start another --run with a lower --learning-rate"
            )
        rate = self.spec.rate_at(progress)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return norm

    def state_dict(self) -> list[dict[str, Any]]:
        """States of the optimisers, to be saved with the weights."""
        return [optimizer.state_dict() for optimizer in self._optimizers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Take up saved states; raises ValueError where they do not fit."""
        if len(states) != len(self._optimizers):
            raise ValueError("saved optimiser states are of another kind of optimiser")
        for optimizer, state in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict(state)


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and not any(table in name for table in TABLE_NAMES)
