"""Least recently used: one order, renewed by every reference."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from .base import EvictionPolicy

__all__ = ["LRUPolicy"]


class LRUPolicy(EvictionPolicy):
    """Evict the key whose last reference is longest ago.

    Parameters
    ----------
    capacity : int
        Number of chunks that can be resident, at least 1.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._keys: OrderedDict[bytes, None] = OrderedDict()  # coldest first

    def access(self, key: bytes) -> bool:
        """Make `key` the most recent if it is resident; return whether it is."""
        keys = self._keys
        if key in keys:
            keys.move_to_end(key)
            return True
        return False

    def add(self, key: bytes) -> None:
        """Make `key` resident and the most recent."""
        keys = self._keys
        if key in keys:
            keys.move_to_end(key)
        else:
            keys[key] = None

    def remove(self, key: bytes) -> None:
        """Forget `key`."""
        self._keys.pop(key, None)

    def access_many(self, keys: Iterable[bytes]) -> None:
        """Make the resident ones of `keys` the most recent, in order."""
        own = self._keys
        for key in keys:
            if key in own:
                own.move_to_end(key)

    def add_many(self, keys: Iterable[bytes]) -> None:
        """Make `keys` resident and the most recent, in order."""
        own = self._keys
        for key in keys:
            if key in own:
                own.move_to_end(key)
            else:
                own[key] = None

    def victims(
        self,
        n: int,
        evictable: Callable[[bytes], bool] | None = None,
        incoming: Sequence[bytes] = (),
    ) -> list[bytes]:
        """Evict the `n` least recent keys that may go, or none; `incoming` makes no difference."""
        keys = self._keys
        if n == 1 and evictable is None:
            return [keys.popitem(last=False)[0]] if keys else []
        found = list(islice(keys if evictable is None else filter(evictable, keys), n))
        if len(found) < n:
            return []
        for key in found:
            del keys[key]
        return found

    def coldest(self, n: int) -> list[bytes]:
        """Up to `n` keys, least recent first."""
        return list(islice(self._keys, n))

    def clear(self) -> None:
        """Forget every key."""
        self._keys.clear()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys
