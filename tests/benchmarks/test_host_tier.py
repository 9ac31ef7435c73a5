"""Host memory: look-ups against bare dict look-ups, and reads that copy nothing."""

from __future__ import annotations

import os
import random
import time
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from _paired import Side, compare
from pytest_benchmark.fixture import BenchmarkFixture

import kvstore

KEYS = 1000
#: Batches that one timing takes: one alone is shorter than what a clock can tell apart.
BATCHES = 50


@pytest.fixture
def store() -> Iterator[kvstore.Store]:
    with kvstore.open("ram://?capacity=4MiB&pin=off", "memory://look-ups", chunk_size=4096) as store:
        yield store


def test_lookup_of_resident_keys(benchmark: BenchmarkFixture, store: kvstore.Store) -> None:
    keys = [os.urandom(16) for _ in range(KEYS)]
    store.put_many(dict.fromkeys(keys, b"payload"))
    store.flush()
    random.Random(1).shuffle(keys)
    index = {key: number for number, key in enumerate(keys)}
    assert set(store.lookup(keys)) == {kvstore.Lookup.HIT}

    def ours() -> None:
        for _ in range(BATCHES):
            store.lookup(keys)

    def bare() -> None:
        for _ in range(BATCHES):
            for key in keys:
                index[key]

    ratios = compare(benchmark, Side("lookup", ours), Side("dict", bare), clock=time.thread_time)
    assert ratios["dict"] >= 0.2


def test_read_hands_out_the_arena_itself(store: kvstore.Store) -> None:
    keys = [os.urandom(16) for _ in range(8)]
    store.put_many({key: key * 10 for key in keys})
    with store.read(keys) as lease:
        for key, view in lease.items():
            address = np.asarray(view).ctypes.data
            assert address == store.arena.base + lease.slots[key] * store.arena.slot_size
            assert view == key * 10


def test_read_allocates_no_payload() -> None:
    chunk = 1 << 20
    with kvstore.open(f"ram://?capacity={16 * chunk}&pin=off", chunk_size=chunk) as store:
        keys = [os.urandom(16) for _ in range(16)]
        store.put_many(dict.fromkeys(keys, bytes(chunk)))
        tracemalloc.start()
        try:
            with store.read(keys) as lease:
                read = sum(len(view) for _, view in lease.items())
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert read == 16 * chunk
    assert peak < chunk // 16
