"""The calls of a store, one property each, on the inline engine: everything happens when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import ConfigError, Lookup, NoSpaceError, Store, content_key
from support.chunks import CHUNK, chunk_key, payload

PAGE = 4096
KEYS = [chunk_key(number) for number in range(20)]
A, B, C, D = KEYS[:4]
Opener = Callable[..., Store]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Opener]:
    """Opens stores of `slots` host slots over ``file://`` tiers with these options."""
    stores: list[Store] = []

    def open_one(*options: str, slots: int = 4, policy: str = "lru", **more: Any) -> Store:
        tiers = [f"file://{tmp_path}/{i}?name=tier{i}&{option}" for i, option in enumerate(options)]
        host = f"ram://?capacity={slots * PAGE}&policy={policy}&pin=off"
        store = kvstore.open(host, *tiers, **{"chunk_size": CHUNK, "engine": "inline", **more})
        stores.append(store)
        return store

    yield open_one
    for store in stores:
        store.close()


def items(*keys: bytes) -> dict[bytes, bytes]:
    return {key: payload(key) for key in keys}


def resident(store: Store) -> list[bytes]:
    with store.read(KEYS) as lease:
        return list(lease)


# Storing.


def test_a_slip_in_a_name_is_a_wrong_configuration_with_the_right_name(open_store: Opener) -> None:
    with pytest.raises(ConfigError, match="unknown setting 'chunksize'; did you mean 'chunk_size'"):
        open_store(chunksize="1MiB")
    with pytest.raises(ConfigError, match="no tier 'hots'; did you mean 'host'"):
        open_store().stats().tier("hots")


def test_two_tiers_at_one_place_are_refused(tmp_path: Path) -> None:
    for one, other in [(tmp_path, f"file://{tmp_path}/kv/.."), ("memory://x", "memory://x/")]:
        tiers = [{"url": str(url), "name": name} for url, name in ((one, "near"), (other, "far"))]
        with pytest.raises(ConfigError, match="tiers 'near' and 'far' are the same place, .*; keep one"):
            kvstore.open("ram://?capacity=1MiB&pin=off", "memory://y", *tiers, chunk_size=CHUNK)
    assert not list(tmp_path.iterdir())


def test_put_and_get(open_store: Opener) -> None:
    store = open_store()
    assert store.put(A, b"some bytes") is True
    assert store.put(A, b"other bytes") is False, "a key names its content"
    assert store.get(A) == b"some bytes"
    assert store.get(B) is None


@pytest.mark.parametrize("data", [b"", b"x" * CHUNK, bytearray(b"abc"), memoryview(b"abc")])
def test_any_bytes_up_to_a_chunk(open_store: Opener, data: bytes) -> None:
    store = open_store("")
    store.put(A, data)
    assert store.get(A) == bytes(data)


def test_data_longer_than_a_chunk_is_refused_before_anything_is_stored(open_store: Opener) -> None:
    store = open_store()
    with pytest.raises(ValueError, match="65 bytes is longer than a chunk"):
        store.put_many({A: b"x", B: b"x" * 65})
    assert resident(store) == []


@pytest.mark.parametrize("key", [b"x" * 15, b"x" * 65, b""])
def test_keys_that_are_too_short_or_too_long(open_store: Opener, key: bytes) -> None:
    store = open_store()
    with pytest.raises(ConfigError):
        store.put(key, b"x")
    with pytest.raises(ConfigError):
        store.lookup([key])


def test_add_returns_the_key_of_the_content(open_store: Opener) -> None:
    store = open_store()
    key = store.add(b"some bytes")
    assert key == content_key(b"some bytes") == store.add(b"some bytes")
    assert store.get(key) == b"some bytes"


def test_put_many_says_how_many_were_new(open_store: Opener) -> None:
    store = open_store()
    assert store.put_many(items(A, B)) == 2
    assert store.put_many(items(A, B, C)) == 1
    assert store.put_many({}) == 0


def test_put_many_larger_than_the_host_loses_nothing_that_a_tier_takes(open_store: Opener) -> None:
    store = open_store("", slots=3)
    assert store.put_many(items(*KEYS)) == len(KEYS)
    assert store.flush()
    assert store.get_many(KEYS) == items(*KEYS)
    assert store.stats().tier("tier0").dropped == 0


def test_reserve_gives_slots_to_fill_in_place(open_store: Opener) -> None:
    store = open_store()
    with store.reserve([A, B]) as lease:
        assert store.lookup([A]) == [Lookup.PENDING]
        for key, view in lease.items():
            assert len(view) == CHUNK
            view[:3] = b"abc"
            lease.set_length(key, 3)
    assert store.get_many([A, B]) == {A: b"abc", B: b"abc"}


