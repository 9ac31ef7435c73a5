"""What each fault of a storage does to a store: hits are lost, and nothing else.

Everything goes through the calls that an engine's thread makes; none of them may raise. Each test ends with
an audit of the store (``World.close``). ``docs/reference/faults.md`` lists the faults and the tests.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import kvstore
from kvstore import Lookup
from kvstore.presence import Known
from kvstore.scan import Status
from kvstore.testing.faults import Fault, FaultPlan, Rule
from support.engines import BACKGROUND, ENGINES
from support.world import CHUNK, KEYS, World, is_idle, is_staffed, kinds, load, save, wait_for

ERRORS = [Fault.EIO, Fault.ENOSPC, Fault.EACCES, Fault.EMFILE]
A_FEW, OTHERS = KEYS[:3], KEYS[3:6]  # fewer than open a breaker
MANY, LATER = KEYS[:12], KEYS[12:]  # more than that
LONGER_THAN_A_BREAKER_IS_OPEN = 120.0

background = pytest.mark.parametrize("engine", BACKGROUND)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def world(tmp_path: Path, engine: str, lasting_breakers: None) -> Iterator[World]:
    world = World(tmp_path, engine)
    yield world
    world.close()


def first(world: World) -> kvstore.TierStats:
    return world.store.stats().tier("first")


def second(world: World) -> kvstore.TierStats:
    return world.store.stats().tier("second")


# Reads.


@pytest.mark.parametrize("fault", ERRORS)
def test_a_failing_read_is_asked_of_the_next_tier(world: World, fault: Fault) -> None:
    world.plant([*A_FEW, *OTHERS])
    store = world.open(Rule(fault, "get"))
    assert load(store, A_FEW) == set(A_FEW)
    assert (first(world).errors, first(world).corrupt, second(world).hits) == (3, 0, 3)
    assert kinds(store.events(), "second") == {"promoted": 3}
    assert len(world.plan.log()) == 3
    world.plan.heal()
    assert load(store, OTHERS) == set(OTHERS)
    assert (first(world).hits, second(world).hits) == (3, 3)
    assert world.found("first") == {Status.GOOD: 6}


@pytest.mark.parametrize("fault", ERRORS)
def test_a_failing_probe_is_asked_of_the_next_tier(world: World, fault: Fault) -> None:
    world.plant(A_FEW)
    store = world.open(Rule(fault, "exists"))
    assert load(store, A_FEW) == set(A_FEW)
    assert (first(world).hits, second(world).hits) == (0, 3)
    assert first(world).errors > 0


@pytest.mark.parametrize("fault", ERRORS)
def test_a_probe_of_many_keys_that_fails_once_is_made_key_by_key(world: World, fault: Fault) -> None:
    world.plant(A_FEW)
    store = world.open(Rule(fault, "exists", times=1))
    assert load(store, A_FEW) == set(A_FEW)
    assert (first(world).hits, second(world).hits, first(world).errors) == (3, 0, 0)


def test_with_no_other_tier_a_failing_read_is_a_miss(world: World) -> None:
    world.plant(A_FEW, "first")
    store = world.open(Rule(Fault.EIO, "get"))
    assert load(store, A_FEW) == set()
    assert store.lookup(A_FEW) == [Lookup.MISS] * 3
    world.plan.heal()
    world.clock.skip(LONGER_THAN_A_BREAKER_IS_OPEN)  # and than an absence is remembered
    assert load(store, A_FEW) == set(A_FEW)


def test_only_what_may_pass_is_tried_again(world: World) -> None:
    world.plant(A_FEW)
    rules = Rule(Fault.EIO, "get", key=A_FEW[0].hex(), times=1), Rule(Fault.EACCES, "get", key=A_FEW[1].hex())
    store = world.open(*rules, retries=3)
    assert load(store, A_FEW) == set(A_FEW)
    assert (first(world).hits, first(world).errors, second(world).hits) == (2, 1, 1)
    assert [injection.fault for injection in world.plan.log()] == [Fault.EIO, Fault.EACCES]


def test_the_breaker_for_reads(world: World) -> None:
    world.plant(KEYS)
    store = world.open(Rule(Fault.EIO, "get"))
    assert load(store, MANY[:8]) == set(MANY[:8])
    assert (first(world).breaker.read, first(world).breaker.write) == ("open", "closed")
    asked = len(world.plan.log())
    assert load(store, MANY[8:]) == set(MANY[8:])
    assert len(world.plan.log()) == asked  # a tier that is down is not asked
    world.plan.heal()
    world.clock.skip(LONGER_THAN_A_BREAKER_IS_OPEN)
    assert load(store, LATER) == set(LATER)
    assert (first(world).breaker.read, first(world).hits) == ("closed", 4)
    down, up = (event for event in store.events() if event.kind.startswith("tier"))
    assert (down.kind, up.kind, down.source) == ("tier-down", "tier-up", "first")
    assert "reads" in down.detail
    assert "injected" in down.detail


# Writes.


@pytest.mark.parametrize("fault", [*ERRORS, Fault.SHORT_WRITE])
def test_a_failing_write_is_a_future_miss(world: World, fault: Fault) -> None:
    store = world.open(Rule(fault, "put"))
    assert save(store, A_FEW) == set(A_FEW)
    assert store.flush(timeout=20)
    assert load(store, A_FEW) == set(A_FEW)
    assert (first(world).errors, first(world).writes, second(world).writes) == (3, 0, 3)
    world.plan.heal()
    assert save(store, OTHERS) == set(OTHERS)
    assert store.flush(timeout=20)
    assert (first(world).errors, first(world).writes, second(world).writes) == (3, 3, 6)
    wrong = {Status.CORRUPT: 3} if fault is Fault.SHORT_WRITE else {}  # half of each, and refused
    assert world.found("first") == {Status.GOOD: 3, **wrong}


def test_a_full_disk_stops_stores_and_loads_go_on(world: World) -> None:
    world.plant(LATER, "first")
    store = world.open(Rule(Fault.ENOSPC, "put"))
    for keys in MANY[:4], MANY[4:8], MANY[8:11]:
        assert save(store, keys) == set(keys)
        assert store.flush(timeout=20)
    assert (first(world).breaker.write, first(world).breaker.read) == ("open", "closed")
    assert (first(world).errors, first(world).dropped, second(world).writes) == (8, 3, 11)
    assert len(world.plan.log()) == 8  # nothing more was written there
    assert load(store, LATER) == set(LATER)
    assert first(world).hits == 4
    world.plan.heal()
    world.clock.skip(LONGER_THAN_A_BREAKER_IS_OPEN)
    assert save(store, MANY[11:]) == set(MANY[11:])
    assert store.flush(timeout=20)
    assert (first(world).breaker.write, first(world).writes) == ("closed", 1)
    states = [event.detail for event in store.events() if event.kind.startswith("tier")]
    assert len(states) == 2
    assert "No space left" in states[0]


def test_a_tier_that_cannot_be_listed(world: World, tmp_path: Path) -> None:
    """Where nobody else keeps to the capacity a tier is listed at its opening; what cannot be seen is not
    counted."""
    store = world.open(Rule(Fault.EIO, "scan"), url=f"memory://{tmp_path}", capacity="1MiB")
    assert save(store, A_FEW) == set(A_FEW)
    assert store.flush(timeout=20)
    assert (first(world).errors, first(world).writes) == (1, 3)


# Wrong bytes.


@pytest.mark.parametrize("fault", [Fault.SHORT_READ, Fault.FLIPPED_BIT])
def test_what_is_read_wrong_is_refused(world: World, fault: Fault) -> None:
    """On the way it went wrong; what is sound on storage stays there."""
    world.plant(A_FEW)
    store = world.open(Rule(fault, "get"))
    assert load(store, A_FEW) == set(A_FEW)
    assert (first(world).corrupt, first(world).hits, second(world).hits) == (3, 0, 3)
    assert kinds(store.events(), "first") == {"corrupt": 3}
    assert world.found("first") == {Status.GOOD: 3}
    assert first(world).breaker.read == "closed"  # the tier does answer
    world.plan.heal()
    world.close()
    store = world.open()
    assert load(store, A_FEW) == set(A_FEW)
    assert (first(world).corrupt, first(world).hits) == (0, 3)


@pytest.mark.parametrize("fault", [Fault.TORN, Fault.FLIPPED_BIT, Fault.SHORT_WRITE])
def test_what_was_written_wrong_is_refused_and_moved_aside(world: World, fault: Fault) -> None:
    store = world.open(Rule(fault, "put"))
    save(store, A_FEW)
    assert store.flush(timeout=20)
    assert world.found("first") == {Status.CORRUPT: 3}
    world.close()
    store = world.open()
    assert load(store, A_FEW) == set(A_FEW)
    assert (first(world).corrupt, second(world).hits) == (3, 3)
    corrupt = [event for event in store.events() if event.kind == "corrupt"]
    assert {key for event in corrupt for key in event.keys} == set(A_FEW)
    assert world.found("first") == {Status.QUARANTINED: 3}
    store.delete(A_FEW)
    assert save(store, A_FEW) == set(A_FEW)
    assert store.flush(timeout=20)
    assert world.found("first") == {Status.GOOD: 3, Status.QUARANTINED: 3}


def test_what_cannot_be_moved_aside_stays_refused(world: World) -> None:
    store = world.open(Rule(Fault.FLIPPED_BIT, "put"))
    save(store, A_FEW)
    assert store.flush(timeout=20)
    world.close()
    store = world.open(Rule(Fault.EACCES, "quarantine"))
    assert load(store, A_FEW) == set(A_FEW)
    assert (first(world).corrupt, second(world).hits) == (3, 3)
    assert world.found("first") == {Status.CORRUPT: 3}


# What others do.


def test_what_vanishes_between_probe_and_read_is_a_miss(world: World) -> None:
    world.plant(A_FEW, "first")
    store = world.open(Rule(Fault.VANISH, "get"))
    assert load(store, A_FEW) == set()
    assert store.lookup(A_FEW) == [Lookup.MISS] * 3
    presence = store._planner.tiers[0].presence
    assert {presence.get(key) for key in A_FEW} == {Known.ABSENT}
    assert (first(world).errors, first(world).corrupt, first(world).hits) == (0, 0, 0)
    assert first(world).misses > 0
    assert kinds(store.events(), "first") == {}
    world.plan.heal()
    assert save(store, A_FEW) == set(A_FEW)
    assert store.flush(timeout=20)
    assert world.found("first") == {Status.GOOD: 3}


def test_what_vanishes_is_asked_of_the_next_tier(world: World) -> None:
    world.plant(A_FEW)
    assert load(world.open(Rule(Fault.VANISH, "get")), A_FEW) == set(A_FEW)
    assert second(world).hits == 3


# Slow, and hung.


def test_a_slow_tier_is_waited_for_by_nobody_but_its_job(world: World) -> None:
    world.plant(A_FEW)
    store = world.open(Rule(Fault.DELAY, "get", seconds=0.02))
    assert load(store, A_FEW) == set(A_FEW)
    assert (first(world).hits, first(world).errors, first(world).timeouts) == (3, 0, 0)


@background
def test_who_asks_where_chunks_are_waits_for_no_slow_read(world: World) -> None:
    world.plant(KEYS)
    slow, hung = Rule(Fault.DELAY, "get", seconds=0.1, times=11), Rule(Fault.HANG, "get", skip=11)
    store = world.open(slow, hung, timeout="60s")
    job = store.prefetch(MANY)
    wait_for(lambda: job.done() or bool(world.plan.log()))
    wait_for(lambda: store.lookup(LATER) == [Lookup.PENDING] * len(LATER))
    assert not job.done()
    world.plan.heal()
    assert len(job.result(timeout=20).promoted) == len(MANY)


@background
def test_a_hung_read_is_given_up_and_its_slot_set_aside(world: World) -> None:
    world.plant([*A_FEW, *OTHERS])
    store = world.open(Rule(Fault.HANG, "get", times=1), timeout="300ms", workers=2)
    assert load(store, A_FEW[:1]) == set(A_FEW[:1])
    assert (first(world).timeouts, second(world).hits) == (1, 1)
    if world.engine == "threads":  # a process that hangs is killed, and its slot comes back by that
        assert store.stats().quarantined == 1
    assert load(store, OTHERS) == set(OTHERS)  # another worker has taken over
    assert first(world).hits == 3
    world.plan.heal()
    wait_for(lambda: is_idle(store))
    assert load(store, A_FEW) == set(A_FEW)


@background
def test_a_hung_write_keeps_its_slot_leased(world: World) -> None:
    store = world.open(Rule(Fault.HANG, "put", times=1), timeout="300ms", workers=2)
    assert save(store, A_FEW[:1]) == set(A_FEW[:1])
    assert store.flush(timeout=20)  # the deadline ends what flush waits for
    assert (first(world).timeouts, second(world).writes) == (1, 1)
    if world.engine == "threads":
        assert store.stats().leased == 1
    assert save(store, OTHERS) == set(OTHERS)
    assert store.flush(timeout=20)
    assert first(world).writes == 3
    world.plan.heal()
    wait_for(lambda: is_idle(store))
    if world.engine == "threads":  # the bytes came late, and were still the right ones
        assert world.found("first") == {Status.GOOD: 4}


@background
def test_a_hung_probe_is_answered_by_the_next_tier(world: World) -> None:
    key = A_FEW[0]
    world.plant([key])
    store = world.open(Rule(Fault.HANG, "exists", times=1), timeout="300ms", workers=2)
    assert store.lookup([key]) == [Lookup.RETRY]
    wait_for(lambda: store.lookup([key]) != [Lookup.RETRY], store)
    assert store.lookup([key]) == [Lookup.PENDING]
    assert load(store, [key]) == {key}
    assert (first(world).timeouts, second(world).hits) == (1, 1)


@background
def test_a_tier_that_hangs_again_and_again_is_left_alone(world: World) -> None:
    world.plant(KEYS)
    store = world.open(Rule(Fault.HANG, "get"), timeout="200ms", workers=2)
    for key in MANY[:2]:
        assert load(store, [key]) == {key}
    assert first(world).breaker.read == "open"
    began = time.monotonic()
    assert load(store, MANY[2:]) == set(MANY[2:])
    assert time.monotonic() - began < 10  # as long as a hang lasts it would be many times the timeout
    assert first(world).timeouts == 2
    world.plan.heal()
    wait_for(lambda: is_idle(store) and is_staffed(store))
    world.clock.skip(LONGER_THAN_A_BREAKER_IS_OPEN)
    assert load(store, LATER) == set(LATER)
    assert (first(world).breaker.read, first(world).hits) == ("closed", 4)


@background
def test_a_hung_delete_is_an_error_to_its_caller_only(world: World) -> None:
    world.plant(A_FEW)
    store = world.open(Rule(Fault.HANG, "delete", times=1), timeout="300ms", workers=2)
    with pytest.raises(kvstore.BackendError, match="no answer within"):
        store.delete(A_FEW)
    assert load(store, A_FEW) == set()  # hidden from this store
    assert first(world).timeouts == 1


# A tier that is down at the start.


def test_a_tier_that_cannot_be_opened_comes_back(world: World) -> None:
    world.plant(A_FEW)
    store = world.open(Rule(Fault.EIO, "open"), required="false")
    assert load(store, A_FEW) == set(A_FEW)
    assert (first(world).breaker.read, second(world).hits) == ("open", 3)
    world.plan.heal()
    world.clock.skip(LONGER_THAN_A_BREAKER_IS_OPEN)
    world.plant(OTHERS, "first")
    assert load(store, OTHERS) == set(OTHERS)
    assert (first(world).breaker.read, first(world).hits) == ("closed", 3)


def test_a_required_tier_that_cannot_be_opened(world: World) -> None:
    with pytest.raises(kvstore.BackendError, match="injected.*required=false"):
        world.open(Rule(Fault.EIO, "open"))


# The same through a filesystem of fsspec.


def test_through_a_filesystem(tmp_path: Path, engine: str) -> None:
    if engine == "processes" and "fault" not in entry_points(group="fsspec.specs").names:
        pytest.skip("worker processes learn of fault:: from the package's entry points: install it again")
    rules = [Rule(Fault.EIO, "get", times=1), Rule(Fault.FLIPPED_BIT, "get", times=1)]
    plan = FaultPlan(rules, tmp_path / "plan")
    tiers = (
        f"ram://?capacity={32 * CHUNK}B&pin=off",
        {
            "url": f"fault::file://{tmp_path}/first?retries=0&workers=1&concurrency=1&name=first",
            "storage_options": {"fault": plan.options},
        },
        f"file://{tmp_path}/second",
    )
    options = {"chunk_size": CHUNK, "engine": engine}
    with kvstore.open(*tiers, **options) as store:
        save(store, A_FEW)
        assert store.flush(timeout=20)
    with kvstore.open(*tiers, **options) as store:
        assert load(store, A_FEW) == set(A_FEW)
        stats = store.stats()
        assert stats.tier("first").hits == 1
        assert (stats.tier("first").errors, stats.tier("first").corrupt) == (1, 1)
        wait_for(lambda: is_idle(store))
        store._catalog.audit()
    assert [injection.fault for injection in plan.log()] == [Fault.EIO, Fault.FLIPPED_BIT]
