"""Touching what is read in a bucket, so that its time of modification says when it was last used."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from kvstore.backends import BackendContext
from support.chunks import chunk_key
from support.object_store import Bucket
from support.tcp_proxy import Proxy
from support.world import wait_for

pytest.importorskip("s3fs", reason="no s3fs (pip install '.[s3]')")

from kvstore.backends.s3 import S3Backend

CHUNK = 4096
SPACE = "0f" * 16


def open_backend(bucket: Bucket) -> S3Backend:
    """A backend that touches what it reads."""
    context = BackendContext(bytes(16), b"manifest", CHUNK)
    backend = S3Backend(context, bucket.url, SPACE, bucket.options, stamp=True)
    backend.open()
    return backend


@pytest.fixture
def proxy(moto_bucket: Bucket) -> Iterator[Proxy]:
    with Proxy(moto_bucket.address) as proxy:
        yield proxy


@pytest.fixture
def backend(moto_bucket: Bucket, proxy: Proxy) -> Iterator[S3Backend]:
    with closing(open_backend(moto_bucket.at(proxy.endpoint))) as backend:
        yield backend


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every object is old enough to be touched."""
    monkeypatch.setattr("kvstore.backends.s3._STAMP_EVERY", -1.0)


def write(backend: S3Backend, *numbers: int) -> None:
    for number in numbers:
        backend.write(chunk_key(number), memoryview(bytes(CHUNK)))


def read(backend: S3Backend, number: int) -> bool:
    return backend.read_into(chunk_key(number), memoryview(bytearray(CHUNK))) == CHUNK


def rows(backend: S3Backend) -> dict[bytes, float]:
    return {found.key: found.mtime for found in backend.scan()}


def test_reading_an_old_object_touches_it(backend: S3Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.backends.s3._STAMP_EVERY", 0.5)
    write(backend, 0, 1)
    before = rows(backend)[chunk_key(0)]
    time.sleep(1.1)
    assert read(backend, 0)
    wait_for(lambda: rows(backend)[chunk_key(0)] > before)
    assert read(backend, 0), "it is whole"
    assert rows(backend)[chunk_key(1)] <= rows(backend)[chunk_key(0)]


@pytest.mark.usefixtures("always")
def test_most_connections_are_left_to_readers(backend: S3Backend, proxy: Proxy) -> None:
    write(backend, *range(11))
    proxy.forget()
    may_copy = threading.Event()

    def hold_copies(head: bytes) -> None:
        if b"x-amz-copy-source" in head.lower():
            may_copy.wait(30)

    def touched() -> set[str]:
        return {target[-35:-3] for method, target in list(proxy.requests) if method == "PUT"}

    proxy.reply = hold_copies
    assert all(read(backend, number) for number in range(10))
    wait_for(lambda: len(touched()) == 2)
    may_copy.set()
    wait_for(lambda: read(backend, 10) and chunk_key(10).hex() in touched())
    assert len(touched()) == 3


@pytest.mark.usefixtures("always")
def test_storage_class_and_encryption_stay(backend: S3Backend, moto_bucket: Bucket) -> None:
    write(backend, 0)
    name = chunk_key(0).hex()
    place = {"Bucket": moto_bucket.name, "Key": f"kv/{SPACE}/{name[:2]}/{name}.kv"}
    kept = {
        "StorageClass": "STANDARD_IA",
        "ServerSideEncryption": "aws:kms",
        "SSEKMSKeyId": "arn:aws:kms:us-east-1:123456789012:key/of-the-bucket",
        "BucketKeyEnabled": True,
    }
    client = moto_bucket.client()
    mark = {"MetadataDirective": "REPLACE", "Metadata": {"untouched": "yes"}}
    client.copy_object(**place, CopySource=place, **mark, **kept)

    def found() -> dict[str, Any]:
        return dict(client.head_object(**place))

    assert found()["Metadata"]
    assert found().items() >= kept.items()
    assert read(backend, 0)
    wait_for(lambda: not found()["Metadata"])
    assert found().items() >= kept.items()