def test_reserve_leaves_out_what_is_there_and_what_does_not_fit(open_store: Opener) -> None:
    store = open_store(slots=2)
    store.put(A, b"x")
    with store.reserve([A, B, C, D]) as lease:
        assert (list(lease), lease.present, lease.refused) == ([B], [A], [C, D])
        with store.reserve([B, C]) as other:
            assert (list(other), other.present, other.refused) == ([C], [B], []), "A may go for this one"


def test_an_exception_aborts_a_reservation(open_store: Opener) -> None:
    store = open_store()
    with pytest.raises(RuntimeError), store.reserve([A, B]) as lease:
        lease[A][:] = b"x" * CHUNK
        raise RuntimeError
    assert store.lookup([A, B]) == [Lookup.MISS] * 2
    assert store.stats().fill == 0.0


def test_a_reservation_ends_once(open_store: Opener) -> None:
    store = open_store()
    lease = store.reserve([A])
    lease.commit()
    lease.abort()
    lease.commit()
    assert resident(store) == [A]
    with pytest.raises(ValueError, match="ended"):
        lease[A]


def test_length_of_a_reserved_chunk_is_checked(open_store: Opener) -> None:
    store = open_store()
    with store.reserve([A]) as lease:
        for length in (-1, CHUNK + 1):
            with pytest.raises(ValueError, match="length"):
                lease.set_length(A, length)
        with pytest.raises(KeyError):
            lease.set_length(B, 1)


# Reading.


def test_get_promotes(open_store: Opener) -> None:
    store = open_store("", slots=2)
    store.put_many(items(*KEYS[:4]))
    assert A not in resident(store)
    assert store.get(A) == payload(A)
    assert A in resident(store)
    assert store.stats().tier("tier0").hits == 1


def test_get_many_keeps_the_order_and_leaves_out_misses(open_store: Opener) -> None:
    store = open_store("", slots=2)
    store.put_many(items(*KEYS[:6]))
    asked = [KEYS[5], KEYS[9], KEYS[0], KEYS[5], KEYS[3]]
    assert list(store.get_many(asked)) == [KEYS[5], KEYS[0], KEYS[3]]


def test_chunks_of_one_request_come_from_different_tiers(open_store: Opener) -> None:
    for option, keys in (("", KEYS[:3]), ("write=off&read=off", [])):
        with open_store(option, "write=off") as store:
            store.put_many(items(*keys))
    with open_store("write=off&read=off", "") as store:
        store.put_many(items(*KEYS[3:6]))
    store = open_store("", "", slots=8)
    assert store.get_many(KEYS[:6]) == items(*KEYS[:6])
    assert [tier.hits for tier in store.stats()] == [0, 3, 3]


def test_read_copies_nothing_and_promotes_nothing(open_store: Opener) -> None:
    store = open_store("", slots=2)
    store.put_many(items(A, B, C))
    with store.read([A, C, A]) as lease:
        assert (list(lease), lease.missing) == ([C], [A, A])
        assert lease[C] == payload(C)
        assert lease[C].obj is store._payload(lease.slots[C]).obj, "the arena itself"
    assert store.stats().promoting == 0


def test_views_of_a_read_are_read_only_and_end_with_the_lease(open_store: Opener) -> None:
    store = open_store()
    store.put(A, b"abc")
    with store.read([A]) as lease:
        view = lease[A]
        assert len(view) == 3
        with pytest.raises(TypeError):
            view[0] = 0
    with pytest.raises(ValueError, match="released"):
        view[0]
    with pytest.raises(ValueError, match="ended"):
        lease[A]
    lease.release()
    assert store.stats().leased == 0


def test_a_leased_chunk_stays_whatever_else_is_stored(open_store: Opener) -> None:
    store = open_store("", slots=2)
    store.put(A, payload(A))
    with store.read([A]) as lease:
        store.put_many(items(*KEYS[1:8]))
        store.delete([A])
        assert lease[A] == payload(A)
    assert store.get(A) is None


def test_lookup_moves_no_data(open_store: Opener) -> None:
    with open_store("") as store:
        store.put_many(items(A))
    store = open_store("")
    store.put(B, b"x")
    assert store.lookup([A, B, C]) == [Lookup.RETRY, Lookup.HIT, Lookup.RETRY]
    assert store.lookup([A, B, C]) == [Lookup.PENDING, Lookup.HIT, Lookup.MISS]
    assert resident(store) == [B]


