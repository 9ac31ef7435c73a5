"""The worker process: receives batches over a socket, moves bytes between storage and the shared arena,
reports.

Started by :mod:`kvstore.engine.nursery` with a fresh interpreter, so that it holds nothing of its parent but
the descriptors it was given. Two threads: the main one works; the other watches the parent through a pidfd
and ends the process when the parent is gone, for the socket tells that only once every forked copy of the
parent is gone too.

Messages to the parent are pairs of the worker's number and a :class:`Completion`, or bytes: none when it is
up and begins to open its backend, then the outcome of that.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import BinaryIO, ClassVar

import msgspec

from ..backends import Backend
from ..collect.collector import collector_of
from ..config import TierConfig
from ..errors import ConfigError
from ..namespace import Namespace
from .base import Batch, Completion, Slots, Verb, may_join
from .worker import Worker

__all__ = [
    "MESSAGE_LIMIT",
    "ProcessSpec",
    "Spec",
    "decode_outcome",
    "main",
    "make_encoder",
    "make_pair",
    "take_place",
    "watch_parent",
]

#: Largest message on either socket, in bytes; a socket's buffer must hold it whole.
MESSAGE_LIMIT = 128 << 10


@dataclass(frozen=True)
class ProcessSpec:
    """What every process of a nursery is told; it arrives pickled, in memory that only parent and child can
    see.

    `module` is the one whose ``main`` the process runs.
    """

    module: ClassVar[str]

    number: int
    parent: int
    slots_fd: int
    jobs_fd: int

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors that the process inherits."""
        return (self.slots_fd, self.jobs_fd)

    @property
    def name(self) -> str:
        """What the process is for, in messages."""
        raise NotImplementedError


@dataclass(frozen=True)
class Spec(ProcessSpec):
    """Everything a worker process is told."""

    module: ClassVar[str] = "kvstore.engine.child"

    attach: Callable[[int], Slots]
    results_fd: int
    tier: TierConfig
    namespace: Namespace
    factory: Callable[[TierConfig, Namespace], Backend]
    concurrency: int
    nice: int | None
    affinity: tuple[int, ...] | None

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors that the process inherits."""
        return (*super().fds, self.results_fd)

    @property
    def name(self) -> str:
        """What the process is for, in messages."""
        return f"tier {self.tier.name!r}"


def make_pair() -> tuple[socket.socket, socket.socket]:
    """Connected sockets that keep the borders of messages, with room for a few of the largest."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MESSAGE_LIMIT)
    return pair


def make_encoder() -> msgspec.msgpack.Encoder:
    """An encoder of messages, for which a key of any subclass of bytes is bytes."""
    return msgspec.msgpack.Encoder(enc_hook=bytes)


def decode_outcome(content: bytes) -> Exception | None:
    """Why a worker could not open its backend; None when it could."""
    error: Exception | None = pickle.loads(content)
    return error


def main(spec_file: BinaryIO) -> None:
    """Serve until the parent closes the socket, or is gone."""
    spec: Spec = pickle.load(spec_file)
    spec_file.close()
    watch_parent(spec.parent)
    report = _Reporter(socket.socket(fileno=spec.results_fd), spec.number)
    with suppress(BrokenPipeError):  # nobody listens any longer
        try:
            worker = _make_worker(spec)
        except Exception as error:
            report.opened(error)
            os._exit(1)
        report.begins()
        report.opened(_open(worker))
        _serve(socket.socket(fileno=spec.jobs_fd), worker, report)
    worker.close()
    os._exit(0)  # threads of the backend's libraries that hang would keep an orderly end waiting


def watch_parent(parent: int) -> None:
    """End this process with the parent, whatever it is doing."""
    try:
        pidfd = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    if os.getppid() != parent:  # it was gone before the look, and its number may be somebody else's
        os._exit(1)

    def wait() -> None:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.poll()
        os._exit(1)

    threading.Thread(target=wait, name="kvstore-parent", daemon=True).start()


