"""A store among threads: the threads engine, many callers, the idle pump, closing while others wait."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from kvstore import ClosedError, Lookup, NoSpaceError, Store
from kvstore.config import parse
from kvstore.opening import assemble
from kvstore.testing.faults import Fault, FaultPlan, Rule
from support.chunks import CHUNK, chunk_key, payload, version_of

PAGE = 4096
KEYS = [chunk_key(number) for number in range(40)]
A, B, C, D = KEYS[:4]
#: Longest that a test waits for what must come (seconds).
PATIENCE = 20.0


@pytest.fixture
def plans() -> Iterator[list[FaultPlan]]:
    """Plans that must be healed in the end."""
    made: list[FaultPlan] = []
    yield made
    for plan in made:
        plan.heal()


@pytest.fixture
def open_store(tmp_path: Path, plans: list[FaultPlan]) -> Iterator[Callable[..., Store]]:
    """Opens stores on the threads engine over ``file://`` tiers with these options."""
    stores: list[Store] = []

    def open_one(*options: str, slots: int = 8, rules: tuple[Rule, ...] = ()) -> Store:
        tiers = [f"file://{tmp_path}/{i}?name=tier{i}&retries=0&{option}" for i, option in enumerate(options)]
        config = parse(f"ram://?capacity={slots * PAGE}&pin=off", *tiers, chunk_size=CHUNK, engine="threads")
        plans.append(FaultPlan(rules))
        stores.append(assemble(config, plans[-1]))
        return stores[-1]

    yield open_one
    for store, plan in zip(stores, plans, strict=True):
        plan.heal()
        store.close(PATIENCE)


def wait_for(ready: Callable[[], bool]) -> None:
    """Look again and again, without calling the store."""
    deadline = time.monotonic() + PATIENCE
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Run `call`, and keep what it returns or raises."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def call_at_random(store: Store, rng: random.Random) -> int:
    """Make one call, check what it serves, and return how many chunks that was."""
    keys = rng.sample(KEYS, rng.randint(1, 6))
    served: dict[bytes, bytes] = {}
    match rng.choice(["put", "reserve", "read", "get", "other"]):
        case "put":
            with suppress(NoSpaceError):
                store.put_many({key: payload(key) for key in keys}, timeout=1.0)
        case "reserve":
            with store.reserve(keys) as lease:
                for key, view in lease.items():
                    view[:] = payload(key)
        case "read":
            with store.read(keys) as lease:
                served = {key: bytes(view) for key, view in lease.items()}
        case "get":
            served = store.get_many(keys, timeout=1.0)
        case "other":
            store.prefetch(keys)
            store.lookup(keys)
    for key, data in served.items():
        version_of(key, data)
    return len(served)


def test_many_threads_never_see_a_wrong_byte(open_store: Callable[..., Store]) -> None:
    store = open_store("", "write=on-evict&capacity=80KiB", slots=8)

    def work(seed: int) -> int:
        rng = random.Random(seed)
        return sum(call_at_random(store, rng) for _ in range(120))

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(work, range(6))) > 100
    assert store.flush(timeout=PATIENCE)
    store.poll()
    wait_for(lambda: not store.busy)
    store._catalog.audit()
    stats = store.stats()
    assert (stats.leased, stats.promoting, stats.quarantined) == (0, 0, 0)


def test_callers_in_many_threads_share_one_read(
    open_store: Callable[..., Store], plans: list[FaultPlan]
) -> None:
    with open_store("") as other:
        other.put(A, payload(A))
    store = open_store("", rules=(Rule(Fault.HANG, "get"),))
    threads = [in_thread(lambda: store.get(A, timeout=PATIENCE)) for _ in range(5)]
    wait_for(lambda: len(plans[-1].log()) == 1)
    plans[-1].heal()
    for thread, _ in threads:
        thread.join(PATIENCE)
    assert [outcome for _, outcome in threads] == [[payload(A)]] * 5
    assert store.stats().tier("tier0").reads == 1


def test_a_caller_that_waits_is_woken_by_what_another_releases(open_store: Callable[..., Store]) -> None:
    store = open_store(slots=1)
    store.put(A, b"x")
    lease = store.read([A])
    thread, outcome = in_thread(lambda: store.put(B, b"y", timeout=PATIENCE))
    wait_for(lambda: store._waiters.leader is not None)
    started = time.monotonic()
    lease.release()
    thread.join(PATIENCE)
    assert outcome == [True]
    assert time.monotonic() - started < 1.0


# A tier that hangs.


def test_calls_that_never_wait_do_not_feel_a_tier_that_hangs(
    open_store: Callable[..., Store], lasting_breakers: None
) -> None:
    rules = tuple(Rule(Fault.HANG, verb) for verb in ("exists", "get", "put", "delete"))
    store = open_store("timeout=1s", "", rules=tuple(_on_first_tier(rule) for rule in rules))
    slowest, number, down = 0.0, 0, 0
    while down < 100:  # through the deadline of the tier, and for a while after it
        number += 1
        down += store.stats().tier("tier0").breaker.write == "open"
        started = time.monotonic()
        with store.reserve([KEYS[number % 40]]):
            pass
        store.lookup(KEYS)
        store.prefetch(KEYS[:8])
        with store.read(KEYS):
            pass
        store.poll()
        slowest = max(slowest, time.monotonic() - started)
        time.sleep(0.001)
    assert slowest < 0.8, "no call waits for the tier's deadline"
    assert number > 104, "nor a part of it: then there were few before it"
    assert store.flush(timeout=PATIENCE)
    assert store.stats().tier("tier1").writes > 0, "the other tier goes on"


