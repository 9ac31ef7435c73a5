"""Facts about processes, as the kernel tells them."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "Footprint",
    "await_death",
    "await_workers",
    "children",
    "engine_of",
    "has_ended",
    "mappers",
    "state",
    "stopped",
    "wait_for",
]


class Footprint(NamedTuple):
    """What this process holds: descriptors (number -> what they are), threads, children."""

    descriptors: dict[int, str]
    threads: set[str]
    children: set[int]

    @classmethod
    def now(cls) -> Footprint:
        """Of this moment."""
        descriptors = {}
        for fd in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):  # that of the listing itself
                descriptors[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
        return cls(descriptors, {thread.name for thread in threading.enumerate()}, children())


def children() -> set[int]:
    """Process ids of this process's children, zombies included."""
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError):  # a thread that has just ended
            found.update(map(int, Path(f"/proc/self/task/{task}/children").read_text().split()))
    return found


def await_workers(store: Any, count: int) -> list[int]:
    """Wait until `count` workers have opened their backends; their process ids."""
    engine = store._engine

    def ready() -> bool:
        store.poll()
        return [worker.opened for worker in engine._workers.values()] == [True] * count

    wait_for(ready)
    return list(engine.pids)


def await_death(store: Any, pid: int) -> None:
    """Wait until the engine has seen that worker `pid` is dead."""

    def seen() -> bool:
        store.poll()
        return pid not in store._engine.pids

    wait_for(seen)


def engine_of(store: Any) -> Any:
    """The process engine of a store: tests of the engine look at what users do not see."""
    return store._engine


def state(pid: int) -> str:
    """Letter of the process's state; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


@contextmanager
def stopped(pids: Iterable[int]) -> Iterator[None]:
    """Processes stand still, as those do whose storage hangs; some may be killed meanwhile."""
    pids = list(pids)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    yield
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def has_ended(pid: int, timeout: float) -> bool:
    """Whether the process ends within `timeout` seconds; that of anybody, also a zombie that nobody reaps."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    ended = bool(poller.poll(timeout * 1000))
    os.close(pidfd)
    return ended


def mappers(inode: int) -> set[int]:
    """Processes that map the arena whose memfd has this inode; the kernel frees it when there are none."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if any("/memfd:kvstore-arena" in line and int(line.split()[4]) == inode for line in lines):
            found.add(int(maps.parent.name))
    return found


def wait_for(condition: Callable[[], object], timeout: float = 15.0) -> None:
    """Return when `condition` holds; where nothing can be waited on, it is asked again and again."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        threading.Event().wait(0.01)
