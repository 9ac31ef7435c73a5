"""What busy main loops feel of peers: the reader's while chunks come, and the owner's while they are served.

As ``test_busy_loop.py``. The other side is a process of its own; it, the process that serves and the worker
that reads have the CPUs that the loop has not: in earnest half of them are on another machine, and must not
take anything from the loop.
"""

from __future__ import annotations

import os
import select
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from _busy import BATCH, CHUNK, Loop, Tick, pinned_to, store_tick

import kvstore
from support.peers import peer_of
from support.processes import wait_for

pytest.importorskip("zmq", reason="no pyzmq (pip install '.[p2p]')")
pytestmark = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs: one for the loop, one for the rest"
)

CHUNKS = 64
ROUNDS = 9
SPEED, P99 = 0.97, 1.2
KEYS = [number.to_bytes(16) for number in range(CHUNKS)]
CPUS = sorted(os.sched_getaffinity(0))
OTHERS = CPUS[len(CPUS) // 2 :]
OWNER = f"ram://?capacity={(CHUNKS + 8) * CHUNK}&pin=off&transport=zmq&serve=tcp://127.0.0.1:0"
READER = f"ram://?capacity={2 * BATCH * CHUNK}&pin=off"

_OPEN = """
import os, sys
import kvstore
os.sched_setaffinity(0, {cpus})
keys = [number.to_bytes(16) for number in range({chunks})]
store = kvstore.open(config=kvstore.StoreConfig.from_dict({settings}))
"""
#: It sleeps; its pump serves.
_SERVE = """
for key in keys:
    store.put(key, key * (store.chunk_size // len(key)))
print(store.served_at, flush=True)
sys.stdin.read()
"""
#: For each line it reads all chunks, of which its host memory holds a part, and says how many have come.
_READ = """
for _ in sys.stdin:
    parts = [keys[first : first + {batch}] for first in range(0, len(keys), {batch})]
    print(sum(len(store.prefetch(part).result().promoted) for part in parts), flush=True)
"""


def settings(*tiers: str) -> dict[str, Any]:
    """Of a store whose processes keep to the CPUs that the loop has not."""
    return {"tiers": tiers, "chunk_size": CHUNK, "engine": "processes", "affinity": OTHERS}


def open_store(*tiers: str) -> kvstore.Store:
    return kvstore.open(config=kvstore.StoreConfig.from_dict(settings(*tiers)))


@contextmanager
def other_side(program: str, *tiers: str) -> Iterator[subprocess.Popen[str]]:
    """A process that opens a store and runs `program`."""
    code = (_OPEN + program).format(cpus=OTHERS, chunks=CHUNKS, batch=BATCH, settings=settings(*tiers))
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


class Reading:
    """Keeps a reader at it, step by step, and polls the store that it reads, as an engine does."""

    def __init__(self, store: kvstore.Store, reader: subprocess.Popen[str]) -> None:
        assert reader.stdin is not None and reader.stdout is not None
        self._store = store
        self._told, self._said = reader.stdin, reader.stdout
        self._poller = select.poll()
        self._poller.register(self._said, select.POLLIN)
        self._is_reading = False

    def tick(self) -> int:
        self._store.poll()
        moved = 0
        if self._is_reading and self._poller.poll(0):
            moved = self.finish()
        if not self._is_reading:
            self._told.write("\n")
            self._told.flush()
            self._is_reading = True
        return moved

    def finish(self) -> int:
        """Wait until the reader rests; bytes that have come."""
        count = int(self._said.readline()) if self._is_reading else 0
        self._is_reading = False
        return count * CHUNK


def measure(benchmark: Any, tick: Tick, rest: Callable[[], object]) -> None:
    """Rounds of the loop alone and with `tick`, by turns; `rest` ends what `tick` has begun."""
    loop = Loop()
    pairs = []
    with pinned_to(CPUS[0]):
        for _ in range(ROUNDS):
            mine = loop.run(tick)
            rest()
            pairs.append((mine, loop.run(None)))
    report = {
        "speed": round(statistics.median(mine[0] / alone[0] for mine, alone in pairs), 3),
        "p99": round(statistics.median(mine[1] / alone[1] for mine, alone in pairs), 3),
        "GB/s": round(statistics.median(mine[2] for mine, _ in pairs) / 1e9, 2),
    }
    benchmark.extra_info.update(report)
    benchmark.pedantic(loop.run, args=(None,), rounds=1)
    print(report)
    assert report["GB/s"] > 0.2
    assert report["speed"] >= SPEED
    assert report["p99"] <= P99


def test_busy_loop_does_not_feel_what_it_reads_from_a_peer(benchmark: Any) -> None:
    with other_side(_SERVE, OWNER) as owner:
        assert owner.stdout is not None
        url = owner.stdout.readline().strip().replace("tcp://", "peer://")
        with open_store(READER, f"{url}?workers=1&transport=zmq") as store:
            measure(
                benchmark,
                store_tick(store, KEYS, None),
                lambda: wait_for(lambda: not store.stats().promoting),
            )


def test_busy_loop_does_not_feel_who_reads_from_it(benchmark: Any) -> None:
    with open_store(OWNER) as store:
        for key in KEYS:
            store.put(key, key * (CHUNK // len(key)))
        with other_side(_READ, READER, f"{peer_of(store)}?workers=1&transport=zmq") as reader:
            reading = Reading(store, reader)
            measure(benchmark, reading.tick, reading.finish)
