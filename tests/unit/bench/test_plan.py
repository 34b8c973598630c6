from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.bench.plan import (
    WARMUP_MAX_TOKENS,
    balanced_orders,
    label_policies,
    limit_outputs,
    plan_rounds,
    policy_of_label,
    seed_offsets,
    split_rounds,
    warmup_sampling,
)
from specbench.errors import InputError, UsageError
from specbench.records import Conversation, SamplingSpec


def items(count: int) -> list[Conversation]:
    return [Conversation(f"p{i}", turns=("x",)) for i in range(count)]


def test_repeated_policies_get_labels_of_their_own() -> None:
    labels = label_policies(["dspark", "dspark", "dspark:3", "ar", "dspark"])
    assert labels == ("dspark", "dspark#2", "dspark:3", "ar", "dspark#3")
    assert [policy_of_label(label) for label in labels] == [
        "dspark", "dspark", "dspark:3", "ar", "dspark",
    ]  # fmt: skip


@given(st.integers(1, 7), st.integers(0, 100))
def test_every_policy_stands_in_every_place_equally_often(num_policies: int, seed: int) -> None:
    orders = balanced_orders(num_policies, 2 * num_policies, seed)
    for order in orders:
        assert sorted(order) == list(range(num_policies))
    for place in range(num_policies):
        counts = Counter(order[place] for order in orders)
        assert set(counts.values()) == {2}
        half = Counter(order[place] for order in orders[:num_policies])
        assert set(half.values()) == {1}


@given(st.integers(2, 7), st.integers(0, 100))
def test_every_policy_follows_every_other_equally_often(num_policies: int, seed: int) -> None:
    orders = balanced_orders(num_policies, 2 * num_policies, seed)
    follows = Counter(pair for order in orders for pair in pairwise(order))
    assert len(follows) == num_policies * (num_policies - 1)
    assert set(follows.values()) == {2}


def test_two_policies_alternate_and_the_seed_decides_who_starts() -> None:
    assert balanced_orders(2, 4, seed=0) in ([(0, 1), (1, 0)] * 2, [(1, 0), (0, 1)] * 2)
    assert len({balanced_orders(2, 1, seed)[0] for seed in range(20)}) == 2


@given(st.integers(1, 9), st.integers(0, 40))
def test_slices_are_disjoint_complete_and_even(num_rounds: int, extra: int) -> None:
    conversations = items(num_rounds + extra)
    slices = split_rounds(conversations, num_rounds)
    assert sorted(i.item_id for part in slices for i in part) == sorted(
        i.item_id for i in conversations
    )
    assert max(map(len, slices)) - min(map(len, slices)) <= 1


def test_fewer_prompts_than_rounds_are_refused() -> None:
    with pytest.raises(UsageError, match="3 prompts cannot be split over 5 rounds; use --rounds 3"):
        split_rounds(items(3), 5)


def test_plan_gives_all_policies_of_a_round_the_same_prompts() -> None:
    plan = plan_rounds(["a", "b", "c"], items(10), num_rounds=3, warmup_prompts=2, seed=0)
    warmups, measured = plan[:3], plan[3:]
    assert [p.policy for p in warmups] == ["a", "b", "c"]
    assert all(p.warmup and len(p.conversations) == 2 for p in warmups)
    assert not any(p.warmup for p in measured)
    assert [p.round_index for p in measured] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for index in range(3):
        shares = [p for p in measured if p.round_index == index]
        assert {p.policy for p in shares} == {"a", "b", "c"}
        assert len({p.conversations for p in shares}) == 1
    assert len({p.conversations for p in measured}) == 3


def test_warmup_outputs_are_short_but_never_longer_than_asked_for() -> None:
    wishes = [replace(item, max_tokens=n) for item, n in zip(items(3), (8, 500, None), strict=True)]
    warmup = plan_rounds(["a"], wishes, num_rounds=1, warmup_prompts=3, seed=0)[0]
    assert [c.max_tokens for c in warmup.conversations] == [8, WARMUP_MAX_TOKENS, None]
    assert warmup_sampling(SamplingSpec(max_tokens=500)).max_tokens == WARMUP_MAX_TOKENS
    assert warmup_sampling(SamplingSpec(max_tokens=5)).max_tokens == 5


def test_no_warmup_if_none_is_wanted() -> None:
    plan = plan_rounds(["a"], items(2), num_rounds=1, warmup_prompts=0, seed=0)
    assert [p.warmup for p in plan] == [False]


def test_repeated_item_ids_are_refused() -> None:
    with pytest.raises(InputError, match="more than one item with id 'p0'"):
        plan_rounds(["a"], items(2) + items(1), num_rounds=1, warmup_prompts=0, seed=0)


def test_seed_offsets_count_turns() -> None:
    conversations = [
        Conversation("a", turns=("x", "y", "z")),
        Conversation("b", text="raw"),
        Conversation("c", turns=("x",)),
    ]
    assert seed_offsets(conversations) == {"a": 0, "b": 3, "c": 4}


def test_output_cap_leaves_smaller_wishes_alone() -> None:
    capped = limit_outputs(
        [
            Conversation("a", turns=("x",), max_tokens=10),
            Conversation("b", turns=("x",), max_tokens=500),
            Conversation("c", turns=("x",)),
        ],
        100,
    )
    assert [item.max_tokens for item in capped] == [10, 100, None]
