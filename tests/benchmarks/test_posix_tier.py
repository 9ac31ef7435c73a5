"""The POSIX tier with chunks of 2 MiB against the bare system calls, and against plain fsspec.

Each side has memory of its own, an arena of the same kind, all of which it has touched before. It uses as
much of it as the store does, which puts new chunks into the slots that it has last deleted, and promotes into
those that it has not used for a round: else a side would find its memory in the processor's cache. All files
are in the page cache, and in the same directories: where ext4 has put a directory decides what it costs to
create a file in it, here 28 to 181 microseconds. And the same threads delete them all: pages go back to the
core that has freed them, and on a virtual machine that hands free memory back to its host, to write a chunk
on another core took 6 milliseconds instead of 0.4. "verified fsspec" hashes the payload as the store does;
"fsspec" trusts it.
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
from kvstore.backends.compiled import why_not

CHUNK = 2 << 20
CHUNKS = 64
ROUNDS = 41  # at times the system has other work to do
AT_LEAST_BARE = 0.9
AT_LEAST_BARE_IN_PIECES = 1.0  # of what is hashed while it is in the cache, and compiled
AT_LEAST_FSSPEC = 1.3


class Region:
    """Memory of one side: the half that a round needs, and another one."""

    def __init__(self, fill: Callable[[list[memoryview]], None]) -> None:
        self._arena = Arena.create(2 * CHUNKS * CHUNK, CHUNK, pin="off")
        halves = [[self._arena.view(half * CHUNKS + slot) for slot in range(CHUNKS)] for half in range(2)]
        for views in halves:
            fill(views)
        self._halves = cycle(halves)
        self.turn()

    def turn(self) -> None:
        """Go to the other half."""
        self.views = next(self._halves)

    def close(self) -> None:
        self._halves = cycle(())
        self.views = []
        self._arena.close()


class Rig:
    """A store over one directory, and the bare loop and fsspec with as many threads beside it."""

    def __init__(self, root: Path, workers: int) -> None:
        self.workers = workers
        self.store = kvstore.open(
            f"ram://?capacity={2 * CHUNKS * CHUNK}&pin=off",
            f"file://{root}/store?workers={workers}",
            chunk_size=CHUNK,
        )
        # Also makes the directories, as they are in a tier of some age.
        self.bare = Bare(f"{root}/store/{self.store.namespace.directory}")
        self.fs = fsspec.filesystem("file")
        self.crew = Crew(workers)
        noise = np.random.default_rng(1).integers(0, 256, CHUNKS * CHUNK, np.uint8)
        self.sources = [part.data for part in noise.reshape(CHUNKS, CHUNK)]
        self.keys: list[bytes] = []
        self._regions: list[Region] = []

    def close(self) -> None:
        self.crew.close()
        self.store.close()
        for region in self._regions:
            region.close()

    def fill(self, views: list[memoryview]) -> None:
        """Copy the payloads, as a caller would who has them elsewhere."""
        for view, source in zip(views, self.sources, strict=True):
            np.copyto(np.asarray(view), np.asarray(source))

    def draw_keys(self) -> None:
        self.keys = [os.urandom(16) for _ in range(CHUNKS)]

    def fs_write(self, key: bytes, view: memoryview) -> None:
        self.fs.pipe_file(self._fs_name(key), bytes(view))

    def fs_write_hashed(self, key: bytes, view: memoryview) -> None:
        xxh3_128_digest(view)
        self.fs_write(key, view)

    def fs_read(self, key: bytes, view: memoryview) -> None:
        view[:] = self.fs.cat_file(self._fs_name(key))

    def fs_read_hashed(self, key: bytes, view: memoryview) -> None:
        self.fs_read(key, view)
        xxh3_128_digest(view)

    def _fs_name(self, key: bytes) -> str:
        return f"{self.bare.name(key)}.fsspec"

    def delete(self) -> None:
        """Delete the files of the moment, whoever has written them."""
        self.crew.run(self._unlink, self.keys, [memoryview(b"")] * CHUNKS)

    def _unlink(self, key: bytes, _: memoryview) -> None:
        for name in (self.bare.name(key), self._fs_name(key)):
            if os.access(name, os.F_OK):
                os.unlink(name)

    def forget(self) -> None:
        """The same for what the store has written."""
        self.delete()
        self.store.delete(self.keys)

    def reading(self, name: str, move: Move) -> Side:
        """Let the crew read all keys of the moment by `move`."""
        region = self._region()
        return Side(name, lambda: self.crew.run(move, self.keys, region.views), region.turn)

    def writing(self, name: str, move: Move) -> Side:
        """Let the crew write new keys by `move`, from memory that has just been filled."""
        region = self._region()

        def prepare() -> None:
            self.draw_keys()
            self.fill(region.views)

        return Side(name, lambda: self.crew.run(move, self.keys, region.views), prepare, self.delete)

    def putting(self, name: str, move: Move) -> Side:
        """The same, but filling the memory is part of it."""
        region = self._region()

        def run() -> None:
            self.fill(region.views)
            self.crew.run(move, self.keys, region.views)

        return Side(name, run, self.draw_keys, self.delete)

    def _region(self) -> Region:
        self._regions.append(Region(self.fill))
        return self._regions[-1]


@pytest.fixture(params=[1, 2], ids=lambda workers: f"workers={workers}")
def rig(request: pytest.FixtureRequest, tmp_path: Path, benchmark: BenchmarkFixture) -> Iterator[Rig]:
    benchmark.extra_info["not compiled"] = why_not()
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

    return Side("store", store, prepare, rig.forget)


def may_miss(ratio: float, bound: float, reason: str) -> None:
    """Say why a bound is missed, if it is."""
    if ratio < bound:
        pytest.xfail(f"{ratio:.2f} of {bound}: {reason}")


def test_store_of_filled_slots(benchmark: BenchmarkFixture, rig: Rig) -> None:
    bare = rig.writing("bare", rig.bare.write)
    ratios = compare(benchmark, store_filled_slots(rig), bare, rounds=ROUNDS)
    assert rig.store.stats().tiers[1].dropped == 0
    assert ratios["bare"] >= AT_LEAST_BARE


def test_store_against_fsspec(benchmark: BenchmarkFixture, rig: Rig) -> None:
    ratios = compare(
        benchmark,
        store_filled_slots(rig),
        rig.writing("fsspec", rig.fs_write),
        rig.writing("verified fsspec", rig.fs_write_hashed),
        rig.writing("bare", rig.bare.write),
        rounds=ROUNDS,
    )
    may_miss(ratios["fsspec"], AT_LEAST_FSSPEC, "copying into the page cache is most of both")


def test_put_and_flush(benchmark: BenchmarkFixture, rig: Rig) -> None:
    """From payloads in the caller's memory; every side copies them into its region first."""

    def store() -> None:
        rig.store.put_many(dict(zip(rig.keys, rig.sources, strict=True)))
        assert rig.store.flush(timeout=60)

    ratios = compare(
        benchmark,
        Side("store", store, rig.draw_keys, rig.forget),
        rig.putting("bare", rig.bare.write),
        rounds=ROUNDS,
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
    bare = rig.reading("bare", rig.bare.read)
    ratios = compare(benchmark, prepare_promotion(rig), bare, rounds=ROUNDS)
    assert ratios["bare"] >= (AT_LEAST_BARE if why_not() else AT_LEAST_BARE_IN_PIECES)


def test_promotion_against_fsspec(benchmark: BenchmarkFixture, rig: Rig) -> None:
    ratios = compare(
        benchmark,
        prepare_promotion(rig),
        rig.reading("bare", rig.bare.read),
        rig.reading("fsspec", rig.fs_read),
        rig.reading("verified fsspec", rig.fs_read_hashed),
        rounds=ROUNDS,
    )
    if rig.workers == 1:
        may_miss(ratios["fsspec"], AT_LEAST_FSSPEC, "the bare calls and one hash miss it, too")
    assert ratios["fsspec"] >= AT_LEAST_FSSPEC
