"""Loads and stores of one tier: what becomes of each chunk of vLLM's jobs.

vLLM may reuse a row as soon as the job that names it has ended. So a chunk past its deadline does not end its
job: it is counted, the tier's breaker learns of it, the engine does away with the worker that has it, and
the chunk ends when that worker has answered or is gone. A worker *process* that hangs is killed, so this is
soon; a thread cannot be, and keeps the row for as long as it hangs.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import count

from kvstore.engine.base import Result, Status, Verb
from kvstore.events import EventQueue
from kvstore.frame import object_size
from kvstore.planner import TierState, report
from kvstore.planner.answers import Answers
from kvstore.planner.capacity import CapacityKeeper
from kvstore.planner.dispatch import Dispatcher
from kvstore.planner.erase import Eraser
from kvstore.planner.tier import Item
from kvstore.presence import Known

from .jobs import Job, Jobs

__all__ = ["HOST", "Loads", "Stores"]

#: Name of vLLM's host tier in events.
HOST = "host"


class Loads:
    """Reads into rows."""

    def __init__(
        self, tier: TierState, chunk_size: int, jobs: Jobs, dispatcher: Dispatcher, events: EventQueue
    ) -> None:
        self._tier = tier
        self._chunk_size = chunk_size
        self._jobs = jobs
        self._dispatcher = dispatcher
        self._events = events
        self._rows: dict[int, tuple[Job, int]] = {}  # row -> the job that fills it, and its place there
        dispatcher.register(Verb.READ, self)

    def start(self, job: Job, keys: Sequence[bytes], rows: Sequence[int], now: float) -> None:
        """Begin to fill `rows` with the chunks `keys`."""
        if not self._tier.readable(now):
            for place in range(len(keys)):
                self._jobs.settle(job, place, False)
            return
        for place, row in enumerate(rows):
            self._rows[row] = (job, place)
        items = [(key, row, 0) for key, row in zip(keys, rows, strict=True)]
        self._dispatcher.enqueue(self._tier, Verb.READ, items)

    def done(self, tier: TierState, answers: Answers, now: float) -> None:
        """Reads have ended, or are past their deadline: then nobody is promised their chunks meanwhile."""
        for item, result in answers:
            if result.status is Status.TIMEOUT:
                tier.presence.lost(item[0], now)
            else:
                self._ended(tier, item, result, now)

    def late(self, tier: TierState, item: Item, result: Result, now: float) -> None:
        """The worker is through with the row at last; what it has read is as good as any."""
        self._ended(tier, item, result, now)

    def _ended(self, tier: TierState, item: Item, result: Result, now: float) -> None:
        key, row, _ = item
        good = result.status is Status.OK and result.value == self._chunk_size
        if good:
            self._read(tier, key, now)
        else:
            self._failed(tier, key, result, now)
        job, place = self._rows.pop(row)
        self._jobs.settle(job, place, good, self._chunk_size if good else 0)

    def _read(self, tier: TierState, key: bytes, now: float) -> None:
        tier.counters.hits += 1
        tier.counters.reads += 1
        tier.counters.read_bytes += self._chunk_size
        tier.presence.found(key, now)
        if tier.ledger is not None:
            tier.ledger.touch(key)

    def _failed(self, tier: TierState, key: bytes, result: Result, now: float) -> None:
        tier.counters.misses += 1
        tier.presence.lost(key, now)
        if result.status in (Status.CORRUPT, Status.OK):  # OK: sound, but not a whole row
            tier.counters.corrupt += 1
            why = result.error or f"{result.value} bytes where a row has {self._chunk_size}"
            self._events.emit(report.corrupt(key, tier, why))


class Stores:
    """Writes from rows, within the limits of the tier."""

    def __init__(
        self, tier: TierState, chunk_size: int, jobs: Jobs, dispatcher: Dispatcher, events: EventQueue
    ) -> None:
        self._tier = tier
        self._chunk_size = chunk_size
        self._jobs = jobs
        self._events = events
        self._keys: dict[bytes, tuple[Job, int]] = {}  # key -> the job that writes it, and its place there
        self._sequence = count()
        dispatcher.register(Verb.WRITE, self)
        self._keeper = keeper = CapacityKeeper([tier], dispatcher)
        self._eraser = Eraser([tier], dispatcher, self.withdraw, events)
        keeper.erase_from, keeper.on_dropped = self._eraser.erase_from, self.drop
        keeper.on_collected = self._eraser.collected

    @property
    def keeper(self) -> CapacityKeeper:
        """Makes room in the tier."""
        return self._keeper

    def start(self, job: Job, keys: Sequence[bytes], rows: Sequence[int], now: float) -> None:
        """Begin to write the chunks `keys` from `rows`; what is there, or cannot be taken, ends at once.

        A job is taken as a whole while less than the limit is under way, so that no prompt is cut short.
        """
        tier = self._tier
        has_room = tier.write_room() > 0 and not tier.writes.breaker.blocked(now)
        for place, (key, row) in enumerate(zip(keys, rows, strict=True)):
            if not self._is_wanted(key):
                self._jobs.settle(job, place, True)
            elif key in tier.tombs or not has_room:
                tier.counters.dropped += 1
                self._jobs.settle(job, place, False)
            else:
                tier.writing[key] = next(self._sequence)
                self._keys[key] = (job, place)
                self._keeper.enqueue(tier, [(key, row, self._chunk_size)], now)

    def done(self, tier: TierState, answers: Answers, now: float) -> None:
        """Writes have ended; after a TIMEOUT the worker may still read the row."""
        for item, result in answers:
            if result.status is Status.TIMEOUT:
                tier.overdue.add(item[0])
            else:
                tier.counters.dropped += result.status in (Status.CANCELLED, Status.DIED)
                self._ended(tier, item, result, now)

    def late(self, tier: TierState, item: Item, result: Result, now: float) -> None:
        """The worker is through with the row at last."""
        self._ended(tier, item, result, now)

    def withdraw(self, tier: TierState, keys: Container[bytes], now: float) -> None:
        """Take back the writes of `keys` that no worker has yet."""
        items = self._keeper.withdraw(tier, keys)
        for key, _, _ in items:
            self._finish(tier, key, False)
        if items:
            self._keeper.withdrawn(tier, now)

    def drop(self, tier: TierState, item: Item) -> None:
        """A write that waited for room in vain."""
        tier.counters.dropped += 1
        self._finish(tier, item[0], False)

    def _is_wanted(self, key: bytes) -> bool:
        tier = self._tier
        there = key in tier.writing or tier.presence.get(key) is Known.PRESENT
        return tier.config.write != "off" and not there

    def _ended(self, tier: TierState, item: Item, result: Result, now: float) -> None:
        good = result.status is Status.OK
        created = good and bool(result.value)
        if good:
            self._note(tier, item[0], created, now)
        self._finish(tier, item[0], good, self._chunk_size if created else 0)
        self._keeper.ended(tier, [self._chunk_size], now)
        self._eraser.write_over(tier, [item[0]])

    def _note(self, tier: TierState, key: bytes, created: bool, now: float) -> None:
        size = object_size(self._chunk_size)
        tier.presence.found(key, now)
        if created:
            tier.counters.writes += 1
            tier.counters.written_bytes += self._chunk_size
            tier.chunks += 1
            tier.bytes += size
            if tier.tally is not None:
                tier.tally.wrote(size)
            self._events.emit(report.written((key,), HOST, tier))
        if tier.ledger is not None and key not in tier.ledger:
            tier.ledger.add(key, size)

    def _finish(self, tier: TierState, key: bytes, good: bool, moved: int = 0) -> None:
        del tier.writing[key]
        tier.overdue.discard(key)
        job, place = self._keys.pop(key)
        self._jobs.settle(job, place, good, moved)
