"""What a tier does for vLLM, without vLLM: look-ups, loads and stores over an engine of kvstore.

The decisions are those of kvstore's planner, part by part: queues, windows, deadlines and breakers
(``dispatch``), what is known of a key (``locate``), room in a tier with limits (``capacity``). There is no
catalog, since vLLM decides what is in the host, and in which row.

Who owns what: the scheduler's thread calls everything here; nothing but :meth:`Mover.drain` and
:meth:`Mover.close` waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvstore.engine.base import Engine
from kvstore.events import Event, EventQueue
from kvstore.metrics import TierStats
from kvstore.planner import TierState
from kvstore.planner.dispatch import Dispatcher
from kvstore.planner.locate import Locator
from kvstore.presence import Known
from kvstore.snapshot import tier_stats

from .jobs import Job, Jobs
from .transfers import Loads, Stores

__all__ = ["Mover"]

#: Longest that a call which waits goes without looking at deadlines (seconds).
_TICK = 0.01


class Mover:
    """Serves one tier.

    Parameters
    ----------
    tier : TierState
    engine : Engine
        Started; it serves this tier only.
    chunk_size : int
        Bytes of a row.
    clock : callable
        Seconds, monotonic; what deadlines go by.
    """

    def __init__(
        self,
        tier: TierState,
        engine: Engine,
        chunk_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tier = tier
        self._engine = engine
        self._clock = clock
        self._events = EventQueue()
        self._jobs = Jobs(clock)
        self._dispatcher = dispatcher = Dispatcher([tier], self._events)
        self._locator = Locator([tier], dispatcher)
        self._locator.on_located = self._located
        self._unknown: dict[bytes, TierState] = {}  # to be asked with the next step's probes
        self._loads = Loads(tier, chunk_size, self._jobs, dispatcher, self._events)
        self._stores = Stores(tier, chunk_size, self._jobs, dispatcher, self._events)
        self._age()

    def lookup(self, key: bytes) -> Known:
        """What is known of `key`; where nothing is, it is asked with the next :meth:`advance`."""
        known = self._locator.where(key, self._locator.askable(self._now))[1]
        if known is Known.UNKNOWN:
            self._unknown[key] = self._tier
            known = Known.PROBING
        return known

    def load(self, job_id: int, keys: Sequence[bytes], names: Sequence[bytes], rows: Sequence[int]) -> None:
        """Begin a job: fill `rows` with the chunks stored as `names`, which the job calls `keys`."""
        self._loads.start(self._jobs.start(job_id, keys), names, rows, self._clock())

    def store(self, job_id: int, keys: Sequence[bytes], names: Sequence[bytes], rows: Sequence[int]) -> None:
        """Begin a job: write what is in `rows` under `names`; the job calls the chunks `keys`."""
        self._stores.start(self._jobs.start(job_id, keys), names, rows, self._clock())

    def poll(self) -> list[Job]:
        """Take in what workers have answered; the jobs that have ended since the last call."""
        self._take_in()
        return self._jobs.take()

    def advance(self) -> None:
        """Start what is due, and give up what is past its deadline."""
        self._age()
        now = self._now
        self._ask()
        self._dispatcher.expire(now)
        self._stores.keeper.advance(now)
        self._dispatcher.pump(now)
        outbox, self._dispatcher.outbox = self._dispatcher.outbox, []
        for batch in outbox:
            self._engine.submit(batch)
        abandoned, self._dispatcher.abandoned = self._dispatcher.abandoned, []
        for batch in abandoned:
            self._engine.abandon(batch)

    def drain(self) -> None:
        """Return when no worker has anything to do with any row; what has ended by then waits for
        :meth:`poll`."""
        self._serve_until(lambda: not self._jobs.active, float("inf"))

    def forget(self) -> None:
        """Nothing that was known of any key holds any longer."""
        self._tier.presence.clear()

    def events(self) -> list[Event]:
        """Events since the last call."""
        return list(self._events.take())

    def stats(self) -> TierStats:
        """Counters and latencies of the tier."""
        return tier_stats(self._tier, self._clock())

    def close(self, timeout: float) -> None:
        """End the workers, in about `timeout` seconds; stores that have not begun are dropped."""
        self._serve_until(lambda: self._stores.keeper.leave(self._now), timeout / 2)
        self._engine.close(timeout / 2)

    def _ask(self) -> None:
        """Ask for what nothing is known of; what is too much to ask is a miss for the time being."""
        if self._unknown:
            keys = list(self._unknown.items())
            self._unknown.clear()
            for key, tier in keys[self._locator.ask(keys) :]:
                tier.presence.lost(key, self._now)

    def _located(self, key: bytes, next_tier: TierState | None) -> None:
        """A probe has ended, and is not repeated; hits are counted when they are read."""
        if next_tier is None:
            self._tier.counters.misses += self._tier.presence.get(key) is not Known.PRESENT

    def _serve_until(self, ready: Callable[[], bool], timeout: float) -> None:
        deadline = self._clock() + timeout
        while not ready() and self._clock() < deadline:
            self.advance()
            self._engine.wait(_TICK)
            self._take_in()

    def _take_in(self) -> None:
        now = self._clock()
        for completion in self._engine.poll():
            self._dispatcher.apply(completion, now)

    def _age(self) -> None:
        """Note the time for the look-ups to come; they are many, and all at one time."""
        self._now = self._clock()
        self._locator.age(self._now)
