"""A worker dies: its jobs fail, it is replaced, the store lives, and no slot is lost."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore.engine.base import Batch, Status, Verb
from support.gates import Gates, open_gated
from support.processes import await_death, await_workers, engine_of, has_ended, wait_for
from support.world import Clock

SLOTS = 32
HOST = f"ram://?capacity={SLOTS * 64}KiB&pin=off"
DATA = {bytes([number]) * 16: bytes([number]) * 60_000 for number in range(1, 25)}
KEYS = list(DATA)
LONGER_THAN_A_BREAKER_IS_OPEN = 120.0


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[Gates]:
    gates = Gates(tmp_path / "gates")
    yield gates
    gates.close()


def open_store(gates: Gates, options: str = "workers=1", clock: Clock | None = None) -> kvstore.Store:
    url = f"file://{gates.folder.parent}/kv?{options}"
    return open_gated(gates, HOST, url, clock=clock or Clock(), chunk_size="64KiB", engine="processes")


def fill(gates: Gates) -> None:
    """Put all of `DATA` into the tier."""
    with kvstore.open(HOST, f"file://{gates.folder.parent}/kv", chunk_size="64KiB") as store:
        store.put_many(DATA)


def audit(store: kvstore.Store) -> None:
    """No slot is lost: all are free or hold a chunk, none is leased, and all can be had at once."""
    stats = store.stats()
    assert (stats.quarantined, stats.promoting, stats.leased) == (0, 0, 0)
    store._catalog.audit()
    with store.reserve([bytes([200, number]) * 8 for number in range(SLOTS)]) as lease:
        assert len(lease) == SLOTS
        lease.abort()


def test_while_idle(gates: Gates) -> None:
    fill(gates)
    with open_store(gates, "workers=2") as store:
        first = engine_of(store).pids
        os.kill(first[0], signal.SIGKILL)
        assert has_ended(first[0], 5)
        assert store.get_many(KEYS) == DATA
        assert first[1] in await_workers(store, 2)
        assert store.stats().tiers[1].errors == 0
        audit(store)


def test_while_reading(gates: Gates) -> None:
    fill(gates)
    gates.shut("get", KEYS[5])
    with open_store(gates) as store:
        job = store.prefetch(KEYS)
        os.kill(gates.await_arrival(), signal.SIGKILL)
        gates.open("get", KEYS[5])
        promoted, missing, _ = job.result(timeout=20)
        assert (set(promoted), missing) == (set(KEYS), ()), "the next worker was asked once more"
        assert store.get_many(promoted) == {key: DATA[key] for key in promoted}
        assert store.stats().tiers[1].errors == 1, "one death is one fault"
        audit(store)


def test_while_writing(gates: Gates) -> None:
    gates.shut("put", KEYS[5])
    with open_store(gates) as store:
        half = dict(list(DATA.items())[: SLOTS // 4])
        store.put_many(half)
        os.kill(gates.await_arrival(), signal.SIGKILL)
        assert store.flush(timeout=20)
        tier = store.stats().tiers[1]
        assert tier.errors == 1
        assert tier.writes < len(half)
        assert store.get_many(KEYS) == half, "the host has them all the same"
        audit(store)
    with open_store(gates) as store:
        found = store.get_many(KEYS)
        assert found == {key: DATA[key] for key in found}
        assert KEYS[5] not in found


def test_what_was_answered_before_the_death_is_not_answered_again(gates: Gates) -> None:
    """To the engine itself: one result for each item, also for a batch that was still in the socket."""
    fill(gates)
    gates.shut("get", KEYS[0])
    gates.shut("get", KEYS[3])
    with open_store(gates) as store, store.reserve([bytes([99, n]) * 8 for n in range(16)]) as lease:
        engine, slots = engine_of(store), list(lease.slots.values())
        for number in (1, 2):
            engine.submit(Batch(number, 0, Verb.READ, KEYS[:8], slots[8 * number - 8 :][:8], [0] * 8))
        gates.await_arrival()
        time.sleep(0.01)  # a worker reports what took it more than two milliseconds
        gates.open("get", KEYS[0])
        os.kill(gates.await_arrival(), signal.SIGKILL)
        results: dict[tuple[int, int], Status] = {}
        while len(results) < 16:
            engine.wait(20)
            for completion in engine.poll():
                for index, result in enumerate(completion.results, completion.first):
                    assert (completion.id, index) not in results
                    results[completion.id, index] = result.status
        assert [results[1, index] for index in range(8)] == [Status.OK] + [Status.DIED] * 7
        assert [results[2, index] for index in range(8)] == [Status.DIED] * 8
        lease.abort()


def test_repeated_deaths_open_the_breaker_and_it_closes_again(gates: Gates, lasting_breakers: None) -> None:
    fill(gates)
    gates.shut("get")
    clock = Clock()
    with open_store(gates, clock=clock) as store:
        job = store.prefetch(KEYS[:1])
        for _ in range(2):
            os.kill(gates.await_arrival(), signal.SIGKILL)
        assert job.result(timeout=20).missing == (KEYS[0],)
        stats = store.stats().tiers[1]
        assert (stats.breaker.read, stats.breaker.write, stats.errors) == ("open", "closed", 2)
        assert store.get(KEYS[2], timeout=5) is None
        gates.open("get")
        wait_for(lambda: clock.skip(LONGER_THAN_A_BREAKER_IS_OPEN) or store.get(KEYS[3]) == DATA[KEYS[3]])
        assert store.stats().tiers[1].breaker.read == "closed"
        kinds = [event.kind for event in store.events() if event.kind.startswith("tier")]
        assert kinds == ["tier-down", "tier-up"]
        audit(store)


def test_a_death_wakes_who_waits_on_the_descriptor(gates: Gates) -> None:
    with open_store(gates) as store:
        store.poll()
        assert not select.select([store.fileno()], [], [], 0)[0]
        os.kill(engine_of(store).pids[0], signal.SIGKILL)
        assert select.select([store.fileno()], [], [], 5)[0]
        store.poll()


def test_a_completion_wakes_who_waits_on_the_descriptor(gates: Gates) -> None:
    fill(gates)
    with open_store(gates) as store:
        job = store.prefetch(KEYS)
        while not job.done():
            store.wait_until(lambda: True, 0)
            assert select.select([store.fileno()], [], [], 5)[0] or job.done()
        assert len(job.result().promoted) == len(KEYS)


def test_killed_during_its_start(gates: Gates) -> None:
    """One that dies before it has opened its backend is replaced as well."""
    fill(gates)
    with open_store(gates) as store:
        gates.shut("open")
        os.kill(engine_of(store).pids[0], signal.SIGKILL)
        job = store.prefetch(KEYS[:4])
        os.kill(gates.await_arrival(), signal.SIGKILL)
        gates.open("open")
        found = job.result(timeout=20)
        assert set(found.promoted) | set(found.missing) == set(KEYS[:4])
        wait_for(lambda: store.get(KEYS[9]) == DATA[KEYS[9]])
        audit(store)


def test_many_deaths_lose_nothing(gates: Gates) -> None:
    """Kill a worker while others read and write, again and again: whatever is served is right."""
    fill(gates)
    with open_store(gates, "workers=2") as store:
        for start in range(0, len(KEYS), 6):
            first, *others = KEYS[start : start + 6]
            pids = await_workers(store, 2)
            assert store.get(first) == DATA[first]
            job = store.prefetch(others)
            added = {store.add(data): data for data in (os.urandom(500) for _ in range(4))}
            os.kill(pids[0], signal.SIGKILL)
            promoted, missing, _ = job.result(timeout=20)
            assert set(promoted) | set(missing) == set(others)
            assert store.flush(timeout=20)
            assert store.get_many(promoted) == {key: DATA[key] for key in promoted}
            assert store.get_many(list(added)) == added
            await_death(store, pids[0])  # or the next round counts it among the living
        audit(store)


def test_memory_is_lost_with_its_one_worker() -> None:
    with kvstore.open(HOST, "memory://m?workers=4", chunk_size="64KiB", engine="processes") as store:
        (pid,) = engine_of(store).pids
        store.put(KEYS[0], b"here")
        assert store.flush(timeout=20)
        evict(store)
        assert store.get(KEYS[0]) == b"here"
        evict(store)
        os.kill(pid, signal.SIGKILL)
        assert has_ended(pid, 5)
        assert store.get(KEYS[0], timeout=20) is None
        audit(store)


def evict(store: kvstore.Store) -> None:
    """Push everything out of the host."""
    with store.reserve([os.urandom(16) for _ in range(SLOTS)], wait=5) as lease:
        assert len(lease) == SLOTS
        lease.abort()
