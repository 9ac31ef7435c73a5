"""What uploads leave that did not come to their end: nothing that anybody reads, or that stays in the way."""

from __future__ import annotations

from contextlib import closing

import pytest

import kvstore
from kvstore.backends.layout import object_name
from kvstore.testing.backend import make_key
from support.object_store import Bucket
from support.tcp_proxy import Proxy

pytest.importorskip("s3fs", reason="no s3fs (pip install '.[s3]')")

CHUNK = 256 * 1024
KEY = make_key(1)
DATA = bytes(range(256)) * (CHUNK // 256)
HEADS = (b"GET ", b"HEAD ", b"PUT ", b"POST ", b"DELETE ")


def open_store(bucket: Bucket) -> kvstore.Store:
    return kvstore.open(
        "ram://?capacity=4MiB&pin=off",
        {"url": bucket.url, "storage_options": bucket.options, "retries": 0},
        chunk_size=CHUNK,
    )


def sizes_in(bucket: Bucket) -> list[int]:
    """Bytes of the objects that have names of chunks."""
    client = bucket.client()
    names = [name for name in bucket.names() if name.endswith(".kv")]
    return [client.head_object(Bucket=bucket.name, Key=name)["ContentLength"] for name in names]


def cut_bodies(data: bytes) -> bytes:
    """End the connection at the second piece of what a request brings."""
    if not data.startswith(HEADS):
        raise ConnectionResetError
    return data


def test_an_upload_that_is_cut_is_a_miss_and_not_in_the_way(bucket: Bucket) -> None:
    with Proxy(bucket.address) as proxy:
        with closing(open_store(bucket.at(proxy.endpoint))) as store:
            proxy.rewrite = cut_bodies
            store.put(KEY, DATA)
            assert store.flush(timeout=60)
            tier = store.stats().tiers[1]
            assert (tier.writes, tier.errors) == (0, 1)
        assert all(size < CHUNK for size in sizes_in(bucket)), "SeaweedFS keeps what has come"
        proxy.rewrite = None
        with closing(open_store(bucket.at(proxy.endpoint))) as store:
            assert store.get(KEY) is None
            store.put(KEY, DATA)
            assert store.flush(timeout=60)
            assert store.stats().tiers[1].writes == 1
    with closing(open_store(bucket)) as store:
        assert store.get(KEY) == DATA


def test_a_multipart_upload_of_somebody_else_is_no_object(bucket: Bucket) -> None:
    client = bucket.client()
    with closing(open_store(bucket)) as store:
        [manifest] = [name for name in bucket.names() if name.endswith("/namespace.json")]
        name = manifest.replace("namespace.json", object_name(KEY))
        upload = client.create_multipart_upload(Bucket=bucket.name, Key=name)["UploadId"]
        client.upload_part(Bucket=bucket.name, Key=name, UploadId=upload, PartNumber=1, Body=DATA)
        assert store.get(KEY) is None
        store.put(KEY, DATA)
        assert store.flush(timeout=60)
        assert store.stats().tiers[1].writes == 1
    with closing(open_store(bucket)) as store:
        assert store.get(KEY) == DATA
    client.abort_multipart_upload(Bucket=bucket.name, Key=name, UploadId=upload)
