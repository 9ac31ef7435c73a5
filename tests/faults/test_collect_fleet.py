"""Processes that share one directory with a capacity, and are killed at random, collectors first.

What must hold at every moment: the directory is never fuller than its capacity, no byte is wrong, and every
instance gets its share of stores.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore.collect.accounting import Books
from kvstore.collect.collector import LOCK

CHUNK = 16 * 1024
SIZE = CHUNK + 4096
CHUNKS = 200
CAPACITY = CHUNKS * SIZE
INSTANCES = 6
SECONDS = 6.0


def content(number: int) -> bytes:
    return hashlib.shake_128(number.to_bytes(8)).digest(CHUNK)


def key_of(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8), digest_size=16).digest()


def open_here(root: str, engine: str = "threads", options: str = "") -> kvstore.Store:
    return kvstore.open(
        f"ram://?capacity={32 * CHUNK}&pin=off",
        f"file://{root}?capacity={CAPACITY}&workers=1{options}",
        chunk_size=CHUNK,
        namespace={"model": "fleet"},
        engine=engine,
    )


def work(root: str, seed: int) -> None:
    """Store and load chunks until killed; say what was stored, and stop at the first wrong byte."""
    rng = random.Random(seed)
    with open_here(root) as store:
        while True:
            for _ in range(8):
                number = rng.randrange(10 * CHUNKS)
                data = store.get(key_of(number))
                if data is not None and data != content(number):
                    print("wrong", flush=True)
                    return
                if data is None:
                    store.put(key_of(number), content(number))
            print(store.stats().tiers[1].writes, flush=True)


class Fleet:
    """The processes, and the last that each has said."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.started = 0
        self.processes: list[subprocess.Popen[bytes]] = []
        self._said: dict[int, Path] = {}

    def start(self) -> None:
        self.started += 1
        said = self.root.parent / f"said-{self.started}"
        with said.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, __file__, str(self.root), str(self.started)], stdout=file, stderr=file
            )
        self._said[process.pid] = said
        self.processes.append(process)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        self.processes.remove(process)

    def said(self, process: subprocess.Popen[bytes]) -> str:
        lines = self._said[process.pid].read_text().split()
        return lines[-1] if lines else "0"

    def everything(self) -> str:
        return "".join(path.read_text() for path in self._said.values())

    def collector(self) -> subprocess.Popen[bytes] | None:
        """Who has the lock of the collector, by what the kernel says."""
        try:
            inode = os.stat(f"{self.space}/accounting/{LOCK}").st_ino
        except (FileNotFoundError, StopIteration):
            return None
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if "->" not in fields and fields[1] == "FLOCK" and int(fields[5].split(":")[-1]) == inode:
                return next((p for p in self.processes if p.pid == int(fields[4])), None)
        return None

    @property
    def space(self) -> Path:
        return next(self.root.iterdir())

    def size(self) -> int:
        """Bytes in the directory at one moment: nobody moves while they are counted."""
        for process in self.processes:
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        total = size_of(self.root)
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
        return total

    def close(self) -> None:
        for process in list(self.processes):
            self.kill(process)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path / "kv")
    fleet.root.mkdir()
    yield fleet
    fleet.close()


def size_of(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*.kv"))


@pytest.mark.timeout(120)
def test_collectors_are_killed_at_random(fleet: Fleet) -> None:
    for _ in range(INSTANCES):
        fleet.start()
    fullest, killed = 0, 0
    end = time.monotonic() + SECONDS
    next_kill = time.monotonic() + 1.5
    while time.monotonic() < end:
        fullest = max(fullest, fleet.size())
        at_work = fleet.collector()
        if at_work is not None and time.monotonic() >= next_kill:
            fleet.kill(at_work)
            fleet.start()
            killed += 1
            next_kill = time.monotonic() + 0.4
    assert killed >= 3
    assert fullest <= CAPACITY
    assert fullest > CAPACITY * 0.8, "it was filled"
    before = {process.pid: int(fleet.said(process)) for process in fleet.processes}
    deadline = time.monotonic() + 30
    while any(int(fleet.said(process)) <= before[process.pid] for process in fleet.processes):
        assert time.monotonic() < deadline, "an instance gets no room"
        assert fleet.size() <= CAPACITY
        time.sleep(0.05)
    fleet.close()
    assert not set(fleet.everything().split()) - {str(number) for number in range(100_000)}
    with open_here(str(fleet.root)) as store:  # the books come right again by themselves
        for number in range(CHUNKS):
            store.put(key_of(-number - 1 & 0xFFFF_FFFF), bytes(CHUNK))
        store.flush(timeout=30)
    accounts = Books(str(fleet.space)).read()
    assert accounts is not None
    assert 0 <= accounts.size - size_of(fleet.root) <= CAPACITY // 20, "too high by what was in hand, at most"


def test_a_hung_collector_costs_stores_and_never_space(fleet: Fleet) -> None:
    for _ in range(3):
        fleet.start()
    deadline = time.monotonic() + 30
    while (hung := fleet.collector()) is None:
        assert time.monotonic() < deadline
    hung.send_signal(signal.SIGSTOP)
    end = time.monotonic() + 3
    fleet.processes.remove(hung)
    while time.monotonic() < end:
        assert fleet.size() <= CAPACITY
        time.sleep(0.05)
    fleet.processes.append(hung)
    hung.send_signal(signal.SIGCONT)
    before = {process.pid: int(fleet.said(process)) for process in fleet.processes}
    deadline = time.monotonic() + 30
    while any(int(fleet.said(process)) <= before[process.pid] for process in fleet.processes):
        assert time.monotonic() < deadline, "an instance gets no room"
        time.sleep(0.05)


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]))
