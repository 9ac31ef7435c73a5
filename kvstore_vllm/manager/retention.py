"""How long chunks stay in host memory: the priority that their request gave them, and when that ends.

Only ``policy=priority`` heeds priorities: what has the lowest goes first. A request may say for how long it
holds (``ttl``); once that is over its chunks go before all others. What tiers have got of them stays there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from kvstore import Store

__all__ = ["Retention"]

#: Priority of what need not be kept any longer.
_OVER = 0


class Retention:
    """Gives chunks their priorities.

    Parameters
    ----------
    store : Store
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ends: dict[bytes, float] = {}  # the most recent last
        self._due: list[tuple[float, tuple[bytes, ...]]] = []  # a heap
        self._keys_due = 0  # in it, also those that no longer are, or that another end holds for

    def stored(self, keys: Sequence[bytes], priority: int | None, ttl: float | None) -> None:
        """A request stores `keys`, which were not in host memory: what it wishes is what holds.

        Parameters
        ----------
        keys : sequence of bytes
        priority : int or None
            None for that of chunks of which nothing is said.
        ttl : float or None
            Seconds for which it holds; None for as long as they are in host memory.
        """
        if priority is not None:
            self._store.set_priority(keys, priority)
        if self._ends:
            for key in keys:
                self._ends.pop(key, None)
        if ttl is not None:
            end = self._store.clock() + ttl
            self._ends.update(dict.fromkeys(keys, end))
            heappush(self._due, (end, tuple(keys)))
            self._keys_due += len(keys)
            slots = self._store.arena.slots
            if len(self._ends) > 3 * slots or self._keys_due > 6 * slots:
                self._forget_evicted()

    def sweep(self) -> None:
        """Let those go first whose time is over."""
        now = self._store.clock()
        over: list[bytes] = []
        while self._due and self._due[0][0] <= now:
            end, keys = heappop(self._due)
            self._keys_due -= len(keys)
            mine = [key for key in keys if self._ends.get(key) == end]
            for key in mine:
                del self._ends[key]
            over += mine
        here = [key for key in over if key in self._store.resident]
        if here:
            self._store.set_priority(here, _OVER)

    def _forget_evicted(self) -> None:
        """Remember no more than the host can hold; the most recent are about to be there."""
        recent = len(self._ends) - self._store.arena.slots
        self._ends = {
            key: end
            for place, (key, end) in enumerate(self._ends.items())
            if place >= recent or key in self._store.resident
        }
        by_end: defaultdict[float, list[bytes]] = defaultdict(list)
        for key, end in self._ends.items():
            by_end[end].append(key)
        self._due = [(end, tuple(keys)) for end, keys in by_end.items()]
        heapify(self._due)
        self._keys_due = len(self._ends)
