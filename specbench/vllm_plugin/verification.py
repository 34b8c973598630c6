"""Verification under a policy, on top of vLLM's adaptive-verification manager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import vllm.v1.worker.gpu.spec_decode.adaptive_verification as stock
from vllm.utils.torch_utils import async_tensor_h2d

from specbench.costs import CostTable
from specbench.policies import Policy, StepCosts, VerifyBatch
from specbench.vllm_plugin.speculators import PolicyDrafting
from specbench.vllm_plugin.step_log import StepLog

# Cost tables are interpolated to the batch's mean context in steps of this many tokens:
# fine against the spacing of profiled contexts, coarse enough to be cached.
CONTEXT_BUCKET_TOKENS = 128


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
        policy: Policy,
        step_log: StepLog,
        drafting: PolicyDrafting,
        staleness: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.policy = policy
        self.step_log = step_log
        self.drafting = drafting
        self.staleness = staleness
        self._table: CostTable | None = None
        self._dense: dict[int, StepCosts] = {}
        self._on_device: dict[int, StepCosts] = {}

    def set_table(self, table: CostTable) -> None:
        """Use this cost table from the next step on."""
        self._table = table
        self._dense.clear()
        self._on_device.clear()

    @property
    def has_costs(self) -> bool:
        """Whether a cost table is installed."""
        return self._table is not None

    def add_request(self, req_idx: int) -> None:
        """A new request in this slot: nothing of the last one's past counts for it."""
        super().add_request(req_idx)
        self.drafting.ngram.forget(req_idx)

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: Any) -> None:
        """Keep the chains' survivals where vLLM keeps the drafter's confidences."""
        super().record_confidences(self.drafting.chains.survival, input_batch)

    def max_budget(self, num_reqs: int) -> int:
        """Draft tokens that one step can verify beside ``num_reqs`` bonus tokens."""
        return int(max(0, self._max_total_logits - num_reqs * self.num_bonus_tokens))

    def get_num_tokens(
        self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]
    ) -> int:
        """Tokens of the step after the policy has sized the draft budget."""
        start = self.step_log.clock.mark()
        req_ids = list(num_tokens_per_req)
        drafts = np.array([len(draft_tokens.get(r, ())) for r in req_ids], dtype=np.int32)
        scheduled = np.fromiter(num_tokens_per_req.values(), dtype=np.int32, count=len(req_ids))
        base = scheduled - drafts
        # Asynchronous scheduling gives every request all slots. Those that no drafter of this
        # policy fills hold leftovers: verified with sampled drafting they would not be exact.
        drafts = np.minimum(drafts, self.drafting.longest_chain)
        slots = np.array([self.req_states.req_id_to_index[r] for r in req_ids], dtype=np.int64)
        batch = self._verify_batch(drafts, base, slots)
        budget = self.policy.verify_budget(batch, self._costs(slots))
        # The three values vLLM's compact_batch and reallocate_drafts pick up again.
        self._batch_budget: Any = (
            dict(zip(req_ids, drafts.tolist(), strict=True)),
            dict(zip(req_ids, base.tolist(), strict=True)),
            budget,
        )
        self._decided(start)
        return int(base.sum()) + budget

    def reallocate_drafts(
        self, req_ids: Sequence[str], idx_mapping: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Share the budget out on the device and rebuild the step's offsets."""
        start = self.step_log.clock.mark()
        decided: Any = self._batch_budget
        assert decided is not None
        num_drafts, num_base, budget = decided
        self._batch_budget = None
        num_reqs = idx_mapping.shape[0]
        lengths = self._batch_draft_capacity[:num_reqs]
        if budget == 0:
            lengths.zero_()
        else:
            scheduled = np.array([num_drafts[r] for r in req_ids], dtype=np.int32)
            async_tensor_h2d(scheduled, out=lengths)
            if budget < int(scheduled.sum()):
                survival = self._confidence_probs[idx_mapping]
                lengths.copy_(self.policy.verify_lengths(survival, lengths, budget))
        base = np.array([num_base[r] for r in req_ids], dtype=np.int32)
        base_on_device = self._num_non_draft_tokens[:num_reqs]
        async_tensor_h2d(base, out=base_on_device)
        self._fill_offsets(self._cu_num_logits[: num_reqs + 1], lengths + self.num_bonus_tokens)
        self._fill_offsets(self.query_start_loc[: num_reqs + 1], lengths + base_on_device)
        self.query_start_loc[num_reqs + 1 :].fill_(int(base.sum()) + budget)
        self._decided(start)
        return self._cu_num_logits[: num_reqs + 1], self.query_start_loc, budget

    @staticmethod
    def _fill_offsets(offsets: torch.Tensor, counts: torch.Tensor) -> None:
        offsets[:1].zero_()
        torch.cumsum(counts, dim=0, out=offsets[1:])

    def _verify_batch(self, drafts: np.ndarray, base: np.ndarray, slots: np.ndarray) -> VerifyBatch:
        if self.staleness == 0:
            survival = self._confidence_probs.cpu().numpy()[slots].astype(np.float64)
        else:
            survival = self._stale_confidences[self._stale_idx].np[slots].astype(np.float64)
        states = self.req_states
        samples = states.num_computed_tokens_np[slots] + base >= states.prefill_len.np[slots]
        block = self.drafting.block_tokens if self.policy.drafter.uses_model else 0
        return VerifyBatch(
            survival=torch.from_numpy(survival),
            capacity=torch.from_numpy(drafts),
            num_base_tokens=int(base.sum()),
            num_sampling=int(np.count_nonzero(samples)),
            num_drafted=len(slots) * block,
            max_budget=self.max_budget(len(slots)),
        )

    def _costs(self, slots: np.ndarray) -> StepCosts | None:
        if self._table is None or not self.policy.needs_costs:
            return None
        return self._costs_at(float(self.req_states.num_computed_tokens_np[slots].mean()))

    def device_costs(self, context_tokens: float) -> StepCosts | None:
        """Costs at a mean context as float32 tensors on the device, for choosing chains."""
        costs = self._costs_at(context_tokens)
        if costs is None:
            return None
        bucket = round(context_tokens / CONTEXT_BUCKET_TOKENS)
        if bucket not in self._on_device:
            device = self.req_states.device
            self._on_device[bucket] = StepCosts(
                costs.draft_ms.to(device, torch.float32), costs.verify_ms.to(device, torch.float32)
            )
        return self._on_device[bucket]

    def _costs_at(self, context_tokens: float) -> StepCosts | None:
        if self._table is None:
            return None
        bucket = round(context_tokens / CONTEXT_BUCKET_TOKENS)
        if bucket not in self._dense:
            draft_ms, verify_ms = self._table.dense(
                bucket * CONTEXT_BUCKET_TOKENS,
                self.req_states.max_num_batched_tokens,
                self.req_states.max_num_reqs * self.drafting.block_tokens,
            )
            self._dense[bucket] = StepCosts(torch.from_numpy(draft_ms), torch.from_numpy(verify_ms))
        return self._dense[bucket]

    def _decided(self, start: Any) -> None:
        step = self.step_log.current
        if step is not None:
            step.decide_marks.append((start, self.step_log.clock.mark()))
