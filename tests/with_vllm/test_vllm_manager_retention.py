"""For how long the priority that a request gives its chunks holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from offers import Offers
from small_world import World, open_scripted_world
from vllm.v1.kv_offload.base import ScheduleEndContext

from support.scripted import Clock

SLOTS = 8
Make = Callable[..., tuple[World, Clock]]


@pytest.fixture
def make() -> Iterator[Make]:
    """Opens worlds without tiers whose clock the test moves, and closes their stores."""
    worlds: list[World] = []

    def opened(**options: Any) -> tuple[World, Clock]:
        world, _, clock = open_scripted_world(slots=SLOTS, **{"policy": "priority", **options})
        worlds.append(world)
        return world, clock

    yield opened
    for world in worlds:
        world.manager.shutdown()


def end_step(world: World) -> None:
    world.manager.on_schedule_end(ScheduleEndContext((), ()))


def resident(world: World, request: Offers) -> int:
    """How many chunks of a request are in host memory."""
    return sum(key in world.store.resident for key in request.keys)


@pytest.mark.parametrize("ttl", [60, 60.0, "1min"])
def test_chunks_go_first_once_their_time_is_over(make: Make, ttl: object) -> None:
    world, clock = make()
    brief, other = Offers(world, "a", 4, priority=90, ttl=ttl), Offers(world, "bb", 4)
    for request in (brief, other):
        assert request.offer() == request.keys
    clock.advance(59)
    end_step(world)
    assert Offers(world, "ccc", 2).offer() is not None
    assert (resident(world, brief), resident(world, other)) == (4, 2)
    clock.advance(1)
    end_step(world)
    assert Offers(world, "dddd", 3).offer() is not None
    assert (resident(world, brief), resident(world, other)) == (1, 2)


def test_without_a_priority_they_are_like_others_until_then(make: Make) -> None:
    world, clock = make()
    old, brief = Offers(world, "a", 4), Offers(world, "bb", 4, ttl=10)
    for request in (old, brief):
        request.offer()
    Offers(world, "ccc", 2).offer()
    assert (resident(world, old), resident(world, brief)) == (2, 4)
    clock.advance(10)
    end_step(world)
    Offers(world, "dddd", 2).offer()
    assert (resident(world, old), resident(world, brief)) == (2, 2)


def test_who_stores_them_anew_says_how_long(make: Make) -> None:
    world, clock = make()
    Offers(world, "a", 4, ttl=10).offer()
    world.store.clear()
    again = Offers(world, "b", 4)
    assert again.offer() == again.keys
    clock.advance(10)
    end_step(world)
    Offers(world, "bb", 6).offer()
    assert resident(world, again) == 2, "they are the oldest, and no more than that"
    Offers(world, "ccc", 2).offer()
    assert resident(world, again) == 0


def test_the_past_is_not_remembered_without_end(make: Make) -> None:
    world, clock = make()
    for number in range(1, 20):
        Offers(world, "x" * number, SLOTS, ttl=3600 + number).offer()
        world.store.clear()
    last = Offers(world, "y" * 100, 4, priority=90, ttl=60)
    last.offer()
    assert len(world.manager._retention._ends) <= 3 * SLOTS
    assert sum(len(keys) for _, keys in world.manager._retention._due) <= 3 * SLOTS
    clock.advance(60)
    end_step(world)
    Offers(world, "z" * 200, SLOTS - 4).offer()
    Offers(world, "z" * 150, 2).offer()
    assert resident(world, last) == 2


def test_neither_is_the_past_of_chunks_that_come_again(make: Make) -> None:
    world, clock = make()
    for _ in range(50):
        last = Offers(world, "a", SLOTS, priority=90, ttl=60)
        assert last.offer() == last.keys
        clock.advance(0.001)
        world.store.clear()
    last.offer()
    assert sum(len(keys) for _, keys in world.manager._retention._due) <= 6 * SLOTS
    clock.advance(59)
    end_step(world)
    assert len(world.manager._retention._ends) == SLOTS
    clock.advance(1)
    end_step(world)
    assert not world.manager._retention._ends


@pytest.mark.parametrize("ttl", ["soon", -1, 0, [1], True, 10**400])
def test_what_is_no_time_is_ignored(make: Make, ttl: object, caplog: pytest.LogCaptureFixture) -> None:
    world, clock = make()
    request = Offers(world, "a", 2, ttl=ttl)
    request.offer()
    clock.advance(1e6)
    end_step(world)
    assert resident(world, request) == 2
    assert "ttl is a time such as 30 (seconds)" in caplog.text


def test_other_policies_heed_no_time(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    world, _ = make(policy="lru")
    Offers(world, "a", 2, ttl=5).offer()
    assert "policy=priority" in caplog.text
