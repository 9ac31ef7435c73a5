"""Deletion from secondary tiers, in an order that no late write can undo.

A key under deletion in a tier is *entombed* there: neither read nor written. A write that no worker has yet
is withdrawn; one that is under way is waited for, and the delete follows it, even when the one who asked has
given up by then. The tomb goes when the delete has succeeded; where it fails, the key stays hidden for the
life of the store. (A victim of eviction that could not be deleted is shown again: nobody asked for its end.)
Where the tier may not be written, the key is only hidden, also when it is stored again: what the tier has may
be what had to go. It is seen again once a great many others have been deleted after it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from ..engine.base import Result, Status, Verb
from ..events import EventQueue
from ..presence import Known
from . import report
from .answers import Answers
from .dispatch import Dispatcher
from .tier import Item, TierState

__all__ = ["Eraser", "Erasure"]

#: Keys that a tier which may not be written hides at most; of more, the oldest are seen again.
_MOST_HIDDEN = 1 << 20


class Erasure:
    """One request to delete: how much is outstanding, and what went wrong."""

    #: Counter of the tier that a deletion for this reason adds to.
    counter = "deletes"
    #: Whether a chunk that could not be deleted must not be seen again.
    hides = True

    def __init__(self) -> None:
        self.left = 0
        self.errors: list[tuple[str, bytes, str]] = []  # tier, key, why

    @property
    def done(self) -> bool:
        """Whether every tier has answered."""
        return self.left == 0

    def settle(self, tier: TierState, key: bytes, error: str, now: float) -> None:
        """`tier` has deleted `key`, or `error` says why not."""
        self.left -= 1
        if error:
            self.errors.append((tier.name, key, error))


class Eraser:
    """Deletes keys from tiers."""

    def __init__(
        self,
        tiers: Sequence[TierState],
        dispatcher: Dispatcher,
        withdraw: Callable[[TierState, Container[bytes], float], None],
        events: EventQueue,
    ) -> None:
        self._tiers = tiers
        self._dispatcher = dispatcher
        self._withdraw = withdraw
        self._events = events
        self._waiting: dict[tuple[int, bytes], list[Erasure]] = {}
        self._behind_write: set[tuple[int, bytes]] = set()
        dispatcher.register(Verb.DELETE, self)

    def erase(self, keys: Sequence[bytes], now: float) -> Erasure:
        """Delete `keys` from every tier that may be written, and hide them in the others."""
        erasure = Erasure()
        for tier in self._tiers:
            if tier.config.write == "off":
                _hide(tier, keys)
            else:
                self.erase_from(tier, keys, erasure, now)
        return erasure

    def erase_from(self, tier: TierState, keys: Sequence[bytes], erasure: Erasure, now: float) -> None:
        """Delete `keys` from one tier, on behalf of `erasure`."""
        due: list[Item] = []
        if queued := {key for key in keys if key in tier.writing}:
            self._withdraw(tier, queued, now)
        for key in keys:
            tier.tombs[key] = None
            tier.owed.pop(key, None)
            self._plan(tier, key, erasure, due)
        if tier.writes.breaker.blocked(now):
            for item in due:
                self._settle(tier, item[0], "the tier is down", now)
        else:
            self._dispatcher.enqueue(tier, Verb.DELETE, due)

    def write_over(self, tier: TierState, keys: Sequence[bytes]) -> None:
        """Writes have ended for which deletes may be waiting."""
        if not self._behind_write:
            return
        for key in keys:
            if (tier.index, key) in self._behind_write:
                self._behind_write.discard((tier.index, key))
                self._dispatcher.enqueue(tier, Verb.DELETE, [(key, -1, 0)])

    def done(self, tier: TierState, answers: Answers, now: float) -> None:
        """A tier has answered, or not in time."""
        for (key, _, _), result in answers:
            if result.status is Status.OK:
                self._forget(tier, key, now)
                self._settle(tier, key, "", now)
            else:
                self._settle(tier, key, result.error or result.status.name.lower(), now)

    def late(self, tier: TierState, item: Item, result: Result, now: float) -> None:
        """It is gone after all, though nobody waits for it any more."""
        if result.status is Status.OK:
            self._forget(tier, item[0], now)

    def _plan(self, tier: TierState, key: bytes, erasure: Erasure, due: list[Item]) -> None:
        place = (tier.index, key)
        erasure.left += 1
        waiting = self._waiting.setdefault(place, [])
        waiting.append(erasure)
        if len(waiting) > 1:
            return  # an earlier request has it under way
        if key in tier.writing:
            self._behind_write.add(place)
        else:
            due.append((key, -1, 0))

    def _forget(self, tier: TierState, key: bytes, now: float) -> None:
        known, size = tier.presence.get(key), 0
        if tier.ledger is not None:
            size = tier.ledger.remove(key)
        elif known is Known.PRESENT:
            size = tier.bytes // max(1, tier.chunks)  # its own is not remembered
        if size:
            self._shrink(tier, size)
        if tier.tally is not None and known is not Known.ABSENT:
            tier.tally.erased(size)
        tier.presence.lost(key, now)
        tier.tombs.pop(key, None)
        waiting = self._waiting.get((tier.index, key)) or [Erasure()]
        tier.counters.add(waiting[0].counter)
        self._events.emit(report.removed((key,), tier))

    def collected(self, tier: TierState, keys: Sequence[bytes], now: float) -> None:
        """The collector of a shared tier has deleted `keys`."""
        for key in keys:
            tier.presence.lost(key, now)
        tier.counters.add("evictions", len(keys))
        self._events.emit(report.removed(keys, tier))

    def _shrink(self, tier: TierState, size: int) -> None:
        tier.chunks = max(0, tier.chunks - 1)
        tier.bytes = max(0, tier.bytes - size)

    def _settle(self, tier: TierState, key: bytes, error: str, now: float) -> None:
        waiting = self._waiting.pop((tier.index, key), ())
        if error and waiting and not any(erasure.hides for erasure in waiting):
            tier.tombs.pop(key, None)
        for erasure in waiting:
            erasure.settle(tier, key, error, now)


def _hide(tier: TierState, keys: Sequence[bytes]) -> None:
    for key in keys:
        tier.tombs[key] = None
        tier.tombs.move_to_end(key)
    while len(tier.tombs) > _MOST_HIDDEN:
        tier.tombs.popitem(last=False)
