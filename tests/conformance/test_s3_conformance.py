"""The S3 backend against the suite of backends: on a real server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache

import pytest

from kvstore.backends.base import Backend, BackendContext
from kvstore.testing.backend import BackendTests, make_key
from support.object_store import Bucket

pytest.importorskip("s3fs", reason="no s3fs (pip install '.[s3]')")

from aiobotocore.session import AioSession

from kvstore.backends.s3 import S3Backend

SPACE = "00ff" * 8
SIZE = 64 * 1024


@cache
def session() -> AioSession:
    """Shared by all backends here: a new one takes a moment to read the description of the protocol."""
    return AioSession()


class InBucket(BackendTests):
    """Raw access through a plain boto client."""

    def use(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.raw = bucket.client()

    def make_backend(self, context: BackendContext) -> Backend:
        options = {**self.bucket.options, "session": session()}
        return S3Backend(context, self.bucket.url, SPACE, options)

    def path(self, key: bytes) -> str:
        return f"kv/{SPACE}/{key.hex()[:2]}/{key.hex()}.kv"

    def raw_get(self, key: bytes) -> bytes | None:
        with suppress(self.raw.exceptions.NoSuchKey):
            return self.raw.get_object(Bucket=self.bucket.name, Key=self.path(key))["Body"].read()
        return None

    def raw_set(self, key: bytes, data: bytes) -> None:
        self.raw.put_object(Bucket=self.bucket.name, Key=self.path(key), Body=data)

    def raw_list(self) -> list[str]:
        return [name for name in self.bucket.names() if not name.endswith("/namespace.json")]


class TestSeaweed(InBucket):
    @pytest.fixture(autouse=True)
    def _bucket(self, bucket: Bucket) -> None:
        self.use(bucket)

    def test_claims_what_the_server_does(self, backend: Backend) -> None:
        assert backend.capabilities.first_writer_wins

    def test_of_racing_writers_one_wins(self, backend: Backend) -> None:
        """With more writers and fewer keys than elsewhere: the server makes losers wait for a second."""
        payloads = [bytes([number]) * SIZE for number in range(16)]
        out = memoryview(bytearray(SIZE))
        with ThreadPoolExecutor(len(payloads)) as pool:
            for key in map(make_key, range(2)):
                created = list(pool.map(lambda data, key=key: backend.write(key, memoryview(data)), payloads))
                assert backend.read_into(key, out) == SIZE
                assert [out == data for data in payloads] == created
                assert created.count(True) == 1
