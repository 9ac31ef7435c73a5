"""What the options of a tier mean, and what its faults do: real directories, and faults by plan."""

from __future__ import annotations

import errno
import logging
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import kvstore
from kvstore import BackendError, ConfigError, Lookup, NamespaceMismatchError, Store
from kvstore.backends import memory
from kvstore.config import parse
from kvstore.frame import object_size
from kvstore.opening import assemble
from kvstore.testing.faults import Fault, FaultPlan, Rule
from support.chunks import CHUNK, chunk_key, payload

PAGE = 4096
KEYS = [chunk_key(number) for number in range(20)]
A, B, C, D = KEYS[:4]
Opener = Callable[..., Store]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Opener]:
    """Opens stores over ``file://`` tiers with these options, whose storage fails as a plan says."""
    stores: list[Store] = []

    def open_one(*options: str, slots: int = 4, rules: tuple[Rule, ...] = (), model: str = "m") -> Store:
        tiers = [f"file://{tmp_path}/{i}?name=tier{i}&retries=0&{option}" for i, option in enumerate(options)]
        host = f"ram://?capacity={slots * PAGE}&pin=off"
        config = parse(host, *tiers, namespace={"model": model}, chunk_size=CHUNK, engine="inline")
        stores.append(assemble(config, FaultPlan(rules)))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


@pytest.fixture
def stored(tmp_path: Path) -> Callable[[int], set[bytes]]:
    """Keys of the objects in a tier, by their file names."""
    return lambda tier: {bytes.fromhex(path.stem) for path in (tmp_path / str(tier)).rglob("*.kv")}


def items(*keys: bytes) -> dict[bytes, bytes]:
    return {key: payload(key) for key in keys}


# write= and read=.


def test_write_through_writes_at_once(open_store: Opener, stored: Callable[[int], set[bytes]]) -> None:
    store = open_store("")
    store.put(A, b"x")
    assert stored(0) == {A}


def test_write_off_is_never_written(open_store: Opener, stored: Callable[[int], set[bytes]]) -> None:
    store = open_store("write=off", slots=2)
    store.put_many(items(*KEYS[:6]))
    store.delete([A])
    assert store.close() and stored(0) == set()


def test_read_off_is_never_read(open_store: Opener) -> None:
    store = open_store("read=off", slots=1)
    store.put_many(items(A, B))
    assert store.get(A) is None
    assert store.lookup([A]) == [Lookup.MISS]
    assert store.stats().tier("tier0").misses == 0, "nobody asked it"


def test_on_evict_is_cleaned_ahead_of_eviction(
    open_store: Opener, stored: Callable[[int], set[bytes]]
) -> None:
    store = open_store("write=on-evict", slots=8)
    for key in KEYS[:6]:
        store.put(key, payload(key))
    assert stored(0) == set(), "there is room"
    for key in KEYS[6:]:
        store.put(key, payload(key))
    assert stored(0) >= set(KEYS[:12]), "whatever was evicted had been written"
    assert store.stats().tier("tier0").dropped == 0
    for key in KEYS:
        assert store.get(key) == payload(key), "promotions move the cold end, too"


def test_close_writes_what_on_evict_tiers_are_owed(
    open_store: Opener, stored: Callable[[int], set[bytes]]
) -> None:
    store = open_store("write=on-evict", slots=8)
    store.put_many(items(A, B, C))
    assert store.flush() and stored(0) == set(), "flush is for what is queued"
    assert store.close() is True
    assert stored(0) == {A, B, C}


# Deletion.


def test_delete_removes_from_host_and_tiers(open_store: Opener, stored: Callable[[int], set[bytes]]) -> None:
    store = open_store("", "write=on-evict", "write=off")
    store.put_many(items(A, B))
    store.delete([A, C])
    assert (store.get(A), store.get(B)) == (None, payload(B))
    assert stored(0) == {B}
    store.close()
    assert stored(1) == {B}


def test_a_key_can_be_stored_anew_after_its_delete(open_store: Opener) -> None:
    store = open_store("", slots=1)
    store.put(A, b"old")
    store.delete([A])
    store.put(A, b"new")
    store.put(B, b"x")
    assert store.get(A) == b"new"


def test_a_delete_that_fails_says_where_and_hides_the_chunk(open_store: Opener) -> None:
    store = open_store("", rules=(Rule(Fault.EIO, "delete", times=2),))
    store.put_many(items(A, B))
    with pytest.raises(BackendError, match="tier 'tier0'.*Input/output error.*and 1 more") as caught:
        store.delete([A, B])
    assert (caught.value.tier, caught.value.key) == ("tier0", A)
    assert store.get(A) is None
    store.delete([A])
    assert store.get(A) is None


def test_delete_leaves_read_only_tiers_alone_but_looks_there_no_more(
    open_store: Opener, stored: Callable[[int], set[bytes]]
) -> None:
    with open_store("") as store:
        store.put_many(items(A))
    store = open_store("write=off")
    assert store.get(A) == payload(A)
    store.delete([A])
    assert store.get(A) is None
    assert stored(0) == {A}


# capacity=.


@pytest.fixture
def open_memory() -> Iterator[Opener]:
    """Opens stores of one host slot over one memory tier with these options."""
    name = uuid.uuid4().hex
    stores: list[Store] = []

    def open_one(options: str) -> Store:
        tier = f"memory://{name}?name=tier0&{options}"
        stores.append(kvstore.open("ram://?capacity=4KiB", tier, chunk_size=CHUNK, engine="inline"))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()
    memory.forget(name)


