"""From queues to batches and back: windows, deadlines, breakers. Everything that goes to or comes from an
engine passes here.

1. ``enqueue`` puts items into their tier's queue for a verb.
2. ``pump`` cuts batches off the queues while the direction's window and breaker allow, and appends them to
``outbox``;
   the store submits what it finds there.
3. ``apply`` hands results to the part of the planner that registered for the verb.
4. ``expire`` gives TIMEOUT to the items of a batch past its deadline, appends the batch to ``abandoned``,
and keeps the
   flight: what the worker answers later goes to the late handler, which returns the slot. Until then nobody
   reuses it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import not_
from typing import Protocol

from ..engine.base import BATCH_LIMIT, Batch, Completion, Result, Status, Verb
from ..events import EventQueue
from .answers import Answers
from .report import breaker_event
from .tier import Direction, Item, TierState

__all__ = ["Dispatcher", "Handler"]

#: Verbs that are one operation on many keys: when it fails, that is one fault.
_AT_ONCE = (Verb.PROBE, Verb.DELETE)
#: With this status or a lower one the storage has answered.
_ANSWERED = Status.CORRUPT
#: Keys in one batch of a verb that moves no payload.
_KEYS = 256
#: Latency histogram that a verb's seconds go to.
_HISTOGRAM = {Verb.PROBE: "lookup", Verb.READ: "load", Verb.WRITE: "store"}
_IN_ORDER = (Verb.PROBE, Verb.READ, Verb.DELETE, Verb.WRITE, Verb.SCAN, Verb.COLLECT)


class Handler(Protocol):
    """Part of the planner that a verb's results go to."""

    def done(self, tier: TierState, answers: Answers, now: float) -> None:
        """These items have ended (or are past their deadline: TIMEOUT)."""

    def late(self, tier: TierState, item: Item, result: Result, now: float) -> None:
        """The worker has answered an item that had been given up."""


@dataclass
class _Flight:
    """A batch that a worker has."""

    tier: TierState
    batch: Batch
    deadline: float
    answered: bytearray
    left: int
    expired: bool = False
    blamed: bool = False  # the breaker knows that something of it has failed

    def take(self, completion: Completion) -> Answers | None:
        """Cross off what `completion` answers for the first time."""
        first, n = completion.first, len(completion.results)
        known = self.answered[first : first + n]
        if all(known):
            return None
        self.answered[first : first + n] = b"\1" * n
        answers = Answers.of(self.batch, first, completion.results)
        if any(known):
            answers = answers.where([not it for it in known])
        self.left -= len(answers)
        return answers

    def rest(self) -> Iterator[Item]:
        """Items that have not been answered."""
        batch = self.batch
        return compress(zip(batch.keys, batch.slots, batch.lengths, strict=True), map(not_, self.answered))


