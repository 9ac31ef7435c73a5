"""From the host down: write-through at commit, cleaning ahead of eviction for ``write=on-evict``, capacity.

A queued write holds a lease on its slot until the worker has answered: also past the deadline, for a slot
that was given away would put another chunk's bytes under the key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence

from ..catalog import Catalog
from ..engine.base import Result, Status
from ..events import EventQueue
from ..ledger import object_size
from ..presence import Known
from . import report
from .capacity import CapacityKeeper
from .tier import Answer, Item, TierState

__all__ = ["Cascader"]


class Cascader:
    """Decides which chunk is written to which tier, and when.

    Attributes
    ----------
    on_over : callable
        Called with ``(tier, key)`` when a worker is through with a write; set by whoever puts the planner
        together.
    """

    on_over: Callable[[TierState, bytes], None]

    def __init__(
        self,
        tiers: Sequence[TierState],
        catalog: Catalog,
        keeper: CapacityKeeper,
        events: EventQueue,
        host: str,
    ) -> None:
        self._through = [tier for tier in tiers if tier.config.write == "through"]
        self._on_evict = [tier for tier in tiers if tier.config.write == "on-evict"]
        self._catalog = catalog
        self._keeper = keeper
        self._events = events
        self._host = host
        self._sequence = 0
        self._margin = max(1, catalog.slots // 8)
        self._cleaned_at = 0  # the catalog's count of chunks then

    # What the planner asks.

    def committed(
        self, chunks: Iterable[tuple[bytes, int]], now: float, tiers: Collection[TierState] | None = None
    ) -> None:
        """Callers have stored ``(key, slot)``: queue the writes that are due at once, note those owed for
        later; to `tiers` only, if given."""
        through, on_evict = self._through, self._on_evict
        if tiers is not None:
            through = [tier for tier in through if tier in tiers]
            on_evict = [tier for tier in on_evict if tier in tiers]
        for key, slot in chunks:
            for tier in through:
                self._offer(tier, key, slot, now)
            for tier in on_evict:
                if key not in tier.tombs and not _is_surely_in(tier, key):
                    tier.owed[key] = None

    def room(self, now: float) -> int:
        """Writes that every write-through tier can still queue: what a lossless caller waits for. A tier that
        is down takes none, however long he waits."""
        up = (tier.write_room() for tier in self._through if not tier.writes.breaker.blocked(now))
        return min(up, default=self._catalog.slots)

    def clean(self, now: float, *, all_of_it: bool = False) -> None:
        """Write what on-evict tiers are owed, before eviction comes to it: near the cold end, or
        everything."""
        if not self._on_evict:
            return
        if not all_of_it:
            since = self._catalog.published - self._cleaned_at
            if self._catalog.free > self._margin or since * 4 < self._margin:
                return
            self._cleaned_at = self._catalog.published
        for tier in self._on_evict:
            if not all_of_it and tier.writes.breaker.blocked(now):
                continue  # it may be up again before eviction comes to them
            candidates = list(tier.owed) if all_of_it else self._catalog.policy.coldest(2 * self._margin)
            for key in candidates:
                if tier.write_room() <= 0:
                    break
                slot = self._catalog.ready.get(key)
                if slot is not None and key in tier.owed:
                    self._offer(tier, key, slot, now)
                    del tier.owed[key]

    def is_owed(self, slot: int) -> bool:
        """Whether the chunk in `slot` would be lost to an on-evict tier by evicting it now."""
        key = self._catalog.key(slot)
        return any(key in tier.owed for tier in self._on_evict)

    def evicted(self, keys: Sequence[bytes]) -> None:
        """Chunks leave the host: what is still owed of them is dropped, and counted."""
        for tier in self._on_evict:
            for key in keys:
                if key in tier.owed:
                    del tier.owed[key]
                    tier.counters.dropped += 1

    def settled(self, sequence: int) -> bool:
        """Whether every write from before `sequence` has ended, or is past its deadline."""
        return all(_settled(tier, sequence) for tier in (*self._through, *self._on_evict))

    @property
    def sequence(self) -> int:
        """Number that the next write will get."""
        return self._sequence

    def withdraw(self, tier: TierState, keys: Container[bytes], now: float) -> None:
        """Take back the writes of `keys` that no worker has yet."""
        items = self._keeper.withdraw(tier, keys)
        for item in items:
            self._finish(tier, item)
        if items:
            self._keeper.withdrawn(tier, now)

    def drop(self, tier: TierState, item: Item) -> None:
        """A write that waited for room in vain."""
        tier.counters.dropped += 1
        self._finish(tier, item)

    # What workers answer.

    def done(self, tier: TierState, answers: Sequence[Answer], now: float) -> None:
        """Writes have ended; after a TIMEOUT the slot stays leased until the worker answers."""
        written = [(item, result.value) for item, result in answers if result.status is Status.OK]
        if written:
            self._note(tier, written, now)
        for item, result in answers:
            if result.status is Status.TIMEOUT:
                tier.overdue.add(item[0])
                continue
            if result.status is Status.CANCELLED:
                tier.counters.dropped += 1
            self._account_for_failure(tier, item, result)
            self._ended(tier, item, now)

    def late(self, tier: TierState, item: Item, result: Result, now: float) -> None:
        """The worker is through with the slot at last."""
        if result.status is Status.OK:
            self._note(tier, [(item, result.value)], now)
        self._account_for_failure(tier, item, result)
        self._ended(tier, item, now)

    def _offer(self, tier: TierState, key: bytes, slot: int, now: float) -> None:
        if key in tier.writing or key in tier.tombs or _is_surely_in(tier, key):
            return
        if tier.write_room() <= 0 or tier.writes.breaker.blocked(now):
            tier.counters.dropped += 1
            return
        tier.writing[key] = self._sequence
        self._sequence += 1
        self._catalog.hold(slot)
        self._keeper.enqueue(tier, (key, slot, self._catalog.length(slot)), now)

    def _note(self, tier: TierState, written: Sequence[tuple[Item, int]], now: float) -> None:
        """The tier has these items, of which it had those with a 0 before."""
        tier.presence.found_many([key for (key, _, _), _ in written], now)
        new = [key for (key, _, _), created in written if created]
        for (key, _, length), created in written:
            size = object_size(length)
            if created:
                tier.counters.written_bytes += length
                tier.bytes += size
                if tier.tally is not None:
                    tier.tally.wrote(size)
            if tier.ledger is not None and key not in tier.ledger:
                tier.ledger.add(key, size)
        tier.counters.writes += len(new)
        tier.chunks += len(new)
        if new:
            self._events.emit(report.written(new, self._host, tier))

    @staticmethod
    def _account_for_failure(tier: TierState, item: Item, result: Result) -> None:
        """A remote server may have carried out what failed here, when only its answer was lost."""
        if result.status is Status.FAILED and tier.remote and tier.tally is not None:
            tier.tally.may_have_written(object_size(item[2]))

    def _ended(self, tier: TierState, item: Item, now: float) -> None:
        self._finish(tier, item)
        self._keeper.ended(tier, item, now)
        self.on_over(tier, item[0])

    def _finish(self, tier: TierState, item: Item) -> None:
        key, slot, _ = item
        del tier.writing[key]
        tier.overdue.discard(key)
        self._catalog.drop(slot)


def _is_surely_in(tier: TierState, key: bytes) -> bool:
    """Whether to believe that `tier` has `key`: somebody else may have deleted it. Where a worker finds out
    with one look at a name, it does; elsewhere a look is a request, and a chunk that has gone is a miss."""
    return tier.remote and tier.presence.get(key) is Known.PRESENT


def _settled(tier: TierState, sequence: int) -> bool:
    for key, number in tier.writing.items():  # in order of their numbers
        if number >= sequence:
            return True
        if key not in tier.overdue:
            return False
    return True
