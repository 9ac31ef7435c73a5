"""Garbage collection of 100,000 objects in a directory: what it costs, and what others feel of it.

The objects are files without content that have the names and sizes of chunks; what deleting costs is
metadata. While they go, another instance promotes and stores chunks of 2 MiB in the same directory. The
collector is a process of its own that is stopped in every other window, so that each window has a neighbour
without garbage collection.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

from _garbage import litter

import kvstore
from kvstore.backends import create_files
from kvstore.collect.collector import Collector
from kvstore.collect.directory import DirectoryBooks
from kvstore.collect.limits import Limits
from kvstore.collect.report import Report
from kvstore.config import TierConfig
from kvstore.namespace import Namespace

OBJECTS = 100_000
CHUNK = 2 << 20
CHUNKS = 64
BATCH = 16
#: Seconds of a window.
WINDOW = 0.4
REMOVED_PER_SECOND = 20_000
AT_LEAST = 0.8
#: Pairs of windows at most.
ROUNDS = 60

NAMESPACE = Namespace({"model": "collect"}, CHUNK)


def test_removal_is_cheap(benchmark: Any, tmp_path: Path) -> None:
    litter(tmp_path, NAMESPACE, OBJECTS)
    backend = create_files(TierConfig(url=str(tmp_path)), NAMESPACE)
    backend.open()
    books = DirectoryBooks(f"{tmp_path}/{NAMESPACE.directory}")
    collector = Collector(backend, books, Limits(None, None, 3600.0, CHUNK))
    removed = 0

    def collect() -> None:
        nonlocal removed
        more = True
        while more:
            answer = collector.turn(Report(b"bench---"))
            removed, more = removed + len(answer.removed), answer.more

    started, worked = time.perf_counter(), time.thread_time()  # of which others on the machine take nothing
    benchmark.pedantic(collect, rounds=1)
    rates = {
        "removed per second": round(removed / (time.perf_counter() - started)),
        "removed per second of work": round(removed / (time.thread_time() - worked)),
    }
    collector.close()
    assert removed == OBJECTS
    benchmark.extra_info.update(rates)
    print(rates)
    assert rates["removed per second"] >= REMOVED_PER_SECOND


def collect_forever(root: str) -> None:
    """An instance that stores nothing, and whose collector finds that much has expired."""
    with open_store(root, "threads", "&ttl=1h") as store:
        while True:
            store.poll()
            time.sleep(0.01)


def open_store(root: str, engine: str, options: str = "") -> kvstore.Store:
    return kvstore.open(
        f"ram://?capacity={2 * BATCH * CHUNK}&pin=off",
        f"file://{root}?workers=1{options}",
        namespace={"model": "collect"},
        chunk_size=CHUNK,
        engine=engine,
    )


@contextmanager
def collecting(root: Path) -> Iterator[Callable[[bool], None]]:
    """Lets another process collect while it is switched on; it is off at first."""
    process = subprocess.Popen([sys.executable, __file__, str(root)])
    books = DirectoryBooks(f"{root}/{NAMESPACE.directory}")
    try:
        while (accounts := books.read()) is None or not accounts.counted:
            time.sleep(0.005)
        process.send_signal(signal.SIGSTOP)
        yield lambda on: process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
    finally:
        process.kill()
        process.wait()


def promoting(store: kvstore.Store, keys: list[bytes]) -> Callable[[], object]:
    """Promotes a batch that the host has long evicted, at each call."""
    batches = cycle([keys[i : i + BATCH] for i in range(0, len(keys), BATCH)])
    return lambda: store.prefetch(next(batches)).result()


def storing(store: kvstore.Store) -> Callable[[], object]:
    """Stores a batch of chunks and deletes them again, at each call."""
    data = os.urandom(CHUNK)

    def store_some() -> None:
        keys = [os.urandom(16) for _ in range(BATCH // 2)]
        store.put_many(dict.fromkeys(keys, data))
        store.flush()
        store.delete(keys)

    return store_some


def rate_of(work: Callable[[], object]) -> float:
    """Calls a second, in one window."""
    calls, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < WINDOW:
        work()
        calls += 1
    return calls / passed


def test_running_instances_hardly_feel_it(benchmark: Any, tmp_path: Path) -> None:
    keys = [os.urandom(16) for _ in range(CHUNKS)]
    ratios: dict[str, list[float]] = {"promotion": [], "store": []}
    with open_store(str(tmp_path), "processes") as store:
        for key in keys:
            store.put(key, key * (CHUNK // len(key)))
        assert store.flush(timeout=60)
        litter(tmp_path, NAMESPACE, OBJECTS)
        works = {"promotion": promoting(store, keys), "store": storing(store)}
        with collecting(tmp_path) as switch:
            for number in range(ROUNDS):
                for name, work in works.items():
                    found = {}
                    for on in (number % 2 == 0, number % 2 == 1):
                        switch(on)
                        found[on] = rate_of(work)
                    switch(False)
                    ratios[name].append(found[True] / found[False])
                if _garbage(tmp_path) == 0:
                    break
        benchmark.pedantic(works["promotion"], rounds=3)
    report = {name: round(statistics.median(found[:-1] or found), 3) for name, found in ratios.items()}
    benchmark.extra_info.update(report, rounds=len(ratios["store"]))
    print(report, len(ratios["store"]), "rounds")
    assert _garbage(tmp_path) < OBJECTS, "it was collected meanwhile"
    assert min(report.values()) >= AT_LEAST


def _garbage(root: Path) -> int:
    """Objects that are left of it, by the books."""
    accounts = DirectoryBooks(f"{root}/{NAMESPACE.directory}").read()
    return 0 if accounts is None else max(0, accounts.chunks - CHUNKS)


if __name__ == "__main__":
    collect_forever(sys.argv[1])
