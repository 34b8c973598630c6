"""What a policy decides, and the registry that finds it.

A policy is a set of pure decisions on tensors. It never imports the engine: the engine,
the simulator and the tests all call the same object.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch

from specbench.errors import UsageError
from specbench.policies.price import allocate_by_survival
from specbench.registry import Registry


class Drafter(Enum):
    """Which drafter a policy runs."""

    NONE = "none"
    NGRAM = "ngram"
    MODEL = "model"


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
class VerifyBatch:
    """What is known when the verification budget of a step is sized (on the host).

    Attributes:
        survival: [num_reqs, num_steps] float64, non-increasing along a row.
        capacity: [num_reqs] int, drafted tokens each request can verify.
        num_base_tokens: tokens of the step that are not drafts (one per decoding
            request, plus prefill chunks).
        num_sampling: requests that will emit a bonus token.
        num_drafted: tokens drafted in a step at this batch size (what the drafter costs).
        max_budget: largest number of draft tokens the engine can verify in one step.
    """

    survival: torch.Tensor
    capacity: torch.Tensor
    num_base_tokens: int
    num_sampling: int
    num_drafted: int
    max_budget: int


class Policy(ABC):
    """Decides what is drafted and what is verified, every step.

    Subclasses set ``name`` and ``drafter`` and implement :meth:`verify_budget`; those that
    weigh costs set ``needs_costs``, and the engine then brings a cost table.
    """

    name: ClassVar[str]
    drafter: ClassVar[Drafter]
    needs_costs: bool = False

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
