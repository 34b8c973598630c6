"""Speculators that draft what the current policy asks for."""

from __future__ import annotations

import copy
import time
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

from specbench.kernels.cpu.rows import argmax
from specbench.policies import Drafter
from specbench.vllm_plugin.chains import DraftChains
from specbench.vllm_plugin.context_backlog import ContextBacklog, ContextRows
from specbench.vllm_plugin.decisions import StepDecisions
from specbench.vllm_plugin.ngram_drafting import NgramDrafting
from specbench.vllm_plugin.ragged_drafting import RaggedDSparkSpeculator, Verdicts
from specbench.vllm_plugin.settings import PluginSettings
from specbench.vllm_plugin.step_log import StepLog


class PolicyDrafting:
    """Mixin of both speculators: the batch's chains, the n-gram drafter, and the record.

    Attributes:
        decisions: what the policy in force decides.
        step_log: where durations go.
        chains: what was drafted last.
        ngram: the n-gram drafter.
        prefill_len: [max_num_reqs] tokens after which a request starts to emit, on the host.
    """

    decisions: StepDecisions
    step_log: StepLog
    chains: DraftChains
    ngram: NgramDrafting
    prefill_len: np.ndarray

    def attach(
        self,
        decisions: StepDecisions,
        step_log: StepLog,
        req_states: Any,
        settings: PluginSettings,
    ) -> None:
        """Attach what vLLM's constructor does not know about."""
        num_slots = decisions.limits.num_slots
        self.decisions = decisions
        self.step_log = step_log
        self.chains = DraftChains(req_states.max_num_reqs, num_slots, req_states.device)
        self.ngram = NgramDrafting(req_states, num_slots, settings.ngram_min, settings.ngram_max)
        self.prefill_len = req_states.prefill_len.np

    def forget(self, slot: int) -> None:
        """A new request in this slot: nothing of the last one's past counts for it."""
        self.ngram.forget(slot)
        self.decisions.forget(slot)

    def forget_all(self) -> None:
        """Another policy is in force, and no request is running."""

    def draft_ngram(self, input_batch: Any, num_sampled: torch.Tensor) -> None:
        """Look every sampling request up; every match counts as certain."""
        found = self.ngram.look_up(input_batch, num_sampled, self.decisions.longest_chain)
        self.chains.fill(found.tokens, found.survival, found.counts)


