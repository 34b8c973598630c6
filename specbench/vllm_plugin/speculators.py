"""Speculators that draft what the current policy asks for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

from specbench.errors import UsageError
from specbench.estimators.calibrated_confidence import apply_temperatures
from specbench.estimators.engine_payload import EngineCalibration
from specbench.kernels.cpu.rows import argmax
from specbench.policies import DraftBatch, Drafter, Policy, StepCosts
from specbench.vllm_plugin.chains import DraftChains
from specbench.vllm_plugin.ngram_drafting import NgramDrafting
from specbench.vllm_plugin.settings import PluginSettings
from specbench.vllm_plugin.step_log import StepLog

# Costs at a mean context, and the largest budget of a batch of so many requests.
CostsAt = Callable[[float], StepCosts | None]
MaxBudget = Callable[[int], int]


class PolicyDrafting:
    """Mixin of both speculators: the batch's chains, the n-gram drafter, and the record.

    Attributes:
        chains: what was drafted last.
        ngram: the n-gram drafter.
    """

    policy: Policy
    step_log: StepLog
    chains: DraftChains
    ngram: NgramDrafting

    def setup_policy(
        self,
        policy: Policy,
        step_log: StepLog,
        req_states: Any,
        settings: PluginSettings,
        num_slots: int,
    ) -> None:
        """Attach what vLLM's constructor does not know about."""
        self.policy = policy
        self.step_log = step_log
        self.chains = DraftChains(req_states.max_num_reqs, num_slots, req_states.device)
        self.ngram = NgramDrafting(req_states, num_slots, settings.ngram_min, settings.ngram_max)

    @property
    def block_tokens(self) -> int:
        """Tokens that the model drafter drafts for a request; 0 without one."""
        return 0

    @property
    def longest_chain(self) -> int:
        """Slots that the policy's drafters can fill; a request may have been given more."""
        num_slots = self.chains.num_slots
        copied = min(self.policy.max_ngram_tokens or num_slots, num_slots)
        return max(
            self.block_tokens if self.policy.drafter.uses_model else 0,
            copied if self.policy.drafter.uses_ngram else 0,
        )

    def set_calibration(self, calibration: EngineCalibration) -> None:
        """Use these survivals for n-gram chains."""
        self.ngram.set_calibration(calibration)

    def draft_ngram(self, input_batch: Any, num_sampled: torch.Tensor) -> None:
        """Look every sampling request up; every match counts as certain."""
        found = self.ngram.look_up(input_batch, num_sampled, self.longest_chain)
        self.chains.fill(found.tokens, found.survival, found.counts)

    def timed_draft(self, propose: Callable[[], None]) -> None:
        """Run ``propose`` and put its duration into the step's record."""
        step = self.step_log.current
        start = self.step_log.clock.mark()
        propose()
        if step is not None:
            step.draft_marks.append((start, self.step_log.clock.mark()))


