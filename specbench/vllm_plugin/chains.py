"""The draft slots of a batch: what each request may have verified, whichever drafter wrote it."""

from __future__ import annotations

import torch


class DraftChains:
    """One chain a request, in batch order; more slots than the model drafter's block.

    Attributes:
        tokens: [max_num_reqs, num_slots] int64; valid token ids throughout.
        survival: [max_num_reqs, num_slots] float32, probability that a chain is still alive
            at each slot; 0 beyond its end.
        lengths: [max_num_reqs] int32, usable slots of each request.
    """

    def __init__(self, max_num_reqs: int, num_slots: int, device: torch.device) -> None:
        shape = (max_num_reqs, num_slots)
        self.num_slots = num_slots
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.survival = torch.zeros(shape, dtype=torch.float32, device=device)
        self.lengths = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)

    def clear(self, num_reqs: int) -> None:
        """No drafts for anyone."""
        self.survival[:num_reqs].zero_()
        self.lengths[:num_reqs].zero_()

    def fill(self, tokens: torch.Tensor, survival: torch.Tensor, lengths: torch.Tensor) -> None:
        """Take over chains of at most ``num_slots`` tokens; survival beyond them becomes 0.

        Args:
            tokens: [num_reqs, num_steps] int64.
            survival: [num_reqs, num_steps] or [num_reqs, num_slots].
            lengths: [num_reqs] int32.
        """
        num_reqs = lengths.shape[0]
        self.tokens[:num_reqs, : tokens.shape[1]] = tokens
        self.survival[:num_reqs, : survival.shape[1]] = survival
        self.survival[:num_reqs, survival.shape[1] :].zero_()
        self.lengths[:num_reqs] = lengths
