"""Which policy serves which prompts when: everything that is fixed before an engine starts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specbench.errors import InputError, UsageError
from specbench.records import Conversation, SamplingSpec

# A warm-up touches every batch size up to the concurrency, for which short outputs are
# enough; full outputs would spend measuring time on numbers that are thrown away.
WARMUP_MAX_TOKENS = 32


@dataclass(frozen=True)
class PlannedRound:
    """One policy's share of one round. ``policy`` is a label (see :func:`label_policies`)."""

    policy: str
    round_index: int
    warmup: bool
    conversations: tuple[Conversation, ...]


def label_policies(policies: Sequence[str]) -> tuple[str, ...]:
    """Tell repeated policies apart: the second ``dspark`` becomes ``dspark#2``."""
    seen: Counter[str] = Counter()
    labels = []
    for policy in policies:
        seen[policy] += 1
        labels.append(policy if seen[policy] == 1 else f"{policy}#{seen[policy]}")
    return tuple(labels)


def policy_of_label(label: str) -> str:
    """The policy behind a label, as the engine knows it."""
    return label.partition("#")[0]


def balanced_orders(num_policies: int, num_rounds: int, seed: int) -> list[tuple[int, ...]]:
    """Order of the policies in every round; [num_rounds] permutations of range(num_policies).

    Rows of a Williams design under a seeded relabelling (Williams, 1949, "Experimental
    designs balanced for the estimation of residual effects of treatments"): over
    ``num_policies`` rounds every policy stands once in every place, and over twice as
    many rounds (as many, for an even number) every policy follows every other one equally
    often, so that neither warming up nor what ran before favours one.
    """
    relabel = list(range(num_policies))
    random.Random(seed).shuffle(relabel)
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(num_policies)]
    rows = [
        tuple(relabel[(place + shift) % num_policies] for place in zigzag)
        for shift in range(num_policies)
    ]
    if num_policies % 2:
        rows += [row[::-1] for row in rows]
    return [rows[r % len(rows)] for r in range(num_rounds)]


def split_rounds(
    conversations: Sequence[Conversation], num_rounds: int
) -> list[tuple[Conversation, ...]]:
    """Deal the prompts out to the rounds like cards; sizes differ by one at most.

    Every round has prompts of its own, so the spread over rounds shows what other prompts
    of the same kind would have changed. Dealing keeps the order's mix of categories.

    Raises:
        UsageError: fewer prompts than rounds.
    """
    if len(conversations) < num_rounds:
        raise UsageError(
            f"{len(conversations)} prompts cannot be split over {num_rounds} rounds; "
            f"use --rounds {max(len(conversations), 1)} or more prompts"
        )
    return [tuple(conversations[start::num_rounds]) for start in range(num_rounds)]


def plan_rounds(
    labels: Sequence[str],
    conversations: Sequence[Conversation],
    *,
    num_rounds: int,
    warmup_prompts: int,
    seed: int,
) -> list[PlannedRound]:
    """Warm-ups of all policies, then ``num_rounds`` rounds with all policies in each.

    Raises:
        UsageError: fewer prompts than rounds.
        InputError: two prompts share an id.
    """
    counts = Counter(item.item_id for item in conversations)
    repeated = [item_id for item_id, count in counts.items() if count > 1]
    if repeated:
        raise InputError(f"the workload has more than one item with id {repeated[0]!r}")
    slices = split_rounds(conversations, num_rounds)
    warmup = tuple(limit_outputs(conversations[:warmup_prompts], WARMUP_MAX_TOKENS))
    plan = [PlannedRound(label, 0, True, warmup) for label in labels if warmup]
    for index, order in enumerate(balanced_orders(len(labels), num_rounds, seed)):
        plan += [PlannedRound(labels[which], index, False, slices[index]) for which in order]
    return plan


def limit_outputs(conversations: Sequence[Conversation], cap: int) -> list[Conversation]:
    """Cap what every item may generate at ``cap`` tokens, whatever the item asks for."""
    return [
        item if item.max_tokens is None else replace(item, max_tokens=min(item.max_tokens, cap))
        for item in conversations
    ]


def warmup_sampling(sampling: SamplingSpec) -> SamplingSpec:
    """The run's sampling with outputs short enough for a warm-up."""
    return replace(sampling, max_tokens=min(sampling.max_tokens, WARMUP_MAX_TOKENS))


def seed_offsets(conversations: Sequence[Conversation]) -> dict[str, int]:
    """item id -> offset of its first request's seed; turn k adds k.

    Offsets count the turns of all earlier items of the workload, so they do not depend on
    the policy, the round or the order in which requests finish.
    """
    offsets: dict[str, int] = {}
    next_offset = 0
    for item in conversations:
        offsets[item.item_id] = next_offset
        next_offset += num_turns(item)
    return offsets


def num_turns(conversation: Conversation) -> int:
    """Requests that a conversation needs."""
    return 1 if conversation.text is not None else len(conversation.turns)
