"""Retention priority first, recency within it."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import Final

from .base import EvictionPolicy

__all__ = ["DEFAULT_PRIORITY", "PriorityPolicy"]

DEFAULT_PRIORITY: Final = 35
_HIGHEST: Final = 100


class PriorityPolicy(EvictionPolicy):
    """Evict the lowest retention priority first, and within it the key whose last reference is longest ago.

    A key without a priority has 35. A priority given to a key that is not resident waits for its `add` (as
    many wait as the capacity, then the oldest is dropped), and is forgotten when the key is evicted or
    removed. A resident key whose priority changes counts as just referenced.

    Parameters
    ----------
    capacity : int
        Number of chunks that can be resident, at least 1.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._levels: dict[int, OrderedDict[bytes, None]] = {}  # only used ones; each coldest first
        self._order: list[int] = []  # the used levels, ascending
        self._priorities: dict[bytes, int] = {}  # of residents, where it is not the default
        self._waiting: OrderedDict[bytes, int] = OrderedDict()  # of keys that are not resident

    def access(self, key: bytes) -> bool:
        """Make `key` the most recent of its priority if it is resident; return whether it is."""
        level = self._level_of(key)
        if level is None or key not in level:
            return False
        level.move_to_end(key)
        return True

    def add(self, key: bytes) -> None:
        """Make `key` resident, with the priority that waits for it."""
        if not self.access(key):
            self._insert(key, self._waiting.pop(key, DEFAULT_PRIORITY))

    def remove(self, key: bytes) -> None:
        """Forget a resident key and its priority."""
        level = self._level_of(key)
        if level is not None and key in level:
            del level[key]
            priority = self._priorities.pop(key, DEFAULT_PRIORITY)
            if not level:
                del self._levels[priority]
                self._order.remove(priority)

    def victims(
        self,
        n: int,
        evictable: Callable[[bytes], bool] | None = None,
        incoming: Sequence[bytes] = (),
    ) -> list[bytes]:
        """Evict the `n` lowest keys that may go, or none; `incoming` makes no difference."""
        keys = self._ascending()
        found = list(islice(keys if evictable is None else filter(evictable, keys), n))
        if len(found) < n:
            return []
        self.remove_many(found)
        return found

    def coldest(self, n: int) -> list[bytes]:
        """Up to `n` keys, lowest priority first, least recent first within it."""
        return list(islice(self._ascending(), n))

    def clear(self) -> None:
        """Forget every key and every priority."""
        self._levels.clear()
        self._order.clear()
        self._priorities.clear()
        self._waiting.clear()

    def set_priority(self, key: bytes, priority: int) -> None:
        """Give `key` a retention priority.

        Parameters
        ----------
        key : bytes
            Resident, or about to be.
        priority : int
            From 0 (goes first) to 100.

        Raises
        ------
        ValueError
            The priority is out of range.
        """
        if not 0 <= priority <= _HIGHEST:
            raise ValueError(f"priority must be from 0 to {_HIGHEST}, not {priority}")
        if key not in self:
            self._waiting[key] = priority
            self._waiting.move_to_end(key)
            if len(self._waiting) > self.capacity:
                self._waiting.popitem(last=False)
        elif priority != self._priorities.get(key, DEFAULT_PRIORITY):
            self.remove(key)
            self._insert(key, priority)

    def __len__(self) -> int:
        return sum(map(len, self._levels.values()))

    def __contains__(self, key: object) -> bool:
        return any(key in level for level in self._levels.values())

    def _level_of(self, key: bytes) -> OrderedDict[bytes, None] | None:
        """The only level in which `key` can be resident."""
        return self._levels.get(self._priorities.get(key, DEFAULT_PRIORITY))

    def _insert(self, key: bytes, priority: int) -> None:
        if priority not in self._levels:
            self._levels[priority] = OrderedDict()
            insort(self._order, priority)
        self._levels[priority][key] = None
        if priority != DEFAULT_PRIORITY:
            self._priorities[key] = priority

    def _ascending(self) -> Iterable[bytes]:
        """All residents, in the order in which they would go."""
        return chain.from_iterable(self._levels[priority] for priority in self._order)