class PolicyDSparkSpeculator(PolicyDrafting, DSparkSpeculator):  # type: ignore[misc]
    """vLLM's DSpark drafter beside the n-gram lookup, either or both as the policy says.

    vLLM's part works on blocks of the drafter's own length; the batch's chains may be
    longer. Skipping the drafter leaves its context keys and values unwritten, which is why
    policies are only switched with no request running and after the prefix cache was cleared.
    """

    costs_at: CostsAt
    max_budget: MaxBudget
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
        self._temperatures: torch.Tensor | None = None

    @property
    def block_tokens(self) -> int:
        """The drafter's block."""
        return int(self.num_speculative_steps)

    def set_calibration(self, calibration: EngineCalibration) -> None:
        """Use these survivals, and temperatures for the drafter's confidences if there are."""
        values = calibration.temperatures
        if values is not None and len(values) < self.block_tokens:
            raise UsageError(
                f"the calibration has temperatures for {len(values)} positions, the drafter "
                f"drafts {self.block_tokens}; run 'specbench calibrate' again"
            )
        super().set_calibration(calibration)
        self._temperatures = None
        if values is not None:
            self._temperatures = torch.tensor(values, dtype=torch.float32, device=self.device)

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Draft for the batch; same contract as vLLM's propose, one column for each slot."""
        if kwargs.get("dummy_run"):
            drafts: torch.Tensor = super().propose(input_batch, *args, **kwargs)
            return drafts
        self.timed_draft(lambda: self._propose_by_policy(input_batch, args, kwargs))
        chains: torch.Tensor = self.chains.tokens[: input_batch.num_reqs]
        return chains

    def observe_verification(
        self, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        """Feed vLLM's acceptance estimator, but only with verdicts on the model's own drafts."""
        if not self.policy.drafter.uses_model or self.acceptance_estimator is None:
            return
        # Nothing accepted and nothing rejected is no observation to it.
        own = ~self._replaced[idx_mapping.long()]
        super().observe_verification(idx_mapping, num_sampled * own, num_rejected * own)

    def _propose_by_policy(self, input_batch: Any, args: Any, kwargs: Any) -> None:
        num_reqs = input_batch.num_reqs
        num_sampled: torch.Tensor = args[4]
        drafter = self.policy.drafter
        if drafter.uses_model:
            super().propose(input_batch, *args, **kwargs)
        if drafter is Drafter.MODEL:
            self._take_blocks(input_batch, num_sampled)
        elif drafter is Drafter.NGRAM:
            self.draft_ngram(input_batch, num_sampled)
            self._cache_one_hot(input_batch)
        elif drafter is Drafter.BOTH:
            self._choose_chains(input_batch, num_sampled, temperature=args[8])
            # Also for kept blocks: the choice looked at their sampled tokens, so a ratio
            # test against the distribution they came from would not be exact.
            self._cache_one_hot(input_batch)
        else:
            self.chains.clear(num_reqs)

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
        start = self.step_log.clock.mark()
        num_reqs = input_batch.num_reqs
        found = self.ngram.look_up_calibrated(input_batch, num_sampled, temperature)
        samples = num_sampled[:num_reqs] > 0
        confidence = self.draft_token_confidence_probs[:num_reqs]
        if self._temperatures is not None:
            confidence = apply_temperatures(confidence, self._temperatures)
        model_survival = confidence.cumprod(dim=1) * samples[:, None]
        choice = self.policy.choose_chains(
            DraftBatch(
                model_survival=model_survival,
                ngram_survival=found.survival,
                num_sampling=samples.sum(),
                num_base_tokens=num_reqs,
                num_drafted=num_reqs * self.block_tokens,
                max_budget=self.max_budget(num_reqs),
            ),
            self.costs_at(float(np.mean(input_batch.num_computed_tokens_np[:num_reqs]))),
        )
        tokens = found.tokens.clone()
        block = tokens[:, : self.block_tokens]
        block.copy_(torch.where(choice.use_ngram[:, None], block, self.draft_tokens[:num_reqs]))
        own_length = samples.to(torch.int32) * self.block_tokens
        lengths = torch.where(choice.use_ngram, found.counts, own_length)
        self.chains.fill(tokens, choice.survival, lengths)
        self._replaced[input_batch.idx_mapping[:num_reqs].long()] = choice.use_ngram
        if (step := self.step_log.current) is not None:
            step.choice_marks.append((start, self.step_log.clock.mark()))

    def _cache_one_hot(self, input_batch: Any) -> None:
        """Make the cached proposal of every request certain of its chain's token.

        With sampled drafting the rejection sampler reads the proposal distribution from
        ``draft_logits``; a chain that was chosen or looked up is a one-hot proposal.
        """
        if self.draft_logits is None:
            return
        num_reqs = input_batch.num_reqs
        rows = input_batch.idx_mapping[:num_reqs].long()
        steps = torch.arange(self.chains.num_slots, device=rows.device)
        self.draft_logits[rows] = float("-inf")
        self.draft_logits[rows[:, None], steps[None], self.chains.tokens[:num_reqs]] = 0.0

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
    def draft_token_confidence_probs(self) -> torch.Tensor:
        """Asked for by the runner; verification reads the chains' survival instead."""
        return self.chains.survival

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Draft for the batch; same contract as vLLM's propose."""
        if not kwargs.get("dummy_run"):
            num_sampled = args[4]
            self.timed_draft(lambda: self._propose_by_policy(input_batch, num_sampled))
        drafts: torch.Tensor = self.chains.tokens[: input_batch.num_reqs]
        return drafts

    def _propose_by_policy(self, input_batch: Any, num_sampled: torch.Tensor) -> None:
        if self.policy.drafter is Drafter.NGRAM:
            self.draft_ngram(input_batch, num_sampled)
        else:
            self.chains.clear(input_batch.num_reqs)


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
