"""The S3 tier with chunks of 2 MiB against a bare loop of the same client, and against naive s3fs.

One SeaweedFS on the loopback interface serves all sides; it takes most of the processors, which pulls every
ratio towards one. All sides have the same number of requests under way.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from _bare import Crew
from _paired import Side, compare
from pytest_benchmark.fixture import BenchmarkFixture
from xxhash import xxh3_128_digest

import kvstore
from kvstore.arena import Arena
from support.object_store import Bucket

pytest.importorskip("s3fs", reason="no s3fs (pip install '.[s3]')")

import s3fs
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession

CHUNK = 2 << 20
CHUNKS = 32
HEADER = 4096
WORKERS, CONCURRENCY = 2, 8
AT_ONCE = WORKERS * CONCURRENCY
ROUNDS = 9
AT_LEAST_BARE = 0.9
AT_LEAST_NAIVE = 1.3


class Bare:
    """aiobotocore alone, with one copy and one hash of each chunk."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._loop = asyncio.new_event_loop()
        config = AioConfig(
            max_pool_connections=AT_ONCE,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"payload_signing_enabled": False},
        )
        self._made = AioSession().create_client(
            "s3",
            endpoint_url=bucket.endpoint,
            aws_access_key_id=bucket.key,
            aws_secret_access_key=bucket.secret,
            config=config,
        )
        self._client: Any = self._loop.run_until_complete(self._made.__aenter__())

    def close(self) -> None:
        self._loop.run_until_complete(self._made.__aexit__(None, None, None))
        self._loop.close()

    def write(self, names: Sequence[str], views: Sequence[memoryview]) -> None:
        self._run(self._write, names, views)

    def read(self, names: Sequence[str], views: Sequence[memoryview]) -> None:
        self._run(self._read, names, views)

    async def _write(self, name: str, view: memoryview) -> None:
        header = bytearray(HEADER)
        header[:16] = xxh3_128_digest(view)
        body = b"".join((header, view))
        await self._client.put_object(Bucket=self._bucket.name, Key=name, Body=body, IfNoneMatch="*")

    async def _read(self, name: str, view: memoryview) -> None:
        span = f"bytes=0-{HEADER + CHUNK - 1}"
        answer = await self._client.get_object(Bucket=self._bucket.name, Key=name, Range=span)
        view[:] = memoryview(await answer["Body"].read())[HEADER:]
        xxh3_128_digest(view)

    def _run(
        self,
        move: Callable[[str, memoryview], Awaitable[None]],
        names: Sequence[str],
        views: Sequence[memoryview],
    ) -> None:
        pairs = iter(list(zip(names, views, strict=True)))

        async def take_turns() -> None:
            for name, view in pairs:
                await move(name, view)

        async def all_of_them() -> None:
            await asyncio.gather(*(take_turns() for _ in range(AT_ONCE)))

        self._loop.run_until_complete(all_of_them())


class Rig:
    """A store over one bucket, with the bare loop and s3fs beside it."""

    def __init__(self, bucket: Bucket, engine: str) -> None:
        self.bucket = bucket
        query = f"workers={WORKERS}&concurrency={CONCURRENCY}&timeout=60s"
        self.store = kvstore.open(
            f"ram://?capacity={2 * CHUNKS * CHUNK}&pin=off",
            {"url": f"{bucket.url}?{query}", "storage_options": bucket.options},
            chunk_size=CHUNK,
            engine=engine,
        )
        self.directory = f"kv/{self.store.namespace.directory}"
        self.bare = Bare(bucket)
        self.fs = s3fs.S3FileSystem(**bucket.options)
        self.crew = Crew(AT_ONCE)
        self._arena = Arena.create(CHUNKS * CHUNK, CHUNK, pin="off")
        self.views = [self._arena.view(slot) for slot in range(CHUNKS)]
        noise = np.random.default_rng(1).integers(0, 256, CHUNKS * CHUNK, np.uint8)
        self.sources = [memoryview(part) for part in noise.reshape(CHUNKS, CHUNK)]
        self.fill(self.views)
        self.keys: list[bytes] = []

    def close(self) -> None:
        self.crew.close()
        self.bare.close()
        self.store.close()
        self.views.clear()
        self._arena.close()

    def fill(self, views: list[memoryview]) -> None:
        for view, source in zip(views, self.sources, strict=True):
            np.copyto(np.asarray(view), np.asarray(source))

    def draw_keys(self) -> None:
        self.keys = [os.urandom(16) for _ in range(CHUNKS)]

    def names(self, keys: Sequence[bytes]) -> list[str]:
        """Where the store has the objects of `keys`."""
        return [f"{self.directory}/{key.hex()[:2]}/{key.hex()}.kv" for key in keys]

    def naive_write(self, key: bytes, view: memoryview) -> None:
        self.fs.pipe_file(f"{self.bucket.name}/naive/{key.hex()}", bytes(view))

    def naive_read(self, key: bytes, view: memoryview) -> None:
        view[:] = self.fs.cat_file(f"{self.bucket.name}/{self.names([key])[0]}")[HEADER:]


@pytest.fixture(params=["threads", "processes"])
def rig(request: pytest.FixtureRequest, bucket: Bucket) -> Iterator[Rig]:
    rig = Rig(bucket, request.param)
    yield rig
    rig.close()


def test_store_of_filled_slots(benchmark: BenchmarkFixture, rig: Rig) -> None:
    """From the commit of slots filled in place until the last object is there."""
    leases: list[kvstore.WriteLease] = []

    def prepare() -> None:
        rig.draw_keys()
        lease = rig.store.reserve(rig.keys)
        rig.fill([view for _, view in lease.items()])
        leases.append(lease)

    def store() -> None:
        leases.pop().commit()
        assert rig.store.flush(timeout=60)

    ratios = compare(
        benchmark,
        Side("store", store, prepare),
        Side("bare", lambda: rig.bare.write(rig.names(rig.keys), rig.views), rig.draw_keys),
        Side("naive", lambda: rig.crew.run(rig.naive_write, rig.keys, rig.views), rig.draw_keys),
        rounds=ROUNDS,
    )
    assert rig.store.stats().tiers[1].dropped == 0
    assert ratios["bare"] >= AT_LEAST_BARE


def test_promotion(benchmark: BenchmarkFixture, rig: Rig) -> None:
    """Chunks that the host has evicted; each round evicts those of the round before the last."""
    sets = []
    for _ in range(3):
        rig.draw_keys()
        rig.store.put_many(dict(zip(rig.keys, rig.sources, strict=True)))
        sets.append(rig.keys)
    assert rig.store.flush(timeout=60)
    turns = iter(range(100))

    def choose() -> None:
        rig.keys = sets[next(turns) % 3]

    def promote() -> None:
        assert len(rig.store.prefetch(rig.keys).result(timeout=60).promoted) == CHUNKS

    ratios = compare(
        benchmark,
        Side("store", promote, choose),
        Side("bare", lambda: rig.bare.read(rig.names(sets[2]), rig.views)),
        Side("naive", lambda: rig.crew.run(rig.naive_read, sets[2], rig.views)),
        rounds=ROUNDS,
    )
    assert ratios["bare"] >= AT_LEAST_BARE
    assert ratios["naive"] >= AT_LEAST_NAIVE
