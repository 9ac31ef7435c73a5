"""Resets of the cache: nothing from before is found again, and no slot is given away that a worker still
touches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from small_world import TOKENS, Prompt, World, group_keys, open_scripted_world

from support.scripted import Clock, ScriptedEngine

Scripted = tuple[World, ScriptedEngine, Clock]


@pytest.fixture
def scripted(request: pytest.FixtureRequest) -> Iterator[Scripted]:
    """A world of 8 slots over one tier; parameters are further options."""
    options = getattr(request, "param", {})
    world, engine, clock = open_scripted_world(f"memory://{request.node.name}", **{"slots": 8} | options)
    yield world, engine, clock
    world.store.close(0.1)


def work(world: World, engine: ScriptedEngine) -> None:
    """Everybody does what he has in hand."""
    world.step()
    world.settle()
    engine.run_all()
    world.store.poll()


def live(world: World, engine: ScriptedEngine, name: str, path: range) -> int:
    """A request lives; returns how many of its tokens were loaded."""
    request = world.arrive(name, path)
    loaded = 0
    while request.state != "running":
        work(world, engine)
        loaded = max(loaded, 0 if request.state == "running" else request.num_computed_tokens)
    world.settle()
    world.finish(request)
    work(world, engine)
    return loaded


def start(world: World, path: range) -> Prompt:
    """A request whose chunks are computed, and on their way to the host."""
    request = world.arrive(f"start {path}", path)
    while request.state != "running":
        world.step()
        world.store._engine.run_all()  # type: ignore[attr-defined]
    return request


def test_a_reset_empties_the_host(scripted: Scripted) -> None:
    world, engine, _ = scripted
    live(world, engine, "before", range(4))
    assert world.store.resident
    world.reset()
    assert not world.store.resident


def test_nothing_from_before_is_found_again_in_any_tier(scripted: Scripted) -> None:
    world, engine, _ = scripted
    live(world, engine, "before", range(4))
    world.reset()
    assert live(world, engine, "after", range(4)) == 0
    assert live(world, engine, "again", range(4)) == 4 * TOKENS
    world.store.clear()
    assert live(world, engine, "from the tier", range(4)) == 4 * TOKENS


@pytest.mark.parametrize("scripted", [{"on_reset": "keep"}], indirect=True)
def test_with_keep_the_tiers_keep_what_they_have(scripted: Scripted) -> None:
    world, engine, _ = scripted
    live(world, engine, "before", range(4))
    world.reset()
    world.version -= 1  # the weights are the same
    assert not world.store.resident
    assert live(world, engine, "after", range(4)) == 4 * TOKENS


def test_slots_of_dropped_stores_wait_for_their_workers() -> None:
    world, engine, _ = open_scripted_world(slots=8)
    with world.store:
        request = start(world, range(6))
        world.reset()
        world.finish(request, aborted=True)
        assert world.store.room == 2
        other = start(world, range(100, 106))
        assert world.store.room == 0
        world.settle(newest_first=True)  # the dropped store comes last
        world.finish(other)
        work(world, engine)
        assert world.store.room == 8
        assert live(world, engine, "loads", range(100, 106)) == 2 * TOKENS


def test_slots_of_dropped_loads_wait_for_their_workers(scripted: Scripted) -> None:
    world, engine, _ = scripted
    live(world, engine, "before", range(6))
    request = world.arrive("loads", range(6))
    world.step()
    assert request.state == "loading"
    world.reset()
    world.finish(request, aborted=True)
    assert world.store.room == 2
    work(world, engine)
    work(world, engine)
    assert world.store.room == 8


def test_completions_of_dropped_jobs_change_nothing(scripted: Scripted) -> None:
    world, _, _ = scripted
    request = start(world, range(4))
    context = world.scheduler._req_status[request.request_id].req_context
    world.reset()
    world.manager.complete_store(set(group_keys(request)), context)
    world.manager.complete_load(set(group_keys(request)), context)
    assert not world.store.resident
    assert world.store.room == 4


def test_a_waiting_request_is_planned_anew(scripted: Scripted) -> None:
    world, engine, _ = scripted
    live(world, engine, "before", range(4))
    world.store.clear()
    request = world.arrive("waits", range(4))
    assert world.step() == ["waits"]
    world.reset()
    while request.state != "running":
        work(world, engine)
        assert request.state != "loading"
    assert world.telemetry._counts["resets"] == 1


def test_events_of_another_epoch_are_not_published(scripted: Scripted) -> None:
    world, engine, _ = scripted
    live(world, engine, "before", range(2))
    world.reset()
    assert list(world.manager.take_events()) == []
    live(world, engine, "after", range(2))
    told = {key for event in world.manager.take_events() for key in event.keys}
    assert told == set(group_keys(Prompt("p", (0, 1))))
