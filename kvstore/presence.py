"""What is known of a key in one secondary tier, bounded in number and in age.

Knowledge ages because tiers are shared: others store and delete. It is kept in two generations of plain
sets; the older one is dropped whole when the younger is full or old enough, so that an entry costs one set
slot and its key, and forgetting costs nothing per entry. A remembered absence grows old sooner than a
presence: a stale presence ends with one failed read, a stale absence hides a hit.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum

__all__ = ["AgingSet", "Known", "Presence"]


class Known(IntEnum):
    """State of a key in a tier."""

    UNKNOWN = 0
    PROBING = 1
    PRESENT = 2
    ABSENT = 3


# To look up a member of an enum costs a tenth of a microsecond before Python 3.12.
_UNKNOWN, _PRESENT, _ABSENT = Known.UNKNOWN, Known.PRESENT, Known.ABSENT


class AgingSet:
    """A set that forgets.

    A key stays for at least `ttl` seconds and at most twice that, unless more than `limit` keys come.

    Parameters
    ----------
    limit : int
        Largest number of keys.
    ttl : float
        Seconds.
    """

    def __init__(self, limit: int, ttl: float) -> None:
        self._half = max(1, limit // 2)
        self._ttl = ttl
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()
        self._turned = float("-inf")

    def __contains__(self, key: object) -> bool:
        return key in self._young or key in self._old

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, key: bytes, now: float) -> None:
        """Remember `key`, seen at time `now`."""
        self.age(now)
        if len(self._young) >= self._half:
            self._turn(now)
        self._young.add(key)
        self._old.discard(key)

    def add_many(self, keys: Collection[bytes], now: float) -> None:
        """Remember `keys`, seen at time `now`."""
        self.age(now)
        if len(self._young) + len(keys) <= self._half:
            self._young.update(keys)
            self._old.difference_update(keys)
        else:
            for key in keys:
                self.add(key, now)

    def discard(self, key: bytes) -> None:
        """Forget `key`."""
        self._young.discard(key)
        self._old.discard(key)

    def discard_many(self, keys: Collection[bytes]) -> None:
        """Forget `keys`."""
        self._young.difference_update(keys)
        self._old.difference_update(keys)

    def clear(self) -> None:
        """Forget everything."""
        self._young.clear()
        self._old.clear()

    def age(self, now: float) -> None:
        """Forget what is too old at time `now`; to be called before a batch of look-ups."""
        if now - self._turned < self._ttl:
            return
        stale = now - self._turned >= 2 * self._ttl
        self._turn(now)
        if stale:
            self._old.clear()

    def _turn(self, now: float) -> None:
        self._young, self._old = set(), self._young
        self._turned = now


class Presence:
    """Knowledge of the keys of one tier.

    Parameters
    ----------
    limit : int
        Largest number of keys remembered as present, and as absent.
    present_ttl, absent_ttl : float
        Seconds after which a key counts as unknown again.
    """

    def __init__(self, limit: int = 1 << 20, present_ttl: float = 300.0, absent_ttl: float = 5.0) -> None:
        self.present = AgingSet(limit, present_ttl)
        self.absent = AgingSet(limit, absent_ttl)

    def __len__(self) -> int:
        return len(self.present) + len(self.absent)

    def get(self, key: bytes) -> Known:
        """What is known of `key`; whether it is being probed, the planner knows."""
        present, absent = self.present, self.absent
        if key in present._young or key in present._old:  # one call for each key looked up, not three
            return _PRESENT
        return _ABSENT if key in absent._young or key in absent._old else _UNKNOWN

    def has_all(self, keys: Collection[bytes]) -> bool:
        """Whether each of `keys` is known to be there."""
        present = self.present
        return present._young.issuperset(keys) or all(map(present.__contains__, keys))

    def found(self, key: bytes, now: float) -> None:
        """`key` was seen in the tier."""
        self.absent.discard(key)
        self.present.add(key, now)

    def found_many(self, keys: Collection[bytes], now: float) -> None:
        """`keys` were seen in the tier."""
        self.absent.discard_many(keys)
        self.present.add_many(keys, now)

    def lost(self, key: bytes, now: float) -> None:
        """`key` is not in the tier, or must not be asked of it for a while."""
        self.present.discard(key)
        self.absent.add(key, now)

    def age(self, now: float) -> None:
        """Forget what is too old at time `now`."""
        self.present.age(now)
        self.absent.age(now)

    def clear(self) -> None:
        """Forget everything."""
        self.present.clear()
        self.absent.clear()
