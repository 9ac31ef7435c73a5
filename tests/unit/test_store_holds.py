"""What a scheduler needs of a store: holds that are no use, promotion into a lease, room, clearing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore import Store
from kvstore.engine.base import Verb
from kvstore.policy import make_policy
from support.chunks import chunk_key, payload
from support.scripted import Clock, ScriptedEngine, open_scripted

KEYS = [chunk_key(number) for number in range(8)]
Scripted = tuple[Store, ScriptedEngine, Clock]


@pytest.fixture(params=["lru", "arc", "priority"])
def scripted(request: pytest.FixtureRequest) -> Iterator[Scripted]:
    store, engine, clock = open_scripted(f"memory://{request.node.name}", slots=4, policy=request.param)
    yield store, engine, clock
    store.close(0.1)


def stored(store: Store, engine: ScriptedEngine, *keys: bytes) -> None:
    """`keys` are in host memory and in the tier."""
    for key in keys:
        store.put(key, payload(key))
        engine.run_all()
        store.poll()


def test_resident_is_a_live_view(scripted: Scripted) -> None:
    store, engine, _ = scripted
    resident = store.resident
    stored(store, engine, KEYS[0])
    assert KEYS[0] in resident and KEYS[1] not in resident
    store.clear()
    assert not resident


def test_room_is_what_is_free_or_may_go(scripted: Scripted) -> None:
    store, engine, _ = scripted
    stored(store, engine, *KEYS[:3])
    assert store.room == 4
    with store.hold(KEYS[:2]):
        assert store.room == 2
        with store.reserve(KEYS[4:5]) as lease:
            assert store.room == 1
            lease.abort()
    assert store.room == 4


def test_a_hold_keeps_without_counting_as_a_use(scripted: Scripted) -> None:
    store, engine, _ = scripted
    stored(store, engine, *KEYS[:4])
    hits = store.stats().host.hits
    with store.hold([KEYS[0], KEYS[7]]) as lease:
        assert list(lease) == [KEYS[0]] and lease.missing == [KEYS[7]]
        stored(store, engine, *KEYS[4:6])
        assert KEYS[0] in store.resident
        assert KEYS[1] not in store.resident
    assert store.stats().host.hits == hits
    stored(store, engine, KEYS[6])
    assert KEYS[0] not in store.resident, "the hold has made it recent"


def test_clearing_leaves_what_is_leased_and_what_is_in_the_tiers(scripted: Scripted) -> None:
    store, engine, _ = scripted
    stored(store, engine, *KEYS[:3])
    with store.read(KEYS[:1]):
        store.clear()
        assert set(store.resident) == {KEYS[0]}
    job = store.prefetch(KEYS[1:3])
    engine.run_all()
    assert job.done()
    assert set(store.resident) == set(KEYS[:3])


def test_what_is_promoted_into_a_lease_stays(scripted: Scripted) -> None:
    store, engine, _ = scripted
    stored(store, engine, *KEYS[:2])
    store.clear()
    lease = store.hold([])
    job = store.prefetch(KEYS[:2], into=lease)
    assert store.promoting == 2
    engine.run_all()
    assert job.done() and store.promoting == 0
    assert list(lease) == KEYS[:2]
    stored(store, engine, *KEYS[2:8])
    assert set(KEYS[:2]) <= set(store.resident)
    lease.release()
    assert store.room == 4


@pytest.mark.parametrize("way", ["release", "cancel"])
def test_what_comes_after_the_end_is_not_held(scripted: Scripted, way: str) -> None:
    store, engine, _ = scripted
    stored(store, engine, *KEYS[:2])
    store.clear()
    lease = store.hold([])
    job = store.prefetch(KEYS[:2], into=lease)
    engine.run(engine.find(Verb.READ), 1)
    store.poll()
    assert len(lease) == 1
    (lease.release if way == "release" else job.cancel)()
    engine.run_all()
    store.poll()
    assert len(lease) == 1
    lease.release()
    assert store.room == 4


def test_a_commit_may_stay_out_of_the_tiers(scripted: Scripted) -> None:
    store, engine, _ = scripted
    lease = store.reserve(KEYS[:1])
    lease[KEYS[0]][:] = bytes(store.chunk_size)
    lease.commit(tiers=())
    assert KEYS[0] in store.resident
    assert not any(batch.verb is Verb.WRITE for batch in engine.submitted)


def test_renewing_makes_recent(scripted: Scripted) -> None:
    store, engine, _ = scripted
    stored(store, engine, *KEYS[:4])
    store.renew([KEYS[7], *reversed(KEYS[:4])])
    stored(store, engine, *KEYS[4:6])
    assert set(KEYS[:2]) <= set(store.resident)
    assert not set(KEYS[2:4]) & set(store.resident)


def test_to_arc_renewing_is_no_reference() -> None:
    policy = make_policy("arc", 4)
    policy.add_many(KEYS[:4])
    policy.access(KEYS[0])
    policy.renew_many([KEYS[2], KEYS[1]])
    assert policy.coldest(4) == [KEYS[3], KEYS[2], KEYS[1], KEYS[0]]
