"""What a busy main loop feels of S3 in worker processes.

As ``test_busy_loop.py``, with a bucket below. The server has the CPUs of the workers: in earnest it is
another machine, and must not take anything from the loop.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

import pytest
from _busy import BATCH, CHUNK, Loop, Tick, pinned_to, store_tick

import kvstore
from support.object_store import Bucket

pytest.importorskip("s3fs", reason="no s3fs (pip install '.[s3]')")

CHUNKS = 64
ROUNDS = 9
SPEED, P99 = 0.97, 1.2


def keep_children_on(cpus: set[int]) -> None:
    """Let every process that this one has started, the server among them, use these CPUs only."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            tasks = os.listdir(status.parent / "task") if parent == os.getpid() else []
            for task in tasks:
                os.sched_setaffinity(int(task), cpus)
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs: one for the loop, one for the I/O"
)
def test_busy_loop_does_not_feel_s3_in_a_worker(benchmark: Any, bucket: Bucket) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    others = cpus[len(cpus) // 2 :]
    keys = [os.urandom(16) for _ in range(CHUNKS)]
    config = kvstore.StoreConfig.from_dict(
        {
            "tiers": [
                f"ram://?capacity={2 * BATCH * CHUNK}",
                {"url": f"{bucket.url}?workers={len(others)}", "storage_options": bucket.options},
            ],
            "chunk_size": CHUNK,
            "engine": "processes",
            "affinity": others,
        }
    )
    loop = Loop()
    with kvstore.open(config=config) as store, pinned_to(cpus[0]):
        keep_children_on(set(others))
        for key in keys:
            store.put(key, key * (CHUNK // len(key)))
        assert store.flush(timeout=60)
        sides: dict[str, Tick | None] = {"alone": None, "s3": store_tick(store, keys, None)}
        rounds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in sides}
        for _ in range(ROUNDS):
            for name, tick in sides.items():
                rounds[name].append(loop.run(tick))
    pairs = list(zip(rounds["s3"], rounds["alone"], strict=True))
    report = {
        "speed": round(statistics.median(mine[0] / alone[0] for mine, alone in pairs), 3),
        "p99": round(statistics.median(mine[1] / alone[1] for mine, alone in pairs), 3),
        "GB/s": round(statistics.median(mine[2] for mine in rounds["s3"]) / 1e9, 2),
    }
    benchmark.extra_info.update(report)
    benchmark.pedantic(loop.run, args=(None,), rounds=1)
    print(report)
    assert report["GB/s"] > 0.05
    assert report["speed"] >= SPEED
    assert report["p99"] <= P99
