"""Recent acceptance of every running request, kept on the engine's device."""

from __future__ import annotations

import torch

from specbench.estimators.acceptance_prior import AcceptancePrior


class AcceptanceTracker:
    """The counts behind :class:`RecentAcceptance`, one row a request slot.

    Nothing here reads a value back to the host.

    Attributes:
        resolution: the prior's.

    Args:
        prior: as fitted; may cover more positions than the drafter drafts.
        num_positions: tokens of the drafter's block.
        max_num_reqs: request slots.
    """

    def __init__(
        self, prior: AcceptancePrior, num_positions: int, max_num_reqs: int, device: torch.device
    ) -> None:
        self._mean = torch.tensor(prior.conditional[:num_positions], device=device)
        self._weight, self._decay = prior.weight, prior.decay
        self.resolution = prior.resolution
        self._positions = torch.arange(num_positions, device=device)
        # Accepted and reached, by request slot and position.
        self._counts = torch.zeros(2, max_num_reqs, num_positions, device=device)

    def forget(self, slot: int) -> None:
        """A new request in this slot."""
        self._counts[:, slot].zero_()

    def observe(
        self, slots: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        """Take in the verdicts of a step.

        A request that emitted nothing (a chunk of its prompt) leaves no trace; one that
        emitted without having drafts verified forgets a little.

        Args:
            slots: [num_reqs] int, different from each other.
            num_sampled: [num_reqs] tokens emitted: the accepted ones and one more.
            num_rejected: [num_reqs] verified tokens that were not emitted.
        """
        accepted = (num_sampled - 1).clamp(min=0)[:, None]
        # Behind the first rejected token nothing was decided.
        decided = accepted + (num_rejected > 0)[:, None]
        emitted = (num_sampled > 0)[:, None]
        now = torch.stack([self._positions < accepted, (self._positions < decided) & emitted])
        rows = slots.long()
        before = self._counts[:, rows]
        self._counts[:, rows] = torch.where(emitted, self._decay * (before + now), before)

    def survival(self) -> torch.Tensor:
        """[max_num_reqs, num_positions] float32 expected of next blocks, non-increasing."""
        accepted, reached = self._counts
        posterior: torch.Tensor = (self._weight * self._mean + accepted) / (self._weight + reached)
        return posterior.cumprod(dim=1)
