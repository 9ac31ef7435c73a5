"""Requests larger than host memory: when the manager takes their chunks, and when vLLM has to ask again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from offers import Offers
from small_world import World, open_scripted_world
from vllm.v1.kv_offload.base import ScheduleEndContext

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


class _Counted(dict[bytes, int]):
    """Counts how often somebody goes through it."""

    walks = 0

    def __iter__(self) -> Iterator[bytes]:
        self.walks += 1
        return super().__iter__()


def test_who_is_refused_is_not_looked_through_again(make: Make) -> None:
    world, storage = make("memory://")
    request = Offers(world, "long", 10)
    positions = _Counted(request.context._offload_key_positions)
    request.context._offload_key_positions = positions
    request.offer(slice(0, 6))
    assert request.offer(slice(6, 8)) is None
    assert positions.walks == 1
    for _ in range(10):
        assert request.offer(slice(6, 8)) is None
    while storage.held:
        storage.run_all()
        world.store.poll()
    assert request.offer(slice(6, 8)) == request.keys[6:8]
    assert positions.walks == 1


def test_a_part_that_was_stored_since_is_part_of_the_beginning(make: Make) -> None:
    world, storage = make("memory://")
    request = Offers(world, "long", 14)
    request.offer(slice(0, 6))
    while storage.held:
        storage.run_all()
        world.store.poll()
    assert request.offer(slice(6, 12)) == request.keys[6:12]
    assert request.offer(slice(12, 14)) is None
    while storage.held:
        storage.run_all()
        world.store.poll()
    assert request.offer(slice(12, 14)) == request.keys[12:]
    assert world.store.stats().tier("memory").dropped == 0


def test_a_request_that_goes_to_one_of_two_tiers_keeps_its_beginning(make: Make) -> None:
    world, storage = make("memory://near?name=near", "memory://far?name=far")
    request = Offers(world, "long", 10, tiers=["far"])
    request.offer(slice(0, 6))
    assert request.offer(slice(6, 10)) is None
    while storage.held:
        storage.run_all()
        world.store.poll()
    assert request.offer(slice(6, 10)) == request.keys[6:]
    assert world.store.stats().tier("far").dropped == 0


def test_what_is_computed_again_after_a_preemption_counts_again(make: Make) -> None:
    world, _ = make()
    request = Offers(world, "long", 4)
    estimator = world.manager._lookups._promoter.estimator
    request.offer()
    tokens = estimator._tokens
    assert tokens > 0
    world.manager.on_schedule_end(ScheduleEndContext((), (request.context.req_id,)))
    world.store.clear()
    request.offer()
    assert estimator._tokens == tokens
