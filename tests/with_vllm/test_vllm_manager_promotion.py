"""How promotion is planned: what defers a request, for how long, and what the host is promised to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import pytest
from small_world import TOKENS, Prompt, World, group_keys, open_scripted_world, open_world
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext

from kvstore import Lookup
from kvstore.engine.base import Verb
from kvstore.testing.faults import Fault, FaultPlan, Rule
from support.scripted import Clock, ScriptedEngine

Scripted = tuple[World, ScriptedEngine, Clock]


@pytest.fixture
def scripted(request: pytest.FixtureRequest) -> Iterator[Scripted]:
    """A world of 16 slots over one tier; parameters are further options."""
    options = getattr(request, "param", {})
    world, engine, clock = open_scripted_world(f"memory://{request.node.name}", **{"slots": 16} | options)
    yield world, engine, clock
    world.store.close(0.1)


def fill(world: World, engine: ScriptedEngine, *paths: range) -> None:
    """The tier gets what a request computes for each of `paths`, and the host forgets it."""
    for path in paths:
        for part in range(path.start + 4, path.stop + 4, 4):  # the queue of writes is short
            serve(world, engine, range(path.start, min(part, path.stop)))
    world.store.clear()
    assert not world.store.resident


def serve(world: World, engine: ScriptedEngine, path: range) -> None:
    """A request lives, and everybody works."""
    prompt = world.arrive(f"{path}", path)
    while prompt.state != "running":
        world.step()
        world.settle()
        engine.run_all()
        world.store.poll()
    world.settle()
    world.finish(prompt)
    world.step()
    engine.run_all()
    world.store.poll()


def run(engine: ScriptedEngine, verb: Verb) -> None:
    """Workers do what they have of `verb`."""
    for held in [held for held in engine.held if held.batch.verb is verb]:
        engine.run(held)


class Walks:
    """Counts the calls of each walk."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[OffloadKey, LookupResult]] = []
        lookup = world.manager.lookup

        def counted(key: OffloadKey, context: ReqContext) -> LookupResult:
            self.calls.append((key, lookup(key, context)))
            return self.calls[-1][1]

        monkeypatch.setattr(world.manager, "lookup", counted)

    def take(self) -> list[LookupResult]:
        """Answers since the last call."""
        answers = [answer for _, answer in self.calls]
        self.calls.clear()
        return answers


