"""A worker hangs: the caller is told at the deadline, and what the worker may touch is nobody else's."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

import kvstore
from support.gates import Gates, open_gated
from support.processes import Footprint, await_workers, has_ended, state, wait_for
from support.world import Clock

SLOTS = 16
CHUNK = 64 << 10
HOST = f"ram://?capacity={SLOTS * CHUNK}&pin=off"
DATA = {bytes([number]) * 16: bytes([number]) * CHUNK for number in range(1, 9)}
KEYS = list(DATA)
TIMEOUT = 0.8
LONGER_THAN_A_BREAKER_IS_OPEN = 120.0

_stopped: list[int] = []


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[Gates]:
    gates = Gates(tmp_path / "gates")
    yield gates
    gates.close()
    while _stopped:
        if state(pid := _stopped.pop()) == "T":  # the test has failed before it came to that
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def unkillable(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL has no effect on a process that waits in the kernel for a device; here it is not sent."""
    monkeypatch.setattr("kvstore.engine.nursery.signal.pidfd_send_signal", lambda *_: None)


def open_store(
    gates: Gates, options: str = f"workers=1&timeout={TIMEOUT}s", clock: Clock | None = None
) -> kvstore.Store:
    url = f"file://{gates.folder.parent}/kv?{options}"
    return open_gated(gates, HOST, url, clock=clock or Clock(), chunk_size=CHUNK, engine="processes")


def fill(gates: Gates) -> None:
    with kvstore.open(HOST, f"file://{gates.folder.parent}/kv", chunk_size=CHUNK) as store:
        store.put_many(DATA)


def stop_at(gates: Gates, verb: str, key: bytes = b"") -> int:
    """Stop the worker that comes to a gate, so that it would go on from there when it is continued."""
    pid = gates.await_arrival()
    _stopped.append(pid)
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: state(pid) == "T")
    gates.open(verb, key)
    return pid


def comes(store: kvstore.Store, key: bytes) -> bool:
    """Whether a chunk comes; on a busy machine it may be late, and is a miss then."""
    found = store.get(key)
    assert found in (None, DATA[key])
    return found is not None


@contextmanager
def takes(low: float, high: float) -> Iterator[None]:
    """The block takes between `low` and `high` seconds."""
    started = time.monotonic()
    yield
    assert low <= time.monotonic() - started <= high


def keep_to(seconds: float, call: Callable[[], object]) -> None:
    """`call` takes so many seconds, and no more than 0.3 s longer, unless the machine is late each time."""
    for _ in range(5):
        started = time.monotonic()
        call()
        took = time.monotonic() - started
        assert took >= seconds
        if took <= seconds + 0.3:
            return
    raise AssertionError(f"{took} s, and no less in five tries")


def settle(store: kvstore.Store) -> None:
    """Wait until no slot is set aside, and check that none is lost."""
    wait_for(lambda: (stats := store.stats()).quarantined == stats.leased == stats.promoting == 0)
    store._catalog.audit()


def test_a_read_that_hangs_fails_at_its_deadline(gates: Gates) -> None:
    fill(gates)
    gates.shut("get", KEYS[3])
    with open_store(gates) as store:
        with takes(0.9 * TIMEOUT, TIMEOUT + 1):
            job = store.prefetch(KEYS[3:4])
            pid = stop_at(gates, "get", KEYS[3])
            assert job.result().missing == (KEYS[3],)
        assert store.stats().tiers[1].timeouts == 1
        assert has_ended(pid, 5)
        wait_for(partial(comes, store, KEYS[4]))
        settle(store)


def test_late_bytes_of_a_read_fall_on_nobody(gates: Gates, unkillable: None) -> None:
    """Slots of a batch that hangs in its middle are set aside until the worker has answered."""
    fill(gates)
    gates.shut("get", KEYS[2])
    with open_store(gates) as store:
        job = store.prefetch(KEYS[:6])
        pid = stop_at(gates, "get", KEYS[2])
        aside = len(job.result().missing)
        assert store.stats().quarantined == aside >= 4

        # All other slots go to others while the worker sleeps, and the tier has another worker.
        await_workers(store, 2)  # the one that cannot be ended, and the one in its place
        wait_for(partial(comes, store, KEYS[7]))
        others = {os.urandom(16): os.urandom(CHUNK) for _ in range(SLOTS)}
        with store.reserve(list(others)) as lease:
            assert len(lease) == SLOTS - aside, "what is set aside is given to nobody"
            for key, view in lease.items():
                view[:] = others[key]
        others = {key: others[key] for key in lease}

        os.kill(pid, signal.SIGCONT)
        settle(store)  # the worker has written and answered
        with store.read(list(others)) as found:
            assert not found.missing
            assert all(view == others[key] for key, view in found.items())


