"""The n-gram drafter inside the engine: lookup, calibrated survival, and what it remembers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from specbench.estimators.ngram_features import strata_of, survival_of, update_recent
from specbench.kernels.ngram_lookup import ngram_lookup
from specbench.vllm_plugin.installed import InstalledCalibration

# Marks a request slot whose last lookup found nothing.
NO_TOKEN = -1


@dataclass(frozen=True)
class NgramProposal:
    """N-gram chains of a batch, in batch order.

    Attributes:
        tokens: [num_reqs, num_slots] int64, 0 beyond the end of a chain.
        counts: [num_reqs] int32.
        survival: [num_reqs, num_slots] float32, 0 beyond the end of a chain.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    survival: torch.Tensor


class NgramDrafting:
    """Looks requests up, and keeps for each request slot how its last lookups fared.

    Nothing here is read back to the host: it runs between the sampler and the next step.

    Args:
        req_states: vLLM's request states.
        num_slots: longest chain.
        min_n, max_n: suffix lengths to match while there is no calibration.
    """

    def __init__(self, req_states: Any, num_slots: int, min_n: int, max_n: int) -> None:
        self._req_states = req_states
        self._num_slots = num_slots
        self._given_range = (min_n, max_n)
        shape, device = (req_states.max_num_reqs,), req_states.device
        # By request slot, not by batch position: requests change places between steps.
        self._recent = torch.full(shape, torch.nan, dtype=torch.float32, device=device)
        self._first_draft = torch.full(shape, NO_TOKEN, dtype=torch.int64, device=device)

    def forget(self, slot: int) -> None:
        """A new request takes this slot."""
        self._recent[slot].fill_(torch.nan)
        self._first_draft[slot].fill_(NO_TOKEN)

    def look_up(
        self, input_batch: Any, num_sampled: torch.Tensor, num_tokens: int
    ) -> NgramProposal:
        """Longest matches of every sampling request; a match counts as certain.

        Args:
            num_sampled: [num_reqs], 0 marks a request still in its prompt: no lookup.
            num_tokens: longest continuation wanted, at most the number of slots.
        """
        min_n, max_n = self._given_range
        matches, _ = self._matches(input_batch, num_sampled, num_tokens, min_n, max_n)
        steps = torch.arange(self._num_slots, device=matches.counts.device)
        survival = (steps[None] < matches.counts[:, None]).float()
        return NgramProposal(self._padded(matches.drafts), matches.counts, survival)

    def look_up_calibrated(
        self,
        input_batch: Any,
        num_sampled: torch.Tensor,
        temperature: torch.Tensor,
        calibration: InstalledCalibration,
    ) -> NgramProposal:
        """Longest matches with calibrated survival.

        Args:
            num_sampled: as in :meth:`look_up`.
            temperature: [max_num_reqs] by request slot.
            calibration: also says which suffix lengths to match.
        """
        table = calibration.ngram
        num_tokens = min(self._num_slots, calibration.ngram_survival.shape[2])
        matches, slots = self._matches(
            input_batch, num_sampled, num_tokens, table.min_n, table.max_n
        )
        recent = self._remember(slots, num_sampled[: slots.shape[0]], matches.drafts[:, 0])
        strata = strata_of(
            table.stratification,
            matches.num_occurrences,
            matches.num_agreeing,
            recent_acceptance=recent,
            in_prompt=matches.starts < self._req_states.prompt_len.gpu[slots],
            temperatures=temperature[slots],
        )
        survival = survival_of(
            calibration.ngram_survival[:, :, :num_tokens],
            strata,
            matches.match_lengths,
            matches.counts,
        )
        missing = self._num_slots - num_tokens
        return NgramProposal(
            self._padded(matches.drafts),
            matches.counts,
            torch.nn.functional.pad(survival, (0, missing)),
        )

    def _matches(
        self, input_batch: Any, num_sampled: torch.Tensor, num_tokens: int, min_n: int, max_n: int
    ) -> tuple[Any, torch.Tensor]:
        num_reqs = input_batch.num_reqs
        slots = input_batch.idx_mapping[:num_reqs]
        total = self._req_states.total_len.gpu[slots]
        matches = ngram_lookup(
            self._req_states.all_token_ids.gpu,
            torch.where(num_sampled[:num_reqs] > 0, total, 0),
            min_n=min_n,
            max_n=max_n,
            num_tokens=num_tokens,
            rows=slots,
        )
        return matches, slots

    def _remember(
        self, slots: torch.Tensor, num_sampled: torch.Tensor, first_drafts: torch.Tensor
    ) -> torch.Tensor:
        """Grade the last lookups by the tokens emitted since, and note the new ones.

        Returns:
            [num_reqs] recent acceptance, this step's verdict included.
        """
        first = self._req_states.total_len.gpu[slots] - num_sampled
        row = slots.long()
        text = self._req_states.all_token_ids.gpu
        # A request that sampled nothing has no emitted token; its row is read but not used.
        emitted = text[row, first.clamp(min=0, max=text.shape[1] - 1).long()]
        expected = self._first_draft[row]
        graded = (expected != NO_TOKEN) & (num_sampled > 0)
        recent = update_recent(self._recent[row], graded, expected == emitted)
        self._recent[row] = recent
        # A step that samples nothing leaves the open verdict for the next one that does.
        self._first_draft[row] = torch.where(num_sampled > 0, first_drafts, expected)
        return recent

    def _padded(self, drafts: torch.Tensor) -> torch.Tensor:
        missing = self._num_slots - drafts.shape[1]
        return torch.nn.functional.pad(drafts.clamp(min=0), (0, missing))
