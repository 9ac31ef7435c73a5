"""Processes that share one directory with a capacity, and are killed at random, collectors first.

What must hold at every moment: the directory is never fuller than its capacity, no byte is wrong, and every
instance gets its share of stores.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.collect.directory import LEAD, DirectoryBooks
from support.fleet import CAPACITY, CHUNK, CHUNKS, Fleet, key_of, open_store

INSTANCES = 8


class DirectoryFleet(Fleet):
    """A fleet over a directory."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "kv"
        self.root.mkdir()
        super().__init__({"url": f"file://{self.root}"}, folder)

    @property
    def space(self) -> Path:
        return next(self.root.iterdir())

    def used(self) -> int:
        return sum(path.stat().st_size for path in self.root.rglob("*.kv"))

    def leader(self) -> int | None:
        """Who has the lock of the collector, by what the kernel says."""
        try:
            inode = os.stat(f"{self.space}/accounting/{LEAD}").st_ino
        except (FileNotFoundError, StopIteration):
            return None
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if "->" not in fields and fields[1] == "FLOCK" and int(fields[5].split(":")[-1]) == inode:
                return int(fields[4])
        return None

    def check(self) -> None:
        self.look()
        assert self.fullest <= CAPACITY


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[DirectoryFleet]:
    fleet = DirectoryFleet(tmp_path)
    yield fleet
    fleet.close()


@pytest.mark.timeout(240)
def test_collectors_are_killed_at_random(fleet: DirectoryFleet) -> None:
    for _ in range(INSTANCES):
        fleet.start()
    fleet.fill(timeout=60)
    fleet.kill_collectors(5, timeout=60)
    assert fleet.fullest <= CAPACITY
    fleet.all_write(60, meanwhile=fleet.check)
    fleet.close()
    assert fleet.complaints() == []
    with open_store(fleet.tier) as store:  # the books come right again by themselves
        for number in range(CHUNKS):
            store.put(key_of(-number - 1 & 0xFFFF_FFFF), bytes(CHUNK))
        store.flush(timeout=30)
    accounts = DirectoryBooks(str(fleet.space)).read()
    assert accounts is not None
    assert 0 <= accounts.size - fleet.used() <= CAPACITY // 20, "too high by what was in hand, at most"


@pytest.mark.timeout(240)
def test_a_hung_collector_costs_stores_and_never_space(fleet: DirectoryFleet) -> None:
    for _ in range(3):
        fleet.start()
    fleet.fill(timeout=60)
    hung = fleet.catch_collector(timeout=60)
    end = time.monotonic() + 3
    while time.monotonic() < end:
        fleet.check()
    fleet.processes.append(hung)
    hung.send_signal(signal.SIGCONT)
    fleet.all_write(60, meanwhile=fleet.check)
    assert fleet.complaints() == []
