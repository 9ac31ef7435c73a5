"""Conformance suite of eviction policies: what the contract promises, as tests.

An author subclasses :class:`PolicyTests` in a test module that pytest collects, and says how to make one::

    class TestMyPolicy(PolicyTests):
        def make(self, capacity):
            return MyPolicy(capacity)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from random import Random

from ..policy.base import EvictionPolicy

__all__ = ["PolicyTests"]


def _key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def _keys(numbers: Iterable[int]) -> list[bytes]:
    return [_key(number) for number in numbers]


class PolicyTests(ABC):
    """Tests that hold for every eviction policy, whatever its order."""

    @abstractmethod
    def make(self, capacity: int) -> EvictionPolicy:
        """Make an empty policy of that capacity."""

    def filled(self, capacity: int) -> EvictionPolicy:
        """A full policy that has a past: keys 0 to 3 * `capacity` came in, every third was used again."""
        policy = self.make(capacity)
        for number in range(3 * capacity):
            key = _key(number)
            policy.access(key)
            if len(policy) == capacity:
                assert len(policy.victims(1, None, [key])) == 1
            policy.add(key)
            if number % 3 == 0:
                policy.access(key)
        return policy

    def residents(self, policy: EvictionPolicy) -> list[bytes]:
        """All resident keys, coldest first."""
        return policy.coldest(len(policy))

    def test_new_policy_is_empty(self) -> None:
        policy = self.make(4)
        assert policy.capacity == 4
        assert len(policy) == 0
        assert _key(1) not in policy
        assert policy.coldest(3) == []
        assert policy.victims(1) == []

    def test_capacity_of_none_is_refused(self) -> None:
        try:
            self.make(0)
        except ValueError:
            return
        raise AssertionError("a capacity of 0 must be a ValueError")

    def test_added_key_is_resident_once(self) -> None:
        policy = self.make(4)
        policy.add(_key(1))
        policy.add(_key(1))
        assert len(policy) == 1
        assert _key(1) in policy
        assert policy.coldest(4) == [_key(1)]

    def test_access_tells_residency_and_makes_nothing_resident(self) -> None:
        policy = self.make(4)
        assert policy.access(_key(1)) is False
        assert _key(1) not in policy
        policy.add(_key(1))
        assert policy.access(_key(1)) is True

    def test_coldest_lists_each_resident_once_and_changes_nothing(self) -> None:
        policy = self.filled(20)
        order = policy.coldest(20)
        assert len(set(order)) == 20
        assert all(key in policy for key in order)
        assert policy.coldest(7) == order[:7]
        assert policy.coldest(1000) == order
        assert len(policy) == 20

    def test_victims_are_the_coldest_and_leave(self) -> None:
        policy = self.filled(20)
        expected = policy.coldest(6)
        assert policy.victims(6) == expected
        assert len(policy) == 14
        assert not any(key in policy for key in expected)

    def test_single_victims_go_in_the_order_of_coldest(self) -> None:
        policy = self.filled(12)
        expected = policy.coldest(12)
        assert [policy.victims(1)[0] for _ in range(12)] == expected
        assert policy.victims(1) == []

    def test_too_few_victims_means_none_and_no_change(self) -> None:
        for n, stay in ((21, 0), (11, 10), (1, 20)):
            policy = self.filled(20)
            order = self.residents(policy)
            held = set(order[:stay])
            incoming = _keys(range(n))  # evicted long ago: an adaptive policy may remember them
            assert policy.victims(n, lambda key, held=held: key not in held, incoming) == []  # type: ignore[misc]
            assert self.residents(policy) == order

    def test_victims_of_none_changes_nothing(self) -> None:
        policy = self.filled(20)
        order = self.residents(policy)
        assert policy.victims(0, lambda key: True, [_key(1)]) == []
        assert self.residents(policy) == order

    def test_held_keys_stay_and_keep_their_order(self) -> None:
        policy = self.filled(20)
        order = self.residents(policy)
        held = set(order[::2])
        assert len(policy.victims(10, lambda key: key not in held)) == 10
        assert set(self.residents(policy)) == held

    def test_each_key_is_asked_at_most_once_per_call(self) -> None:
        for n in (1, 5, 50, 51):
            policy = self.filled(1000)
            order = self.residents(policy)
            free = set(order[-50:])
            asked: list[bytes] = []

            def evictable(key: bytes, asked: list[bytes] = asked, free: set[bytes] = free) -> bool:
                asked.append(key)
                return key in free

            gone = policy.victims(n, evictable, _keys(range(n)))
            assert len(gone) == (n if n <= 50 else 0)
            assert len(asked) == len(set(asked))

    def test_more_incoming_than_victims_uses_free_room(self) -> None:
        policy = self.filled(20)
        policy.victims(5)
        incoming = _keys(range(100, 108))
        assert len(policy.victims(3, None, incoming)) == 3
        policy.add_many(incoming)
        assert len(policy) == 20

    def test_removed_key_is_gone(self) -> None:
        policy = self.filled(20)
        first, *others = self.residents(policy)
        policy.remove(first)
        policy.remove(_key(12345))
        assert first not in policy
        assert sorted(self.residents(policy)) == sorted(others)

    def test_clear_forgets_everything(self) -> None:
        policy = self.filled(20)
        policy.clear()
        assert len(policy) == 0
        numbers = [Random(7).randrange(60) for _ in range(500)]
        assert self._hits(policy, numbers) == self._hits(self.make(20), numbers)

    def test_batches_do_what_loops_do(self) -> None:
        batch, loop = self.filled(20), self.filled(20)
        used = _keys(range(30, 60))
        batch.access_many(used)
        for key in used:
            loop.access(key)
        assert batch.victims(6) == loop.victims(6)
        batch.add_many(used[:6])
        for key in used[:6]:
            loop.add(key)
        batch.remove_many(used[3:9])
        for key in used[3:9]:
            loop.remove(key)
        assert self.residents(batch) == self.residents(loop)

    def test_priority_may_be_set_for_any_key(self) -> None:
        policy = self.filled(20)
        order = self.residents(policy)
        policy.set_priority(order[0], 100)
        policy.set_priority(_key(12345), 0)
        assert sorted(self.residents(policy)) == sorted(order)
        assert _key(12345) not in policy

    def test_random_walk_against_a_set(self) -> None:
        for seed in range(5):
            self._walk(Random(seed), capacity=8)

    def _hits(self, policy: EvictionPolicy, numbers: list[int]) -> list[bool]:
        """Which references hit, in the protocol of the contract."""
        hits = []
        for key in _keys(numbers):
            hits.append(policy.access(key))
            if not hits[-1]:
                if len(policy) == policy.capacity:
                    policy.victims(1, None, [key])
                policy.add(key)
        return hits

    def _walk(self, random: Random, capacity: int) -> None:
        policy = self.make(capacity)
        resident: set[bytes] = set()
        for _ in range(1500):
            key, action = _key(random.randrange(3 * capacity)), random.randrange(4)
            if action == 0:
                assert policy.access(key) is (key in resident)
            elif action == 1:
                policy.remove(key)
                resident.discard(key)
            else:
                count = random.randint(1, 4)
                incoming = [
                    new for new in _keys(random.sample(range(3 * capacity), count)) if new not in resident
                ]
                held = {key for key in resident if random.random() < 0.4}
                short = len(resident) + len(incoming) - capacity
                if short > 0:
                    gone = policy.victims(short, lambda key, held=held: key not in held, incoming)  # type: ignore[misc]
                    assert bool(gone) is (len(resident - held) >= short)
                    assert len(set(gone)) in (0, short)
                    assert set(gone) <= resident - held
                    resident -= set(gone)
                    if not gone:
                        continue
                policy.add_many(incoming)
                resident |= set(incoming)
            assert len(policy) == len(resident)
            assert set(self.residents(policy)) == resident
