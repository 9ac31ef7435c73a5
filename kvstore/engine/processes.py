"""The processes engine: worker processes over the shared arena, so that the caller's interpreter feels no
I/O.

Who owns what:

- The lock-holder of the store calls ``submit``, ``poll`` and ``abandon``; it owns the books (which worker
  has which batch).
- The thread of :mod:`kvstore.engine.nursery` starts processes, reaps the dead and replaces them; it leaves
  notes for ``poll`` and rings the bell.
- Each worker has a socket of its own for jobs; all share one for results, so that a poll with nothing to
  report is one system call however many workers there are. Messages carry keys and slot numbers; payload
  never does.

A worker gets batches once its backend has been opened, well or not; that of a place for peers is started when
the first peer is named. What it has not answered when it ends fails; before that is said, everything that it
did answer has been received.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from ..arena import Arena
from ..backends import Backend
from ..config import TierConfig
from ..errors import BackendError, WorkerDiedError
from ..namespace import Namespace
from .base import Batch, Completion, Doorbell, Engine, Result, Slots, Status, answer_all
from .child import MESSAGE_LIMIT, Spec, decode_outcome, make_encoder, make_pair
from .nursery import Child, Nursery, hang_up

__all__ = ["ProcessTier", "ProcessesEngine"]

#: Seconds that a fresh interpreter may take until it opens its backend; the tier's time to open comes on top.
_START_UP = 10.0


@dataclass(frozen=True)
class ProcessTier:
    """What the engine needs to know of a tier: `workers` processes, `concurrency` operations at a time in
    each."""

    config: TierConfig
    workers: int
    concurrency: int


@dataclass(eq=False)
class _Worker:
    """The books on one worker process."""

    child: Child
    deadline: float  # for opening its backend
    opened: bool = False
    error: Exception | None = None  # of opening
    lost: bool = False  # past a deadline: killed
    overdue: set[int] = field(default_factory=set)  # ids of the batches that were given up
    gone: bool = False  # its socket says that it has ended; the nursery will, too
    backlog: deque[bytes] = field(default_factory=deque)  # batches its socket had no room for
    batches: dict[int, tuple[Batch, bytearray]] = field(default_factory=dict)  # id -> what it still owes


class ProcessesEngine(Engine):
    """Worker processes.

    Parameters
    ----------
    tiers : sequence of ProcessTier
        The secondary tiers, in order.
    arena : Slots
        Its descriptor is inherited by the workers.
    namespace : Namespace
    factory : callable
        Makes a tier's backend, in the worker; picklable.
    attach : callable
        Makes of the inherited descriptor, in the worker, what `arena` is here; picklable.
    nice : int, optional
        Added to the workers' niceness.
    affinity : tuple of int, optional
        CPUs that the workers may run on.
    """

    def __init__(
        self,
        tiers: Sequence[ProcessTier],
        arena: Slots,
        namespace: Namespace,
        factory: Callable[[TierConfig, Namespace], Backend],
        *,
        attach: Callable[[int], Slots] = Arena.from_fd,
        nice: int | None = None,
        affinity: tuple[int, ...] | None = None,
    ) -> None:
        self._tiers = list(tiers)
        self._results, self._sender = make_pair()
        self._results.setblocking(False)
        self._epoll = select.epoll()
        self._bell = Doorbell()
        self._epoll.register(self._results, select.EPOLLIN)
        self._epoll.register(self._bell.fd, select.EPOLLIN)
        specs = [
            Spec(
                number=0,
                parent=os.getpid(),
                slots_fd=arena.fd,
                attach=attach,
                jobs_fd=-1,
                results_fd=self._sender.fileno(),
                tier=tier.config,
                namespace=namespace,
                factory=factory,
                concurrency=tier.concurrency,
                nice=nice,
                affinity=affinity,
            )
            for tier in self._tiers
        ]
        self._nursery = Nursery(specs, self._bell)
        self._workers: dict[int, _Worker] = {}  # by number
        self._waiting: list[deque[Batch]] = [deque() for _ in self._tiers]  # while a tier has no worker
        self._asleep = {index for index, tier in enumerate(self._tiers) if tier.config.dials}
        self._full: dict[int, _Worker] = {}  # workers with a backlog
        self._answers: list[Completion] = []  # the engine's own, for batches that no worker will answer
        self._encoder = make_encoder()
        self._decoder = msgspec.msgpack.Decoder(tuple[int, Completion | bytes])
        self._message = memoryview(bytearray(MESSAGE_LIMIT + 64))  # with room for the worker's number

    def start(self) -> list[Exception | None]:
        errors: list[Exception | None] = [None] * len(self._tiers)
        for index, tier in enumerate(self._tiers):
            for _ in range(0 if index in self._asleep else tier.workers):
                try:
                    self._adopt(self._nursery.spawn(index))
                except OSError as error:
                    errors[index] = error
                    self._nursery.postpone(index)
        self._nursery.watch()
        expected = list(self._workers.values())
        self._await_opening(expected)
        return [
            error or self._first_error(index, [w for w in expected if w.child.tier == index])
            for index, error in enumerate(errors)
        ]

    def submit(self, batch: Batch) -> None:
        message = self._encoder.encode(batch)
        able = [
            worker
            for worker in self._workers.values()
            if worker.child.tier == batch.tier and worker.opened and not (worker.lost or worker.gone)
        ]
        able.sort(key=lambda worker: len(worker.batches))
        for worker in able:
            worker.backlog.append(message)
            self._send_backlog(worker)
            if not worker.gone:
                worker.batches[batch.id] = (batch, bytearray(max(1, len(batch.keys))))
                return
        self._waiting[batch.tier].append(batch)
        if batch.tier in self._asleep:
            self._asleep.discard(batch.tier)
            self._nursery.want(batch.tier, self._tiers[batch.tier].workers)

    def has_news(self) -> bool:
        return bool(self._answers or self._epoll.poll(0))  # a third of the cost of a receive that fails

    def poll(self) -> list[Completion]:
        if not self.has_news():
            return []
        done, self._answers = self._answers, []
        dead = self._take_notes() if self._bell.rung else ()
        self._receive(done)  # after the look at who is dead: so their last words are among these
        for child in dead:
            self._bury(child, done)
        if self._full and done:  # a worker takes in what it was sent before it reports again
            for worker in list(self._full.values()):
                self._send_backlog(worker)
        return done

    def abandon(self, batch: Batch) -> None:
        """Kill the worker: its death answers what it has. One hung in the kernel dies later, and is replaced
        at once."""
        if batch in self._waiting[batch.tier]:
            self._waiting[batch.tier].remove(batch)
            self._answers.append(answer_all(batch, Result(Status.CANCELLED, error="no worker")))
            self._bell.ring()
        now = time.monotonic()
        for worker in self._workers.values():
            stuck = worker.child.tier == batch.tier and not worker.opened and now > worker.deadline
            if batch.id in worker.batches:
                worker.overdue.add(batch.id)
            elif not stuck:
                continue
            if not worker.lost:
                worker.lost = True
                self._nursery.replace(worker.child)

    def fileno(self) -> int:
        return self._epoll.fileno()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.child.process.pid for worker in self._workers.values()]

    def close(self, timeout: float) -> None:
        hang_up(self._results)  # a worker ends when it has nothing left to do, or nobody to report to
        self._nursery.close(timeout)
        self._sender.close()
        self._epoll.close()
        self._bell.close()

    # Start.

    def _await_opening(self, workers: Sequence[_Worker]) -> None:
        """Wait until each of `workers` has opened its backend, or is past its deadline."""
        while True:
            left = max((w.deadline for w in workers if not w.opened), default=0.0) - time.monotonic()
            if left <= 0:
                return
            self.wait(left)
            self.poll()

    def _first_error(self, index: int, workers: Sequence[_Worker]) -> Exception | None:
        name, timeout = self._tiers[index].config.name, self._tiers[index].config.opening_timeout
        for worker in workers:
            if not worker.opened:
                return BackendError(f"tier {name!r} did not answer within {timeout:g} s", tier=name)
            if worker.error is not None:
                return worker.error
        return None

    # Books.

    def _adopt(self, child: Child) -> None:
        deadline = time.monotonic() + _START_UP + self._tiers[child.tier].config.opening_timeout
        self._workers[child.number] = _Worker(child, deadline)

    def _take_notes(self) -> list[Child]:
        """Take in what the nursery has noted: new workers; returns those that have ended."""
        self._bell.answer()
        # In this order: whoever is noted as dead was noted as born before.
        dead = [self._nursery.dead.popleft() for _ in range(len(self._nursery.dead))]
        while self._nursery.born:
            self._adopt(self._nursery.born.popleft())
        return dead

    def _receive(self, done: list[Completion]) -> None:
        while True:
            try:
                size = self._results.recv_into(self._message)
            except BlockingIOError:
                return
            number, content = self._decoder.decode(self._message[:size])
            worker = self._workers.get(number)
            if worker is None:
                continue
            if isinstance(content, Completion):
                self._cross_off(worker, content)
                done.append(content)
            elif not content:
                worker.deadline = time.monotonic() + self._tiers[worker.child.tier].config.opening_timeout
            else:
                self._opened(worker, decode_outcome(content))

    def _opened(self, worker: _Worker, error: Exception | None) -> None:
        worker.opened, worker.error = True, error
        tier = worker.child.tier
        waiting, self._waiting[tier] = self._waiting[tier], deque()
        for batch in waiting:
            self.submit(batch)

    def _cross_off(self, worker: _Worker, completion: Completion) -> None:
        owed = worker.batches.get(completion.id)
        if owed is None:
            return
        answered, first, n = owed[1], completion.first, len(completion.results)
        answered[first : first + n] = b"\1" * n
        if 0 not in answered:
            del worker.batches[completion.id]

    def _bury(self, child: Child, done: list[Completion]) -> None:
        """Answer for a worker that has ended."""
        worker = self._workers.pop(child.number)
        self._full.pop(child.number, None)
        hang_up(child.jobs)
        why = f"the worker died (exit code {child.process.returncode})"
        if not worker.opened:
            worker.opened, worker.error = True, WorkerDiedError(f"{why} at its start")
        for batch, answered in worker.batches.values():
            blameless = worker.lost and batch.id not in worker.overdue
            result = Result(Status.CANCELLED if blameless else Status.DIED, error=why)
            done.extend(
                Completion(batch.id, index, [result], [], {})
                for index, known in enumerate(answered)
                if not known
            )

    def _send_backlog(self, worker: _Worker) -> None:
        """Send as much as the socket takes."""
        try:
            while worker.backlog:
                worker.child.jobs.send(worker.backlog[0])
                worker.backlog.popleft()
        except BlockingIOError:
            self._full[worker.child.number] = worker
            return
        except ConnectionError:
            worker.gone = True
            worker.backlog.clear()
        self._full.pop(worker.child.number, None)