class Dispatcher:
    """Queues, windows and deadlines of all tiers."""

    def __init__(self, tiers: Sequence[TierState], events: EventQueue) -> None:
        self.tiers = tiers
        self.outbox: list[Batch] = []
        self.abandoned: list[Batch] = []
        self.on_rows: Callable[[TierState, list[tuple[bytes, int, float]]], None] | None = None
        self._events = events
        self._handlers: dict[Verb, Handler] = {}
        self._flights: dict[int, _Flight] = {}
        self._next_id = 0
        self._deaths: dict[tuple[int, Verb], float] = {}  # when work of this kind last died
        self._next_deadline = float("inf")

    @property
    def busy(self) -> bool:
        """Whether a worker has anything, or anything waits for one."""
        return bool(self._flights) or any(len(t.reads) or len(t.writes) or len(t.upkeep) for t in self.tiers)

    def register(self, verb: Verb, handler: Handler) -> None:
        """Send the results of `verb` to `handler`."""
        self._handlers[verb] = handler
        for tier in self.tiers:
            tier.direction(verb).queues[verb] = deque()

    def enqueue(self, tier: TierState, verb: Verb, items: Sequence[Item]) -> None:
        """Queue `items` behind what waits for the same verb."""
        tier.direction(verb).queues[verb].extend(items)

    def pump(self, now: float) -> None:
        """Cut as many batches as windows and breakers allow."""
        for tier in self.tiers:
            for direction in (tier.reads, tier.writes, tier.upkeep):
                shares: dict[Verb, int] = {}
                while (
                    direction.in_flight < direction.window
                    and any(direction.queues.values())
                    and self._cut(tier, direction, shares, now)
                ):
                    pass

    def apply(self, completion: Completion, now: float) -> None:
        """Take in what a worker reports."""
        flight = self._flights.get(completion.id)
        if flight is None:
            return
        tier = flight.tier
        if completion.rows and self.on_rows is not None and not flight.expired:
            self.on_rows(tier, completion.rows)
            flight.deadline = now + tier.config.timeout  # a scan lives as long as rows come
        if completion.results and not flight.expired:
            flight.deadline = max(flight.deadline, now + tier.config.timeout)  # each has its own time
        for name, value in completion.counters.items():
            tier.counters.custom[name] = tier.counters.custom.get(name, 0.0) + value
        answers = flight.take(completion)
        if answers is not None:
            self._answer(flight, answers, now)
        if not flight.left:
            del self._flights[completion.id]
            if not flight.expired:
                tier.direction(flight.batch.verb).in_flight -= 1

    def expire(self, now: float) -> None:
        """Give up what is past its deadline."""
        if now < self._next_deadline:
            return
        self._next_deadline = float("inf")
        for flight in list(self._flights.values()):
            if flight.expired:
                continue
            if now >= flight.deadline:
                self._give_up(flight, now)
            else:
                self._next_deadline = min(self._next_deadline, flight.deadline)

    @property
    def next_deadline(self) -> float:
        """No flight is past its deadline before this time."""
        return self._next_deadline

    def _cut(self, tier: TierState, direction: Direction, shares: dict[Verb, int], now: float) -> bool:
        """Make a batch of what is most urgent; False when the breaker is against it. `shares` has what one
        worker gets of the items of a verb: a short queue is spread over all workers."""
        verb = next((verb for verb in _IN_ORDER if direction.queues.get(verb)), None)
        if verb is None or not direction.breaker.admit(now):
            return False
        queue = direction.queues[verb]
        most = (BATCH_LIMIT if tier.bulk else _KEYS) if verb in _AT_ONCE else direction.items
        share = shares.setdefault(verb, -(-len(queue) // tier.config.workers))
        if tier.remote:
            share = max(share, tier.config.concurrency)  # as much as one of them has under way at once
        items = _take_front(queue, min(most, share))
        keys, slots, lengths = map(list, zip(*items, strict=True))
        self._next_id += 1
        batch = Batch(self._next_id, tier.lane(verb), verb, keys, slots, lengths, tier.address)
        # Behind at most `window` others, it starts when they are done: each may take its whole time.
        ahead = direction.in_flight // tier.config.workers
        deadline = now + tier.config.timeout * (1 + ahead)
        self._flights[batch.id] = _Flight(tier, batch, deadline, bytearray(len(keys)), len(keys))
        self._next_deadline = min(self._next_deadline, deadline)
        direction.in_flight += 1
        self.outbox.append(batch)
        return True

    def _answer(self, flight: _Flight, answers: Answers, now: float) -> None:
        handler = self._handlers[flight.batch.verb]
        if flight.expired:
            for item, result in answers:
                handler.late(flight.tier, item, result, now)
            return
        self._judge(flight, answers, now)
        handler.done(flight.tier, answers, now)

    def _judge(self, flight: _Flight, answers: Answers, now: float) -> None:
        """Count results, and let the breaker learn from them."""
        tier, verb = flight.tier, flight.batch.verb
        good: Sequence[float] = answers.seconds
        if answers.good is not answers:
            good = [result.seconds for result in answers.results if result.status <= _ANSWERED]
        if good:
            name = _HISTOGRAM.get(verb)
            if name is not None:
                tier.counters.histograms[name].observe_many(good)
            if tier.direction(verb).breaker.succeeded(verb, len(good)):
                self._events.emit(breaker_event(tier, verb, up=True))
        if len(good) < len(answers):
            for result in answers.results:
                if result.status > _ANSWERED:
                    self._fault(flight, result, now)

    def _fault(self, flight: _Flight, result: Result, now: float) -> None:
        """Count a failure, unless the breaker knows of it."""
        tier, verb = flight.tier, flight.batch.verb
        if result.status is Status.FAILED:
            if flight.blamed and verb in _AT_ONCE:
                return
            flight.blamed = True
        elif result.status is Status.DIED:
            if self._deaths.get((tier.index, verb)) == now:
                return  # the death of one worker is one fault, however much it had in hand
            self._deaths[tier.index, verb] = now
        elif result.status is Status.CANCELLED and not tier.direction(verb).breaker.on_trial:
            return  # never started: says nothing about the tier
        tier.counters.errors += 1
        self._blame(tier, verb, result.error, now, hang=result.status is Status.DIED)

    def _give_up(self, flight: _Flight, now: float) -> None:
        tier, verb = flight.tier, flight.batch.verb
        flight.expired = True
        tier.direction(verb).in_flight -= 1
        tier.counters.timeouts += 1
        self.abandoned.append(flight.batch)
        result = Result(Status.TIMEOUT, error=f"no answer within {tier.config.timeout:g} s")
        self._blame(tier, verb, result.error, now, hang=True)
        self._handlers[verb].done(tier, Answers.alike(flight.rest(), result), now)

    def _blame(self, tier: TierState, verb: Verb, why: str, now: float, *, hang: bool) -> None:
        """Tell a breaker of a failure. When that opens it, also after a trial, nothing waits for the tier."""
        tier.last_error = why or tier.last_error
        breaker = tier.direction(verb).breaker
        openings = breaker.openings
        if breaker.failed(now, verb, hang=hang):
            self._events.emit(breaker_event(tier, verb, up=False, why=why))
        if breaker.openings > openings:
            self._drain(tier, verb, why, now)

    def _drain(self, tier: TierState, verb: Verb, why: str, now: float) -> None:
        """End everything that is queued for the direction of `verb`."""
        down = Result(Status.CANCELLED, error=f"tier {tier.name!r} is down: {why}")
        for queued, queue in tier.direction(verb).queues.items():
            items = list(queue)
            queue.clear()
            if items:
                self._handlers[queued].done(tier, Answers.alike(items, down), now)


def _take_front(queue: deque[Item], n: int) -> list[Item]:
    """Take the first `n` out of a queue, or all."""
    if len(queue) > n:
        return [queue.popleft() for _ in range(n)]
    items = list(queue)
    queue.clear()
    return items
