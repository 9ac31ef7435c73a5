"""``kvstore prune`` and ``kvstore stat`` on a bucket whose stores share a capacity."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

import kvstore
from support.chunks import chunk_key
from support.command import Command, Ran
from support.object_store import Bucket

pytest.importorskip("s3fs", reason="no s3fs (pip install '.[s3]')")

CHUNK = 4096
SIZE = 2 * CHUNK


def open_store(bucket: Bucket, model: str, options: str = "?capacity=1GiB") -> kvstore.Store:
    return kvstore.open(
        "ram://?capacity=1MiB&pin=off",
        {"url": f"{bucket.url}{options}", "storage_options": bucket.options},
        namespace={"model": model},
        chunk_size=CHUNK,
    )


def fill(bucket: Bucket, model: str, numbers: range, options: str = "?capacity=1GiB") -> str:
    """The directory of the namespace."""
    with open_store(bucket, model, options) as store:
        store.put_many({chunk_key(number): bytes(CHUNK) for number in numbers})
        assert store.flush(timeout=30)
        return store.namespace.directory


def left(bucket: Bucket, directory: str) -> int:
    return len([name for name in bucket.names(f"kv/{directory}/") if name.endswith(".kv")])


@pytest.fixture
def run(kv: Command, moto_bucket: Bucket) -> Callable[..., Ran]:
    """A command on the bucket."""

    def run(command: str, *arguments: str, code: int = 0) -> Ran:
        options = [f"s3.{name}={value}" for name, value in moto_bucket.options.items()]
        words = [word for option in options for word in ("--storage-option", option)]
        return kv(command, moto_bucket.url, *words, *arguments, code=code)

    return run


def test_down_to_a_size_and_the_books_stay_right(moto_bucket: Bucket, run: Callable[..., Ran]) -> None:
    one = fill(moto_bucket, "one", range(10))
    time.sleep(1.1)  # times of objects are in seconds
    two = fill(moto_bucket, "two", range(4))
    dry = run("prune", "--to", f"{6 * SIZE}B", "--dry-run", "--json").json
    assert (dry["chunks"], left(moto_bucket, one)) == (8, 10)
    report = run("prune", "--to", f"{6 * SIZE}B", "--json").json
    assert (report["chunks"], report["kept_chunks"]) == (8, 6)
    assert (left(moto_bucket, one), left(moto_bucket, two)) == (2, 4), "the oldest first"
    facts = {row["directory"]: row for row in run("stat", "--json").json["namespaces"]}
    assert (facts[one]["source"], facts[one]["chunks"], facts[one]["bytes"]) == ("books", 2, 2 * SIZE)


def test_in_one_namespace_what_is_old(moto_bucket: Bucket, run: Callable[..., Ran]) -> None:
    one, two = fill(moto_bucket, "one", range(3)), fill(moto_bucket, "two", range(3))
    time.sleep(2.1)
    run("prune", "--older-than", "1s", "--namespace", two)
    assert (left(moto_bucket, one), left(moto_bucket, two)) == (3, 0)
    assert run("verify", "--json").json["ok"]


def test_orphaned_namespaces_go_whole(moto_bucket: Bucket, run: Callable[..., Ran]) -> None:
    one = fill(moto_bucket, "one", range(3), "")
    two = fill(moto_bucket, "two", range(3))
    time.sleep(1.1)
    with open_store(moto_bucket, "two") as store:
        store.put(chunk_key(9), bytes(CHUNK))
        assert store.flush(timeout=30)
        report = run("prune", "--orphaned", "--older-than", "0s", "--json").json
    assert {row["directory"]: row["gone"] for row in report["namespaces"]} == {one: True, two: False}
    assert moto_bucket.names(f"kv/{one}/") == []
    assert left(moto_bucket, two) == 4, "a living store has entered itself"


def test_stat_answers_from_the_books(moto_bucket: Bucket, run: Callable[..., Ran]) -> None:
    one = fill(moto_bucket, "one", range(5))
    name = next(name for name in moto_bucket.names(f"kv/{one}/") if name.endswith(".kv"))
    moto_bucket.client().delete_object(Bucket=moto_bucket.name, Key=name)
    assert run("stat", "--json").json["chunks"] == 5
    assert run("stat", "--scan", "--json").json["chunks"] == 4
