"""Starts, watches, reaps and replaces worker processes.

Who owns what: the thread of a :class:`Nursery` waits on the pidfds of its children, reaps the dead and starts
others in their place. It knows nothing of batches: it leaves notes in ``born`` and ``dead`` and rings the
bell of the engine, whose thread alone uses and closes the children's sockets.

Processes are started with ``subprocess``: a fresh interpreter (nothing of fsspec survives a fork), in a
session of its own (Ctrl-C is the caller's), also from inside a daemonic ``multiprocessing`` process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
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
from collections.abc import Iterable, Sequence

from ..errors import ConfigError
from .base import Doorbell
from .child import ProcessSpec, make_pair

__all__ = ["Child", "Nursery", "hang_up"]

_log = logging.getLogger("kvstore")

_BOOT = (
    "import importlib, os, pickle, sys\n"
    "spec = os.fdopen(int(sys.argv[1]), 'rb')\n"
    "sys.path[:] = pickle.load(spec)\n"
    "importlib.import_module(sys.argv[2]).main(spec)\n"
)
#: Threads of numerical libraries would only cost a worker memory and start-up time. Buffers as large as a
#: chunk come and go: memory that is kept need not be faulted in again.
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
}
#: Unless the caller has set them: what libraries print would end up between the lines of the program that
#: they work for.
_QUIET = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}
#: Seconds before a worker that died is replaced: the first time, and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0
#: A worker that lived this long (seconds) did not die of its start.
_SETTLED = 10.0
#: Seconds that all killed workers together have to be gone; those hung in the kernel end later.
_GRACE = 0.2


@dataclasses.dataclass(frozen=True, eq=False)
class Child:
    """A worker process.

    Attributes
    ----------
    number : int
        Its own in the life of the engine; messages carry it.
    tier : int
        Index of the tier it serves.
    pidfd : int
        The nursery's; closed when the process has been reaped.
    jobs : socket
        The engine's end; its other end is the worker's.
    started : float
        Monotonic time in seconds.
    """

    number: int
    tier: int
    process: subprocess.Popen[bytes]
    pidfd: int
    jobs: socket.socket
    started: float


class Nursery:
    """Worker processes of all tiers.

    Parameters
    ----------
    specs : sequence of ProcessSpec
        What the workers of each tier are told; number and socket are filled in here.
    bell : Doorbell
        Rung when there is a note.

    Attributes
    ----------
    born, dead : deque of Child
        The notes: processes that were started in place of others, and those that have ended.
    """

    def __init__(self, specs: Sequence[ProcessSpec], bell: Doorbell) -> None:
        self.born: deque[Child] = deque()
        self.dead: deque[Child] = deque()
        self._specs = specs
        self._bell = bell
        self._numbers = 0
        self._living: dict[int, Child] = {}  # by pidfd
        self._replaced: set[int] = set()
        self._pauses = [_FIRST_PAUSE] * len(specs)
        self._due: list[tuple[float, int]] = []  # when to start a worker, for which tier
        self._wake = Doorbell()
        self._closing = False
        self._lock = threading.Lock()  # of what both threads change: the living, and what is due
        self._thread = threading.Thread(target=self._run, name="kvstore-nursery", daemon=True)

    def watch(self) -> None:
        """Begin to watch. Until then only the caller's thread starts workers, from then on only the
        nursery's."""
        self._thread.start()

    def spawn(self, tier: int) -> Child:
        """Start a worker process for `tier`.

        Raises
        ------
        ConfigError
            Its configuration cannot be sent to a process.
        OSError
            The system has no room for a process, or nothing to start.
        """
        self._numbers += 1
        ours, theirs = make_pair()
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            ours.setblocking(False)
            process = _start_process(
                dataclasses.replace(self._specs[tier], number=self._numbers, jobs_fd=theirs.fileno())
            )
            undo.callback(process.wait)
            undo.callback(process.kill)
            pidfd = os.pidfd_open(process.pid)
            undo.pop_all()
        child = Child(self._numbers, tier, process, pidfd, ours, started=time.monotonic())
        with self._lock:
            self._living[pidfd] = child
        return child

    def want(self, tier: int, count: int) -> None:
        """Start `count` worker processes for `tier` soon, without waiting for it."""
        with self._lock:
            self._due += [(time.monotonic(), tier)] * count
        self._wake.ring()

    def postpone(self, tier: int) -> None:
        """Start a worker process for `tier` a little later; each time the pause is longer."""
        pause = self._pauses[tier]
        self._pauses[tier] = min(_LONGEST_PAUSE, 2 * pause)
        with self._lock:
            self._due.append((time.monotonic() + pause, tier))

    def replace(self, child: Child) -> None:
        """Kill `child`, and start another in its place without waiting for its end."""
        with self._lock:
            if self._living.get(child.pidfd) is not child:
                return  # it has ended, and its descriptor may be another's
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
            self._replaced.add(child.number)
            self._due.append((time.monotonic(), child.tier))
        self._wake.ring()

    def close(self, timeout: float) -> None:
        """Wait for the workers to end, kill those that have not within `timeout` seconds, and reap them."""
        self._closing = True
        self._wake.ring()
        if self._thread.ident is not None:
            self._thread.join()
        living = list(self._living.values())
        for child in (*living, *self.dead):
            hang_up(child.jobs)
        for child in _still_running(living, timeout):
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        for child in _still_running(living, _GRACE):
            _log.warning("worker %d hangs in the kernel and cannot be ended", child.process.pid)
        while self._living:  # one by one: a close that was interrupted is called again
            pidfd, child = self._living.popitem()
            child.process.poll()  # reaps it
            os.close(pidfd)
        self._wake.close()

    # What the thread does.

    def _run(self) -> None:
        while not self._closing:
            with self._lock:
                watched = [self._wake.fd, *self._living]
                pause = min((when for when, _ in self._due), default=float("inf")) - time.monotonic()
            ready = _poll(watched, pause)
            self._wake.answer()
            for fd in ready:
                if fd != self._wake.fd and not self._closing:
                    self._bury(fd)
            self._start_due()

    def _bury(self, pidfd: int) -> None:
        with self._lock:
            child = self._living.pop(pidfd)
        child.process.wait()
        os.close(pidfd)
        if child.number in self._replaced:
            self._replaced.discard(child.number)
        else:
            if time.monotonic() - child.started > _SETTLED:
                self._pauses[child.tier] = _FIRST_PAUSE
            self.postpone(child.tier)
        self.dead.append(child)
        self._bell.ring()

    def _start_due(self) -> None:
        now = time.monotonic()
        with self._lock:
            due = [tier for when, tier in self._due if when <= now]
            self._due = [(when, tier) for when, tier in self._due if when > now]
        for tier in due:
            if self._closing:
                return
            try:
                self.born.append(self.spawn(tier))
            except OSError as error:  # no descriptor or no memory is left: that may pass
                _log.warning("cannot start a worker, trying again soon: %s", error)
                self.postpone(tier)
            self._bell.ring()


