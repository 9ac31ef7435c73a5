"""Processes that share one tier with limits, store and load the same chunks, and are killed at random."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvstore

__all__ = ["CAPACITY", "CHUNK", "CHUNKS", "SIZE", "Fleet", "content", "key_of", "open_store"]

CHUNK = 16 * 1024
SIZE = CHUNK + 4096
"""Bytes of a chunk on storage."""
CHUNKS = 200
CAPACITY = CHUNKS * SIZE


def content(number: int, model: str = "fleet") -> bytes:
    """What is stored under :func:`key_of` of `number` in the namespace of `model`."""
    return hashlib.shake_128(model.encode() + number.to_bytes(8)).digest(CHUNK)


def key_of(number: int) -> bytes:
    """A key."""
    return hashlib.blake2b(number.to_bytes(8), digest_size=16).digest()


def open_store(tier: dict[str, Any], model: str = "fleet") -> kvstore.Store:
    """A store over `tier`, which has a capacity unless it says otherwise, for the namespace of `model`."""
    return kvstore.open(
        f"ram://?capacity={32 * CHUNK}&pin=off",
        {"capacity": CAPACITY, "workers": 1, **tier},
        chunk_size=CHUNK,
        namespace={"model": model},
    )


class Fleet(ABC):
    """The processes, and the last that each has said: how much it has written to the tier.

    Parameters
    ----------
    tier : dict
        That they share; with a capacity, unless it says otherwise.
    folder : Path
        For what they say.
    """

    def __init__(self, tier: dict[str, Any], folder: Path) -> None:
        self.tier = tier
        self.processes: list[subprocess.Popen[bytes]] = []
        self.fullest = 0
        self._folder = folder
        self._said: dict[int, Path] = {}

    @abstractmethod
    def used(self) -> int:
        """Bytes of the tier that chunks take."""

    @abstractmethod
    def leader(self) -> int | None:
        """Process id of the one who collects."""

    def start(self, model: str = "fleet") -> None:
        """Start another process, in the namespace of `model`."""
        said = self._folder / f"said-{len(self._said)}"
        command = [sys.executable, __file__, json.dumps(self.tier), str(len(self._said)), model]
        with said.open("wb") as out, said.with_suffix(".log").open("wb") as log:
            process = subprocess.Popen(command, stdout=out, stderr=log)
        self._said[process.pid] = said
        self.processes.append(process)

    def look(self, *, catch: bool = False) -> subprocess.Popen[bytes] | None:
        """Measure, at a moment when nobody moves; afterwards the fleet gets four times as long to move.

        With `catch`, the one who collects at that moment stays as it is, stopped, and leaves the fleet.
        """
        began = time.monotonic()
        caught = None
        with self._standstill():
            self.fullest = max(self.fullest, self.used())
            if catch and (leader := self.leader()) is not None:
                caught = next((process for process in self.processes if process.pid == leader), None)
            if caught is not None:
                self.processes.remove(caught)
        time.sleep(4 * (time.monotonic() - began))
        return caught

    @contextmanager
    def _standstill(self) -> Iterator[None]:
        for process in self.processes:
            assert process.poll() is None, self._said[process.pid].with_suffix(".log").read_text()
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        try:
            yield
        finally:
            for process in self.processes:
                process.send_signal(signal.SIGCONT)

    def fill(self, timeout: float) -> None:
        """Return when the tier is nearly full."""
        deadline = time.monotonic() + timeout
        while self.fullest < CAPACITY * 0.85:
            assert time.monotonic() < deadline, "it does not fill"
            self.look()

    def catch_collector(self, timeout: float) -> subprocess.Popen[bytes]:
        """Whoever is found collecting, stopped; no longer in the fleet."""
        deadline = time.monotonic() + timeout
        while (caught := self.look(catch=True)) is None:
            assert time.monotonic() < deadline, "nobody is found collecting"
        return caught

    def kill_collectors(self, count: int, timeout: float, models: Sequence[str] = ("fleet",)) -> None:
        """Kill that many at their work; another process starts for each, in the namespaces of `models` by
        turns."""
        for number in range(count):
            end(self.catch_collector(timeout))
            self.start(models[number % len(models)])

    def all_write(self, timeout: float, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Return when each process that is there now has written something more."""
        before = {process.pid: self.written(process) for process in self.processes}
        deadline = time.monotonic() + timeout
        while any(self.written(process) <= before[process.pid] for process in self.processes):
            assert time.monotonic() < deadline, "an instance gets no room"
            meanwhile()
            time.sleep(0.05)

    def written(self, process: subprocess.Popen[bytes]) -> int:
        """Chunks that a process has written to the tier."""
        lines = self._said[process.pid].read_text().split("\n")[:-1]
        return int(lines[-1]) if lines else 0

    def complaints(self) -> list[str]:
        """What processes have said that is no number: they have found a wrong byte."""
        return [line for path in self._said.values() for line in path.read_text().split("\n")
                if line and not line.isdecimal()]  # fmt: skip

    def close(self) -> None:
        """Kill all."""
        while self.processes:
            end(self.processes.pop())


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill it, whatever it is doing, stopped or not."""
    process.kill()
    process.wait()


def work(tier: dict[str, Any], seed: int, model: str) -> None:
    """Store and load chunks until killed; say what was stored, and stop at the first wrong byte."""
    rng = random.Random(seed)
    with open_store(tier, model) as store:
        while True:
            for _ in range(8):
                number = rng.randrange(10 * CHUNKS)
                data = store.get(key_of(number))
                if data is not None and data != content(number, model):
                    print("wrong", flush=True)
                    return
                if data is None:
                    store.put(key_of(number), content(number, model))
            print(store.stats().tiers[1].writes, flush=True)
            time.sleep(0.01)  # an engine computes between its steps; else dropped stores would be all it does


if __name__ == "__main__":
    work(json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
