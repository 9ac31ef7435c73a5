"""Processes in several namespaces of one root with a total, killed at random, collectors of the root first.

What must hold at every moment: the namespaces together are never fuller than the total (in a bucket: but for
what got there with its answer lost, less than one step of the watermarks); no byte is wrong, and every
instance in every namespace gets room. What nobody uses any longer goes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.fleet import CAPACITY, CHUNK, CHUNKS, content, key_of, open_store
from support.fleets import STEP, TOTAL, BucketFleet, DirectoryFleet
from support.object_store import Bucket

MODELS = ("one", "two", "three")
#: Chunks in a namespace that nobody uses: half of the total.
FORMER = CHUNKS // 2


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[DirectoryFleet]:
    fleet = DirectoryFleet(tmp_path, TOTAL)
    yield fleet
    fleet.close()


@pytest.fixture
def bucket_fleet(bucket: Bucket, tmp_path: Path) -> Iterator[BucketFleet]:
    pytest.importorskip("s3fs", reason="no s3fs (pip install '.[s3]')")
    fleet = BucketFleet(bucket, tmp_path, TOTAL)
    yield fleet
    fleet.close()


def leave_something(tier: dict[str, Any]) -> None:
    with open_store(tier, "former") as store:
        for number in range(FORMER):
            store.put(key_of(number), content(number, "former"))
        assert store.flush(timeout=120)
        assert store.stats().tiers[1].writes == FORMER


def left_of_it(tier: dict[str, Any]) -> int:
    with open_store({**tier, "write": "off"}, "former") as store:
        return len(store.get_many([key_of(number) for number in range(FORMER)]))


def work(fleet: DirectoryFleet | BucketFleet, instances: int, kills: int) -> None:
    """Some instances in each namespace, until all have come to write, whoever was killed."""
    leave_something(fleet.tier)
    for model in MODELS * instances:
        fleet.start(model)
    fleet.fill(timeout=120)
    fleet.kill_collectors(kills, 120, MODELS)
    fleet.all_write(120, meanwhile=fleet.check)
    fleet.close()
    assert fleet.complaints() == []


def write_a_total(tier: dict[str, Any]) -> None:
    with open_store(tier, MODELS[0]) as store:
        for number in range(CHUNKS):
            store.put(key_of(-number - 1 & 0xFFFF_FFFF), bytes(CHUNK))
        store.flush(timeout=120)


@pytest.mark.timeout(600)
def test_collectors_of_a_root_are_killed_at_random(fleet: DirectoryFleet) -> None:
    work(fleet, instances=2, kills=5)
    assert left_of_it(fleet.tier) < FORMER
    write_a_total(fleet.tier)
    assert fleet.fullest <= CAPACITY
    root = fleet.accounts()
    assert fleet.used() <= root.shared_out <= CAPACITY
    assert fleet.used() >= CAPACITY - 4 * STEP, "the books have come right again by themselves"


@pytest.mark.timeout(600)
def test_collectors_of_a_root_in_a_bucket_are_killed_at_random(bucket_fleet: BucketFleet) -> None:
    work(bucket_fleet, instances=1, kills=2)
    assert left_of_it(bucket_fleet.tier) < FORMER
    write_a_total(bucket_fleet.tier)
    assert bucket_fleet.used() <= bucket_fleet.accounts().shared_out + STEP
    assert bucket_fleet.accounts().shared_out <= CAPACITY + STEP