def hang_up(end: socket.socket) -> None:
    """Close our end of a pair for good: also where a forked child holds a copy of it."""
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:  # the other end has gone first
        pass
    end.close()


def _start_process(spec: ProcessSpec) -> subprocess.Popen[bytes]:
    """A fresh interpreter that reads `spec` from memory that nobody else can open by name."""
    told = pickle.dumps(sys.path) + _pickled(spec)
    fd = os.memfd_create("kvstore-spec")
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(told)
        os.lseek(fd, 0, os.SEEK_SET)
        return subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(fd), spec.module],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(fd, *spec.fds),
            env={**_QUIET, **os.environ, **_ENVIRONMENT},
            start_new_session=True,
        )
    finally:
        os.close(fd)


def _pickled(spec: ProcessSpec) -> bytes:
    try:
        return pickle.dumps(spec)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{spec.name}: its configuration cannot be sent to a worker process ({error}); "
            "give plain values in storage_options, or use engine='threads'"
        ) from error


def _poll(fds: Iterable[int], timeout: float) -> list[int]:
    """Those of `fds` that are readable, within `timeout` seconds (inf: as soon as there is one)."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return [fd for fd, _ in poller.poll(None if timeout == float("inf") else max(0.0, timeout) * 1000)]


def _still_running(children: Iterable[Child], timeout: float) -> list[Child]:
    """Wait for the end of all `children`, for `timeout` seconds; those that have not ended."""
    deadline = time.monotonic() + timeout
    return [child for child in children if not _poll([child.pidfd], deadline - time.monotonic())]
