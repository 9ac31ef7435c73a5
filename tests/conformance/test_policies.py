"""The shipped conformance suite on every shipped policy."""

from __future__ import annotations

from kvstore.policy import POLICIES, ARCPolicy, EvictionPolicy, LRUPolicy, PriorityPolicy, make_policy
from kvstore.testing.policy import PolicyTests


class TestLRU(PolicyTests):
    def make(self, capacity: int) -> EvictionPolicy:
        return LRUPolicy(capacity)


class TestARC(PolicyTests):
    def make(self, capacity: int) -> EvictionPolicy:
        return ARCPolicy(capacity)


class TestPriority(PolicyTests):
    def make(self, capacity: int) -> EvictionPolicy:
        return PriorityPolicy(capacity)


class TestMixedPriorities(PolicyTests):
    """Keys that differ in priority: the low bits of a key say which."""

    def make(self, capacity: int) -> EvictionPolicy:
        class Mixed(PriorityPolicy):
            def add(self, key: bytes) -> None:
                self.set_priority(key, key[-1] % 5 * 20)
                super().add(key)

        return Mixed(capacity)


def test_every_named_policy_has_passed_here() -> None:
    tested = {type(suite().make(1)) for suite in (TestLRU, TestARC, TestPriority)}
    assert {type(make_policy(name, 1)) for name in POLICIES} == tested
