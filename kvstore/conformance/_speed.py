"""How fast a storage is: the time of single operations, and the rate of several at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from ..backends.files import FileBackend
from ._trial import Trial, make_slot

__all__ = ["Latency", "Speed", "measure"]

#: Seconds that one series of operations may take.
_BUDGET, _QUICK_BUDGET = 5.0, 1.0


class Latency(NamedTuple):
    """Time of one operation by one client, in seconds: half, and 99 of 100, take no longer."""

    p50: float
    p99: float


class Speed(NamedTuple):
    """Figures of chunks of the size that was asked for.

    ``operations`` is how often each operation was timed; the rates are in bytes of payload per second, by
    `clients` threads with a client each.
    """

    operations: int
    probe: Latency
    write: Latency
    read: Latency
    clients: int
    write_rate: float
    read_rate: float


def measure(trial: Trial) -> Speed:
    """Time probes, writes and reads: by one client, then by as many as the tier has workers."""
    budget = _QUICK_BUDGET if trial.quick else _BUDGET
    (client,), slot = trial.clients(1), trial.payload(1, trial.chunk_size)
    out = make_slot(trial.chunk_size)
    keys = trial.new_keys(4 * trial.rounds)
    writes = _time(lambda key: client.write(key, slot), keys, budget)
    written = keys[: len(writes)]
    probes = _time(lambda key: client.exists([key]), written, budget)
    reads = _time(lambda key: client.read_into(key, out), written, budget)
    count = trial.tier.workers
    # As many as are sure to fit the budget, were the clients to get no faster together.
    share = max(1, len(written) // count)
    fresh = [trial.new_keys(share) for _ in range(count)]
    crew = [_Client(backend, trial) for backend in trial.clients(count)]
    total = count * share * trial.chunk_size
    write_rate = total / _time_together([member.write for member in crew], fresh)
    read_rate = total / _time_together([member.read for member in crew], fresh)
    probe, write, read = map(_latency, (probes, writes, reads))
    return Speed(len(written), probe, write, read, count, write_rate, read_rate)


class _Client:
    """A client with a buffer."""

    def __init__(self, backend: FileBackend, trial: Trial) -> None:
        self._backend = backend
        self._slot = trial.payload(2, trial.chunk_size)

    def write(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._backend.write(key, self._slot)

    def read(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._backend.read_into(key, self._slot)


def _time(operation: Callable[[bytes], object], keys: Sequence[bytes], budget: float) -> list[float]:
    """Seconds of one operation for each key, until the budget is spent."""
    times = []
    deadline = time.perf_counter() + budget
    for key in keys:
        started = time.perf_counter()
        operation(key)
        ended = time.perf_counter()
        times.append(ended - started)
        if ended > deadline:
            break
    return times


def _time_together(
    series: Sequence[Callable[[Sequence[bytes]], None]], keys: Sequence[Sequence[bytes]]
) -> float:
    """Seconds until all series have ended, each in a thread."""
    with ThreadPoolExecutor(len(series)) as pool:
        started = time.perf_counter()
        for future in [pool.submit(run, some) for run, some in zip(series, keys, strict=True)]:
            future.result()
        return time.perf_counter() - started


def _latency(times: Sequence[float]) -> Latency:
    ordered = sorted(times)
    return Latency(*(ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in (0.5, 0.99)))
