"""The policy in force, what it was given, and what it decides at each point of an engine step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from specbench.costs import CostTable
from specbench.errors import UsageError
from specbench.estimators.acceptance_tracker import AcceptanceTracker
from specbench.estimators.engine_payload import EngineCalibration
from specbench.policies import (
    ChainChoice,
    DraftBatch,
    DraftBudget,
    Drafter,
    Policy,
    PreDraftBatch,
    VerifyBatch,
    make_policy,
)
from specbench.vllm_plugin.host_rows import HostRows
from specbench.vllm_plugin.installed import InstalledCalibration, InstalledCosts


@dataclass(frozen=True)
class EngineLimits:
    """What bounds every decision in one engine.

    Attributes:
        num_slots: draft tokens of a request that the engine has room for; 0 without a drafter.
        block_tokens: tokens that the model drafter drafts for a request; 0 without one.
        max_num_reqs: requests in a step.
        max_num_tokens: tokens of a target pass.
        max_logits: rows of logits that one step can sample from.
        device: where requests and chains live.
        staleness: 1 where host decisions see what the step before last left, 0 where they
            see what the last one left.
        why_whole_blocks: what keeps the model drafter from drafting fewer tokens than whole
            blocks; empty if nothing does.
    """

    num_slots: int
    block_tokens: int
    max_num_reqs: int
    max_num_tokens: int
    max_logits: int
    device: torch.device
    staleness: int = 0
    why_whole_blocks: str = ""


class DraftPlan(NamedTuple):
    """What the model drafts in a step.

    Attributes:
        budget: tokens in all.
        lengths: [num_reqs] int32 on the device, their distribution.
        survival: [num_reqs, block] float32 on the device, as predicted.
    """

    budget: int
    lengths: torch.Tensor
    survival: torch.Tensor


class StepDecisions:
    """Shared by runner, speculator and verification manager; holds what decisions depend on.

    A step asks, in this order: :meth:`verify_budget` (host), :meth:`verify_lengths` (device);
    then, if the policy sizes drafts, tells the verdicts to :meth:`observe` and asks
    :meth:`plan_drafts`; with two drafters it asks :meth:`choose_chains` (device) at the end.

    Attributes:
        policy: in force; change it with :meth:`switch`.
        calibration: None until one is installed.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.policy: Policy = make_policy("ar")
        self.calibration: InstalledCalibration | None = None
        self._costs: InstalledCosts | None = None
        self._recent: AcceptanceTracker | None = None
        self._predicted: HostRows | None = None
        # [max_num_reqs, block] expected of each slot's next block; zeros without a calibration.
        self._survival = self._no_survival()
        self._num_planned = 0
        self._held_up_ms = 0.0

    def set_costs(self, table: CostTable) -> None:
        """Weigh costs by this table from the next step on."""
        limits = self.limits
        max_drafted = limits.max_num_reqs * limits.block_tokens
        self._costs = InstalledCosts(table, limits.max_num_tokens, max_drafted, limits.device)

    def set_calibration(self, calibration: EngineCalibration) -> None:
        """Price chains by this calibration from the next step on.

        Raises:
            UsageError: it does not cover the drafter's block.
        """
        limits = self.limits
        self.calibration = InstalledCalibration.install(
            calibration, limits.block_tokens, limits.device
        )
        prior = calibration.acceptance
        if prior is None or not limits.block_tokens:
            self._recent = self._predicted = None
            self._survival = self._no_survival()
            return
        num_reqs = limits.max_num_reqs
        self._recent = AcceptanceTracker(prior, limits.block_tokens, num_reqs, limits.device)
        expected = torch.tensor(prior.conditional[: limits.block_tokens]).cumprod(dim=0)
        self._predicted = HostRows(expected, num_reqs, limits.device, limits.staleness)
        self._survival = self._recent.survival()

    def _no_survival(self) -> torch.Tensor:
        limits = self.limits
        return torch.zeros(limits.max_num_reqs, limits.block_tokens, device=limits.device)

    def switch(self, spec: str) -> None:
        """Put ``name[:argument]`` in force; no request may be running.

        Raises:
            UsageError: unknown policy, or one that lacks something in this engine.
        """
        policy = make_policy(spec)
        if not self.limits.num_slots and policy.drafter is not Drafter.NONE:
            raise UsageError(
                f"policy {spec!r} drafts, but the engine was started without a drafter"
            )
        if not self.limits.block_tokens and policy.drafter.uses_model:
            raise UsageError(f"policy {spec!r} needs a model drafter; give one with --drafter")
        if policy.sizes_drafts:
            self._check_sizing(spec, policy)
        prices_copies = policy.needs_calibration or policy.drafter is Drafter.BOTH
        if prices_copies and self.calibration is None:
            raise UsageError(
                f"policy {spec!r} needs a calibration of n-gram acceptance, which is installed "
                "after the engine has started; 'specbench calibrate' makes one"
            )
        if policy.needs_costs and self._costs is None:
            raise UsageError(f"policy {spec!r} needs step costs; run 'specbench costs profile'")
        self.policy = policy

    def _check_sizing(self, spec: str, policy: Policy) -> None:
        if self.limits.why_whole_blocks:
            raise UsageError(
                f"policy {spec!r} drafts less than whole blocks, which this drafter cannot: "
                f"{self.limits.why_whole_blocks}"
            )
        if policy.needs_calibration and self._recent is None:
            raise UsageError(
                f"policy {spec!r} needs a calibration of this drafter's acceptance, which is "
                "installed after the engine has started; 'specbench calibrate' makes one"
            )

    @property
    def longest_chain(self) -> int:
        """Slots that the policy's drafters can fill; a request may have been given more."""
        limits, policy = self.limits, self.policy
        copied = min(policy.max_ngram_tokens or limits.num_slots, limits.num_slots)
        return max(
            limits.block_tokens if policy.drafter.uses_model else 0,
            copied if policy.drafter.uses_ngram else 0,
        )

    def max_budget(self, num_reqs: int) -> int:
        """Draft tokens that one step can verify beside a bonus token of every request."""
        return max(0, self.limits.max_logits - num_reqs)

    def verify_budget(
        self,
        survival: torch.Tensor,
        capacity: torch.Tensor,
        *,
        num_base_tokens: int,
        num_sampling: int,
        context_tokens: float,
    ) -> int:
        """Draft tokens to verify in this step; arguments as in :class:`VerifyBatch`."""
        num_reqs = capacity.shape[0]
        batch = VerifyBatch(
            survival=survival,
            capacity=capacity,
            num_base_tokens=num_base_tokens,
            num_sampling=num_sampling,
            num_drafted=self._num_drafted(num_reqs),
            max_budget=self._max_verified(num_reqs),
        )
        costs = self._costs.on_host(context_tokens) if self._costs else None
        return self.policy.verify_budget(batch, costs if self.policy.needs_costs else None)

    def verify_lengths(
        self, survival: torch.Tensor, capacity: torch.Tensor, budget: int
    ) -> torch.Tensor:
        """[num_reqs] how many of them each request gets."""
        return self.policy.verify_lengths(survival, capacity, budget)

    def forget(self, slot: int) -> None:
        """A new request in this slot: nothing of the last one's past counts for it."""
        if self._recent is not None and self._predicted is not None:
            self._recent.forget(slot)
            self._predicted.forget(slot)

    def observe(
        self, slots: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        """Verdicts on the model's own drafts; arguments as in :class:`AcceptanceTracker`."""
        if self._recent is None or self._predicted is None:
            return
        self._recent.observe(slots, num_sampled, num_rejected)
        self._survival = self._recent.survival()
        self._predicted.publish(self._survival)

    def predicted_on_host(self, slots: np.ndarray) -> torch.Tensor:
        """[num_reqs, block] float64 survivals expected of blocks, as the host knows them.

        Zeros without a calibration; a policy that does without does not look at them.
        """
        if self._predicted is None:
            return torch.zeros(len(slots), self.limits.block_tokens, dtype=torch.float64)
        return torch.from_numpy(self._predicted.read(slots))

    def plan_drafts(
        self,
        slots: np.ndarray,
        slots_on_device: torch.Tensor,
        samples: np.ndarray,
        *,
        context_tokens: float,
        backlog_ms: float,
    ) -> DraftPlan:
        """What the model drafts at the end of this step; asked of policies that size drafts.

        Args:
            slots, slots_on_device: [num_reqs] request slots.
            samples: [num_reqs] bool, requests that emit in this step and so can draft.
            context_tokens: mean context of the batch.
            backlog_ms: cost of the contexts that must be stored before anything is drafted.
        """
        num_reqs, block = len(slots), self.limits.block_tokens
        capacity = torch.from_numpy(samples.astype(np.int32) * block)
        batch = PreDraftBatch(
            survival=self.predicted_on_host(slots),
            capacity=capacity,
            resolution=0.0 if self._recent is None else self._recent.resolution,
            num_base_tokens=num_reqs,
            num_sampling=int(samples.sum()),
            max_budget=self.max_budget(num_reqs),
        )
        costs = self._costs.on_host(context_tokens) if self._costs else None
        wanted = self.policy.draft_budget(batch, costs if self.policy.needs_costs else None)
        budget = wanted.num_tokens if self._is_worth_it(wanted, backlog_ms) else 0
        self._num_planned = budget
        survival = self._survival[slots_on_device.long()]
        capacity = capacity.to(self.limits.device, non_blocking=True)
        if budget == 0:
            return DraftPlan(0, torch.zeros_like(capacity), survival)
        return DraftPlan(budget, self.policy.draft_lengths(survival, capacity, budget), survival)

    def _is_worth_it(self, wanted: DraftBudget, backlog_ms: float) -> bool:
        """Whether to store the backlog of contexts, which the wanted drafts need.

        How long drafting will pay is not known. Once the drafts that a backlog held up would
        have saved what storing it costs, it is stored: that loses at most as much again
        against knowing (the ski-rental problem's deterministic rule).
        """
        if wanted.num_tokens == 0:
            return False
        self._held_up_ms += wanted.gain_ms
        if self._held_up_ms < backlog_ms:
            return False
        self._held_up_ms = 0.0
        return True

    def choose_chains(
        self,
        model_survival: torch.Tensor,
        ngram_survival: torch.Tensor,
        *,
        num_sampling: torch.Tensor,
        context_tokens: float,
    ) -> ChainChoice:
        """Which chain each request verifies; arguments as in :class:`DraftBatch`."""
        num_reqs = model_survival.shape[0]
        batch = DraftBatch(
            model_survival=model_survival,
            ngram_survival=ngram_survival,
            num_sampling=num_sampling,
            num_base_tokens=num_reqs,
            num_drafted=self._num_drafted(num_reqs),
            max_budget=self.max_budget(num_reqs),
        )
        costs = self._costs.on_device(context_tokens) if self._costs else None
        return self.policy.choose_chains(batch, costs)

    def _max_verified(self, num_reqs: int) -> int:
        limit = self.max_budget(num_reqs)
        # Under asynchronous scheduling every request seems to have drafted a whole block.
        return min(limit, self._num_planned) if self.policy.sizes_drafts else limit

    def _num_drafted(self, num_reqs: int) -> int:
        if self.policy.sizes_drafts:
            return self._num_planned
        return num_reqs * self.limits.block_tokens if self.policy.drafter.uses_model else 0
