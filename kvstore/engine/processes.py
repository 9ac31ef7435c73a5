"""The processes engine: worker processes over the shared arena, so that the caller's interpreter feels no
I/O.

Who owns what:

- The lock-holder of the store calls ``submit``, ``poll`` and ``abandon``; it owns the books (which worker
  has which batch).
- A :class:`_Nursery` thread starts worker processes, watches their pidfds, reaps the dead and replaces them.
  It never touches the books: it leaves notes in ``born`` and ``dead``, and rings the bell.
- Each worker has a socket of its own for jobs; all share one for results, so that a poll with nothing to
  report is one failed receive however many workers there are. Messages carry keys and slot numbers; payload
  never does.

Processes are started with ``subprocess``: a fresh interpreter (nothing of fsspec survives a fork), in a
session of its own (Ctrl-C is the caller's), also from inside a daemonic ``multiprocessing`` process.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..arena import Arena
from ..backends import Backend
from ..config import TierConfig
from ..errors import BackendError, WorkerDiedError
from ..namespace import Namespace
from .base import Batch, Completion, Doorbell, Engine, Result, Status
from .child import MESSAGE_LIMIT, Spec, decode_hello

__all__ = ["ProcessTier", "ProcessesEngine"]

_BOOT = (
    "import os, pickle, sys\n"
    "spec = os.fdopen(int(sys.argv[1]), 'rb')\n"
    "sys.path[:] = pickle.load(spec)\n"
    "from kvstore.engine.child import main\n"
    "main(spec)\n"
)
#: Threads of numerical libraries would only cost a worker memory and start-up time.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
#: Seconds before a worker that died is replaced: the first time, and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0
#: A worker that lived this long (seconds) did not die of its start.
_SETTLED = 10.0


@dataclass(frozen=True)
class ProcessTier:
    """What the engine needs to know of a tier: `workers` processes, `concurrency` operations at a time in
    each."""

    config: TierConfig
    workers: int
    concurrency: int


@dataclass(eq=False)
class _Child:
    """A worker process, and the books on it."""

    number: int
    tier: int
    process: subprocess.Popen[bytes]
    pidfd: int
    jobs: socket.socket
    started: float
    lost: bool = False  # past a deadline: killed, gets no more work
    backlog: deque[bytes] = field(default_factory=deque)  # batches its socket had no room for
    batches: dict[int, tuple[Batch, bytearray]] = field(default_factory=dict)  # id -> what it still owes


class ProcessesEngine(Engine):
    """Worker processes.

    Parameters
    ----------
    tiers : sequence of ProcessTier
        The secondary tiers, in order.
    arena : Arena
        Its descriptor is inherited by the workers.
    namespace : Namespace
    factory : callable
        Makes a tier's backend, in the worker; picklable.
    nice : int, optional
        Added to the workers' niceness.
    affinity : tuple of int, optional
        CPUs that the workers may run on.
    """

    def __init__(
        self,
        tiers: Sequence[ProcessTier],
        arena: Arena,
        namespace: Namespace,
        factory: Callable[[TierConfig, Namespace], Backend],
        *,
        nice: int | None = None,
        affinity: tuple[int, ...] | None = None,
    ) -> None:
        self._tiers = list(tiers)
        self._results, sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._results.setblocking(False)
        self._bell = Doorbell()
        self._nursery = _Nursery(self._tiers, arena, namespace, factory, sender, self._bell, nice, affinity)
        self._epoll = select.epoll()
        self._epoll.register(self._results, select.EPOLLIN)
        self._epoll.register(self._bell.fd, select.EPOLLIN)
        self._children: dict[int, _Child] = {}
        self._waiting: list[deque[Batch]] = [deque() for _ in self._tiers]  # while a tier has no worker
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(tuple[int, Completion | bytes])
        self._hellos: dict[int, Exception | None] = {}
        self._answers: list[Completion] = []  # the engine's own, for batches that no worker will answer
        self._full: set[int] = set()  # children with a backlog

    def start(self) -> list[Exception | None]:
        for index, tier in enumerate(self._tiers):
            for _ in range(tier.workers):
                self._adopt(self._nursery.spawn(index))
        self._nursery.watch()
        expected = list(self._children.values())
        started = time.monotonic()
        longest = max((tier.config.timeout for tier in self._tiers), default=0.0)
        while not all(self._heard_of(child) for child in expected):
            left = started + longest - time.monotonic()
            if left <= 0:
                break
            self.wait(left)
            self._answers.extend(self.poll())
        return [
            self._opening(index, [c for c in expected if c.tier == index])
            for index in range(len(self._tiers))
        ]

    def submit(self, batch: Batch) -> None:
        children = [c for c in self._children.values() if c.tier == batch.tier and not c.lost]
        if not children:
            self._waiting[batch.tier].append(batch)
            return
        child = min(children, key=lambda c: len(c.batches))
        child.batches[batch.id] = (batch, bytearray(max(1, len(batch.keys))))
        message = self._encoder.encode(batch)
        if child.backlog or not _send(child.jobs, message):
            child.backlog.append(message)
            self._full.add(child.number)

    def poll(self) -> list[Completion]:
        done, self._answers = self._answers, []
        while True:
            try:
                message = self._results.recv(MESSAGE_LIMIT)
            except BlockingIOError:
                break
            number, content = self._decoder.decode(message)
            if isinstance(content, Completion):
                self._cross_off(number, content)
                done.append(content)
            else:
                self._hellos[number] = decode_hello(content)
        if self._bell.rung:
            self._read_notes(done)
        if self._full:
            self._send_backlogs()
        return done

    def abandon(self, batch: Batch) -> None:
        """Kill the worker: its death answers what it has. One hung in the kernel dies later, and is replaced
        at once."""
        if batch in self._waiting[batch.tier]:
            self._waiting[batch.tier].remove(batch)
            self._answer(batch, Status.CANCELLED, "no worker")
            return
        for child in self._children.values():
            if batch.id in child.batches and not child.lost:
                child.lost = True
                self._nursery.replace(child)

    def fileno(self) -> int:
        return self._epoll.fileno()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [child.process.pid for child in self._children.values()]

    def close(self, timeout: float) -> None:
        for child in self._children.values():
            child.jobs.close()  # the worker ends when it is through with what it has in hand
        self._nursery.close(timeout)
        self._epoll.close()
        self._results.close()
        self._bell.close()

    # Books.

    def _adopt(self, child: _Child) -> None:
        self._children[child.number] = child
        waiting, self._waiting[child.tier] = self._waiting[child.tier], deque()
        for batch in waiting:
            self.submit(batch)

    def _cross_off(self, number: int, completion: Completion) -> None:
        child = self._children.get(number)
        owed = child.batches.get(completion.id) if child else None
        if child is None or owed is None:
            return
        answered = owed[1]
        for index in range(completion.first, completion.first + len(completion.results)):
            answered[index] = 1
        if all(answered):
            del child.batches[completion.id]

    def _read_notes(self, done: list[Completion]) -> None:
        """Take in what the nursery has noted: new workers, and dead ones, whose work has failed."""
        self._bell.answer()
        while self._nursery.born:
            self._adopt(self._nursery.born.popleft())
        while self._nursery.dead:
            child = self._nursery.dead.popleft()
            self._children.pop(child.number, None)
            self._full.discard(child.number)
            self._hellos.setdefault(child.number, WorkerDiedError("a worker died at its start"))
            status = Status.CANCELLED if child.lost else Status.DIED  # one batch of a lost worker was at fault
            result = Result(status, error=f"the worker died (exit code {child.process.returncode})")
            for batch, answered in child.batches.values():
                done.extend(
                    Completion(batch.id, index, [result], [], {})
                    for index, known in enumerate(answered)
                    if not known
                )
            child.jobs.close()

    def _send_backlogs(self) -> None:
        for number in list(self._full):
            child = self._children[number]
            while child.backlog and _send(child.jobs, child.backlog[0]):
                child.backlog.popleft()
            if not child.backlog:
                self._full.discard(number)

    def _answer(self, batch: Batch, status: Status, why: str) -> None:
        results = [Result(status, error=why)] * max(1, len(batch.keys))
        self._answers.append(Completion(batch.id, 0, results, [], {}))
        self._bell.ring()

    # Start.

    def _heard_of(self, child: _Child) -> bool:
        return child.number in self._hellos

    def _opening(self, index: int, children: list[_Child]) -> Exception | None:
        name, timeout = self._tiers[index].config.name, self._tiers[index].config.timeout
        for child in children:
            if child.number not in self._hellos:
                return BackendError(f"tier {name!r} did not answer within {timeout:g} s", tier=name)
            if (error := self._hellos[child.number]) is not None:
                return error
        return None


class _Nursery:
    """Starts, watches, reaps and replaces worker processes, in a thread of its own."""

    def __init__(
        self,
        tiers: Sequence[ProcessTier],
        arena: Arena,
        namespace: Namespace,
        factory: Callable[[TierConfig, Namespace], Backend],
        sender: socket.socket,
        bell: Doorbell,
        nice: int | None,
        affinity: tuple[int, ...] | None,
    ) -> None:
        self.born: deque[_Child] = deque()
        self.dead: deque[_Child] = deque()
        self._tiers = tiers
        self._arena = arena
        self._common: dict[str, Any] = {
            "parent": os.getpid(),
            "arena_fd": arena.fd,
            "results_fd": sender.fileno(),
            "namespace": namespace,
            "factory": factory,
            "nice": nice,
            "affinity": affinity,
        }
        self._sender = sender
        self._bell = bell
        self._numbers = 0
        self._living: dict[int, _Child] = {}  # by pidfd
        self._replaced: set[int] = set()
        self._pauses = [_FIRST_PAUSE] * len(tiers)
        self._due: list[tuple[float, int]] = []  # when to start a worker, for which tier
        self._wake = Doorbell()
        self._closing = threading.Event()
        self._lock = threading.Lock()  # born workers and replacements come from two threads
        self._thread = threading.Thread(target=self._run, name="kvstore-nursery", daemon=True)

    def watch(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def spawn(self, tier: int) -> _Child:
        """Start a worker process for `tier`."""
        self._numbers += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        spec = Spec(
            number=self._numbers,
            jobs_fd=theirs.fileno(),
            tier=self._tiers[tier].config,
            concurrency=self._tiers[tier].concurrency,
            **self._common,
        )
        with theirs:
            process = _start_process(spec)
        child = _Child(spec.number, tier, process, os.pidfd_open(process.pid), ours, started=time.monotonic())
        with self._lock:
            self._living[child.pidfd] = child
        return child

    def replace(self, child: _Child) -> None:
        """Kill `child`, and start another in its place without waiting for its end."""
        with self._lock:
            if child.pidfd not in self._living:
                return
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
            self._replaced.add(child.number)
            self._due.append((time.monotonic(), child.tier))
        self._wake.ring()

    def close(self, timeout: float) -> None:
        """Wait for the workers to end, kill those that have not within `timeout` seconds, and reap them."""
        self._closing.set()
        self._wake.ring()
        if self._thread.ident is not None:
            self._thread.join()
        deadline = time.monotonic() + timeout
        for child in list(self._living.values()):
            if not select.select([child.pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
            try:
                child.process.wait(max(0.2, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:  # hung in the kernel: it ends when the kernel lets it
                pass
            os.close(child.pidfd)
            child.jobs.close()
        self._sender.close()
        self._wake.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            with self._lock:
                watched = [self._wake.fd, *self._living]
                pause = min((when for when, _ in self._due), default=float("inf")) - time.monotonic()
            poller = select.poll()
            for fd in watched:
                poller.register(fd, select.POLLIN)
            ready = poller.poll(None if pause == float("inf") else max(0.0, pause) * 1000)
            self._wake.answer()
            for fd, _ in ready:
                if fd != self._wake.fd and not self._closing.is_set():
                    self._bury(fd)
            self._start_due()

    def _bury(self, pidfd: int) -> None:
        with self._lock:
            child = self._living.pop(pidfd)
        child.process.wait()
        os.close(pidfd)
        if child.number not in self._replaced:
            lived = time.monotonic() - child.started
            pause = _FIRST_PAUSE if lived > _SETTLED else self._pauses[child.tier]
            self._pauses[child.tier] = min(_LONGEST_PAUSE, 2 * pause)
            with self._lock:
                self._due.append((time.monotonic() + pause, child.tier))
        self.dead.append(child)
        self._bell.ring()

    def _start_due(self) -> None:
        now = time.monotonic()
        with self._lock:
            due = [tier for when, tier in self._due if when <= now]
            self._due = [(when, tier) for when, tier in self._due if when > now]
        for tier in due:
            if not self._closing.is_set():
                self.born.append(self.spawn(tier))
                self._bell.ring()


def _start_process(spec: Spec) -> subprocess.Popen[bytes]:
    """A fresh interpreter that reads `spec` from memory that nobody else can open by name."""
    fd = os.memfd_create("kvstore-spec")
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            pickle.dump(sys.path, file)
            pickle.dump(spec, file)
        os.lseek(fd, 0, os.SEEK_SET)
        return subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(fd)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(fd, spec.arena_fd, spec.jobs_fd, spec.results_fd),
            env={**os.environ, **_ENVIRONMENT},
            start_new_session=True,
        )
    finally:
        os.close(fd)


def _send(jobs: socket.socket, message: bytes) -> bool:
    """False when the socket is full; a worker that has ended is left to the nursery to find."""
    try:
        jobs.send(message)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
