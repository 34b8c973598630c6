"""What a policy decides, and the registry that finds it.

A policy is a set of pure decisions on tensors. It never imports the engine: the engine,
the simulator and the tests all call the same object.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, NamedTuple

import torch

from specbench.errors import UsageError
from specbench.policies.chain_choice import ChainChoice
from specbench.policies.price import allocate_by_survival
from specbench.registry import Registry


class Drafter(Enum):
    """Which drafter a policy runs; with both, the policy chooses between their chains."""

    NONE = "none"
    NGRAM = "ngram"
    MODEL = "model"
    BOTH = "both"

    @property
    def uses_model(self) -> bool:
        """Whether the model drafter runs."""
        return self in (Drafter.MODEL, Drafter.BOTH)

    @property
    def uses_ngram(self) -> bool:
        """Whether the n-gram lookup runs."""
        return self in (Drafter.NGRAM, Drafter.BOTH)


@dataclass(frozen=True)
class StepCosts:
    """Dense step-cost tables of the engine that runs, in milliseconds.

    Attributes:
        draft_ms: [max_drafted_tokens + 1], cost of drafting that many tokens in a step.
        verify_ms: [max_tokens + 1], cost of a target pass over that many tokens.
    """

    draft_ms: torch.Tensor
    verify_ms: torch.Tensor


@dataclass(frozen=True)
class PreDraftBatch:
    """What is known before the model drafter runs, when the step's drafting is sized (host).

    Attributes:
        survival: [num_reqs, num_steps] float64 predicted, non-increasing along a row.
        capacity: [num_reqs] int, tokens each request can draft; 0 if it did not sample.
        resolution: share of the variance of acceptance, given the prediction, that the
            drafter's confidences explain: what drafting a token shows about it, 0 to 1.
        num_base_tokens: tokens of the next target pass that are not drafts, as far as
            known (one per request; prompts that will join are not).
        num_sampling: requests that will emit a bonus token.
        max_budget: largest number of draft tokens the engine can verify in one step.
    """

    survival: torch.Tensor
    capacity: torch.Tensor
    resolution: float
    num_base_tokens: int
    num_sampling: int
    max_budget: int


class DraftBudget(NamedTuple):
    """How much the model drafts in a step.

    Attributes:
        num_tokens: tokens in all requests; with 0 the drafter does not run.
        gain_ms: time that drafting is expected to save against emitting as many tokens
            without it; infinite if the policy drafts whatever it costs. Weighed against
            what drafting needs done first.
    """

    num_tokens: int
    gain_ms: float = math.inf


@dataclass(frozen=True)
class VerifyBatch:
    """What is known when the verification budget of a step is sized (on the host).

    Attributes:
        survival: [num_reqs, num_steps] float64, non-increasing along a row.
        capacity: [num_reqs] int, drafted tokens each request can verify.
        num_base_tokens: tokens of the step that are not drafts (one per decoding
            request, plus prefill chunks).
        num_sampling: requests that will emit a bonus token.
        num_drafted: tokens the model drafted for this step (what the drafter cost).
        max_budget: largest number of draft tokens the engine can verify in one step.
    """

    survival: torch.Tensor
    capacity: torch.Tensor
    num_base_tokens: int
    num_sampling: int
    num_drafted: int
    max_budget: int


@dataclass(frozen=True)
class DraftBatch:
    """What is known once both drafters have proposed, at the end of a step.

    Tensors are on the engine's device; the counts are what the host knows about the next
    step without waiting for this one.

    Attributes:
        model_survival: [num_reqs, num_model_steps] float, non-increasing along a row, 0
            where the model drafted nothing.
        ngram_survival: [num_reqs, num_ngram_steps] float of the same dtype, calibrated;
            0 beyond the tokens that were found.
        num_sampling: requests that will emit a bonus token; an int or a 0-dim tensor.
        num_base_tokens: tokens of the next target pass that are not drafts, as far as
            known (one per request; prompts that will join are not).
        num_drafted: tokens the model drafts in a step at this batch size.
        max_budget: largest number of draft tokens the engine can verify in one step.
    """

    model_survival: torch.Tensor
    ngram_survival: torch.Tensor
    num_sampling: int | torch.Tensor
    num_base_tokens: int
    num_drafted: int
    max_budget: int


class Policy(ABC):
    """Decides what is drafted and what is verified, every step.

    Subclasses set ``name`` and ``drafter`` and implement :meth:`verify_budget`; those that
    weigh costs set ``needs_costs``, and the engine then brings a cost table. Those with
    ``Drafter.BOTH`` also implement :meth:`choose_chains`. Those that decide how much is
    drafted set ``sizes_drafts`` and implement :meth:`draft_budget`.
    """

    name: ClassVar[str]
    drafter: ClassVar[Drafter]
    needs_costs: bool = False
    # Whether acceptance is expected as calibrated; the engine then brings a calibration.
    needs_calibration: bool = False
    # Whether the model drafts as many tokens as the policy says, for which the engine then
    # predicts survivals; otherwise it drafts whole blocks, unasked.
    sizes_drafts: bool = False
    # Longest n-gram chain to look up; None takes every slot the engine has.
    max_ngram_tokens: int | None = None

    def draft_budget(self, batch: PreDraftBatch, costs: StepCosts | None) -> DraftBudget:
        """Tokens the model drafts in this step, 0 to ``capacity.sum()``.

        The default drafts whole blocks.
        """
        return DraftBudget(int(batch.capacity.sum()))

    def draft_lengths(
        self, survival: torch.Tensor, capacity: torch.Tensor, budget: int
    ) -> torch.Tensor:
        """Share ``budget`` out. [num_reqs] int; runs on the device, without host reads.

        The default drafts the ``budget`` slots of largest predicted survival.
        """
        return allocate_by_survival(survival, capacity, budget)

    @abstractmethod
    def verify_budget(self, batch: VerifyBatch, costs: StepCosts | None) -> int:
        """Number of draft tokens to verify in this step, 0 to ``capacity.sum()``."""

    def verify_lengths(
        self, survival: torch.Tensor, capacity: torch.Tensor, budget: int
    ) -> torch.Tensor:
        """Share ``budget`` out. [num_reqs] int; runs on the device, without host reads.

        The default admits the ``budget`` largest survivals, which is a prefix of every
        request because survival does not increase along one.
        """
        return allocate_by_survival(survival, capacity, budget)

    def choose_chains(self, batch: DraftBatch, costs: StepCosts | None) -> ChainChoice:
        """Choose one chain per request; only asked of policies that run both drafters.

        Runs on the device between two steps, without host reads. ``costs`` lies on the
        device of the batch. The chosen survivals come back as ``VerifyBatch.survival``.
        """
        raise NotImplementedError(f"policy {self.name!r} has no two chains to choose between")

    def required(self, costs: StepCosts | None) -> StepCosts:
        """The costs, for a policy that cannot do without; raises UsageError without any."""
        if costs is None:
            raise UsageError(
                f"policy {self.name!r} needs step costs; run 'specbench costs profile'"
            )
        return costs

    @classmethod
    def from_argument(cls, argument: str | None) -> Policy:
        """Build from the part after the colon in ``name:argument``; None if there is none.

        Raises:
            UsageError: the policy takes no argument, or not this one.
        """
        if argument is not None:
            raise UsageError(f"policy {cls.name!r} takes no argument (got {argument!r})")
        return cls()


POLICIES: Registry[type[Policy]] = Registry("policy")


def make_policy(spec: str) -> Policy:
    """Build a policy from ``name`` or ``name:argument``; raises UsageError if unknown."""
    name, colon, argument = spec.partition(":")
    return POLICIES.get(name).from_argument(argument if colon else None)
