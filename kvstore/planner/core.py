"""The planner: every decision of the store, and nothing but decisions.

No thread, no clock, no I/O. Each method is told the time, changes catalog and presence, and leaves batches in
``outbox``; the store submits them to the engine and brings back completions. The parts:

============ ==============================================================
dispatch     queues -> batches -> results; windows, deadlines, breakers
locate       where is a key? presence and probes
select       which tiers a request is about, and which peers
request      one request for promotion
fetch        promotion in key order, in waves, single-flight
cascade      writes to the tiers: through, on evict, cleaning
room         slots for what callers store, and what stays meanwhile
capacity     room in tiers that have a ``capacity``
shared       the same where instances share it
erase        deletion that no late write can undo
============ ==============================================================
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import Enum
from functools import partial

from ..catalog import Catalog
from ..engine.base import Batch, Completion, Verb
from ..events import EventQueue
from ..metrics import TierCounters
from ..presence import Known
from . import report
from .capacity import CapacityKeeper
from .cascade import Cascader
from .dispatch import Dispatcher
from .erase import Eraser, Erasure
from .fetch import Fetcher
from .locate import Locator
from .prefix import Prefix
from .request import Fetch
from .room import Room
from .select import Selector
from .tier import TierState

__all__ = ["Lookup", "Planner"]


class Lookup(Enum):
    """Answer about one key; no data has moved.

    HIT: in host memory, and it stays there until the caller's next call. PENDING: not in host memory yet,
    but on its way, or in a tier from which :meth:`Store.prefetch` brings it. RETRY: not known yet, a probe
    is under way. MISS: no tier has it.
    """

    HIT = "hit"
    PENDING = "pending"
    RETRY = "retry"
    MISS = "miss"


class Planner:
    """Owns catalog, presence and queues of one store.

    Parameters
    ----------
    tiers : list of TierState
        Secondary tiers in order.
    catalog : Catalog
    events : EventQueue
    host : str
        Name of the host tier, for events.
    budget : int
        Slots that promotions may be filling at a time.
    """

    def __init__(
        self,
        tiers: list[TierState],
        catalog: Catalog,
        events: EventQueue,
        *,
        host: str,
        budget: int,
    ) -> None:
        self.tiers = tiers
        self.catalog = catalog
        self.host_counters = TierCounters()
        self._events = events
        self._host = host
        self._dispatcher = Dispatcher(tiers, events)
        self._locator = Locator(tiers, self._dispatcher)
        self._selector = Selector(tiers)
        self._fetcher = Fetcher(tiers, catalog, self._dispatcher, self._locator, events, host, budget)
        self._keeper = keeper = CapacityKeeper(tiers, self._dispatcher)
        self._cascader = Cascader(tiers, catalog, keeper, events, host)
        self._dispatcher.register(Verb.WRITE, self._cascader)
        self._room = Room(tiers, catalog, self._cascader)
        self._eraser = Eraser(tiers, self._dispatcher, self._cascader.withdraw, events)
        keeper.erase_from, keeper.on_dropped = self._eraser.erase_from, self._cascader.drop
        keeper.on_collected = self._eraser.collected
        self._cascader.on_over = self._eraser.write_over
        catalog.on_evict = self._evicted

    # To and from the engine.

    @property
    def busy(self) -> bool:
        """Whether anything is queued or running."""
        return self._dispatcher.busy or self._keeper.busy

    @property
    def resting(self) -> bool:
        """Whether a promotion goes on in the next turn, which should be soon."""
        return self._fetcher.resting

    @property
    def next_deadline(self) -> float:
        """Nothing is due or overdue before this time."""
        if self.resting:
            return float("-inf")
        return min(self._dispatcher.next_deadline, self._keeper.next_due)

    def take_outbox(self) -> list[Batch]:
        """Batches to submit."""
        outbox, self._dispatcher.outbox = self._dispatcher.outbox, []
        return outbox

    def take_abandoned(self) -> list[Batch]:
        """Batches past their deadline, for :meth:`Engine.abandon`."""
        abandoned, self._dispatcher.abandoned = self._dispatcher.abandoned, []
        return abandoned

    def apply(self, completion: Completion, now: float) -> None:
        """Take in what a worker reports."""
        self._dispatcher.apply(completion, now)

    def advance(self, now: float, *, may_evict: bool) -> None:
        """Everything that is due: deadlines, waves of promotion, cleaning, new batches."""
        self._dispatcher.expire(now)
        self._fetcher.advance(now, may_evict=may_evict)
        self._cascader.catch_up(now)
        self._cascader.clean(now)
        self._keeper.advance(now)
        self._dispatcher.pump(now)

    # Look-ups and loads.

    def select(self, names: Collection[str] | None, now: float) -> Sequence[TierState] | None:
        """The tiers with these names, see :class:`Selector`; None, for the usual ones, goes through."""
        return None if names is None else self._selector.select(names, now)

    def is_up(self, name: str, now: float) -> bool:
        """Whether a tier, or a peer, may be asked for chunks."""
        return self._selector.is_up(name, now)

    def lookup(
        self,
        keys: Sequence[bytes],
        now: float,
        tiers: Sequence[TierState] | None = None,
        *,
        anew: Collection[str] = (),
    ) -> list[Lookup]:
        """Answer for each of `keys`, and start probes for those of which nothing is known in `tiers`, or only
        that they were absent, in tiers with names in `anew`."""
        ready, hit, other = self.catalog.ready, Lookup.HIT, self._lookup_elsewhere
        unknown: list[tuple[bytes, TierState]] = []
        self._locator.age(now)
        if anew:
            self._locator.doubt(keys, filter(None, map(self._selector.find, anew)))
        where = partial(self._locator.where, askable=self._locator.askable(now, tiers), tiers=tiers)
        answers = [hit if key in ready else other(key, where, unknown) for key in keys]
        if unknown:
            unknown = list(dict.fromkeys(unknown))
            taken = self._locator.ask(unknown, tiers)
            if taken < len(unknown):
                refused = {key for key, _ in unknown[taken:]}
                answers = [Lookup.MISS if key in refused else a for key, a in zip(keys, answers, strict=True)]
        return answers

    def fetch(self, fetch: Fetch, now: float) -> None:
        """Start a promotion."""
        self._locator.age(now)
        self._fetcher.start(fetch, now)

    def cancel(self, fetch: Fetch) -> None:
        """Start no more of a promotion."""
        self._fetcher.cancel(fetch)

    def read(self, keys: Sequence[bytes]) -> tuple[dict[bytes, int], list[bytes]]:
        """Lease what is READY; returns slots by key, and the keys that are not there."""
        held, missing = self.hold(keys)
        fresh = self._fetcher.fresh
        touched = [key for key in keys if key not in fresh] if fresh else keys
        fresh.difference_update(keys)
        self.catalog.policy.access_many(touched)
        self.host_counters.misses += len(missing)
        self.host_counters.hits += len(touched) - len(missing)
        return held, missing

    def hold(self, keys: Sequence[bytes]) -> tuple[dict[bytes, int], list[bytes]]:
        """Lease what is READY as :meth:`read` does, without counting it as used."""
        ready = self.catalog.ready
        held = {key: ready[key] for key in keys if key in ready}
        self.catalog.hold_many(held.values())
        return held, [key for key in keys if key not in held] if len(held) < len(keys) else []

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count `keys` as used, in order."""
        self.catalog.policy.access_many(key for key in keys if key in self.catalog.ready)

    def renew(self, keys: Sequence[bytes]) -> None:
        """Make `keys` the most recent, in order, without counting them as used."""
        self.catalog.policy.renew_many(keys)

    def drop(self, slots: Collection[int]) -> None:
        """End read leases."""
        for slot in slots:
            self.catalog.drop(slot)

    # Stores.

    def absent(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of `keys` that are neither READY nor FILLING, each once, in order."""
        distinct = dict.fromkeys(keys)
        known = (self.catalog.ready.keys() & distinct) | (self.catalog.filling.keys() & distinct)
        return [key for key in distinct if key not in known] if known else list(distinct)

    def reserve(
        self, keys: Sequence[bytes], now: float, *, lossless: bool, after: Prefix | None = None
    ) -> dict[bytes, int]:
        """Give slots to as many of `keys` as fit, from the front.

        Parameters
        ----------
        keys : sequence of bytes
            Wanted, in order; those that are there or coming get no slot.
        lossless : bool
            The caller would rather wait than lose something: leave room in the queues of writes, and evict
            nothing that a tier still has to get.
        after : Prefix, optional
            Nothing of it is evicted that is to go to a tier and is in none yet: as long as there is such, all
            of `keys` fit, or none gets a slot.

        Returns
        -------
        dict
            Key -> FILLING slot.
        """
        catalog = self.catalog
        wanted = self.absent(keys)
        if lossless:
            wanted = wanted[: max(0, self._cascader.room(now) - self._stores_to_come())]
        keep = catalog.ready.keys() & keys
        spares = after is not None and self._room.is_ample(len(wanted), keep)
        stay = keep if after is None or spares else self._room.beside(len(wanted), keep, after, now)
        if stay is None:
            return {}
        may_go = self._is_paid if lossless or spares else None
        room = self._room.make(wanted, stay, may_go)
        return {key: catalog.reserve(key) for key in wanted[:room]}

    def commit(
        self, chunks: Sequence[tuple[bytes, int, int]], now: float, *, tiers: Collection[str] | None = None
    ) -> Sequence[bytes]:
        """Make ``(key, slot, length)`` READY and plan their cascades, to all tiers or to those with these
        names; returns the keys that are READY now."""
        targets = None if tiers is None else self._selector.stored_in(tiers)
        before = self.catalog.bytes
        filled = [key for key, _, _ in chunks]
        keys, slots = self.catalog.publish_many(
            filled, [slot for _, slot, _ in chunks], [length for _, _, length in chunks]
        )
        self.host_counters.writes += len(keys)
        self.host_counters.written_bytes += self.catalog.bytes - before
        self._fetcher.filled(filled, now)
        if keys:
            self._events.emit(report.stored(keys, self._host))
        self._cascader.committed(zip(keys, slots, strict=True), now, targets)
        return keys

    def abort(self, chunks: Sequence[tuple[bytes, int]], now: float) -> None:
        """Give ``(key, slot)`` back unfilled."""
        for key, slot in chunks:
            self.catalog.discard(key, slot)
            self._fetcher.filled([key], now)

    def has_room(self, key: bytes, now: float) -> bool:
        """Whether a lossless caller who wants to store `key` need not wait any longer."""
        catalog = self.catalog
        if key in catalog.ready:
            return True
        if key in catalog.filling or self._cascader.room(now) <= self._stores_to_come():
            return False
        if catalog.free or catalog.idle > sum(len(tier.owed) for tier in self.tiers):
            return True
        return catalog.idle > self._room.idle_among({key for tier in self.tiers for key in tier.owed})

    def fits(self, keys: Sequence[bytes], now: float, *, after: Prefix | None = None) -> bool:
        """Whether :meth:`reserve` has slots for all of `keys`, for a caller who is not lossless."""
        wanted = len(self.absent(keys))
        keep = self.catalog.ready.keys() & keys
        if self._room.is_ample(wanted, keep):
            return True
        stay = keep if after is None else self._room.beside(wanted, keep, after, now)
        return stay is not None and self._room.fits(wanted, stay)

    def wants_cleaning(self, now: float) -> None:
        """A lossless caller waits: pay what on-evict tiers are owed, so that something may go."""
        self._cascader.clean(now, all_of_it=True)

    # Deletion, flush, facts.

    def delete(self, keys: Sequence[bytes], now: float) -> Erasure:
        """Remove `keys` from the host at once, and from the tiers as they answer."""
        gone = [key for key in dict.fromkeys(keys) if self.catalog.remove(key)]
        for key in keys:
            self._fetcher.fresh.discard(key)
        self.host_counters.deletes += len(gone)
        if gone:
            self._events.emit(report.evicted(gone, self._host))
        self._locator.outdate(keys)
        return self._eraser.erase(list(dict.fromkeys(keys)), now)

    def clear(self) -> None:
        """Drop every chunk that nobody leases from the host, and nothing from the tiers."""
        gone = self.catalog.clear()
        if gone:
            self._evicted(gone)

    def pay_all(self, now: float) -> bool:
        """Queue what on-evict tiers are owed, as room allows; True when nothing is owed any more."""
        self._cascader.clean(now, all_of_it=True)
        return not any(tier.owed for tier in self.tiers)

    def leave(self, now: float) -> bool:
        """Tell those who share limits with this store that it ends; True once they know, or cannot know."""
        return self._keeper.leave(now)

    @property
    def write_sequence(self) -> int:
        """Number that the next cascade write will get."""
        return self._cascader.sequence

    def settled(self, sequence: int) -> bool:
        """Whether every cascade write from before `sequence` has ended."""
        return self._cascader.settled(sequence)

    @property
    def promoting(self) -> int:
        """Slots being filled from tiers."""
        return self._fetcher.promoting

    def host_snapshot(self) -> dict[str, int]:
        """Counters of the host tier."""
        counts = self.host_counters.snapshot()
        counts["hits"] += self._fetcher.hits
        counts["misses"] += self._fetcher.misses
        counts["evictions"] = self.catalog.evictions
        return counts

    def _lookup_elsewhere(
        self,
        key: bytes,
        where: Callable[[bytes], tuple[TierState | None, Known]],
        unknown: list[tuple[bytes, TierState]],
    ) -> Lookup:
        if key in self.catalog.filling:
            return Lookup.PENDING
        tier, known = where(key)
        if known is Known.PRESENT:
            return Lookup.PENDING
        if known is Known.ABSENT:
            return Lookup.MISS
        if tier is not None:
            unknown.append((key, tier))
        return Lookup.RETRY

    def _stores_to_come(self) -> int:
        """Slots that callers are filling: each will want a place in the queues of writes."""
        return max(0, len(self.catalog.filling) - self._fetcher.promoting)

    def _is_paid(self, slot: int) -> bool:
        return not self._cascader.is_owed(slot)

    def _evicted(self, keys: Sequence[bytes]) -> None:
        self._fetcher.fresh.difference_update(keys)
        self._cascader.evicted(keys)
        self._events.emit(report.evicted(keys, self._host))
