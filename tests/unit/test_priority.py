"""Retention priority: lowest first, recency within it, nothing remembered of evicted keys."""

from __future__ import annotations

import pytest

from kvstore.policy import DEFAULT_PRIORITY, PriorityPolicy

A, B, C, D = (bytes([letter]) * 16 for letter in b"abcd")


def make(*keys: bytes, capacity: int = 4) -> PriorityPolicy:
    policy = PriorityPolicy(capacity)
    policy.add_many(keys)
    return policy


def test_lowest_priority_goes_first_and_recency_decides_within_it() -> None:
    policy = PriorityPolicy(4)
    for key, priority in ((A, 90), (B, 10), (C, 90), (D, 10)):
        policy.set_priority(key, priority)
        policy.add(key)
    policy.access(A)
    policy.access(B)
    assert policy.coldest(4) == [D, B, C, A]
    assert policy.victims(3) == [D, B, C]


def test_default_priority_is_35() -> None:
    assert DEFAULT_PRIORITY == 35
    policy = make(A, B, C)
    policy.set_priority(A, 36)
    policy.set_priority(C, 34)
    assert policy.coldest(3) == [C, B, A]


def test_priority_may_change_after_add_and_counts_as_a_reference() -> None:
    policy = make(A, B, C)
    policy.set_priority(B, 50)
    policy.set_priority(A, 50)
    assert policy.coldest(3) == [C, B, A]
    policy.set_priority(A, DEFAULT_PRIORITY)
    assert policy.coldest(3) == [C, A, B]


def test_same_priority_again_changes_nothing() -> None:
    policy = make(A, B)
    policy.set_priority(A, DEFAULT_PRIORITY)
    assert policy.coldest(2) == [A, B]


@pytest.mark.parametrize("forget", ["evict", "remove", "clear"])
def test_priority_is_forgotten_with_the_key(forget: str) -> None:
    policy = make(A)
    policy.set_priority(A, 0)
    {"evict": lambda: policy.victims(1), "remove": lambda: policy.remove(A), "clear": policy.clear}[forget]()
    policy.add_many([B, A])
    assert policy.coldest(2) == [B, A]


def test_priorities_that_wait_for_an_add_are_bounded() -> None:
    policy = PriorityPolicy(2)
    for key in (A, B, C):
        policy.set_priority(key, 0)
    policy.add_many([D, A])
    assert policy.coldest(2) == [D, A], "the oldest of three was dropped"
    policy.victims(2)
    policy.add_many([D, C])
    assert policy.coldest(2) == [C, D]


def test_held_keys_of_a_low_priority_make_a_higher_one_go() -> None:
    policy = make(A, B)
    policy.set_priority(A, 0)
    assert policy.victims(1, lambda key: key != A) == [B]


@pytest.mark.parametrize("priority", [-1, 101])
def test_priority_out_of_range(priority: int) -> None:
    with pytest.raises(ValueError, match="from 0 to 100"):
        PriorityPolicy(4).set_priority(A, priority)


def test_all_101_levels_in_order() -> None:
    policy = PriorityPolicy(101)
    for priority in reversed(range(101)):
        policy.set_priority(bytes([priority]), priority)
        policy.add(bytes([priority]))
    assert len(policy) == 101
    assert policy.victims(101) == [bytes([priority]) for priority in range(101)]
    assert len(policy) == 0
