"""Who has nothing to do stays out of the way: polls that find nothing, and the idle pump."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvstore import Store
from kvstore.errors import ClosedError
from kvstore.pump import IDLE, IdlePump
from support.chunks import chunk_key, payload
from support.scripted import Clock, ScriptedEngine, open_scripted

A = chunk_key(0)
World = tuple[Store, ScriptedEngine, Clock]


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    store, engine, clock = open_scripted(f"memory://{request.node.name}?timeout=1s")
    store.put(A, payload(A))
    store.poll()
    yield store, engine, clock
    engine.run_all()
    store.close()


@pytest.fixture
def plans(world: World, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Times at which the planner was asked for what is due."""
    planner = world[0]._planner
    times: list[float] = []
    advance = planner.advance

    def counted(now: float, *, may_evict: bool) -> None:
        times.append(now)
        advance(now, may_evict=may_evict)

    monkeypatch.setattr(planner, "advance", counted)
    return times


def test_polls_without_news_plan_once_in_a_while(world: World, plans: list[float]) -> None:
    store, _, clock = world
    for _ in range(48):
        clock.advance(0.001)
        store.poll()
    assert 6 <= len(plans) <= 10


def test_news_are_planned_for_at_once(world: World, plans: list[float]) -> None:
    store, engine, _ = world
    engine.run_all()
    store.poll()
    assert plans


def test_what_a_caller_gives_back_is_news(world: World, plans: list[float]) -> None:
    store, _, _ = world
    with store.read([A]):
        store.poll()
        del plans[:]
    store.poll()
    assert plans


def test_a_deadline_is_not_overlooked(world: World) -> None:
    store, _, clock = world
    clock.advance(0.999)
    store.poll()
    assert store.stats().tiers[1].timeouts == 0
    clock.advance(0.001)
    store.poll()
    assert store.stats().tiers[1].timeouts == 1


class _Busy:
    """Something to serve whose callers call all the time until `silence`, by a clock that only naps move."""

    busy = True

    def __init__(self, silence: float) -> None:
        self.now = 1000.0
        self.silence = self.now + silence
        self.served = threading.Semaphore(0)

    def clock(self) -> float:
        return self.now

    @property
    def last_call(self) -> float:
        return min(self.now, self.silence)

    def pump(self, timeout: float) -> None:
        self.served.release()
        raise ClosedError("enough")


class _Dreamer(IdlePump):
    """A pump that naps by the clock of what it serves."""

    def __init__(self, served: _Busy) -> None:
        self.served = served
        self.naps: list[float] = []
        super().__init__(served)

    def _nap(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.served.now += seconds


def test_the_pump_looks_seldom_while_callers_come_and_takes_over_soon() -> None:
    busy = _Busy(silence=1.0)
    pump = _Dreamer(busy)
    pump.wake()
    assert busy.served.acquire(timeout=20)
    pump.stop()
    assert len(pump.naps) <= 1.0 / (4 * IDLE) + 5, "a look at every 80 ms, after the first few"
    assert IDLE <= busy.now - busy.silence <= 5 * IDLE
