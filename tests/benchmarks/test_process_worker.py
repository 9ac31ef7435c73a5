"""Worker processes: their start, their throughput, and what the caller pays however much is in flight."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import pytest
from _bare import Bare
from _paired import Side, compare
from pytest_benchmark.fixture import BenchmarkFixture

import kvstore
from kvstore.arena import Arena
from kvstore.engine.base import Batch, Verb
from support.gates import Gates, open_gated
from support.processes import engine_of

BYTES = 128 << 20
HANGING = ("exists", "get", "put", "delete", "scan")


def test_start(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Opening and closing a store of one worker, at most half a second."""

    def start() -> None:
        kvstore.open(
            "ram://?capacity=1MiB&pin=off",
            f"file://{tmp_path}?workers=1",
            chunk_size="64KiB",
            engine="processes",
        ).close()

    benchmark.pedantic(start, rounds=7, warmup_rounds=1)
    assert benchmark.stats.stats.median < 0.5


@pytest.mark.parametrize(("chunk", "at_least"), [(2 << 20, 0.9), (64 << 10, 0.6)], ids=["2MiB", "64KiB"])
def test_throughput_of_one_worker(
    benchmark: BenchmarkFixture, tmp_path: Path, chunk: int, at_least: float
) -> None:
    """Promotion from the page cache, against plain system calls and the hash in a loop."""
    keys = [os.urandom(16) for _ in range(BYTES // chunk)]
    with (
        Arena.create(BYTES, chunk, pin="off") as arena,
        kvstore.open(
            f"ram://?capacity={2 * BYTES}&pin=off",
            f"file://{tmp_path}?workers=1",
            chunk_size=chunk,
            engine="processes",
        ) as store,
    ):
        for key in keys:
            store.put(key, os.urandom(16) * (chunk // 16))
        assert store.flush()
        bare = Bare(f"{tmp_path}/{store.namespace.directory}")
        views = [arena.view(slot) for slot in range(len(keys))]

        def evict() -> None:
            with store.reserve([os.urandom(16) for _ in range(store.stats().slots)]) as lease:
                lease.abort()

        def promote() -> None:
            assert len(store.prefetch(keys).result().promoted) == len(keys)

        def loop() -> None:
            for key, view in zip(keys, views, strict=True):
                bare.read(key, view)

        speed = compare(benchmark, Side("one worker", promote, evict), Side("bare", loop))["bare"]
        views.clear()
    assert speed >= at_least


def submit_and_poll(store: kvstore.Store, number: int, keys: list[bytes]) -> float:
    """Seconds that the caller spends until one batch of probes has ended; waiting does not count."""
    engine = engine_of(store)
    started = time.perf_counter()
    engine.submit(Batch(number, 0, Verb.PROBE, keys, [], []))
    seconds, left = time.perf_counter() - started, len(keys)
    while left:
        engine.wait(10.0)
        started = time.perf_counter()
        done = engine.poll()
        seconds += time.perf_counter() - started
        left -= sum(len(completion.results) for completion in done if completion.id == number)
    return seconds


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[Gates]:
    gates = Gates(tmp_path / "gates")
    yield gates
    gates.close()


def test_keys_in_flight_do_not_change_the_cost_of_a_key(benchmark: BenchmarkFixture, gates: Gates) -> None:
    """Batches of probes to one worker while a hundred thousand reads are with another that hangs."""
    root = gates.folder.parent
    keys = [os.urandom(16) for _ in range(256)]
    costs: dict[int, list[float]] = {0: [], 100_000: []}
    numbers = iter(range(1 << 40, 1 << 41))
    with open_gated(
        gates,
        "ram://?capacity=1MiB&pin=off",
        f"file://{root}/idle?workers=1",
        f"file://{root}/busy?workers=1",
        chunk_size=4096,
        engine="processes",
    ) as store:
        gates.shut("delete")
        for flying in costs:
            for _ in range(-(-flying // len(keys))):
                engine_of(store).submit(Batch(next(numbers), 1, Verb.DELETE, keys, [], []))
            for _ in range(60):
                costs[flying].append(submit_and_poll(store, next(numbers), keys) / len(keys))
        benchmark.pedantic(submit_and_poll, args=(store, next(numbers), keys), rounds=1)
        store.close(timeout=0.5)
    none, many = (median(cost[10:]) for cost in costs.values())
    benchmark.extra_info["microseconds per key"] = {"none": none * 1e6, "100,000": many * 1e6}
    assert many <= 1.3 * none


class Caller:
    """An engine's thread for a while: it looks up, prefetches, reads and stores, and times each call."""

    def __init__(self, store: kvstore.Store, keys: list[bytes]) -> None:
        self._store = store
        self._keys = keys
        self.calls: list[float] = []
        self.promoted = 0

    def run(self, seconds: float) -> None:
        """Promote `keys` over and over; each time one more chunk is asked for in vain, and one is stored."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._time(lambda: self._store.lookup([os.urandom(16)]))
            job = self._time(lambda: self._store.prefetch(self._keys))
            self.promoted += len(job.result().promoted)
            self._time(lambda: self._store.read(self._keys)).release()
            lease = self._time(lambda: self._store.reserve([os.urandom(16)]))
            self._time(lease.commit)
            self._store.reserve([os.urandom(16) for _ in range(4 * len(self._keys))]).abort()

    def _time(self, call: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        answer = call()
        self.calls.append(time.perf_counter() - started)
        return answer


def test_a_hung_tier_is_not_felt(benchmark: BenchmarkFixture, gates: Gates) -> None:
    """Every operation of a tier hangs: calls take less than 1 ms, and the other tier serves as before."""
    root, chunk = gates.folder.parent, 64 << 10
    keys = [os.urandom(16) for _ in range(32)]
    host = f"ram://?capacity={4 * len(keys) * chunk}&pin=off"
    tiers = [f"file://{root}/free?name=free&workers=1", f"file://{root}/hung?timeout=200ms&workers=1"]
    with kvstore.open(host, tiers[0], chunk_size=chunk) as store:
        store.put_many({key: bytes(chunk) for key in keys})
    rates: dict[int, list[float]] = {1: [], 2: []}
    calls: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(3):
        for count in (1, 2):
            with open_gated(gates, host, *tiers[:count], chunk_size=chunk, engine="processes") as store:
                for verb in HANGING:
                    gates.shut(verb)
                # Breakers open, and again after a trial; the next one comes when all has been measured.
                Caller(store, keys).run(3.0 if count == 2 else 0.3)
                caller = Caller(store, keys)
                caller.run(0.7)
                rates[count].append(caller.promoted)
                calls[count] += caller.calls
                for verb in HANGING:
                    gates.open(verb)
    ratio = median(with_hung / alone for with_hung, alone in zip(rates[2], rates[1], strict=True))
    alone, beside = (quantiles(calls[count], n=100)[98] for count in (1, 2))
    benchmark.extra_info["p99 of a call, ms"] = {"alone": alone * 1e3, "beside the hung one": beside * 1e3}
    benchmark.extra_info["rate of the other tier"] = ratio
    benchmark.pedantic(sum, args=(calls[2],), rounds=1)
    assert beside < 1e-3
    assert ratio >= 0.8