def test_a_slot_stays_aside_until_the_worker_is_reaped(gates: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(gates)
    gates.shut("get", KEYS[0])
    with open_store(gates) as store:
        with monkeypatch.context() as patch:
            patch.setattr("kvstore.engine.nursery.signal.pidfd_send_signal", lambda *_: None)
            job = store.prefetch(KEYS[:1])
            pid = stop_at(gates, "get", KEYS[0])
            assert job.result().missing == (KEYS[0],)
            store.poll()
        assert store.stats().quarantined == 1
        os.kill(pid, signal.SIGKILL)
        assert has_ended(pid, 5)
        settle(store)


def test_a_write_that_hangs_keeps_its_slot(gates: Gates, unkillable: None) -> None:
    """What the worker may still read is not overwritten: else another chunk's bytes came under the key."""
    gates.shut("put", KEYS[0])
    with open_store(gates) as store:
        store.put(KEYS[0], DATA[KEYS[0]])
        pid = stop_at(gates, "put", KEYS[0])
        with takes(0, TIMEOUT + 1):
            assert store.flush(), "a write past its deadline has failed"
        assert (store.stats().tiers[1].timeouts, store.stats().leased) == (1, 1)
        with store.reserve([os.urandom(16) for _ in range(SLOTS)]) as lease:
            assert len(lease) == SLOTS - 1
            for key in lease:
                lease[key][:] = b"\xee" * CHUNK
            lease.abort()
        os.kill(pid, signal.SIGCONT)
        settle(store)
    with open_store(gates) as store:
        assert store.get(KEYS[0]) == DATA[KEYS[0]]


@pytest.mark.parametrize("verb", ["exists", "delete"])
def test_probe_and_delete_have_deadlines(gates: Gates, verb: str) -> None:
    fill(gates)
    with open_store(gates) as store:
        gates.shut(verb)
        with takes(0.9 * TIMEOUT, TIMEOUT + 1.5):
            if verb == "exists":
                assert store.get(KEYS[0]) is None
            else:
                with pytest.raises(kvstore.BackendError, match="no answer within"):
                    store.delete(KEYS[:1])
        gates.open(verb)
        wait_for(partial(comes, store, KEYS[1]))
        settle(store)


def test_a_scan_has_a_deadline(gates: Gates) -> None:
    """Without knowing what is there, a tier with a capacity is written to all the same."""
    gates.shut("scan")
    with open_store(gates, f"workers=1&timeout={TIMEOUT}s&capacity=10MiB") as store:
        store.put(KEYS[0], DATA[KEYS[0]])
        gates.await_arrival()
        wait_for(lambda: store.stats().tiers[1].timeouts)
        gates.open("scan")
        wait_for(lambda: store.add(os.urandom(9)) and store.flush() and store.stats().tiers[1].writes > 0)
        settle(store)


def test_hangs_open_the_breaker_and_calls_go_on(gates: Gates, lasting_breakers: None) -> None:
    fill(gates)
    gates.shut("get")
    clock = Clock()
    with open_store(gates, clock=clock) as store:
        hung = iter(KEYS[:5])  # two of them will do, unless a probe is late, too
        while store.stats().tiers[1].breaker.read == "closed":
            await_workers(store, 1)
            assert store.prefetch([key := next(hung)]).result().missing == (key,)
        while gates.has_arrival():
            gates.await_arrival()
        gates.shut("exists")
        assert store.lookup(KEYS) == [kvstore.Lookup.MISS] * len(KEYS)
        assert store.prefetch(KEYS).result().missing == tuple(KEYS)
        assert store.get(KEYS[5]) is None
        assert not gates.has_arrival(), "who asks nobody waits for nobody"
        store.put(KEYS[6], DATA[KEYS[6]])
        assert store.get(KEYS[6]) == DATA[KEYS[6]]
        gates.open("get")
        gates.open("exists")
        wait_for(lambda: clock.skip(LONGER_THAN_A_BREAKER_IS_OPEN) or comes(store, KEYS[7]))
        settle(store)


def test_timeouts_of_callers_are_kept(gates: Gates) -> None:
    gates.shut("put")
    with open_store(gates, "workers=1&timeout=60s") as store:
        store.put(KEYS[0], DATA[KEYS[0]])
        outcomes: list[object] = []
        keep_to(0.2, lambda: outcomes.append(store.flush(timeout=0.2)))
        assert not any(outcomes)
        gates.shut("exists")
        job = store.prefetch(KEYS[3:5])

        def await_job() -> None:
            with pytest.raises(TimeoutError):
                job.result(timeout=0.2)

        keep_to(0.2, await_job)
        outcomes.clear()
        keep_to(0.2, lambda: outcomes.append(store.get(KEYS[5], timeout=0.2)))
        assert not any(outcomes)
        with takes(0, 4):
            assert store.close(timeout=2) is False


@pytest.mark.parametrize("how", ["stopped", "hung"])
def test_close_with_a_worker_that_does_not_end(gates: Gates, how: str) -> None:
    before = Footprint.now()
    fill(gates)
    gates.shut("get")
    store = open_store(gates, "workers=2&timeout=30s")
    store.prefetch(KEYS[:1])
    pid = gates.await_arrival()
    if how == "stopped":
        os.kill(pid, signal.SIGSTOP)
    with takes(0, 3.2):
        store.close(timeout=2)
    assert has_ended(pid, 0)
    assert Footprint.now() == before
