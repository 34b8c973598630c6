"""The V2 model runner with a policy: drafting, verification and a record of every step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import vllm.v1.worker.gpu.model_runner as stock_runner_module
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

from specbench.errors import UsageError
from specbench.policies import Drafter, Policy
from specbench.vllm_plugin.clock import DeviceClock
from specbench.vllm_plugin.decisions import EngineLimits, StepDecisions
from specbench.vllm_plugin.patching import replaced
from specbench.vllm_plugin.settings import PluginSettings
from specbench.vllm_plugin.speculators import PolicyDSparkSpeculator, PolicyNgramSpeculator
from specbench.vllm_plugin.step_log import StepLog
from specbench.vllm_plugin.verification import PolicyVerification


class PolicyRunner:
    """Mixin over vLLM's V2 runner (the CPU or the GPU one).

    Adds: a speculator that asks the policy, a verification manager that asks the policy,
    exact per-request draft lengths under synchronous scheduling, and the step log.
    """

    # Attributes of vLLM's runner.
    vllm_config: Any
    speculator: Any
    rejection_sampler: Any
    req_states: Any
    input_buffers: Any
    model_state: Any
    vocab_size: int
    execute_model_state: Any
    adaptive_verification: Any = None

    # Whether vLLM's own set-up of adaptive verification (CUDA graphs) is used.
    uses_stock_adaptive_setup = False

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        self.settings = PluginSettings.from_vllm_config(vllm_config)
        self.step_log = StepLog(DeviceClock(device))
        # The constructor builds its speculator through this name.
        with replaced(stock_runner_module, "init_speculator", self._make_speculator):
            super().__init__(vllm_config, device)  # type: ignore[call-arg]
        self.decisions = StepDecisions(self._limits())
        if self.speculator is not None:
            self.speculator.attach(self.decisions, self.step_log, self.req_states, self.settings)
        self.set_policy(self.settings.policy)

    def _limits(self) -> EngineLimits:
        states, speculator = self.req_states, self.speculator
        return EngineLimits(
            num_slots=states.num_speculative_steps if speculator is not None else 0,
            block_tokens=speculator.block_tokens if speculator is not None else 0,
            max_num_reqs=states.max_num_reqs,
            max_num_tokens=states.max_num_batched_tokens,
            max_logits=get_max_chunk_logits(self.vocab_size),
            device=states.device,
            staleness=self._staleness(),
            why_whole_blocks=speculator.why_not_ragged() if speculator is not None else "",
        )

    def _staleness(self) -> int:
        asynchronous = bool(self.vllm_config.scheduler_config.async_scheduling)
        return 1 if asynchronous else self.settings.budget_staleness

    @staticmethod
    def _make_speculator(vllm_config: Any, device: torch.device, req_states: Any) -> Any:
        method = vllm_config.speculative_config.method
        if method == "dspark":
            return PolicyDSparkSpeculator(vllm_config, device)
        if method in ("ngram", "ngram_gpu"):
            return PolicyNgramSpeculator(vllm_config, device)
        raise UsageError(f"specbench policies run on dspark or ngram drafters, not {method!r}")

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self.decisions.policy

    def set_policy(self, spec: str) -> None:
        """Switch to ``name[:argument]``; no request may be running.

        Raises:
            UsageError: unknown policy, or one this engine cannot serve.
        """
        self.decisions.switch(spec)
        if self.speculator is not None:
            self.speculator.forget_all()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load with the confidence head in use, which vLLM ties to its own flag.

        Without CUDA graphs the flag is lowered again afterwards: vLLM would insist on
        them when it creates its manager, and this runner creates its own.
        """
        lend_flag = not self.uses_stock_adaptive_setup and isinstance(
            self.speculator, PolicyDSparkSpeculator
        )
        if lend_flag:
            self.speculator.enable_adaptive_verification = True
            self.speculator.use_acceptance_estimator = True
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        if lend_flag:
            self.speculator.enable_adaptive_verification = False
        if self.rejection_sampler is not None and self.speculator is not None:
            self.rejection_sampler.enable_adaptive_verification = True

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Create the verification manager once request states and buffers exist."""
        super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc]
        if self.speculator is None or self.uses_stock_adaptive_setup:
            return
        self.adaptive_verification = self.make_verification(
            self.req_states,
            self.input_buffers.query_start_loc,
            self.model_state.num_new_sampled_tokens_per_step,
            self.decisions.limits.max_logits,
        )

    def make_verification(
        self, req_states: Any, query_start_loc: torch.Tensor, num_bonus: int, max_logits: int
    ) -> PolicyVerification:
        """The manager that asks this runner's policy."""
        return PolicyVerification(
            req_states,
            query_start_loc,
            num_bonus,
            max_total_logits=max_logits,
            decisions=self.decisions,
            step_log=self.step_log,
            drafting=self.speculator,
            staleness=self.decisions.limits.staleness,
        )

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Target pass of one step, logged unless it is a dummy run or has no work."""
        if kwargs.get("dummy_run") or not scheduler_output.num_scheduled_tokens:
            # A step without work reports finished requests: what follows is idle time.
            self.step_log.pause()
            return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        scheduled = scheduler_output.num_scheduled_tokens
        finished = set(scheduler_output.finished_req_ids)
        step = self.step_log.begin(list(scheduled), finished)
        output = super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        # Building the inputs is part of it: it grows with the tokens that are verified.
        step.spans["verify"].append((step.start, self.step_log.clock.mark()))
        state = self.execute_model_state
        if state is not None:
            batch = state.input_batch
            prefilling = batch.is_prefilling_np[: batch.num_reqs]
            step.num_prompt_tokens = int(batch.num_scheduled_tokens[prefilling].sum())
            step.context_tokens = float(np.mean(batch.num_computed_tokens_np))
        return output

    def sample(self, hidden_states: torch.Tensor, input_batch: Any, grammar_output: Any) -> Any:
        """Sample and log how many tokens each request kept."""
        with self.step_log.span("verify"):
            output, num_sampled, num_rejected = super().sample(  # type: ignore[misc]
                hidden_states, input_batch, grammar_output
            )
        step = self.step_log.current
        if step is not None:
            step.num_sampled = num_sampled.clone()
            step.num_rejected = num_rejected.clone()
        return output, num_sampled, num_rejected

    def sample_tokens(self, grammar_output: Any) -> Any:
        """One step's sampling and drafting; logs how much was drafted."""
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        step = self.step_log.current
        if step is not None and step.num_sampled is not None and self.speculator is not None:
            num_reqs = step.num_sampled.shape[0]
            chains, policy = self.speculator.chains, self.decisions.policy
            step.draft_lengths = chains.lengths[:num_reqs].clone()
            if policy.drafter is Drafter.MODEL:
                block = self.decisions.limits.block_tokens
                step.shown_survival = chains.survival[:num_reqs, :block].clone()
        return output

    def take_draft_token_ids(self) -> Any:
        """Placeholders for the scheduler, exactly as many as each request has drafts.

        Only synchronous scheduling asks; asynchronous scheduling assumes the full length
        and the verification manager trims it.
        """
        drafts = super().take_draft_token_ids()  # type: ignore[misc]
        if drafts is None or self.speculator is None:
            return drafts
        lengths = self.speculator.chains.lengths[: len(drafts.req_ids)].tolist()
        trimmed = [ids[:n] for ids, n in zip(drafts.draft_token_ids, lengths, strict=True)]
        return type(drafts)(drafts.req_ids, trimmed)
