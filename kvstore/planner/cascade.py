"""From the host down: write-through at commit, cleaning ahead of eviction for ``write=on-evict``, capacity.

A queued write holds a lease on its slot until the worker has answered: also past the deadline, for a slot
that was given away would put another chunk's bytes under the key. So the queue is bounded; what finds it full
is *owed* to the tier, and holds nothing: it is queued when there is room, unless it is evicted before that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from itertools import compress, islice

from ..catalog import Catalog
from ..engine.base import Result, Status
from ..events import EventQueue
from ..frame import object_size
from ..presence import Known
from . import report
from .answers import Answers
from .capacity import CapacityKeeper
from .prefix import Prefix
from .tier import Item, TierState

__all__ = ["Cascader"]


class Cascader:
    """Decides which chunk is written to which tier, and when.

    Attributes
    ----------
    on_over : callable
        Called with ``(tier, keys)`` when a worker is through with writes; set by whoever puts the planner
        together.
    """

    on_over: Callable[[TierState, Sequence[bytes]], None]

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
        """Callers have stored ``(key, slot)``: queue the writes that are due at once, note those that are due
        later; to `tiers` only, if given."""
        through, on_evict = self._through, self._on_evict
        if tiers is not None:
            through = [tier for tier in through if tier in tiers]
            on_evict = [tier for tier in on_evict if tier in tiers]
        chunks = list(chunks)
        for tier in through:
            self._offer(tier, chunks, now)
        for tier in on_evict:
            tier.owed.update([(key, self._number()) for key, _ in chunks if _wants(tier, key)])

    def room(self, now: float) -> int:
        """Writes that every write-through tier can still queue: what a lossless caller waits for. A tier that
        is down takes none, however long he waits."""
        up = (tier.write_room() - len(tier.owed) for tier in _up(self._through, now))
        return min(up, default=self._catalog.slots)

    def catch_up(self, now: float) -> None:
        """Queue what write-through tiers are owed, as room allows; those that are down, or whose queue is
        full of writes past their deadlines, do not get it."""
        for tier in self._through:
            if not tier.owed:
                continue
            if tier.writes.breaker.blocked(now) or len(tier.overdue) >= tier.write_limit:
                tier.counters.dropped += len(tier.owed)
                tier.owed.clear()
            else:
                self._pay(tier, list(islice(tier.owed, max(0, tier.write_room()))), now)

    def savers(self, now: float) -> list[TierState]:
        """The tiers that are up and are to get what is in host memory, the write-through ones if there are
        any."""
        return _up(self._through, now) or _up(self._on_evict, now)

    def wants_more(self, tiers: Iterable[TierState]) -> bool:
        """Whether on-evict `tiers` have written half of what they were given to write, and are owed more: it
        has to be given to them."""
        return any(
            tier.config.write == "on-evict" and tier.owed and tier.write_room() * 2 >= tier.write_limit
            for tier in tiers
        )

    def secure(self, prefix: Prefix, now: float) -> None:
        """Leave in `prefix` what is in host memory, or about to be, and in no tier yet, although one that is
        up is to get it; where only on-evict tiers are, it is written now."""
        tiers = self.savers(now)
        ready, filling = self._catalog.ready, self._catalog.filling
        due = set[bytes]().union(*map(_due, tiers))
        unsaved = [key for key in prefix.unsaved if key in filling or (key in due and key in ready)]
        for tier in (*self._through, *self._on_evict):
            where = tier.presence.get
            unsaved = [key for key in unsaved if where(key) is not Known.PRESENT]
        prefix.unsaved = unsaved
        for tier in tiers:
            if tier.config.write == "on-evict":
                self._pay(tier, unsaved, now)

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
            if tier.write_room() <= 0:
                continue
            candidates = list(tier.owed) if all_of_it else self._catalog.policy.coldest(2 * self._margin)
            self._pay(tier, candidates, now)

    def is_owed(self, slot: int) -> bool:
        """Whether the chunk in `slot` would be lost to some tier by evicting it now."""
        key = self._catalog.key(slot)
        return any(key in tier.owed for tier in (*self._through, *self._on_evict))

    def evicted(self, keys: Sequence[bytes]) -> None:
        """Chunks leave the host: what is still owed of them is dropped, and counted."""
        for tier in (*self._through, *self._on_evict):
            if tier.owed:
                for key in keys:
                    if tier.owed.pop(key, None) is not None:
                        tier.counters.dropped += 1

    def settled(self, sequence: int) -> bool:
        """Whether every write that was due before `sequence` has ended, or is past its deadline."""
        return all(_settled(tier, sequence) for tier in (*self._through, *self._on_evict)) and not any(
            next(iter(tier.owed.values())) < sequence for tier in self._through if tier.owed
        )

    @property
    def sequence(self) -> int:
        """Number that the next commit, or write, will get."""
        return self._sequence

    def withdraw(self, tier: TierState, keys: Container[bytes], now: float) -> None:
        """Take back the writes of `keys` that no worker has yet."""
        items = self._keeper.withdraw(tier, keys)
        if items:
            withdrawn, slots, _ = zip(*items, strict=True)
            self._let_go(tier, withdrawn, slots)
            self._keeper.withdrawn(tier, now)

    def drop(self, tier: TierState, item: Item) -> None:
        """A write that waited for room in vain."""
        key, slot, _ = item
        tier.counters.dropped += 1
        self._let_go(tier, [key], [slot])

    # What workers answer.

    def done(self, tier: TierState, answers: Answers, now: float) -> None:
        """Writes have ended; after a TIMEOUT the slot stays leased until the worker answers."""
        good = answers.good
        if good is not None:
            self._note(tier, good, now)
            self._ended(tier, good, now)
        if good is answers:
            return
        for item, result in answers:
            if result.status is Status.OK:
                continue
            if result.status is Status.TIMEOUT:
                tier.overdue.add(item[0])
                continue
            self._account_for_failure(tier, item, result)
            self._ended(tier, Answers.alike([item], result), now)

    def late(self, tier: TierState, item: Item, result: Result, now: float) -> None:
        """The worker is through with the slot at last."""
        answers = Answers.alike([item], result)
        if result.status is Status.OK:
            self._note(tier, answers, now)
        self._account_for_failure(tier, item, result)
        self._ended(tier, answers, now)

    def _offer(self, tier: TierState, chunks: Sequence[tuple[bytes, int]], now: float) -> None:
        """Chunks are to go to `tier`: at once, or as soon as there is room."""
        numbered = [(key, slot, self._number()) for key, slot in chunks if _wants(tier, key)]
        at_once = numbered
        if tier.owed:
            at_once = []
        elif not tier.writes.breaker.blocked(now):
            at_once = numbered[: max(0, tier.write_room())]
        self._begin(tier, at_once, now)
        tier.owed.update([(key, number) for key, _, number in numbered[len(at_once) :]])

    def _pay(self, tier: TierState, keys: Iterable[bytes], now: float) -> None:
        """Queue the writes of those of `keys` that are owed, in order, as room allows."""
        due: list[tuple[bytes, int, int]] = []
        room = tier.write_room()
        for key in keys:
            if len(due) >= room:
                break
            number, slot = tier.owed.get(key), self._catalog.ready.get(key)
            if number is None or slot is None:
                continue
            del tier.owed[key]
            if tier.config.write == "on-evict":
                number = self._number()  # they are not written in the order of their commits
            if _wants(tier, key):
                due.append((key, slot, number))
        self._begin(tier, due, now)

    def _begin(self, tier: TierState, chunks: Sequence[tuple[bytes, int, int]], now: float) -> None:
        """Queue writes of ``(key, slot, number)``, unless there is nobody to write them."""
        if not chunks:
            return
        if tier.writes.breaker.blocked(now):
            tier.counters.dropped += len(chunks)
            return
        tier.writing.update([(key, number) for key, _, number in chunks])
        self._catalog.hold_many([slot for _, slot, _ in chunks])
        length = self._catalog.length
        self._keeper.enqueue(tier, [(key, slot, length(slot)) for key, slot, _ in chunks], now)

    def _number(self) -> int:
        self._sequence += 1
        return self._sequence - 1

    def _note(self, tier: TierState, written: Answers, now: float) -> None:
        """The tier has these items, of which it had those with a 0 before."""
        tier.presence.found_many(written.keys, now)
        if tier.ledger is not None:
            for key, length in zip(written.keys, written.lengths, strict=True):
                if key not in tier.ledger:
                    tier.ledger.add(key, object_size(length))
        new = list(compress(written.keys, written.values))
        if not new:
            return
        lengths = list(compress(written.lengths, written.values))
        sizes = list(map(object_size, lengths))
        tier.counters.written_bytes += sum(lengths)
        tier.counters.writes += len(new)
        tier.chunks += len(new)
        tier.bytes += sum(sizes)
        if tier.tally is not None:
            for size in sizes:
                tier.tally.wrote(size)
        self._events.emit(report.written(new, self._host, tier))

    @staticmethod
    def _account_for_failure(tier: TierState, item: Item, result: Result) -> None:
        """Count a write that was never tried, or that a worker had when it died, whose death is one error. A
        remote server may have carried out what failed here, when only its answer was lost."""
        if result.status in (Status.CANCELLED, Status.DIED):
            tier.counters.dropped += 1
        if result.status is Status.FAILED and tier.remote and tier.tally is not None:
            tier.tally.may_have_written(object_size(item[2]))

    def _ended(self, tier: TierState, answers: Answers, now: float) -> None:
        """A worker is through with items."""
        self._let_go(tier, answers.keys, answers.slots)
        self._keeper.ended(tier, answers.lengths, now)
        self.on_over(tier, answers.keys)

    def _let_go(self, tier: TierState, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        for key in keys:
            del tier.writing[key]
        tier.overdue.difference_update(keys)
        self._catalog.drop_many(slots)


def _up(tiers: Sequence[TierState], now: float) -> list[TierState]:
    """Those of `tiers` that take writes."""
    return [tier for tier in tiers if not tier.writes.breaker.blocked(now)]


def _wants(tier: TierState, key: bytes) -> bool:
    """Whether there is any use in writing `key`."""
    return not (key in tier.writing or key in tier.tombs or _is_surely_in(tier, key))


def _due(tier: TierState) -> set[bytes]:
    """What `tier` has still to get, and may."""
    return tier.owed.keys() | (tier.writing.keys() - tier.overdue)


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