def _make_worker(spec: Spec) -> Worker:
    take_place(spec.nice, spec.affinity)
    backend = spec.factory(spec.tier, spec.namespace)
    return Worker(
        backend,
        spec.attach(spec.slots_fd).view,
        retries=spec.tier.retries,
        timeout=spec.tier.timeout,
        concurrency=spec.concurrency,
        collector=collector_of(spec.tier, spec.namespace, backend),
        has_quick_probes=spec.tier.is_near,
        begins_ahead=True,
    )


def _open(worker: Worker) -> Exception | None:
    try:
        worker.open()
    except Exception as error:  # it is tried again with the first batch
        return error
    return None


def take_place(nice: int | None, affinity: tuple[int, ...] | None) -> None:
    """Take a priority and CPUs.

    Raises
    ------
    ConfigError
        The system refuses.
    """
    try:
        if nice is not None:
            os.nice(nice)
        if affinity is not None:
            os.sched_setaffinity(0, affinity)
    except OSError as error:
        raise ConfigError(
            f"nice={nice} and affinity={affinity} cannot both be had for workers: {error}"
        ) from error


class _Reporter:
    """The worker's end of the socket that all workers share."""

    def __init__(self, results: socket.socket, number: int) -> None:
        self._results = results
        self._number = number
        self._encoder = make_encoder()

    def completion(self, completion: Completion) -> None:
        """Report results, in several messages where one is not enough."""
        message = self._encoder.encode((self._number, completion))
        if len(message) <= MESSAGE_LIMIT:
            self._results.send(message)
            return
        for half in _halves(completion):
            self.completion(half)

    def begins(self) -> None:
        """The process is up; what follows depends on the storage."""
        self._results.send(self._encoder.encode((self._number, b"")))

    def opened(self, error: Exception | None) -> None:
        """How opening the backend has ended."""
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)  # some exceptions only fail on the way back
            fits = len(pickled) <= MESSAGE_LIMIT // 2
        except Exception:
            fits = False
        if not fits:
            pickled = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"[:1000]))
        self._results.send(self._encoder.encode((self._number, pickled)))


def _halves(completion: Completion) -> tuple[Completion, Completion]:
    if completion.rows:
        middle = len(completion.rows) // 2
        return (
            completion._replace(results=[], rows=completion.rows[:middle], counters={}),
            completion._replace(rows=completion.rows[middle:]),
        )
    middle = len(completion.results) // 2
    return (
        completion._replace(results=completion.results[:middle], counters={}),
        completion._replace(first=completion.first + middle, results=completion.results[middle:]),
    )


class _Inbox:
    """The worker's end of its socket for jobs, and what has come: the most urgent goes first."""

    def __init__(self, jobs: socket.socket) -> None:
        self._jobs = jobs
        self._decoder = msgspec.msgpack.Decoder(Batch)
        self._heap: list[tuple[int, int, Batch]] = []
        self._order = count()
        self._over = False

    def next(self) -> Batch | None:
        """Wait for a batch; None when there will be no more."""
        self._look()
        while not self._heap and not self._over:
            self._receive(0)
        return None if self._over else heappop(self._heap)[2]

    def joining(self, running: Batch, verbs: Collection[Verb]) -> Batch | None:
        """What may be begun before `running` has ended."""
        self._look()
        if self._heap and may_join(self._heap[0][2], running, verbs):
            return heappop(self._heap)[2]
        return None

    def _look(self) -> None:
        """Take in what is there."""
        with suppress(BlockingIOError):
            while not self._over:
                self._receive(socket.MSG_DONTWAIT)

    def _receive(self, flags: int) -> None:
        try:
            data = self._jobs.recv(MESSAGE_LIMIT, flags)
        except ConnectionError:
            data = b""
        if not data:
            self._over = True
            return
        batch = self._decoder.decode(data)
        heappush(self._heap, (batch.verb, next(self._order), batch))


def _serve(jobs: socket.socket, worker: Worker, report: _Reporter) -> None:
    """Run what arrives until either socket is closed at the other end."""
    inbox = _Inbox(jobs)
    with suppress(ConnectionError):
        while (batch := inbox.next()) is not None:
            worker.run(batch, report.completion, inbox.joining)
