"""Speculators that draft what the current policy asks for."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

from specbench.kernels.cpu.rows import argmax
from specbench.kernels.ngram_lookup import ngram_lookup
from specbench.policies import Drafter, Policy
from specbench.vllm_plugin.step_log import StepLog


class PolicyDrafting:
    """Mixin of both speculators: which drafter runs, and the record of what it drafted.

    Attributes:
        draft_lengths: [max_num_reqs] int32 in batch order, usable drafts of each request.
        draft_token_confidence_probs: [max_num_reqs, num_steps] conditional acceptance of
            each draft token as the drafter sees it; 0 where nothing was drafted.
    """

    policy: Policy
    step_log: StepLog
    req_states: Any
    draft_lengths: torch.Tensor
    min_n: int
    max_n: int

    def setup_policy(
        self, policy: Policy, step_log: StepLog, req_states: Any, min_n: int, max_n: int
    ) -> None:
        """Attach what vLLM's constructor does not know about."""
        self.policy = policy
        self.step_log = step_log
        self.req_states = req_states
        self.min_n, self.max_n = min_n, max_n
        self.draft_lengths = torch.zeros(
            req_states.max_num_reqs, dtype=torch.int32, device=req_states.device
        )

    def draft_ngram(
        self, input_batch: Any, num_sampled: torch.Tensor, drafts: torch.Tensor
    ) -> None:
        """Look every sampling request up; writes drafts, confidences and lengths.

        Args:
            num_sampled: [num_reqs], 0 marks a request still in its prompt: no lookup.
            drafts: [max_num_reqs, num_steps] int64, first num_reqs rows are written.
        """
        num_reqs = input_batch.num_reqs
        idx_mapping = input_batch.idx_mapping[:num_reqs]
        total = self.req_states.total_len.gpu[idx_mapping]
        lengths = torch.where(num_sampled[:num_reqs] > 0, total, 0)
        tokens, counts, _ = ngram_lookup(
            self.req_states.all_token_ids.gpu[idx_mapping],
            lengths,
            min_n=self.min_n,
            max_n=self.max_n,
            num_tokens=drafts.shape[1],
        )
        drafts[:num_reqs] = tokens.clamp(min=0)
        self.draft_lengths[:num_reqs] = counts
        usable = torch.arange(drafts.shape[1], device=counts.device)[None] < counts[:, None]
        self.draft_token_confidence_probs[:num_reqs] = usable.float()

    draft_token_confidence_probs: torch.Tensor

    def timed_draft(self, propose: Any) -> torch.Tensor:
        """Run ``propose`` and put its duration into the step's record."""
        step = self.step_log.current
        start = self.step_log.clock.mark()
        drafts: torch.Tensor = propose()
        if step is not None:
            step.draft_marks.append((start, self.step_log.clock.mark()))
        return drafts


class PolicyDSparkSpeculator(PolicyDrafting, DSparkSpeculator):  # type: ignore[misc]
    """vLLM's DSpark drafter, skipped or replaced by the n-gram lookup where the policy says so.

    Skipping leaves the drafter's context keys and values unwritten, which is why policies
    are only switched with no request running and after the prefix cache was cleared.
    """

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Draft for the batch; same contract as vLLM's propose."""
        if kwargs.get("dummy_run"):
            drafts: torch.Tensor = super().propose(input_batch, *args, **kwargs)
            return drafts
        num_sampled: torch.Tensor = args[4]
        return self.timed_draft(
            lambda: self._propose_by_policy(input_batch, num_sampled, args, kwargs)
        )

    def observe_verification(self, *args: Any) -> None:
        """Feed vLLM's acceptance estimator, but only with verdicts on the model's own drafts."""
        if self.policy.drafter is Drafter.MODEL:
            super().observe_verification(*args)

    def _propose_by_policy(
        self, input_batch: Any, num_sampled: torch.Tensor, args: Any, kwargs: Any
    ) -> torch.Tensor:
        num_reqs = input_batch.num_reqs
        if self.policy.drafter is Drafter.MODEL:
            proposed: torch.Tensor = super().propose(input_batch, *args, **kwargs)
            drafted = num_sampled[:num_reqs] > 0
            self.draft_lengths[:num_reqs] = drafted.to(torch.int32) * self.num_speculative_steps
            return proposed
        if self.policy.drafter is Drafter.NGRAM:
            self.draft_ngram(input_batch, num_sampled, self.draft_tokens)
            self._cache_one_hot(input_batch)
        else:
            self.draft_lengths[:num_reqs].zero_()
            self.draft_token_confidence_probs[:num_reqs].zero_()
        drafts: torch.Tensor = self.draft_tokens[:num_reqs]
        return drafts

    def _cache_one_hot(self, input_batch: Any) -> None:
        """Make the cached proposal of every request certain of its looked-up token.

        With sampled drafting the rejection sampler reads the proposal distribution from
        ``draft_logits``; a chain that was looked up is a one-hot proposal.
        """
        if self.draft_logits is None:
            return
        num_reqs = input_batch.num_reqs
        rows = input_batch.idx_mapping[:num_reqs].long()
        steps = torch.arange(self.num_speculative_steps, device=rows.device)
        self.draft_logits[rows] = float("-inf")
        self.draft_logits[rows[:, None], steps[None], self.draft_tokens[:num_reqs]] = 0.0

    def _sample_logits(
        self, logits: torch.Tensor, idx_map: torch.Tensor, sample_pos: torch.Tensor, step: int
    ) -> torch.Tensor:
        """Greedy drafting on a CPU takes the compiled argmax: torch's is slow in bfloat16."""
        greedy = self.draft_logits is None and self.acceptance_estimator is None
        if not greedy or logits.device.type != "cpu":
            tokens: torch.Tensor = super()._sample_logits(logits, idx_map, sample_pos, step)
            return tokens
        mapped: torch.Tensor = self.model.map_draft_to_target(argmax(logits))
        return mapped


class PolicyNgramSpeculator(PolicyDrafting, NgramGPUSpeculator):  # type: ignore[misc]
    """N-gram lookup alone, for a target without a model drafter: policies ar and ngram."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        spec = vllm_config.speculative_config
        self.vllm_config = vllm_config
        self.device = device
        self.speculative_config = spec
        self.num_speculative_steps = spec.num_speculative_tokens
        self.max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        shape = (self.max_num_reqs, self.num_speculative_steps)
        self.drafts = torch.zeros(shape, dtype=torch.int64, device=device)
        self.draft_token_confidence_probs = torch.zeros(shape, dtype=torch.float32, device=device)

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Draft for the batch; same contract as vLLM's propose."""
        num_reqs = input_batch.num_reqs
        if not kwargs.get("dummy_run"):
            num_sampled = args[4]
            self.timed_draft(lambda: self._propose_by_policy(input_batch, num_sampled))
        return self.drafts[:num_reqs]

    def _propose_by_policy(self, input_batch: Any, num_sampled: torch.Tensor) -> torch.Tensor:
        if self.policy.drafter is Drafter.NGRAM:
            self.draft_ngram(input_batch, num_sampled, self.drafts)
        else:
            self.draft_lengths[: input_batch.num_reqs].zero_()
            self.draft_token_confidence_probs[: input_batch.num_reqs].zero_()
        return self.drafts
