"""Verification under a policy, on top of vLLM's adaptive-verification manager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import vllm.v1.worker.gpu.spec_decode.adaptive_verification as stock
from vllm.utils.torch_utils import async_tensor_h2d

from specbench.vllm_plugin.decisions import StepDecisions
from specbench.vllm_plugin.speculators import PolicyDrafting
from specbench.vllm_plugin.step_log import StepLog


class PolicyVerification(stock.AdaptiveVerificationManager):  # type: ignore[misc]
    """Asks the policy for the step's budget (host) and its distribution (device).

    Buffers, compaction and the layout handed to the runner are vLLM's. With
    ``staleness = 0`` the budget is sized from the confidences of the tokens about to be
    verified, which the CPU engine has at hand because its scheduling is synchronous.
    With ``staleness = 1`` it is sized from the copy vLLM keeps for asynchronous
    scheduling, which lags one step.
    """

    def __init__(
        self,
        *args: Any,
        decisions: StepDecisions,
        step_log: StepLog,
        drafting: PolicyDrafting,
        staleness: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.decisions = decisions
        self.step_log = step_log
        self.drafting = drafting
        self.staleness = staleness

    def add_request(self, req_idx: int) -> None:
        """A new request in this slot: nothing of the last one's past counts for it."""
        super().add_request(req_idx)
        self.drafting.forget(req_idx)

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: Any) -> None:
        """Keep the chains' survivals where vLLM keeps the drafter's confidences."""
        super().record_confidences(self.drafting.chains.survival, input_batch)

    def get_num_tokens(
        self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]
    ) -> int:
        """Tokens of the step after the policy has sized the draft budget."""
        with self.step_log.span("verify_decision"):
            req_ids = list(num_tokens_per_req)
            drafts = np.array([len(draft_tokens.get(r, ())) for r in req_ids], dtype=np.int32)
            scheduled = np.fromiter(num_tokens_per_req.values(), dtype=np.int32, count=len(req_ids))
            base = scheduled - drafts
            # Asynchronous scheduling gives every request all slots. Those that no drafter of
            # this policy fills hold leftovers: with sampled drafting they would not be exact.
            drafts = np.minimum(drafts, self.decisions.longest_chain)
            slots = np.array([self.req_states.req_id_to_index[r] for r in req_ids], dtype=np.int64)
            budget = self._budget(drafts, base, slots)
            # The three values vLLM's compact_batch and reallocate_drafts pick up again.
            self._batch_budget: Any = (
                dict(zip(req_ids, drafts.tolist(), strict=True)),
                dict(zip(req_ids, base.tolist(), strict=True)),
                budget,
            )
        return int(base.sum()) + budget

    def reallocate_drafts(
        self, req_ids: Sequence[str], idx_mapping: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Share the budget out on the device and rebuild the step's offsets."""
        decided: Any = self._batch_budget
        assert decided is not None
        num_drafts, num_base, budget = decided
        self._batch_budget = None
        num_reqs = idx_mapping.shape[0]
        with self.step_log.span("verify_decision"):
            lengths = self._batch_draft_capacity[:num_reqs]
            if budget == 0:
                lengths.zero_()
            else:
                scheduled = np.array([num_drafts[r] for r in req_ids], dtype=np.int32)
                async_tensor_h2d(scheduled, out=lengths)
                if budget < int(scheduled.sum()):
                    survival = self._confidence_probs[idx_mapping]
                    lengths.copy_(self.decisions.verify_lengths(survival, lengths, budget))
            base = np.array([num_base[r] for r in req_ids], dtype=np.int32)
            base_on_device = self._num_non_draft_tokens[:num_reqs]
            async_tensor_h2d(base, out=base_on_device)
            self._fill_offsets(self._cu_num_logits[: num_reqs + 1], lengths + self.num_bonus_tokens)
            self._fill_offsets(self.query_start_loc[: num_reqs + 1], lengths + base_on_device)
            self.query_start_loc[num_reqs + 1 :].fill_(int(base.sum()) + budget)
        return self._cu_num_logits[: num_reqs + 1], self.query_start_loc, budget

    @staticmethod
    def _fill_offsets(offsets: torch.Tensor, counts: torch.Tensor) -> None:
        offsets[:1].zero_()
        torch.cumsum(counts, dim=0, out=offsets[1:])

    def _budget(self, drafts: np.ndarray, base: np.ndarray, slots: np.ndarray) -> int:
        states = self.req_states
        computed = states.num_computed_tokens_np[slots]
        return self.decisions.verify_budget(
            self._survival_on_host(slots),
            torch.from_numpy(drafts),
            num_base_tokens=int(base.sum()),
            num_sampling=int(np.count_nonzero(computed + base >= states.prefill_len.np[slots])),
            context_tokens=float(computed.mean()),
        )

    def _survival_on_host(self, slots: np.ndarray) -> torch.Tensor:
        """[num_reqs, num_slots] float64, as fresh as the host can have it."""
        if self.staleness == 0:
            survival = self._confidence_probs.cpu().numpy()[slots]
        elif self.decisions.policy.sizes_drafts:
            # Confidences of the step before belong to other lengths; predictions do not.
            predicted = self.decisions.predicted_on_host(slots)
            missing = self.num_speculative_steps - predicted.shape[1]
            return torch.nn.functional.pad(predicted, (0, missing))
        else:
            survival = self._stale_confidences[self._stale_idx].np[slots]
        return torch.from_numpy(survival.astype(np.float64))
