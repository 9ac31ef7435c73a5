"""Processes that share one bucket with a capacity, and are killed at random, collectors first.

What must hold: the bucket is never fuller than its capacity, but for what got there with its answer lost,
which is less than one step of the watermarks; no byte is wrong, and every instance gets its share of stores,
though whoever collects may die or hang at any moment.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.fleet import CAPACITY, CHUNK, CHUNKS, key_of, open_store
from support.fleets import STEP, TIMEOUT, BucketFleet
from support.object_store import Bucket

pytest.importorskip("s3fs", reason="no s3fs (pip install '.[s3]')")

INSTANCES = 8


@pytest.fixture
def fleet(bucket: Bucket, tmp_path: Path) -> Iterator[BucketFleet]:
    fleet = BucketFleet(bucket, tmp_path)
    yield fleet
    fleet.close()


@pytest.mark.timeout(400)
def test_collectors_of_a_bucket_are_killed_at_random(fleet: BucketFleet) -> None:
    for _ in range(INSTANCES):
        fleet.start()
    fleet.fill(timeout=90)
    fleet.kill_collectors(3, timeout=90)
    assert fleet.fullest <= CAPACITY + STEP
    fleet.all_write(90, meanwhile=fleet.check)
    fleet.close()
    assert fleet.complaints() == []
    with open_store(fleet.tier) as store:  # the books come right again by themselves
        for number in range(CHUNKS):
            store.put(key_of(-number - 1 & 0xFFFF_FFFF), bytes(CHUNK))
        store.flush(timeout=60)
    accounts = fleet.accounts()
    assert fleet.used() <= accounts.size + accounts.claimed + STEP, "what the dead were granted is in it"
    assert accounts.size <= CAPACITY + STEP


@pytest.mark.timeout(300)
def test_a_hung_collector_of_a_bucket_loses_the_lead(fleet: BucketFleet) -> None:
    for _ in range(3):
        fleet.start()
    fleet.fill(timeout=90)
    hung = fleet.catch_collector(timeout=90)
    fleet.all_write(90, meanwhile=fleet.check)  # by somebody else's work
    fleet.processes.append(hung)
    hung.send_signal(signal.SIGCONT)
    fleet.all_write(90, meanwhile=fleet.check)
    end = time.monotonic() + TIMEOUT
    while time.monotonic() < end:
        fleet.check()
    assert fleet.complaints() == []
