"""Who waits, how long, and for what: the test is the storage and the clock."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore import BackendError, Lookup, NoSpaceError, Prefix, Store
from kvstore.backends import memory
from kvstore.engine.base import Verb
from support.chunks import chunk_key, payload
from support.scripted import Clock, ScriptedEngine, open_scripted

KEYS = [chunk_key(number) for number in range(12)]
A, B, C, D = KEYS[:4]
Stack = tuple[Store, ScriptedEngine, Clock]
Opener = Callable[..., Stack]


@pytest.fixture
def scripted() -> Iterator[Opener]:
    """Opens stores over memory tiers with these options; those with the same `name` share what is there."""
    opened: list[Stack] = []
    names: set[str] = set()

    def open_one(*options: str, slots: int = 4, name: str = "", timeout: str = "1s") -> Stack:
        name = name or uuid.uuid4().hex
        names.add(name)
        tiers = [
            f"memory://{name}{i}?timeout={timeout}&retries=0&{option}" for i, option in enumerate(options)
        ]
        opened.append(open_scripted(*tiers, slots=slots))
        return opened[-1]

    yield open_one
    for store, engine, _ in opened:
        engine.script.extend([0] * 100)
        store.close(1.0)
    for name in names:
        for i in range(3):
            memory.forget(f"{name}{i}")


def items(*keys: bytes) -> dict[bytes, bytes]:
    return {key: payload(key) for key in keys}


def settle(store: Store, engine: ScriptedEngine) -> None:
    """Let workers do whatever there is to do."""
    store.poll()
    while engine.held or engine.unread:
        engine.run_all()
        store.poll()


# Storing.


def test_put_many_waits_for_a_slow_tier_rather_than_lose_a_chunk(scripted: Opener) -> None:
    store, engine, clock = scripted("", slots=4)
    engine.script.extend([-1, 0] * 12)  # half of the waits bring nothing
    started = clock()
    assert store.put_many(items(*KEYS), timeout=10.0) == 12
    assert clock() > started
    settle(store, engine)
    assert engine.count(Verb.WRITE, A) == 1
    assert store.stats().tiers[1].writes == 12 and store.stats().tiers[1].dropped == 0


def test_put_gives_up_at_its_timeout(scripted: Opener) -> None:
    store, _, clock = scripted("", timeout="100s", slots=2)
    store.put(A, b"x")  # its write keeps the one place in the queue
    started = clock()
    with pytest.raises(NoSpaceError, match="1 chunks within 3 s"):
        store.put(B, b"x", timeout=3)
    assert clock() - started == pytest.approx(3.0, abs=0.02)


def test_put_does_not_wait_for_a_tier_that_is_down(scripted: Opener) -> None:
    store, engine, clock = scripted("", slots=8)
    for key in KEYS[:2]:  # two hang: the breaker opens
        store.put(key, payload(key))
        clock.advance(1.0)
        store.poll()
    assert store.stats().tiers[1].breaker.write == "open"
    started = clock()
    assert store.put_many(items(*KEYS[2:6])) == 4
    assert clock() == started
    assert store.stats().tiers[1].dropped == 4
    assert len(engine.held) == 2


def test_reserve_never_waits_and_never_fails(scripted: Opener) -> None:
    store, engine, clock = scripted("", slots=4)
    started = clock()
    for key in KEYS[:4]:
        with store.reserve([key]) as lease:
            assert len(lease) == 1
    with store.reserve(KEYS[4:8]) as lease:
        assert len(lease) == 2, "two slots are leased by queued writes"
    assert clock() == started
    assert store.stats().tiers[1].dropped == 2, "C and D, before their turn"
    assert engine.count(Verb.WRITE, C) == 0
    assert store.stats().tiers[1].queued == 4


def test_reserve_can_wait_until_all_fit(scripted: Opener) -> None:
    store, engine, clock = scripted("", slots=2)
    store.put(A, b"x")
    engine.script.extend([-1, -1, 0])
    started = clock()
    with store.reserve([B, C], wait=5.0) as lease:
        assert list(lease) == [B, C]
    assert 0.0 < clock() - started < 0.1


def test_reserve_returns_what_fits_when_its_wait_is_over(scripted: Opener) -> None:
    store, _, clock = scripted("", timeout="100s", slots=2)
    store.put(A, b"x")
    busy, started = time.process_time(), clock()
    with store.reserve([B, C], wait=5.0) as lease:
        assert (list(lease), lease.refused) == ([B], [C])
    assert clock() - started == pytest.approx(5.0, abs=0.02)
    assert time.process_time() - busy < 1.0, "it waits in steps, not in a spin"


def test_reserve_waits_for_the_beginning_and_no_longer_than_it_is_told(scripted: Opener) -> None:
    store, engine, clock = scripted("", timeout="100s", slots=4)
    with store.reserve(KEYS[:4]):
        pass
    prefix, turns = Prefix(KEYS[:4]), 0
    reserve = store._planner.reserve

    def counted(*args: Any, **options: Any) -> dict[bytes, int]:
        nonlocal turns
        turns += 1
        assert turns < 100, "it spins"
        return reserve(*args, **options)

    store._planner.reserve = counted  # type: ignore[method-assign]
    started = clock()
    with store.reserve(KEYS[4:6], wait=5.0, after=prefix) as lease:
        assert lease.refused == KEYS[4:6]
    assert clock() - started == pytest.approx(5.0, abs=0.02)
    engine.script.extend([-1, 0, 0])
    with store.reserve(KEYS[4:6], wait=5.0, after=prefix) as lease:
        assert list(lease) == KEYS[4:6]
    assert clock() - started < 6.0
    assert turns == 2


def test_what_comes_before_is_a_prefix(scripted: Opener) -> None:
    store, _, _ = scripted("")
    with pytest.raises(TypeError, match=r"use Prefix\(keys\)"):
        store.reserve([B], after=[A])  # type: ignore[arg-type]


# Reading.


def test_one_read_serves_everybody(scripted: Opener) -> None:
    store, engine, _ = scripted("", slots=4, name="one-read")
    store.put(A, payload(A))
    settle(store, engine)
    other, engine, _ = scripted("", slots=4, name="one-read")
    jobs = [other.prefetch([A, B]) for _ in range(3)]
    other.lookup([A, B])
    settle(other, engine)
    assert other.get(A) == payload(A)
    assert all(job.result(timeout=0).promoted == (A,) for job in jobs)
    assert engine.count(Verb.PROBE, A) == engine.count(Verb.PROBE, B) == 1
    assert engine.count(Verb.READ, A) == 1 and engine.count(Verb.READ, B) == 0


def test_get_gives_up_at_its_timeout_and_keeps_nothing(scripted: Opener) -> None:
    store, engine, clock = scripted("", timeout="100s")
    started = clock()
    assert store.get(A, timeout=2.0) is None
    assert clock() - started == pytest.approx(2.0, abs=0.02)
    settle(store, engine)
    assert store.stats().leased == 0 and not store.busy


def test_get_ends_with_the_deadline_of_the_tier(scripted: Opener) -> None:
    store, _, clock = scripted("")
    started = clock()
    assert store.get(A) is None
    assert clock() - started == pytest.approx(1.0, abs=0.02)
    assert store.stats().tiers[1].timeouts == 1


def test_get_many_larger_than_the_host(scripted: Opener) -> None:
    store, engine, _ = scripted("", slots=3)
    engine.script.extend([0] * 100)
    store.put_many(items(*KEYS))
    engine.script.extend([0] * 100)
    assert store.get_many(KEYS) == items(*KEYS)
    assert store.stats().leased == 0


def test_get_waits_for_a_slot(scripted: Opener) -> None:
    store, engine, clock = scripted("", slots=1)
    engine.script.extend([0] * 3)
    store.put_many(items(A, B))
    assert engine.held  # the write of B keeps the only slot
    engine.script.extend([-1, -1, 0, 0, 0])
    started = clock()
    assert store.get(A, timeout=5.0) == payload(A)
    assert clock() - started < 1.0


def test_what_was_a_hit_is_there_at_the_next_call(scripted: Opener) -> None:
    other, engine, _ = scripted("", name="shared")
    other.put(B, payload(B))
    settle(other, engine)
    store, engine, _ = scripted("write=off", slots=1, name="shared")
    store.put(A, payload(A))
    store.prefetch([B])
    engine.run_all()  # the probe is answered, but nobody has polled: a promotion is due that would evict A
    answer = store.lookup([A])
    with store.read([A]) as lease:
        assert (answer == [Lookup.HIT]) == (A in lease)


def test_lookup_does_not_wait_and_asks_once(scripted: Opener) -> None:
    store, engine, clock = scripted("", "")
    started = clock()
    for _ in range(5):
        assert store.lookup([A]) == [Lookup.RETRY]
    assert clock() == started
    assert engine.count(Verb.PROBE, A) == 1


# Deadlines.


def test_a_late_read_never_lands_in_a_slot_that_somebody_else_has(scripted: Opener) -> None:
    store, engine, clock = scripted("", slots=1)
    store.put(A, payload(A))
    settle(store, engine)
    engine.script.extend([0] * 4)
    store.put(B, payload(B))
    settle(store, engine)
    job = store.prefetch([A])
    late = engine.find(Verb.READ)
    clock.advance(1.5)
    store.poll()
    assert job.result(timeout=0).missing == (A,)
    assert store.stats().quarantined == 1
    assert not list(store.reserve([C])), "the only slot is set aside"
    engine.run(late)
    store.poll()
    assert store.stats().quarantined == 0
    assert store.get(A, timeout=0.0) is None, "what came late is not served"
    assert store.put(C, b"x")


def test_a_late_write_still_writes_the_right_chunk(scripted: Opener) -> None:
    store, engine, clock = scripted("", slots=2)
    store.put(A, payload(A))
    late = engine.find(Verb.WRITE)
    clock.advance(1.5)
    assert store.flush(timeout=0.0), "past its deadline, a write holds up nobody"
    for key in KEYS[2:5]:
        with store.reserve([key, KEYS[9]]) as lease:
            assert list(lease) == [key], "the slot of the write is not given away"
            lease[key][:] = b"z" * len(lease[key])
    engine.run(late)
    settle(store, engine)
    with store.reserve(KEYS[6:8]) as lease:
        assert len(lease) == 2
    settle(store, engine)
    engine.script.extend([0] * 10)
    assert store.get(A) == payload(A)


def test_delete_waits_for_a_write_under_way_and_comes_after_it(scripted: Opener) -> None:
    store, engine, _ = scripted("")
    store.put(A, payload(A))
    engine.script.extend([0, 0])
    store.delete([A])
    assert [batch.verb for batch in engine.submitted] == [Verb.WRITE, Verb.DELETE]
    engine.script.extend([0] * 4)
    assert store.get(A) is None


def test_delete_gives_up_at_its_timeout_and_goes_on_by_itself(scripted: Opener) -> None:
    store, engine, clock = scripted("", timeout="100s")
    store.put(A, payload(A))
    started = clock()
    with pytest.raises(BackendError, match="1 answers are outstanding after 2 s") as caught:
        store.delete([A], timeout=2)
    assert caught.value.retryable
    assert clock() - started == pytest.approx(2.0, abs=0.02)
    assert store.lookup([A]) == [Lookup.MISS]
    settle(store, engine)
    assert engine.count(Verb.DELETE, A) == 1


def test_flush_waits_for_what_is_queued_and_keeps_its_timeout(scripted: Opener) -> None:
    store, engine, clock = scripted("", timeout="100s")
    store.put(A, payload(A))
    started = clock()
    assert store.flush(timeout=2.0) is False
    assert clock() - started == pytest.approx(2.0, abs=0.02)
    engine.script.append(0)
    assert store.flush(timeout=2.0) is True


def test_close_keeps_its_timeout_and_says_that_something_is_unwritten(scripted: Opener) -> None:
    store, engine, clock = scripted("", timeout="100s")
    store.put(A, payload(A))
    started = clock()
    assert store.close(timeout=2.0) is False
    assert clock() - started == pytest.approx(2.0, abs=0.02)
    assert engine.closed and store.close() is True


def test_close_does_not_wait_for_what_is_past_its_deadline(scripted: Opener) -> None:
    store, _, clock = scripted("")
    store.put(A, payload(A))
    started = clock()
    assert store.close(timeout=50.0) is True
    assert clock() - started == pytest.approx(1.0, abs=0.02)


# Interrupted.


def test_an_interrupt_leaves_no_lease_behind(scripted: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store, engine, _ = scripted("write=off")
    store.put(A, payload(A))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine, "wait", _interrupt)
        store.get_many([A, B])  # A is held, B is looked for
    settle(store, engine)
    assert store.stats().leased == 0


def test_a_future_that_was_cancelled_behind_our_back(scripted: Opener) -> None:
    store, engine, _ = scripted("")
    job = store.prefetch([A])
    job.future.cancel()
    settle(store, engine)
    assert not store.busy


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