def test_a_tier_with_a_capacity_keeps_what_was_used_last(open_memory: Opener) -> None:
    room = 3 * object_size(CHUNK)
    store = open_memory(f"capacity={room}")
    for key in (A, B, C):
        store.put(key, payload(key))
    assert store.get(A) == payload(A)  # read from the tier, and so the most recent
    store.put(D, payload(D))
    assert open_memory("").get_many([A, B, C, D]) == items(A, C, D)
    stats = store.stats().tier("tier0")
    assert (stats.evictions, stats.chunks, stats.bytes) == (1, 3, room)
    assert [e.keys for e in store.events() if (e.kind, e.source) == ("removed", "tier0")] == [(B,)]


def test_what_was_there_at_open_counts(open_memory: Opener) -> None:
    with open_memory("") as store:
        store.put_many(items(*KEYS[:6]))
    store = open_memory(f"capacity={6 * object_size(CHUNK)}")
    assert store.stats().tier("tier0").chunks == 6
    store.put_many(items(*KEYS[10:16]))
    assert store.stats().tier("tier0").bytes <= 6 * object_size(CHUNK)
    assert open_memory("").get_many(KEYS[10:16]) == items(*KEYS[10:16])


# Faults.


def test_a_failing_tier_costs_hits_and_nothing_else(open_store: Opener, lasting_breakers: None) -> None:
    store = open_store("", "", rules=(Rule(Fault.ENOSPC, "put", tier="tier0"),), slots=2)
    store.put_many(items(*KEYS[:8]))
    assert store.get_many(KEYS[:8]) == items(*KEYS[:8]), "the second tier has them"
    stats = store.stats()
    assert stats.tier("tier0").errors == 8
    assert stats.tier("tier0").breaker.write == "open" and stats.tier("tier0").breaker.read == "closed"
    assert [event.source for event in store.events() if event.kind == "tier-down"] == ["tier0"]


def test_an_object_that_vanishes_is_a_miss(open_store: Opener) -> None:
    store = open_store("", rules=(Rule(Fault.VANISH, "get"),), slots=1)
    store.put_many(items(A, B))
    assert store.get(A) is None


def test_a_required_tier_that_cannot_be_opened(open_store: Opener, tmp_path: Path) -> None:
    (tmp_path / "0").write_text("no directory")
    with pytest.raises(BackendError, match=r"tier 'tier0' \(file://.*cannot be opened.*required=false"):
        open_store("")


def test_a_tier_that_is_not_required_may_come_later(
    open_store: Opener, caplog: pytest.LogCaptureFixture, lasting_breakers: None
) -> None:
    with caplog.at_level(logging.ERROR, "kvstore"):
        store = open_store("required=false", rules=(Rule(Fault.EIO, "open", times=1),))
    assert "tier 'tier0' is down, going on without it" in caplog.text
    events = list(store.events())
    assert [(event.kind, event.source, event.keys) for event in events] == [("tier-down", "tier0", ())] * 2
    assert [event.detail.partition(": ")[0] for event in events] == ["reads", "writes"]
    assert all(os.strerror(errno.EIO) in event.detail for event in events)
    assert os.strerror(errno.EIO) in store.stats().tier("tier0").last_error
    store.put(A, b"x")
    assert store.get(A) == b"x" and store.get(B) is None
    stats = store.stats().tier("tier0")
    assert (stats.breaker.read, stats.dropped) == ("open", 1)


def test_a_wrong_namespace_is_an_error_also_where_the_tier_is_not_required(
    open_store: Opener, tmp_path: Path
) -> None:
    with open_store("") as store:
        directory = tmp_path / "0" / store.namespace.directory
    (directory / "namespace.json").write_text("{}")
    with pytest.raises(NamespaceMismatchError):
        open_store("required=false")


def test_namespaces_in_one_directory_never_see_each_other(open_store: Opener) -> None:
    one, other = open_store("", model="one"), open_store("", model="other")
    one.put(A, b"one")
    assert other.get(A) is None
    other.put(A, b"other")
    assert (one.get(A), other.get(A)) == (b"one", b"other")


def test_several_stores_share_a_directory(open_store: Opener) -> None:
    one, other = open_store("write=through"), open_store("write=through")
    one.put(A, payload(A))
    assert other.get(A) == payload(A)


@pytest.mark.parametrize("url", ["nosuch://x", "simplecache::nosuch://x", "nosuch::file:///x"])
def test_an_unknown_scheme_is_a_matter_of_configuration(url: str) -> None:
    """Also where the store could do without the tier."""
    with pytest.raises(ConfigError, match="nosuch"):
        kvstore.open("ram://?capacity=64KiB", f"{url}?required=false", chunk_size=CHUNK, engine="inline")


@pytest.mark.parametrize(
    ("url", "scheme"),
    [("flie:///x", "file"), ("per://h:1", "peer"), ("simplecahce::file:///x", "simplecache")],
)
def test_an_unknown_scheme_names_the_nearest(url: str, scheme: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{scheme}'"):
        kvstore.open("ram://?capacity=64KiB", url, chunk_size=CHUNK, engine="inline")


def test_a_scheme_that_is_registered_later_is_known() -> None:
    class Elsewhere(MemoryFileSystem):
        protocol = "elsewhere"
        store: ClassVar[dict[str, Any]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]

    fsspec.register_implementation("elsewhere", Elsewhere, clobber=True)
    with kvstore.open("ram://?capacity=64KiB", "elsewhere://x", chunk_size=CHUNK, engine="inline") as store:
        store.put(A, payload(A))
        assert store.flush(timeout=10)


def test_a_complete_configuration_stands_alone() -> None:
    config = parse("ram://?capacity=64KiB", chunk_size=CHUNK, engine="inline")
    with pytest.raises(ConfigError, match="tiers, chunk_size beside a StoreConfig"):
        kvstore.open("memory://x", chunk_size=2 * CHUNK, config=config)
    with kvstore.open(config=config) as store:
        assert store.chunk_size == CHUNK
