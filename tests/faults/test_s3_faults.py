"""A store with a tier in a bucket: what networks and other users do to it, and how many requests it makes.

Every request goes through a proxy. Whatever happens, a key has the bytes that were stored under it, or none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import kvstore
from kvstore.testing.backend import make_key
from support.object_store import Bucket
from support.tcp_proxy import Proxy

pytest.importorskip("s3fs", reason="no s3fs (pip install '.[s3]')")

CHUNK = 256 * 1024
CHUNKS = 12
DATA = {make_key(number): bytes([number]) * (CHUNK - number) for number in range(CHUNKS)}
KEYS = list(DATA)


@pytest.fixture
def proxy(bucket: Bucket) -> Iterator[Proxy]:
    with Proxy(bucket.address) as proxy:
        yield proxy


@contextmanager
def opened(
    bucket: Bucket, proxy: Proxy, engine: str = "threads", options: str = ""
) -> Iterator[kvstore.Store]:
    tier = bucket.at(proxy.endpoint)
    with kvstore.open(
        "ram://?capacity=8MiB&pin=off",
        {"url": f"{tier.url}?{options}", "storage_options": tier.options},
        chunk_size=CHUNK,
        engine=engine,
    ) as store:
        yield store


@pytest.fixture
def filled(bucket: Bucket, proxy: Proxy) -> Bucket:
    """The bucket with all chunks in it; nothing is counted yet."""
    with opened(bucket, proxy) as store:
        store.put_many(DATA)
        assert store.flush(timeout=30.0)
    proxy.forget()
    return bucket


def get_all(store: kvstore.Store) -> dict[bytes, bytes]:
    """What a store has of the chunks; all of it must be right."""
    found = store.get_many(KEYS)
    assert found == {key: DATA[key] for key in found}
    return found


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_hits_after_a_restart_with_one_request_each(bucket: Bucket, proxy: Proxy, engine: str) -> None:
    with opened(bucket, proxy, engine) as store:
        store.put_many(DATA)
        assert store.flush(timeout=30.0)
    assert proxy.count("PUT", ".kv") == CHUNKS
    assert proxy.count("GET", ".kv") == proxy.count("HEAD") == 0
    proxy.forget()
    with opened(bucket, proxy, engine) as store:
        assert get_all(store) == DATA
    assert proxy.count("HEAD", ".kv") == CHUNKS
    assert proxy.count("GET", ".kv") == CHUNKS
    assert proxy.count("PUT", ".kv") == 0


@pytest.mark.parametrize("reset", [False, True], ids=["end", "reset"])
@pytest.mark.parametrize("limit", [100, 5000, 200_000])
def test_a_truncated_answer_is_a_miss(filled: Bucket, proxy: Proxy, limit: int, reset: bool) -> None:
    """Within the head of the answer, the header of the object, and its payload."""
    with opened(filled, proxy, options="retries=0") as store:
        store.lookup(KEYS)
        proxy.reset, proxy.answer_limit = reset, limit
        assert store.get(KEYS[0]) is None
        assert proxy.cuts > 0


def test_goes_on_when_connections_hold_again(filled: Bucket, proxy: Proxy) -> None:
    """Every answer is cut a few times: the client's own retries see to it."""
    with opened(filled, proxy, options="retries=3") as store:
        proxy.answer_limit, proxy.most_cuts = 10, 2
        assert get_all(store) == DATA
        assert proxy.cuts == 2


def test_a_slow_network_costs_time_only(filled: Bucket, proxy: Proxy) -> None:
    with opened(filled, proxy) as store:
        proxy.delay = 0.02
        assert get_all(store) == DATA


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_a_hang_is_a_miss_at_the_deadline(filled: Bucket, proxy: Proxy, engine: str) -> None:
    with opened(filled, proxy, engine, "timeout=1s") as store:
        proxy.hanging.set()
        started = time.monotonic()
        assert store.get(KEYS[0]) is None
        assert time.monotonic() - started < 4.0
        store.put(b"k" * 16, b"in memory all the same")
        assert store.get(b"k" * 16) == b"in memory all the same"


def test_others_may_delete_between_probe_and_read(filled: Bucket, proxy: Proxy) -> None:
    with opened(filled, proxy) as store:
        job = store.prefetch(KEYS[:1])
        assert job.result(timeout=10.0).promoted
        while kvstore.Lookup.RETRY in store.lookup(KEYS):
            pass
        names = [name for name in filled.names() if name.endswith(".kv")]
        objects = [{"Key": name} for name in names]
        filled.client().delete_objects(Bucket=filled.name, Delete={"Objects": objects})
        assert get_all(store) == {KEYS[0]: DATA[KEYS[0]]}
        store.put(KEYS[1], DATA[KEYS[1]])
        assert store.flush(timeout=10.0)
    assert len([name for name in filled.names() if name.endswith(".kv")]) == 1


def test_a_damaged_object_is_a_miss_and_moved_aside(filled: Bucket, proxy: Proxy) -> None:
    [name] = [name for name in filled.names() if name.endswith(f"{KEYS[0].hex()}.kv")]
    client = filled.client()
    data = bytearray(client.get_object(Bucket=filled.name, Key=name)["Body"].read())
    data[5000] ^= 1
    client.put_object(Bucket=filled.name, Key=name, Body=bytes(data))
    with opened(filled, proxy) as store:
        found = get_all(store)
    assert found.keys() == DATA.keys() - {KEYS[0]}
    assert name not in filled.names()
    assert [other for other in filled.names() if f"/quarantine/{KEYS[0].hex()}." in other]
