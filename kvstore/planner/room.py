"""Room in host memory for what callers store, and what stays meanwhile although nobody leases it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ..catalog import Catalog
from .cascade import Cascader
from .prefix import Prefix
from .tier import TierState

__all__ = ["Room"]


class Room:
    """Counts slots that can be had, and makes them free."""

    def __init__(self, tiers: Sequence[TierState], catalog: Catalog, cascader: Cascader) -> None:
        self._tiers = tiers
        self._catalog = catalog
        self._cascader = cascader

    def is_ample(self, slots: int, keep: Collection[bytes]) -> bool:
        """Whether there are so many `slots` even beside `keep` and all that tiers still have to get; found
        out without a look at any chunk, so that False says nothing."""
        owed = sum(len(tier.owed) for tier in self._tiers)
        return slots <= self._catalog.free + self._catalog.idle - len(keep) - owed

    def fits(self, slots: int, keep: Collection[bytes]) -> bool:
        """Whether there are so many `slots` beside `keep`."""
        return slots <= self._beside(keep)

    def beside(self, slots: int, keep: set[bytes], prefix: Prefix, now: float) -> set[bytes] | None:
        """What has to stay for so many `slots`: `keep`, and of `prefix` what no tier has yet. None when the
        latter leaves too few."""
        tiers = self._cascader.savers(now)
        if not tiers:
            return keep
        # All that can make room: slots that come free or idle, and writes that are given up.
        eased = self._catalog.eased + sum(tier.counters.dropped for tier in self._tiers)
        if prefix.waits(slots, eased) and not self._cascader.wants_more(tiers):
            return None
        self._cascader.secure(prefix, now)
        unsaved = set(prefix.unsaved)
        room = self._beside(unsaved)
        if not unsaved or slots <= room - self.idle_among(keep - unsaved):
            return keep | unsaved
        prefix.wait(room, eased)
        return None

    def make(
        self, wanted: Sequence[bytes], keep: Collection[bytes], may_go: Callable[[int], bool] | None
    ) -> int:
        """Make room for as many of `wanted` as possible, from the front; returns how many."""
        catalog = self._catalog
        n = min(len(wanted), self._beside(keep))
        while n > catalog.free and not catalog.make_room(n, wanted[:n], keep=keep, may_go=may_go):
            n = max(catalog.free, n // 2)
        return n

    def idle_among(self, keys: Collection[bytes]) -> int:
        """How many of `keys`, each given once, are READY and not leased."""
        ready, leases = self._catalog.ready, self._catalog.leases
        return sum(1 for key in keys if key in ready and not leases(ready[key]))

    def _beside(self, keep: Collection[bytes]) -> int:
        return self._catalog.free + self._catalog.idle - self.idle_among(keep)
