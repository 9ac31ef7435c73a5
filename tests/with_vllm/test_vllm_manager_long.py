"""Requests larger than host memory: when the manager takes their chunks, and when vLLM has to ask again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from offers import Offers
from small_world import World, open_scripted_world

from support.scripted import ScriptedEngine

SLOTS = 6
Make = Callable[..., tuple[World, ScriptedEngine]]


@pytest.fixture
def make() -> Iterator[Make]:
    """Opens worlds whose storage does what the test says, and closes their stores."""
    worlds: list[World] = []

    def opened(*tiers: str, **options: Any) -> tuple[World, ScriptedEngine]:
        world, engine, _ = open_scripted_world(*tiers, slots=SLOTS, **options)
        worlds.append(world)
        return world, engine

    yield opened
    for world in worlds:
        world.manager.shutdown()


def test_the_rest_waits_until_a_tier_has_the_beginning(make: Make) -> None:
    world, storage = make("memory://")
    request = Offers(world, "long", 10)
    assert request.offer(slice(0, 6)) == request.keys[:6]
    assert request.offer(slice(6, 8)) is None
    assert request.offer(slice(6, 10)) is None
    while storage.held:
        storage.run_all()
        world.store.poll()
    assert request.offer(slice(6, 10)) == request.keys[6:]
    while storage.held:
        storage.run_all()
        world.store.poll()
    assert world.store.stats().tier("memory").writes == 10


def test_without_a_tier_the_rest_takes_the_place_of_the_beginning(make: Make) -> None:
    world, _ = make()
    request = Offers(world, "long", 10)
    request.offer(slice(0, 6))
    assert request.offer(slice(6, 10)) == request.keys[6:]


def test_a_tier_that_fails_is_not_waited_for(make: Make) -> None:
    world, storage = make("memory://")
    request = Offers(world, "long", 10)
    request.offer(slice(0, 6))
    while storage.held:
        storage.fail(storage.held[0])
        world.store.poll()
    assert request.offer(slice(6, 10)) == request.keys[6:]


def test_what_is_left_out_for_good_is_the_end(make: Make) -> None:
    """More than the host can ever take at once."""
    world, storage = make("memory://")
    request = Offers(world, "long", 14)
    request.offer(slice(0, 6))
    while storage.held:
        storage.run_all()
        world.store.poll()
    assert request.offer(slice(6, 14)) == request.keys[6:12]


def test_others_do_not_wait_for_it(make: Make) -> None:
    """A request that fits takes what it needs, as ever."""
    world, _ = make("memory://")
    long, short = Offers(world, "long", 10), Offers(world, "short", 3)
    long.offer(slice(0, 6))
    assert short.offer(slice(0, 3)) == short.keys[:3]


def test_what_is_offered_again_counts_once(make: Make) -> None:
    world, storage = make("memory://", store_threshold=2)
    request = Offers(world, "long", 8)
    assert request.offer(slice(0, 7)) == []
    assert request.offer(slice(0, 6)) == request.keys[:6]
    assert request.offer(slice(6, 8)) is None
    assert request.offer(slice(6, 8)) is None
    while storage.held:
        storage.run_all()
        world.store.poll()
    assert request.offer(slice(6, 8)) == request.keys[6:7]
