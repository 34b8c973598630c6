"""The policy in force, what it was given, and what it decides at each point of an engine step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specbench.costs import CostTable
from specbench.errors import UsageError
from specbench.estimators.engine_payload import EngineCalibration
from specbench.policies import (
    ChainChoice,
    DraftBatch,
    Drafter,
    Policy,
    VerifyBatch,
    make_policy,
)
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
    """

    num_slots: int
    block_tokens: int
    max_num_reqs: int
    max_num_tokens: int
    max_logits: int
    device: torch.device


class StepDecisions:
    """Shared by runner, speculator and verification manager; holds what decisions depend on.

    A step asks, in this order: :meth:`verify_budget` (host), :meth:`verify_lengths` (device),
    then, with two drafters, :meth:`choose_chains` (device).

    Attributes:
        policy: in force; change it with :meth:`switch`.
        calibration: None until one is installed.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.policy: Policy = make_policy("ar")
        self.calibration: InstalledCalibration | None = None
        self._costs: InstalledCosts | None = None

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
            raise UsageError(f"policy {spec!r} sizes drafts, which this engine cannot do yet")
        prices_copies = policy.needs_calibration or policy.drafter is Drafter.BOTH
        if prices_copies and self.calibration is None:
            raise UsageError(
                f"policy {spec!r} needs a calibration of n-gram acceptance, which is installed "
                "after the engine has started; 'specbench calibrate' makes one"
            )
        if policy.needs_costs and self._costs is None:
            raise UsageError(f"policy {spec!r} needs step costs; run 'specbench costs profile'")
        self.policy = policy

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
            max_budget=self.max_budget(num_reqs),
        )
        costs = self._costs.on_host(context_tokens) if self._costs else None
        return self.policy.verify_budget(batch, costs if self.policy.needs_costs else None)

    def verify_lengths(
        self, survival: torch.Tensor, capacity: torch.Tensor, budget: int
    ) -> torch.Tensor:
        """[num_reqs] how many of them each request gets."""
        return self.policy.verify_lengths(survival, capacity, budget)

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

    def _num_drafted(self, num_reqs: int) -> int:
        return num_reqs * self.limits.block_tokens if self.policy.drafter.uses_model else 0
