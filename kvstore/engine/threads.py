"""The threads engine: a few threads per tier in the caller's process. The library's default.

Who owns what: the lock-holder of the store calls ``submit``, ``poll`` and ``abandon``. Each worker thread
owns one :class:`Worker` and so one backend. The two meet in a :class:`_Lane` (one per tier: batches waiting,
ordered by verb) and in one deque of completions; both sides only append to or take from them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from ..errors import BackendError
from .base import Batch, Completion, Doorbell, Engine, Result, Status, Verb, answer_all, may_join
from .worker import Worker

__all__ = ["ThreadTier", "ThreadsEngine"]

#: Hung threads for each worker that a tier may have before it gets no more: each also holds slots.
_MOST_LOST = 8


@dataclass(frozen=True)
class ThreadTier:
    """What the engine needs to know of a tier: `workers` threads, each with what `make` returns, which gets
    `opening_timeout` seconds to open."""

    name: str
    make: Callable[[], Worker]
    workers: int
    opening_timeout: float


@dataclass
class _Lane:
    """Batches of one tier that no worker has taken yet, and which thread has which of the others.

    Whoever changes it takes the lock itself: Ctrl-C in the methods of the condition around it could leave it
    locked.
    """

    tier: ThreadTier
    lock: threading.RLock = field(default_factory=threading.RLock)
    heap: list[tuple[int, int, Batch]] = field(default_factory=list)
    running: dict[int, threading.Thread] = field(default_factory=dict)
    opening: dict[threading.Thread, float] = field(default_factory=dict)  # their deadlines
    lost: set[threading.Thread] = field(default_factory=set)  # hung; they serve again when they come back
    serving: int = 0  # threads that are not lost
    closed: bool = False

    def __post_init__(self) -> None:
        self.changed = threading.Condition(self.lock)

    def put(self, order: int, batch: Batch) -> None:
        with self.lock:
            heappush(self.heap, (batch.verb, order, batch))
            self.changed.notify()

    def take(self) -> Batch | None:
        """Next batch for the calling thread; None when it should end."""
        me = threading.current_thread()
        with self.lock:
            if me in self.lost:
                self.lost.discard(me)
                if self.serving >= self.tier.workers:
                    return None  # it has been replaced
                self.serving += 1
            while not self.heap and not self.closed:
                self.changed.wait()
            if self.closed:
                return None
            batch = heappop(self.heap)[2]
            self.running[batch.id] = me
            return batch

    def joining(self, running: Batch, verbs: Collection[Verb]) -> Batch | None:
        """What may be begun before `running` has ended, which the calling thread has."""
        head = self.heap[:1]  # a look that is a moment too early does no harm, and the lock costs more
        if not head or head[0][0] not in verbs:
            return None
        with self.lock:
            me = threading.current_thread()
            if me in self.lost or not self.heap or not may_join(self.heap[0][2], running, verbs):
                return None
            batch = heappop(self.heap)[2]
            self.running[batch.id] = me
            return batch

    def opened(self) -> None:
        """The calling thread is ready for batches, or never will be."""
        with self.lock:
            del self.opening[threading.current_thread()]

    def finish(self) -> None:
        """The calling thread is through with what it took."""
        me = threading.current_thread()
        with self.lock:
            for batch_id in [batch_id for batch_id, thread in self.running.items() if thread is me]:
                del self.running[batch_id]

    def withdraw(self, batch_id: int) -> Batch | None:
        """Give up on a batch: returns it if nobody had taken it. Threads that are past their time with it, or
        with opening their backend while it waited, count as lost."""
        with self.lock:
            for i, (_, _, batch) in enumerate(self.heap):
                if batch.id == batch_id:
                    self.heap[i] = self.heap[-1]
                    self.heap.pop()
                    self.heap.sort()
                    now = time.monotonic()
                    self._lose([thread for thread, end in self.opening.items() if now >= end])
                    return batch
            if batch_id in self.running:
                self._lose([self.running[batch_id]])
            return None

    def _lose(self, threads: Iterable[threading.Thread]) -> None:
        hung = set(threads) - self.lost
        self.lost |= hung
        self.serving -= len(hung)

    @property
    def short(self) -> int:
        """How many threads to start in place of lost ones."""
        with self.lock:
            missing = self.tier.workers - self.serving
            return max(0, min(missing, _MOST_LOST * self.tier.workers + 1 - len(self.lost)))

    def close(self) -> list[Batch]:
        with self.lock:
            self.closed = True
            left, self.heap = [batch for _, _, batch in self.heap], []
            self.changed.notify_all()
            return left


class ThreadsEngine(Engine):
    """Worker threads.

    Parameters
    ----------
    tiers : sequence of ThreadTier
        The secondary tiers, in order.
    """

    def __init__(self, tiers: Sequence[ThreadTier]) -> None:
        self._lanes = [_Lane(tier) for tier in tiers]
        self._threads: list[threading.Thread] = []
        self._done: deque[Completion] = deque()
        self._bell = Doorbell()
        self._order = count()

    def start(self) -> list[Exception | None]:
        opened = [self._start_thread(lane) for lane in self._lanes for _ in range(lane.tier.workers)]
        errors: list[Exception | None] = []
        for lane in self._lanes:
            mine, opened = opened[: lane.tier.workers], opened[lane.tier.workers :]
            deadline = time.monotonic() + lane.tier.opening_timeout
            errors.append(_first_error(mine, deadline, lane.tier))
        return errors

    def submit(self, batch: Batch) -> None:
        self._lanes[batch.tier].put(next(self._order), batch)

    def poll(self) -> list[Completion]:
        if not self._done and not self._bell.rung:
            return []
        self._bell.answer()
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def abandon(self, batch: Batch) -> None:
        lane = self._lanes[batch.tier]
        if lane.withdraw(batch.id) is not None:
            self._emit(answer_all(batch, Result(Status.CANCELLED)))
        for _ in range(lane.short):
            self._start_thread(lane)

    def fileno(self) -> int:
        return self._bell.fd

    def close(self, timeout: float) -> None:
        for lane in self._lanes:
            for batch in lane.close():
                self._emit(answer_all(batch, Result(Status.CANCELLED)))
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self._bell.close()  # otherwise a late worker would ring somebody else's descriptor

    def _start_thread(self, lane: _Lane) -> _Opening:
        opening = _Opening()
        thread = threading.Thread(
            target=self._serve, args=(lane, opening), name=f"kvstore-{lane.tier.name}", daemon=True
        )
        with lane.lock:
            lane.opening[thread] = time.monotonic() + lane.tier.opening_timeout
        try:
            thread.start()
        except RuntimeError as error:  # the system has no more threads: those there are go on
            del lane.opening[thread]
            opening.fail(error)
            return opening
        lane.serving += 1
        self._threads = [t for t in self._threads if t.is_alive()]
        self._threads.append(thread)
        return opening

    def _serve(self, lane: _Lane, opening: _Opening) -> None:
        try:
            worker = lane.tier.make()
        except Exception as error:
            lane.opened()
            opening.fail(error)
            self._refuse(lane, error)
            return
        try:
            worker.open()
            opening.over.set()
        except Exception as error:
            opening.fail(error)
        lane.opened()
        while (batch := lane.take()) is not None:
            worker.run(batch, self._emit, lane.joining)
            lane.finish()
        worker.close()

    def _refuse(self, lane: _Lane, error: Exception) -> None:
        """Answer for a worker that could not be made."""
        result = Result(Status.FAILED, error=f"{type(error).__name__}: {error}")
        while (batch := lane.take()) is not None:
            self._emit(answer_all(batch, result))
            lane.finish()

    def _emit(self, completion: Completion) -> None:
        self._done.append(completion)
        self._bell.ring()


class _Opening:
    """Outcome of one worker's start."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.error: Exception | None = None

    def fail(self, error: Exception) -> None:
        """It was no start."""
        self.error = error
        self.over.set()


def _first_error(openings: Sequence[_Opening], deadline: float, tier: ThreadTier) -> Exception | None:
    for opening in openings:
        if not opening.over.wait(max(0.0, deadline - time.monotonic())):
            return BackendError(
                f"tier {tier.name!r} did not answer within {tier.opening_timeout:g} s", tier=tier.name
            )
        if opening.error is not None:
            return opening.error
    return None