def test_a_waiting_request_costs_two_calls_a_step(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, engine, _ = scripted
    fill(world, engine, range(8))
    walks = Walks(world, monkeypatch)
    world.arrive("r", range(8))
    for _ in range(3):
        assert world.step() == ["r"]
        assert walks.take() == [LookupResult.RETRY, LookupResult.MISS]


def test_a_resident_head_waits_with_the_rest(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    world, engine, _ = scripted
    fill(world, engine, range(8))
    world.store.prefetch(group_keys(Prompt("p", tuple(range(8))))[:3])
    engine.run_all()
    world.store.poll()
    walks = Walks(world, monkeypatch)
    world.arrive("r", range(8))
    assert world.step() == ["r"]  # it finds out in the middle of the first walk
    assert walks.take() == [LookupResult.HIT] * 3 + [LookupResult.RETRY, LookupResult.MISS]
    assert world.step() == ["r"]
    assert walks.take() == [LookupResult.RETRY, LookupResult.MISS]


@pytest.mark.parametrize("scripted", [{"windows": (None, 2 * TOKENS), "slots": 32}], indirect=True)
def test_groups_with_a_window_wait_for_a_window(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    world, engine, _ = scripted
    fill(world, engine, range(8))
    walks = Walks(world, monkeypatch)
    world.arrive("r", range(8))
    for _ in range(2):
        assert world.step() == ["r"]
        assert walks.take() == [LookupResult.RETRY, LookupResult.MISS] + [LookupResult.HIT_PENDING] * 2


def test_a_walk_begins_anew_where_the_device_has_lost_its_prefix(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, engine, _ = scripted
    fill(world, engine, range(8))
    request = world.arrive("r", range(8))
    world.cached.update(request.block_hashes[:4])
    assert world.step() == ["r"]
    walks = Walks(world, monkeypatch)
    world.cached.clear()
    assert world.step() == ["r"]
    assert walks.take() == [LookupResult.RETRY, LookupResult.MISS]
    for _ in range(6):
        engine.run_all()
        world.step()
    world.settle()
    assert request.num_computed_tokens == 8 * TOKENS


def test_all_keys_are_asked_for_at_once(scripted: Scripted) -> None:
    world, engine, _ = scripted
    request = world.arrive("r", range(8))
    world.step()
    asked = [key for batch in engine.submitted if batch.verb is Verb.PROBE for key in batch.keys]
    assert sorted(asked) == sorted(group_keys(request))


def test_nothing_in_the_tiers_is_found_out_once(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    world, engine, _ = scripted
    request = world.arrive("r", range(8))
    assert world.step(room=0) == ["r"]
    run(engine, Verb.PROBE)
    lookups: list[int] = []
    lookup = world.store.lookup

    def counted(keys: Sequence[bytes], **options: Any) -> list[Lookup]:
        lookups.append(len(keys))
        return lookup(keys)

    monkeypatch.setattr(world.store, "lookup", counted)
    assert world.step(room=0) == []
    found_out = sum(lookups)
    for _ in range(5):
        assert world.step(room=0) == []
    assert sum(lookups) == found_out, "every step asks again"
    assert world.ask(request) == 0


@pytest.mark.parametrize("verb", [Verb.PROBE, Verb.READ])
def test_at_the_deadline_the_head_is_served(scripted: Scripted, verb: Verb) -> None:
    world, engine, clock = scripted
    fill(world, engine, range(8))
    world.store.prefetch(group_keys(Prompt("p", tuple(range(8))))[:2])
    engine.run_all()
    world.store.poll()
    world.arrive("r", range(8))
    assert world.step() == ["r"]
    if verb is Verb.READ:
        run(engine, Verb.PROBE)
        assert world.step() == ["r"]
        engine.run(engine.find(Verb.READ), 3)
        assert world.step() == ["r"]
    clock.advance(5.1)
    assert world.step() == []
    request = world.requests["r"]
    assert request.state == "loading"
    assert request.num_computed_tokens == (5 if verb is Verb.READ else 2) * TOKENS
    world.settle()


def test_a_failed_deadline_is_not_repeated_for_the_same_attempt(scripted: Scripted) -> None:
    world, engine, clock = scripted
    fill(world, engine, range(8))
    world.arrive("r", range(8))
    assert world.step(room=0) == ["r"]
    clock.advance(5.1)
    assert world.step(room=0) == []
    for _ in range(10):
        clock.advance(10)
        assert world.step(room=0) == []


def test_two_requests_share_one_transfer(scripted: Scripted) -> None:
    world, engine, _ = scripted
    fill(world, engine, range(6))
    requests = [world.arrive(name, range(6)) for name in "ab"]
    for _ in range(6):
        world.step(room=0)
        engine.run_all()
    world.step()
    world.settle()
    assert [request.num_computed_tokens for request in requests] == [6 * TOKENS] * 2 or (
        world.step() == [] and requests[1].state == "loading"
    )
    for key in group_keys(requests[0]):
        assert engine.count(Verb.READ, key) == 1


def test_queued_requests_do_not_fill_the_host_with_halves(scripted: Scripted) -> None:
    """Two prompts of 8 want the 12 slots for promotions: one gets all of it, then the other."""
    world, engine, _ = scripted
    fill(world, engine, range(8), range(100, 108))
    first, second = world.arrive("first", range(8)), world.arrive("second", range(100, 108))
    for _ in range(8):
        world.step(room=0)
        engine.run_all()
    assert all(key in world.store.resident for key in group_keys(first))
    assert not any(key in world.store.resident for key in group_keys(second))
    assert world.step() == ["second"]
    world.settle()
    assert first.num_computed_tokens == 8 * TOKENS
    for _ in range(8):
        world.step(room=0)
        engine.run_all()
    world.step()
    world.settle()
    assert second.num_computed_tokens == 8 * TOKENS


def test_a_queued_head_is_not_cut_while_loads_are_slow(scripted: Scripted) -> None:
    world, engine, clock = scripted
    fill(world, engine, range(8), range(100, 108))
    _, second = world.arrive("first", range(8)), world.arrive("second", range(100, 108))
    while world.step() != ["second"]:
        engine.run_all()
    clock.advance(3)  # the load of the first one is under way, and has its slots
    assert world.step() == ["second"]
    while second.state == "waiting":
        world.settle()
        world.step()
        engine.run_all()
    assert second.num_computed_tokens == 8 * TOKENS


def test_a_promoted_head_stays_until_it_is_loaded(scripted: Scripted) -> None:
    world, engine, _ = scripted
    fill(world, engine, range(8))
    request = world.arrive("r", range(8))
    for _ in range(6):
        world.step(room=0)
        engine.run_all()
    assert all(key in world.store.resident for key in group_keys(request))
    for number in range(4):  # others store as much as the host will take
        prompt = world.arrive(f"other {number}", range(20 * number + 40, 20 * number + 46))
        world.requests = {"r": request, prompt.request_id: prompt}
        request.state = "held back"
        for _ in range(3):
            world.step()
            engine.run_all()
        world.settle()
    request.state = "waiting"
    assert world.ask(request) == 8 * TOKENS
    world.step()
    world.settle()


@pytest.mark.parametrize("scripted", [{"slots": 8}], indirect=True)
def test_what_was_called_a_hit_is_not_evicted_in_the_middle_of_a_walk(scripted: Scripted) -> None:
    """The promotion of another request is about to evict for its second wave when the walk comes to a key
    that has to be looked up."""
    world, engine, _ = scripted
    fill(world, engine, range(100, 106))
    serve(world, engine, range(2))
    learns = world.arrive("learns what is absent", range(3))
    while world.ask(learns) is None:
        engine.run_all()
        world.manager.on_schedule_end(ScheduleEndContext((), ()))
    world.finish(learns, aborted=True)
    world.step()
    serve(world, engine, range(50, 52))  # now the first two are the oldest
    large = world.arrive("large", range(100, 106))
    assert world.step() == ["large"]
    large.state = "held back"
    run(engine, Verb.READ)  # the first wave has come, and nobody has taken it in
    request = world.arrive("r", range(3))
    world.step()
    assert request.state == "loading"
    world.settle()


def test_a_head_that_nobody_loads_is_let_go(scripted: Scripted) -> None:
    world, engine, clock = scripted
    fill(world, engine, range(8))
    request = world.arrive("r", range(8))
    for _ in range(6):
        world.step(room=0)
        engine.run_all()
    assert world.store.room == 8
    request.state = "held back"
    clock.advance(31)
    world.step()
    assert world.store.room == 16


@pytest.mark.parametrize("when", ["probing", "promoting", "promoted"])
def test_an_aborted_request_gives_everything_back(scripted: Scripted, when: str) -> None:
    world, engine, _ = scripted
    fill(world, engine, range(8))
    request = world.arrive("r", range(8))
    world.step(room=0)
    if when != "probing":
        run(engine, Verb.PROBE)
        world.step(room=0)
        engine.run(engine.find(Verb.READ), None if when == "promoted" else 3)
        world.step(room=0)
    world.finish(request, aborted=True)
    world.step()
    engine.run_all()
    world.store.poll()
    assert world.store.room == 16
    assert not world.manager._lookups._requests


def test_recomputing_is_preferred_where_it_is_faster(scripted: Scripted) -> None:
    world, engine, clock = scripted
    fill(world, engine, range(8), range(100, 116), range(200, 208))
    estimator = world.manager._lookups._promoter.estimator
    request = world.arrive("slow storage", range(8))
    world.step(room=0)
    run(engine, Verb.PROBE)
    world.step(room=0)
    clock.advance(4)  # eight chunks in four seconds
    run(engine, Verb.READ)
    world.store.poll()
    clock.advance(20)  # a long step of the engine: the reads did not take longer for that
    world.step()
    assert estimator._loads.at(clock()) == 2.0
    world.settle()
    assert request.num_computed_tokens == 8 * TOKENS
    estimator.computing(4096)
    clock.advance(0.01)
    estimator.step(clock())
    declined = world.arrive("declined", range(200, 208))
    world.step(room=0)
    run(engine, Verb.PROBE)
    assert world.step(room=0) == []
    assert not any(held.batch.verb is Verb.READ for held in engine.held)
    assert world.telemetry._counts["loads_declined"] == 8
    clock.advance(61)  # what was measured so long ago does not count
    assert world.step(room=0) == ["declined"]
    assert engine.find(Verb.READ, group_keys(declined)[0])


def test_without_positions_the_first_walk_tells_the_keys(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, engine, _ = scripted
    fill(world, engine, range(8))
    monkeypatch.setattr("kvstore_vllm.manager.lookups.key_positions", lambda _context: {})
    walks = Walks(world, monkeypatch)
    request = world.arrive("r", range(8))
    assert world.step() == ["r"]
    assert walks.take() == [LookupResult.RETRY] * 8
    for _ in range(6):
        engine.run_all()
        world.step()
    world.settle()
    assert request.num_computed_tokens == 8 * TOKENS


@pytest.mark.parametrize("verb", ["exists", "get"])
def test_a_hung_tier_is_served_by_recompute(
    tmp_path_factory: pytest.TempPathFactory, verb: Literal["exists", "get"]
) -> None:
    folder = tmp_path_factory.mktemp("tier")
    before = open_world(f"file://{folder}", engine="threads")
    prompt = before.arrive("first", range(8))
    while prompt.state != "running":
        before.step()
        before.settle()
    before.settle()
    before.manager.shutdown()
    plan = FaultPlan([Rule(Fault.HANG, verb)])
    world = open_world(f"file://{folder}", engine="threads", factory=plan, lookup_timeout="0.2s")
    try:
        request = world.arrive("again", range(8))
        asked = 0
        while request.state == "waiting":
            asked += 1
            assert asked < 1 << 20, "it waits for ever"
            world.step()
        assert asked > 1
        assert request.state == "running", "something was loaded"
    finally:
        plan.heal()
        world.manager.shutdown()
