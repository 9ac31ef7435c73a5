"""``capacity=`` of a secondary tier: writes wait until there is room.

In a directory or a bucket all instances keep to its limits together (:mod:`kvstore.planner.shared`).
Elsewhere each makes room for itself: its ledger learns from a scan at open what is there; until then nothing
is written. Victims are the least recently used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence

from ..collect.report import Report
from ..engine.base import Result, Verb
from ..frame import object_size
from ..ledger import Ledger
from .answers import Answers
from .dispatch import Dispatcher
from .erase import Erasure
from .shared import SharedGate
from .tier import Item, TierState

__all__ = ["CapacityKeeper"]

_Row = tuple[bytes, int, float]
_EraseFrom = Callable[[TierState, Sequence[bytes], Erasure, float], None]


class CapacityKeeper:
    """Stands between the cascader and the dispatcher.

    Attributes
    ----------
    erase_from : callable
        The eraser's; set by whoever puts the planner together.
    on_dropped : callable
        Called with ``(tier, item)`` for a write that no eviction can make room for.
    on_collected : callable
        Called with ``(tier, keys, now)`` for what the collector of a shared tier has deleted.
    """

    erase_from: _EraseFrom
    on_dropped: Callable[[TierState, Item], None]
    on_collected: Callable[[TierState, Sequence[bytes], float], None]

    def __init__(self, tiers: Sequence[TierState], dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._gates: dict[int, _Gate | SharedGate] = {}
        self._shared: list[SharedGate] = []
        dispatcher.register(Verb.SCAN, self)
        dispatcher.register(Verb.COLLECT, self)
        dispatcher.on_rows = lambda tier, rows: self._gates[tier.index].rows.extend(rows)
        for tier in tiers:
            if tier.tally is not None:
                self._gates[tier.index] = gate = SharedGate(self, tier, tier.tally)
                self._shared.append(gate)
            elif tier.ledger is not None:
                self._gates[tier.index] = _Gate(self, tier, tier.ledger)
                dispatcher.enqueue(tier, Verb.SCAN, [(b"", -1, 0)])

    @property
    def busy(self) -> bool:
        """Whether a collector has to be asked even if nothing else happens."""
        return any(gate.busy for gate in self._shared)

    @property
    def next_due(self) -> float:
        """No busy gate has anything to ask before this time."""
        return min((gate.due for gate in self._shared if gate.busy), default=float("inf"))

    def advance(self, now: float) -> None:
        """Ask the collectors that are due."""
        for gate in self._shared:
            gate.advance(now)

    def leave(self, now: float) -> bool:
        """Tell the collectors that this instance ends; True once they know."""
        gone = [gate.leave(now) for gate in self._shared]  # all are told, whatever the first one says
        return all(gone)

    def ask(self, tier: TierState, report: Report) -> None:
        """Send a report to the collector of a tier."""
        self._dispatcher.enqueue(tier, Verb.COLLECT, [(report.pack(), -1, 0)])

    def enqueue(self, tier: TierState, items: Sequence[Item], now: float) -> None:
        """Queue writes: at once, or as soon as there is room for them."""
        gate = self._gates.get(tier.index)
        if gate is None:
            self._dispatcher.enqueue(tier, Verb.WRITE, items)
        else:
            gate.held.extend(items)
            gate.open(now)

    def withdraw(self, tier: TierState, keys: Container[bytes]) -> list[Item]:
        """Take back the writes of `keys` that no worker has yet."""
        gate = self._gates.get(tier.index)
        queued = _take_out(tier.writes.queues[Verb.WRITE], keys)
        if gate is None:
            return queued
        for _, _, length in queued:
            gate.taken_back(object_size(length))
        return queued + _take_out(gate.held, keys)

    def withdrawn(self, tier: TierState, now: float) -> None:
        """A write was taken back: others may fit in its place."""
        gate = self._gates.get(tier.index)
        if gate is not None:
            gate.open(now)

    def ended(self, tier: TierState, lengths: Sequence[int], now: float) -> None:
        """Writes of so many bytes of payload, which were passed on, have ended, well or not."""
        gate = self._gates.get(tier.index)
        if gate is not None:
            gate.ended(sum(map(object_size, lengths)), now)

    def done(self, tier: TierState, answers: Answers, now: float) -> None:
        """A scan or a turn of a collector has ended."""
        for _, result in answers:
            self._gates[tier.index].done(result, now)

    def late(self, tier: TierState, item: Item, result: Result, now: float) -> None:
        """It was given up before; what it found is not used."""

    def release(self, item: Item, tier: TierState) -> None:
        """Pass a write on to the dispatcher."""
        self._dispatcher.enqueue(tier, Verb.WRITE, [item])


def _take_out(queue: deque[Item], keys: Container[bytes]) -> list[Item]:
    """Remove the items of `keys` from a queue, in one pass however many they are."""
    found = [item for item in queue if item[0] in keys]
    if found:
        left = [item for item in queue if item[0] not in keys]
        queue.clear()
        queue.extend(left)
    return found


class _Gate:
    """Writes to one tier that wait for room."""

    def __init__(self, keeper: CapacityKeeper, tier: TierState, ledger: Ledger) -> None:
        self.tier = tier
        self.held: deque[Item] = deque()
        self.rows: list[_Row] = []
        self._keeper = keeper
        self._ledger = ledger
        self._loaded = False
        self._leaving: dict[bytes, int] = {}

    def done(self, result: Result, now: float) -> None:
        """Take over what the scan has found. What it could not see is not counted: better some bytes too many
        than no writes at all."""
        written = dict.fromkeys(self.tier.writing)
        self._ledger.load([row for row in self.rows if row[0] not in written])
        self.tier.chunks, self.tier.bytes = len(self._ledger), self._ledger.used
        self.rows = []
        self._loaded = True
        self.open(now)

    def open(self, now: float) -> None:
        """Let writes pass while they fit; for the rest, evict what they need and no more."""
        if self.tier.writes.breaker.blocked(now):
            while self.held:
                self._keeper.on_dropped(self.tier, self.held.popleft())
        if not self._loaded:
            return
        while self.held:
            if self._ledger.fits(object_size(self.held[0][2])):
                item = self.held.popleft()
                self._ledger.expected += object_size(item[2])
                self._keeper.release(item, self.tier)
            elif self._make_room(now):
                return
            else:
                self._keeper.on_dropped(self.tier, self.held.popleft())

    def ended(self, size: int, now: float) -> None:
        """Writes that were passed on have ended, well or not."""
        self._ledger.expected -= size
        self.open(now)

    def taken_back(self, size: int) -> None:
        """A write that was passed on will not happen."""
        self._ledger.expected -= size

    def evicted(self, key: bytes, error: str, now: float) -> None:
        """A victim is gone; or it cannot be deleted, and then the write that wanted its room is dropped."""
        self._leaving.pop(key, None)
        if error:
            self._ledger.touch(key)  # others are tried before it next time
            if self.held:
                self._keeper.on_dropped(self.tier, self.held.popleft())
        self.open(now)

    def _make_room(self, now: float) -> bool:
        """Evict for the first write that waits; False when no room will come."""
        wanted = object_size(self.held[0][2]) - sum(self._leaving.values())
        victims = self._ledger.victims(wanted, {*self.tier.tombs, *self.tier.writing, *self._leaving})
        for key in victims:
            self._leaving[key] = self._ledger.size(key)
        if victims:
            eviction = _Eviction(self)
            self._keeper.erase_from(self.tier, victims, eviction, now)
        return bool(victims or self._leaving or self._ledger.expected)


class _Eviction(Erasure):
    """Deletion of victims."""

    counter = "evictions"
    hides = False

    def __init__(self, gate: _Gate) -> None:
        super().__init__()
        self._gate = gate

    def settle(self, tier: TierState, key: bytes, error: str, now: float) -> None:
        super().settle(tier, key, error, now)
        self._gate.evicted(key, error, now)
