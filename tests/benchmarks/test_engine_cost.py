"""What a chunk costs its caller beside the bytes: the engine's messages, and the store's decisions.

The measure is the time that one memcpy of 2 MiB takes on the same machine in the same run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import kvstore
from kvstore.arena import Arena
from kvstore.backends import create
from kvstore.config import parse
from kvstore.engine.base import Batch, Completion, Doorbell, Engine, Result, Status, Verb, answer_all
from kvstore.namespace import Namespace
from kvstore.opening import assemble, make_engine

COPY = 2 << 20
CHUNKS = 256
ROUNDS = 25
#: Of one memcpy, per chunk.
AT_MOST_ENGINE = 0.05
AT_MOST_STORE = 0.2


class Copier:
    """Copies 2 MiB at a time, from and to memory that is in no core's own cache."""

    def __init__(self) -> None:
        self._source, self._target = (np.ones((32, COPY), np.uint8) for _ in range(2))

    def seconds(self) -> float:
        """Time of one copy."""
        started = time.perf_counter()
        np.copyto(self._target, self._source)
        return (time.perf_counter() - started) / len(self._source)


class NoOpEngine(Engine):
    """Says that everything has been done as soon as it is asked."""

    immediate = True

    def __init__(self) -> None:
        self._bell = Doorbell()
        self._done: list[Completion] = []

    def start(self) -> list[Exception | None]:
        return [None]

    def submit(self, batch: Batch) -> None:
        self._done.append(answer_all(batch, Result(Status.OK, 4096, 1e-3)))

    def poll(self) -> list[Completion]:
        done, self._done = self._done, []
        return done

    def abandon(self, batch: Batch) -> None:
        raise AssertionError("nothing is ever late")

    def fileno(self) -> int:
        return self._bell.fd

    def close(self, timeout: float) -> None:
        self._bell.close()


def submit_and_poll(engine: Engine, batch: Batch) -> float:
    """Seconds that the caller spends in the engine until `batch` has ended; waiting does not count."""
    started = time.perf_counter()
    engine.submit(batch)
    seconds, left = time.perf_counter() - started, len(batch.keys)
    while left:
        engine.wait(10.0)
        started = time.perf_counter()
        done = engine.poll()
        seconds += time.perf_counter() - started
        left -= sum(len(completion.results) for completion in done)
    return seconds


def record(benchmark: BenchmarkFixture, cost_of_chunks: Callable[[], float]) -> float:
    """Cost of a chunk as a share of one memcpy: median of rounds in which both are measured."""
    copier = Copier()
    costs, copies = [], []
    for _ in range(ROUNDS + 1):
        copies.append(copier.seconds())
        costs.append(cost_of_chunks() / CHUNKS)
    share = median(cost / copy for cost, copy in zip(costs[1:], copies[1:], strict=True))
    benchmark.extra_info["microseconds per chunk"] = round(median(costs[1:]) * 1e6, 2)
    benchmark.extra_info["microseconds per memcpy"] = round(median(copies[1:]) * 1e6, 1)
    benchmark.extra_info["share"] = round(share, 4)
    benchmark.pedantic(cost_of_chunks, rounds=1)
    return share


@pytest.mark.parametrize("name", ["threads", "processes"])
def test_submit_and_poll(benchmark: BenchmarkFixture, name: str) -> None:
    """Reads of absent keys: the worker has next to nothing to do, and the messages are as long as ever."""
    config = parse("ram://?capacity=4MiB&pin=off", "memory://engine-cost", chunk_size=4096, engine=name)
    with Arena.create(4 << 20, 4096, pin="off") as arena:
        engine = make_engine(config, Namespace(config.namespace, config.chunk_size), arena, create)
        assert engine.start() == [None]
        numbers = iter(range(1, 1000))

        def cost() -> float:
            keys = [os.urandom(16) for _ in range(CHUNKS)]
            batch = Batch(next(numbers), 0, Verb.READ, keys, list(range(CHUNKS)), [0] * CHUNKS)
            return submit_and_poll(engine, batch)

        share = record(benchmark, cost)
        engine.close(10.0)
    assert share <= AT_MOST_ENGINE


def open_without_storage() -> kvstore.Store:
    config = parse(f"ram://?capacity={4 * CHUNKS * 4096}&pin=off", "memory://planner-cost", chunk_size=4096)
    return assemble(config, engine_of=lambda *_: NoOpEngine())


def test_promotion_without_storage(benchmark: BenchmarkFixture) -> None:
    """Prefetch of chunks of which nothing is known, until they are resident: probes, eviction, promotion."""
    with open_without_storage() as store:

        def cost() -> float:
            keys = [os.urandom(16) for _ in range(CHUNKS)]
            started = time.perf_counter()
            promoted = store.prefetch(keys).result().promoted
            seconds = time.perf_counter() - started
            assert len(promoted) == CHUNKS
            return seconds

        share = record(benchmark, cost)
    assert share <= AT_MOST_STORE


def test_store_without_storage(benchmark: BenchmarkFixture) -> None:
    """Reserve and commit, until the cascade has ended: eviction, events, one write for each chunk."""
    with open_without_storage() as store:

        def cost() -> float:
            keys = [os.urandom(16) for _ in range(CHUNKS)]
            started = time.perf_counter()
            lease = store.reserve(keys)
            lease.commit()
            assert store.flush()
            seconds = time.perf_counter() - started
            assert len(lease) == CHUNKS
            return seconds

        share = record(benchmark, cost)
    assert share <= AT_MOST_STORE