def test_prefetch_promotes_in_key_order_and_says_what_became_of_each(open_store: Opener) -> None:
    with open_store("") as store:
        store.put_many(items(*KEYS[:8]))
    store = open_store("write=off", slots=4)
    store.put(KEYS[10], b"x")
    outcome = store.prefetch([KEYS[10], KEYS[11], *KEYS[:8], KEYS[0]]).result(timeout=0)
    assert outcome.missing == (KEYS[11],)
    assert outcome.promoted == tuple(KEYS[:3]), "the head of the request, without evicting its own"
    assert outcome.skipped == (KEYS[10], *KEYS[3:8])


def test_a_bad_object_is_a_miss_an_event_and_a_counter(open_store: Opener, tmp_path: Path) -> None:
    with open_store("") as store:
        store.put(A, payload(A))
    (path,) = (tmp_path / "0").rglob("*.kv")
    path.write_bytes(path.read_bytes().replace(payload(A)[-8:], bytes(8)))
    store = open_store("")
    assert store.get(A) is None
    assert store.stats().tier("tier0").corrupt == 1
    (event,) = [event for event in store.events() if event.kind == "corrupt"]
    assert (event.keys, event.source) == ((A,), "tier0") and "checksum" in event.detail
    assert [p.parent.name for p in (tmp_path / "0").rglob("*.bad")] == ["quarantine"]
    store.put(A, payload(A))
    assert path.exists(), "a sound one takes its place"


# Policy.


def test_touched_chunks_stay_longer(open_store: Opener) -> None:
    store = open_store(slots=3)
    store.put_many(items(A))
    store.put_many(items(B, C))
    store.touch([A, KEYS[9]])
    store.put_many(items(D))
    assert resident(store) == [A, C, D]


def test_priority_decides_who_goes(open_store: Opener) -> None:
    store = open_store(slots=3, policy="priority")
    store.set_priority([A], 100)
    for key in KEYS[:6]:
        store.put(key, payload(key))
    assert resident(store) == [A, KEYS[4], KEYS[5]]
    with pytest.raises(ValueError, match="101"):
        store.set_priority([A], 101)


# Facts.


def test_stats_by_name(open_store: Opener) -> None:
    store = open_store("", "write=off", slots=2)
    store.put_many(items(*KEYS[:4]))
    store.get(A)
    store.get(KEYS[9])
    stats = store.stats()
    assert [tier.name for tier in stats] == ["host", "tier0", "tier1"]
    assert (stats.slots, stats.fill, stats.leased, stats.quarantined) == (2, 1.0, 0, 0)
    assert (stats.host.chunks, stats.host.writes, stats.host.capacity) == (2, 4, 2 * PAGE)
    tier = stats.tier("tier0")
    assert (tier.writes, tier.reads, tier.hits, tier.chunks) == (4, 1, 1, 4)
    assert tier.written_bytes == sum(len(payload(key)) for key in KEYS[:4])
    assert (tier.breaker.read, tier.breaker.write, tier.queued) == ("closed", "closed", 0)
    assert stats.namespace == store.namespace.directory


def test_events_tell_the_story_in_order(open_store: Opener) -> None:
    store = open_store("", slots=1)
    store.put(A, payload(A))
    store.put(B, payload(B))
    store.get(A)
    store.delete([A])
    told = [(event.kind, event.keys, event.source, event.target) for event in store.events()]
    assert told == [
        ("stored", (A,), None, "host"),
        ("stored", (A,), "host", "tier0"),
        ("removed", (A,), "host", None),
        ("stored", (B,), None, "host"),
        ("stored", (B,), "host", "tier0"),
        ("removed", (B,), "host", None),
        ("promoted", (A,), "tier0", "host"),
        ("removed", (A,), "host", None),
        ("removed", (A,), "tier0", None),
    ]
    assert list(store.events()) == []


def test_no_space_says_who_holds_the_slots(open_store: Opener) -> None:
    store = open_store(slots=2)
    store.put(A, b"x")
    with store.read([A]), store.reserve([B]), pytest.raises(NoSpaceError) as caught:
        store.put(C, b"x", timeout=0.0)
    assert "1 chunks within 0.0 s" in str(caught.value)
    assert "of 2 slots 1 are leased, 1 are being filled, 0 are quarantined" in str(caught.value)


def test_a_store_says_what_it_is(open_store: Opener, tmp_path: Path) -> None:
    store = open_store("write=off")
    tiers = f"host (16KiB), tier0 (file://{tmp_path}/0)"
    facts = f"chunks of {CHUNK}B, namespace {store.namespace.directory}"
    assert repr(store) == f"<Store: {tiers}; {facts}>"
    store.close()
    assert repr(store).startswith("<closed Store: host")