def test_a_hung_promotion_fails_at_its_deadline_and_its_slot_is_kept_aside(
    open_store: Callable[..., Store], plans: list[FaultPlan]
) -> None:
    with open_store("") as other:
        other.put(A, payload(A))
    store = open_store("timeout=200ms&workers=1", slots=2, rules=(Rule(Fault.HANG, "get"),))
    started = time.monotonic()
    assert store.get(A, timeout=PATIENCE) is None
    assert 0.15 < time.monotonic() - started < 5.0
    assert store.stats().quarantined == 1
    store.put(B, b"x")
    assert store.get(B) == b"x"
    plans[-1].heal()
    wait_for(lambda: not store.busy)  # the idle pump takes the late answer
    assert store.stats().quarantined == 0


# The idle pump.


def test_the_pump_serves_while_nobody_calls(open_store: Callable[..., Store], tmp_path: Path) -> None:
    store = open_store("workers=1")
    store.put_many({key: payload(key) for key in KEYS[:4]})
    wait_for(lambda: not store.busy)
    assert len(list((tmp_path / "0").rglob("*.kv"))) == 4


def test_the_pump_brings_up_a_prefetch_wave_by_wave(open_store: Callable[..., Store]) -> None:
    with open_store("") as other:
        other.put_many({key: payload(key) for key in KEYS[:6]})
    store = open_store("write=off", slots=8)  # four at a time
    job = store.prefetch(KEYS[:6])
    assert job.future.result(timeout=PATIENCE).promoted == tuple(KEYS[:6])


def test_the_pump_evicts_nothing(open_store: Callable[..., Store]) -> None:
    with open_store("") as other:
        other.put_many({key: payload(key) for key in KEYS[:4]})
    store = open_store("write=off", slots=4)
    store.put_many({key: payload(key) for key in KEYS[10:14]})
    assert store.lookup(KEYS[10:14]) == [Lookup.HIT] * 4
    job = store.prefetch(KEYS[:2])  # it needs slots, as soon as the probes are answered
    wait_for(lambda: not store.busy)
    assert set(store._catalog.ready) == set(KEYS[10:14])
    assert job.result(PATIENCE).promoted == tuple(KEYS[:2]), "who waits is a caller"


# Closing.


@pytest.mark.parametrize("hung", [False, True])
def test_close_is_idempotent(open_store: Callable[..., Store], hung: bool) -> None:
    store = open_store("timeout=200ms", rules=(Rule(Fault.HANG, "put"),) if hung else ())
    store.put(A, b"x")
    assert store.close(timeout=2) is True
    assert store.close() is True
    for call in (lambda: store.get(A), lambda: store.lookup([A]), store.poll, store.stats, store.events):
        with pytest.raises(ClosedError):
            call()


def test_close_tells_those_who_wait(open_store: Callable[..., Store], plans: list[FaultPlan]) -> None:
    store = open_store("timeout=60s", rules=(Rule(Fault.HANG, "exists"),))
    job = store.prefetch([A])
    waiting = [in_thread(call) for call in (lambda: store.get(B), job.result, lambda: store.delete([C]))]
    wait_for(lambda: plans[-1].log() != [] and store._waiters.leader is not None)
    closer, closed = in_thread(lambda: store.close(timeout=0.2))
    closer.join(PATIENCE)
    assert closed == [True], "nothing was left to write"
    for thread, outcome in waiting:
        thread.join(PATIENCE)
        assert isinstance(outcome[0], ClosedError)


def test_several_threads_close(open_store: Callable[..., Store], plans: list[FaultPlan]) -> None:
    store = open_store("timeout=60s", rules=(Rule(Fault.HANG, "put"),))
    store.put(A, b"x")
    closers = [in_thread(lambda: store.close(timeout=PATIENCE)) for _ in range(2)]
    wait_for(lambda: store._waiters.leader is not None)
    assert store.close(timeout=0.05) is False, "the chunk is not written"
    for thread, _ in closers:
        thread.join(PATIENCE)
    assert [outcome for _, outcome in closers] == [[True]] * 2, "there was nothing left to do"


def test_leases_outlive_the_store(open_store: Callable[..., Store]) -> None:
    store = open_store()
    store.put(A, b"abc")
    with store.read([A]) as lease:
        view = lease[A]
        store.close()
        assert bytes(view) == b"abc"


def test_a_closed_store_leaves_no_thread(open_store: Callable[..., Store]) -> None:
    before = set(threading.enumerate())
    store = open_store("", "workers=4")
    store.put(A, b"x")
    assert len(set(threading.enumerate()) - before) == 7  # two tiers of two and four workers, and the pump
    store.close()
    assert set(threading.enumerate()) <= before


def _on_first_tier(rule: Rule) -> Rule:
    return Rule(rule.fault, rule.verb, tier="tier0")
