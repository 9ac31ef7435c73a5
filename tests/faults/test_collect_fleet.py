"""Processes that share one directory with a capacity, and are killed at random, collectors first.

What must hold at every moment: the directory is never fuller than its capacity, no byte is wrong, and every
instance gets its share of stores.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.fleet import CAPACITY, CHUNK, CHUNKS, key_of, open_store
from support.fleets import STEP, DirectoryFleet

INSTANCES = 8


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
    assert 0 <= fleet.accounts().size - fleet.used() <= STEP, "too high by what was in hand, at most"


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
