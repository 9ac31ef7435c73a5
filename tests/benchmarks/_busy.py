"""The busy loop that stands for an engine's scheduler, and what moves bytes below it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle

import kvstore

CHUNK = 2 << 20
BATCH = 16  # chunks in a request, unless it says otherwise
SECONDS = 0.7
STEP_SECONDS = 0.0015

Tick = Callable[[], int]


class Loop:
    """The busy loop; it measures itself."""

    def __init__(self) -> None:
        table = {os.urandom(16): number for number in range(4096)}
        self._table = table
        self._keys = list(table)
        started = time.perf_counter()
        self._pass()
        self._passes = max(1, round(STEP_SECONDS / (time.perf_counter() - started)))

    def _pass(self) -> None:
        table = self._table
        for key in self._keys:
            table[key]

    def run(self, tick: Tick | None) -> tuple[float, float, float]:
        """Steps per second, 99th percentile of a step in seconds, bytes per second that `tick` reports."""
        steps, moved = [], 0
        end = time.perf_counter() + SECONDS
        before = time.perf_counter()
        while before < end:
            for _ in range(self._passes):
                self._pass()
            if tick is not None:
                moved += tick()
            now = time.perf_counter()
            steps.append(now - before)
            before = now
        total = sum(steps)
        return len(steps) / total, statistics.quantiles(steps, n=100)[98], moved / total


class Pace:
    """Lets bytes pass at a rate; None is no limit."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._next = 0.0

    def admits(self, size: int) -> bool:
        """Whether `size` bytes may start now."""
        now = time.perf_counter()
        if self._rate is None or now >= self._next:
            self._next = max(self._next, now - 0.02) + (size / self._rate if self._rate else 0.0)
            return True
        return False


def store_tick(store: kvstore.Store, keys: list[bytes], rate: float | None, batch: int = BATCH) -> Tick:
    """Promotes request after request of `batch` chunks, which the host has long evicted."""
    requests = cycle([keys[i : i + batch] for i in range(0, len(keys), batch)])
    pace = Pace(rate)
    job: kvstore.Job[kvstore.Prefetched] | None = None

    def tick() -> int:
        nonlocal job
        moved = 0
        if job is not None and job.done():
            moved = len(job.result().promoted) * CHUNK
            job = None
        if job is None and pace.admits(batch * CHUNK):
            job = store.prefetch(next(requests))
        return moved

    return tick


@contextmanager
def pinned_to(cpu: int) -> Iterator[None]:
    """The calling thread on one CPU; threads started before keep theirs."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