class PolicyDSparkSpeculator(PolicyDrafting, RaggedDSparkSpeculator):
    """vLLM's DSpark drafter beside the n-gram lookup, either or both as the policy says.

    vLLM's part works on blocks of the drafter's own length; the batch's chains may be
    longer. Skipping the drafter leaves its context keys and values unwritten, which is why
    policies are only switched with no request running and after the prefix cache was cleared.
    """

    draft_logits: torch.Tensor | None

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(with_block_length(vllm_config), device)
        num_slots = vllm_config.speculative_config.num_speculative_tokens
        if self.draft_logits is not None and num_slots > self.num_speculative_steps:
            # The rejection sampler reads a row for every slot, the drafter writes the first.
            shape = (self.max_num_reqs, num_slots, self.vocab_size)
            self.draft_logits = self.draft_logits.new_full(shape, float("-inf"))
        # Requests whose last chain was looked up, by request slot.
        self._replaced = torch.zeros(self.max_num_reqs, dtype=torch.bool, device=device)
        # Measured when a backlog is stored; until then it counts as costing nothing.
        self._backlog_ms_per_token = 0.0
        self.forget_all()

    def forget(self, slot: int) -> None:
        """See :class:`PolicyDrafting`."""
        super().forget(slot)
        self._backlog.forget(slot)

    def forget_all(self) -> None:
        """See :class:`PolicyDrafting`."""
        self._backlog = ContextBacklog(self.max_num_reqs, PAD_SLOT_ID, self.device)

    @property
    def block_tokens(self) -> int:
        """The drafter's block."""
        return int(self.num_speculative_steps)

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """Draft for the batch; same contract as vLLM's propose, one column for each slot."""

        def run_model() -> torch.Tensor:
            drafts: torch.Tensor = super(PolicyDSparkSpeculator, self).propose(
                input_batch,
                attn_metadata,
                slot_mappings,
                last_hidden_states,
                aux_hidden_states,
                num_sampled,
                num_rejected,
                last_sampled,
                next_prefill_tokens,
                temperature,
                seeds,
                **options,
            )
            return drafts

        if options.get("dummy_run"):
            return run_model()
        with self.step_log.span("draft"):
            if self.decisions.policy.sizes_drafts:
                verdicts = Verdicts(
                    num_sampled,
                    num_rejected,
                    last_sampled,
                    next_prefill_tokens,
                    temperature,
                    seeds,
                )
                assert aux_hidden_states is not None
                self._draft_what_pays(input_batch, aux_hidden_states, verdicts)
                return self.chains.tokens[: input_batch.num_reqs]
            if self.decisions.policy.drafter.uses_model:
                run_model()
            self._fill_chains(input_batch, num_sampled, temperature)
        return self.chains.tokens[: input_batch.num_reqs]

    def observe_verification(
        self, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        """Feed vLLM's acceptance estimator, but only with verdicts on the model's own drafts."""
        if not self.decisions.policy.drafter.uses_model or self.acceptance_estimator is None:
            return
        # Nothing accepted and nothing rejected is no observation to it.
        own = ~self._replaced[idx_mapping.long()]
        super().observe_verification(idx_mapping, num_sampled * own, num_rejected * own)

    def _draft_what_pays(
        self, input_batch: Any, aux_hidden_states: list[torch.Tensor], verdicts: Verdicts
    ) -> None:
        """Draft as many tokens as the policy says, where it says."""
        num_reqs = input_batch.num_reqs
        slots, on_device = input_batch.idx_mapping_np[:num_reqs], input_batch.idx_mapping[:num_reqs]
        computed = input_batch.num_computed_tokens_np[:num_reqs]
        with self.step_log.span("draft_decision"):
            self.decisions.observe(on_device, verdicts.num_sampled, verdicts.num_rejected)
            after = computed + input_batch.num_scheduled_tokens[:num_reqs]
            plan = self.decisions.plan_drafts(
                slots,
                on_device,
                after >= self.prefill_len[slots],
                context_tokens=float(np.mean(computed)),
                backlog_ms=self._backlog.num_tokens * self._backlog_ms_per_token,
            )
        if self.step_log.current is not None:
            self.step_log.current.predicted_survival = plan.survival
        if plan.budget == 0:
            self._put_off(self.context_rows(input_batch, aux_hidden_states, verdicts))
            self.chains.clear(num_reqs)
            return
        self._store_backlog()
        self.store_contexts(self.context_rows(input_batch, aux_hidden_states, verdicts))
        self.draft_ragged(input_batch, plan.lengths, plan.budget)
        calibration = self.decisions.calibration
        steps = torch.arange(self.block_tokens, device=plan.lengths.device)
        drafted = steps < plan.lengths[:, None]
        confidence = self.draft_token_confidence_probs[:num_reqs]
        if calibration is not None:
            confidence = calibration.calibrated(confidence)
        # Confidences beyond a request's length are leftovers, perhaps not even numbers.
        survival = torch.where(drafted, confidence, 0.0).cumprod(dim=1)
        self._replaced[on_device.long()] = False
        self.chains.fill(self.draft_tokens[:num_reqs], survival, plan.lengths)
        if self.decisions.limits.staleness:
            # Asynchronous scheduling may have tokens verified that were not drafted.
            self._cache_one_hot(input_batch, beyond=plan.lengths)

    def _put_off(self, rows: ContextRows) -> None:
        """Store contexts when they are needed, or when no more can be kept."""
        self._backlog.add(rows)
        if self._backlog.is_full:
            self._backlog.drop_ended()
        if self._backlog.is_full:
            self._store_backlog()

    def _store_backlog(self) -> None:
        num_tokens, started = 0, time.perf_counter()
        for rows in self._backlog.take(self.max_num_tokens):
            self.store_contexts(rows)
            num_tokens += rows.positions.shape[0]
        if num_tokens:
            # On a GPU this is the time to launch it: too little, so that it is stored early.
            elapsed_ms = (time.perf_counter() - started) * 1e3
            self._backlog_ms_per_token = elapsed_ms / num_tokens

    def _fill_chains(
        self, input_batch: Any, num_sampled: torch.Tensor, temperature: torch.Tensor
    ) -> None:
        """Make the policy's chains of what the model has drafted and the lookup finds."""
        drafter = self.decisions.policy.drafter
        if drafter is Drafter.MODEL:
            self._take_blocks(input_batch, num_sampled)
        elif drafter is Drafter.NGRAM:
            self.draft_ngram(input_batch, num_sampled)
            self._cache_one_hot(input_batch)
        elif drafter is Drafter.BOTH:
            self._choose_chains(input_batch, num_sampled, temperature)
            # Also for kept blocks: the choice looked at their sampled tokens, so a ratio
            # test against the distribution they came from would not be exact.
            self._cache_one_hot(input_batch)
        else:
            self.chains.clear(input_batch.num_reqs)

    def _take_blocks(self, input_batch: Any, num_sampled: torch.Tensor) -> None:
        num_reqs = input_batch.num_reqs
        drafted = num_sampled[:num_reqs] > 0
        self._replaced[input_batch.idx_mapping[:num_reqs].long()] = False
        self.chains.fill(
            self.draft_tokens[:num_reqs],
            self.draft_token_confidence_probs[:num_reqs].cumprod(dim=1),
            drafted.to(torch.int32) * self.block_tokens,
        )

    def _choose_chains(
        self, input_batch: Any, num_sampled: torch.Tensor, temperature: torch.Tensor
    ) -> None:
        """Let the policy choose between both drafters' chains and keep the chosen ones."""
        calibration = self.decisions.calibration
        assert calibration is not None
        num_reqs = input_batch.num_reqs
        with self.step_log.span("draft_decision"):
            found = self.ngram.look_up_calibrated(
                input_batch, num_sampled, temperature, calibration
            )
            samples = num_sampled[:num_reqs] > 0
            confidence = calibration.calibrated(self.draft_token_confidence_probs[:num_reqs])
            choice = self.decisions.choose_chains(
                confidence.cumprod(dim=1) * samples[:, None],
                found.survival,
                num_sampling=samples.sum(),
                context_tokens=float(np.mean(input_batch.num_computed_tokens_np[:num_reqs])),
            )
            tokens = found.tokens.clone()
            block = tokens[:, : self.block_tokens]
            drafted = self.draft_tokens[:num_reqs]
            block.copy_(torch.where(choice.use_ngram[:, None], block, drafted))
            own_length = samples.to(torch.int32) * self.block_tokens
            lengths = torch.where(choice.use_ngram, found.counts, own_length)
            self.chains.fill(tokens, choice.survival, lengths)
            self._replaced[input_batch.idx_mapping[:num_reqs].long()] = choice.use_ngram

    def _cache_one_hot(self, input_batch: Any, beyond: torch.Tensor | None = None) -> None:
        """Make the cached proposal of every request certain of its chain's token.

        With sampled drafting the rejection sampler reads the proposal distribution from
        ``draft_logits``; a chain that was chosen or looked up is a one-hot proposal.

        Args:
            input_batch: of the step.
            beyond: [num_reqs] keep the proposals of so many leading slots.
        """
        if self.draft_logits is None:
            return
        num_reqs = input_batch.num_reqs
        rows = input_batch.idx_mapping[:num_reqs].long()
        steps = torch.arange(self.chains.num_slots, device=rows.device)
        certain = torch.full_like(self.draft_logits[rows], float("-inf"))
        certain.scatter_(2, self.chains.tokens[:num_reqs, :, None], 0.0)
        if beyond is not None:
            kept = (steps < beyond[:, None])[:, :, None]
            certain = torch.where(kept, self.draft_logits[rows], certain)
        self.draft_logits[rows] = certain

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

    def _num_graph_context_tokens(self, num_reqs: int) -> int:
        """Context rows a captured draft step stores: a full verify has a row for every slot."""
        return int(min(num_reqs * (self.chains.num_slots + 1), self.max_num_tokens))


class PolicyNgramSpeculator(PolicyDrafting, NgramGPUSpeculator):  # type: ignore[misc]
    """N-gram lookup alone, for a target without a model drafter: policies ar and ngram."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        spec = vllm_config.speculative_config
        self.vllm_config = vllm_config
        self.device = device
        self.speculative_config = spec
        self.num_speculative_steps = spec.num_speculative_tokens

    @property
    def block_tokens(self) -> int:
        """There is no model drafter."""
        return 0

    def why_not_ragged(self) -> str:
        """There is no model drafter."""
        return "there is none"

    @property
    def draft_token_confidence_probs(self) -> torch.Tensor:
        """Asked for by the runner; verification reads the chains' survival instead."""
        return self.chains.survival

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        *_sampling_state: torch.Tensor,
        dummy_run: bool = False,
        **_options: Any,
    ) -> torch.Tensor:
        """Draft for the batch; same contract as vLLM's propose."""
        if not dummy_run:
            with self.step_log.span("draft"):
                if self.decisions.policy.drafter is Drafter.NGRAM:
                    self.draft_ngram(input_batch, num_sampled)
                else:
                    self.chains.clear(input_batch.num_reqs)
        return self.chains.tokens[: input_batch.num_reqs]


def with_block_length(vllm_config: Any) -> Any:
    """A copy of the configuration in which a request has as many slots as the drafter's block.

    The drafter's shape must not depend on how many slots there are: its attention inside a
    block is not causal, so a longer block would draft other tokens.
    """
    spec = vllm_config.speculative_config
    config = spec.draft_model_config.hf_config
    # The two names that vLLM reads it from.
    block = getattr(config, "block_size", None) or getattr(config, "dspark_block_size", None)
    if not isinstance(block, int) or block >= spec.num_speculative_tokens:
        return vllm_config
    narrowed = copy.copy(vllm_config)
    narrowed.speculative_config = copy.copy(spec)
    narrowed.speculative_config.num_speculative_tokens = block
    return narrowed
