"""The contract of an eviction policy.

A policy orders the keys of the host tier. It sees keys only: no slot, no size, no clock, no I/O. All
chunks have the same size, so its capacity is a number of chunks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence

__all__ = ["EvictionPolicy"]


class EvictionPolicy(ABC):
    """Order of eviction over resident keys, with whatever memory of past ones the policy keeps.

    Protocol of the caller, for each reference to a key:

    1. ``access(key)``: True when the key is resident (it is now recently used), False when not; an adaptive
    policy
       learns from a missed key here.
    2. On a miss that is to be filled with the host tier full: ``victims(n, evictable, incoming)`` chooses
    and evicts. 3. ``add(key)`` when the chunk is resident.

    ``add`` without a preceding ``access`` is legal and must teach an adaptive policy the same.

    Parameters
    ----------
    capacity : int
        Number of chunks that can be resident, at least 1.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 chunk, not {capacity}")
        self.capacity = capacity

    @abstractmethod
    def access(self, key: bytes) -> bool:
        """Record a reference to `key`, resident or not; return whether it is resident."""

    @abstractmethod
    def add(self, key: bytes) -> None:
        """Make `key` resident. A key that is resident already counts as accessed.

        The caller keeps the number of resident keys at or below ``capacity``.
        """

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """Forget a resident key without evicting it (deleted or dropped); unknown keys are ignored."""

    @abstractmethod
    def victims(
        self,
        n: int,
        evictable: Callable[[bytes], bool] | None = None,
        incoming: Sequence[bytes] = (),
    ) -> list[bytes]:
        """Evict exactly `n` keys, or none.

        Parameters
        ----------
        n : int
            How many chunks must go.
        evictable : callable, optional
            ``evictable(key)`` is False for keys that must stay (leased). It is asked at most once per key
            and call; None means that every key may go.
        incoming : sequence of bytes
            The keys for which room is made, in order; some policies choose by them.

        Returns
        -------
        list of bytes
            The `n` evicted keys, coldest first, no longer resident; or an empty list, and then the order is
            unchanged, when fewer than `n` can go.
        """

    @abstractmethod
    def coldest(self, n: int) -> list[bytes]:
        """Up to `n` keys that would go first, coldest first. A peek: nothing changes."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything, learned state included."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of resident keys."""

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Whether `key` is resident."""

    # Batch forms. The defaults loop; a policy overrides one where a batch is cheaper.

    def access_many(self, keys: Iterable[bytes]) -> None:
        """Record a reference to each of `keys`, in order."""
        access = self.access
        for key in keys:
            access(key)

    def renew_many(self, keys: Iterable[bytes]) -> None:
        """Make the resident ones of `keys` the most recent, in order, without a reference: what tells keys
        used once from those used often learns nothing."""
        self.access_many(key for key in keys if key in self)

    def add_many(self, keys: Iterable[bytes]) -> None:
        """Make each of `keys` resident, in order."""
        add = self.add
        for key in keys:
            add(key)

    def remove_many(self, keys: Collection[bytes]) -> None:
        """Forget each of `keys`."""
        remove = self.remove
        for key in keys:
            remove(key)

    def set_priority(self, key: bytes, priority: int) -> None:  # noqa: B027  a power that most policies lack
        """Give `key` a retention priority from 0 (goes first) to 100; a policy without priorities ignores
        it."""
