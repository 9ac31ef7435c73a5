"""The POSIX tier with chunks of 2 MiB against the bare system calls, and against plain fsspec.

Each side has memory of its own, an arena of the same kind, all of which it has touched before; its files
are in directories of the same layout on the same file system and in the page cache. "verified fsspec" hashes
the payload as the store does; "fsspec" trusts it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import fsspec
import numpy as np
import pytest
from _bare import Bare, Crew, Move
from _paired import Side, compare
from pytest_benchmark.fixture import BenchmarkFixture
from xxhash import xxh3_128_digest

import kvstore
from kvstore.arena import Arena

CHUNK = 2 << 20
CHUNKS = 64
AT_LEAST_BARE = 0.9
AT_LEAST_FSSPEC = 1.3


class Rig:
    """A store over one directory, and the bare loop and fsspec with as many threads beside it."""

    def __init__(self, root: Path, workers: int) -> None:
        self.store = kvstore.open(
            f"ram://?capacity={2 * CHUNKS * CHUNK}&pin=off",
            f"file://{root}/store?workers={workers}",
            chunk_size=CHUNK,
        )
        mine = f"{root}/store/{self.store.namespace.directory}"
        self.own_files = Bare(mine)  # also makes the directories, as they are in a tier of some age
        self.bare = Bare(f"{root}/bare/{self.store.namespace.directory}")
        self.fs = fsspec.filesystem("file")
        self.fs_root = f"{root}/fsspec"
        self.fs.makedirs(self.fs_root)
        self.crew = Crew(workers)
        self._arena = Arena.create(CHUNKS * CHUNK, CHUNK, pin="off")
        self.views = [self._arena.view(slot) for slot in range(CHUNKS)]
        noise = np.random.default_rng(1).integers(0, 256, CHUNKS * CHUNK, np.uint8)
        self.sources = [part.data for part in noise.reshape(CHUNKS, CHUNK)]
        self.fill(self.views)
        self.keys: list[bytes] = []

    def close(self) -> None:
        self.crew.close()
        self.store.close()
        self.views.clear()
        self._arena.close()

    def fill(self, views: list[memoryview]) -> None:
        """Copy the payloads, as a caller would who has them elsewhere."""
        for view, source in zip(views, self.sources, strict=True):
            np.copyto(np.asarray(view), np.asarray(source))

    def draw_keys(self) -> None:
        self.keys = [os.urandom(16) for _ in range(CHUNKS)]

    def fs_write(self, key: bytes, view: memoryview) -> None:
        self.fs.pipe_file(f"{self.fs_root}/{key.hex()}", bytes(view))

    def fs_write_hashed(self, key: bytes, view: memoryview) -> None:
        xxh3_128_digest(view)
        self.fs_write(key, view)

    def fs_read(self, key: bytes, view: memoryview) -> None:
        view[:] = self.fs.cat_file(f"{self.fs_root}/{key.hex()}")

    def fs_read_hashed(self, key: bytes, view: memoryview) -> None:
        self.fs_read(key, view)
        xxh3_128_digest(view)

    def fs_delete(self) -> None:
        for key in self.keys:
            self.fs.rm_file(f"{self.fs_root}/{key.hex()}")

    def crewed(self, move: Move) -> Callable[[], None]:
        """Let the crew `move` all keys of the moment."""
        return lambda: self.crew.run(move, self.keys, self.views)


@pytest.fixture(params=[1, 2], ids=lambda workers: f"workers={workers}")
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, request.param)
    yield rig
    rig.close()


def store_filled_slots(rig: Rig) -> Side:
    """From the commit of slots filled in place until the last file is there."""
    leases: list[kvstore.WriteLease] = []

    def prepare() -> None:
        rig.draw_keys()
        lease = rig.store.reserve(rig.keys)
        rig.fill([view for _, view in lease.items()])
        leases.append(lease)

    def store() -> None:
        leases.pop().commit()
        assert rig.store.flush(timeout=60)

    return Side("store", store, prepare, lambda: rig.store.delete(rig.keys))


def test_store_of_filled_slots(benchmark: BenchmarkFixture, rig: Rig) -> None:
    bare = Side("bare", rig.crewed(rig.bare.write), rig.draw_keys, lambda: rig.bare.delete(rig.keys))
    ratios = compare(benchmark, store_filled_slots(rig), bare)
    assert rig.store.stats().tiers[1].dropped == 0
    assert ratios["bare"] >= AT_LEAST_BARE


@pytest.mark.xfail(
    reason="the bare calls are no faster: copying into the page cache is most of both", strict=False
)
def test_store_against_fsspec(benchmark: BenchmarkFixture, rig: Rig) -> None:
    ratios = compare(
        benchmark,
        store_filled_slots(rig),
        Side("fsspec", rig.crewed(rig.fs_write), rig.draw_keys, rig.fs_delete),
        Side("verified fsspec", rig.crewed(rig.fs_write_hashed), rig.draw_keys, rig.fs_delete),
        Side("bare", rig.crewed(rig.bare.write), rig.draw_keys, lambda: rig.bare.delete(rig.keys)),
    )
    assert ratios["fsspec"] >= AT_LEAST_FSSPEC


def test_put_and_flush(benchmark: BenchmarkFixture, rig: Rig) -> None:
    """From payloads in the caller's memory; every side copies them into its region first."""

    def store() -> None:
        rig.store.put_many(dict(zip(rig.keys, rig.sources, strict=True)))
        assert rig.store.flush(timeout=60)

    def bare() -> None:
        rig.fill(rig.views)
        rig.crew.run(rig.bare.write, rig.keys, rig.views)

    ratios = compare(
        benchmark,
        Side("store", store, rig.draw_keys, lambda: rig.store.delete(rig.keys)),
        Side("bare", bare, rig.draw_keys, lambda: rig.bare.delete(rig.keys)),
    )
    assert ratios["bare"] >= AT_LEAST_BARE


def prepare_promotion(rig: Rig) -> Side:
    """Chunks that the host has evicted; each round evicts those of the round before the last."""
    sets = []
    for _ in range(3):
        rig.draw_keys()
        rig.store.put_many(dict(zip(rig.keys, rig.sources, strict=True)))
        rig.crew.run(rig.fs_write, rig.keys, rig.sources)
        sets.append(rig.keys)
    assert rig.store.flush(timeout=60)
    turns = cycle(sets)

    def choose() -> None:
        rig.keys = next(turns)

    def promote() -> None:
        assert len(rig.store.prefetch(rig.keys).result(timeout=60).promoted) == CHUNKS

    return Side("store", promote, choose)


def test_promotion(benchmark: BenchmarkFixture, rig: Rig) -> None:
    ratios = compare(benchmark, prepare_promotion(rig), Side("bare", rig.crewed(rig.own_files.read)))
    assert ratios["bare"] >= AT_LEAST_BARE


@pytest.mark.xfail(
    reason="with one worker even the bare calls and one hash are not 1.3 times cat_file", strict=False
)
def test_promotion_against_fsspec(benchmark: BenchmarkFixture, rig: Rig) -> None:
    ratios = compare(
        benchmark,
        prepare_promotion(rig),
        Side("bare", rig.crewed(rig.own_files.read)),
        Side("fsspec", rig.crewed(rig.fs_read)),
        Side("verified fsspec", rig.crewed(rig.fs_read_hashed)),
    )
    assert ratios["fsspec"] >= AT_LEAST_FSSPEC
