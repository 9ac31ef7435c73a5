"""The manager under vLLM's own scheduler side: what is stored comes back, from host and tiers."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from small_world import TOKENS, World, group_keys, open_world
from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext
from vllm.v1.metrics.cache_hit_source import CacheHitSource

ENGINES = ["inline", "threads"]
Make = Callable[..., World]


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Opens worlds, and closes their stores."""
    worlds: list[World] = []

    def opened(*tiers: str, **options: object) -> World:
        own = [tier.replace("memory://", f"memory://{uuid.uuid4()}") for tier in tiers]
        worlds.append(open_world(*own, **options))  # type: ignore[arg-type]
        return worlds[-1]

    yield opened
    for world in worlds:
        world.manager.shutdown()


def serve(world: World, name: str, path: range, **params: object) -> int:
    """Serve one request to its end; returns how many tokens of it were loaded."""
    request = world.arrive(name, path, **params)
    loaded = 0
    for _ in range(2000):
        world.step()
        if request.state == "loading":
            loaded = request.num_computed_tokens
        world.settle()
        if request.state == "running":
            break
    else:
        pytest.fail("the request has waited for too long")
    world.finish(request)
    world.step()
    world.settle()
    world.step()
    return loaded


def forget(world: World) -> None:
    """The host loses everything; the tiers have it all."""
    assert world.store.flush(timeout=10)
    world.store.clear()
    assert not world.store.resident


def test_a_prompt_comes_back_from_the_host(make: Make) -> None:
    world = make()
    assert serve(world, "first", range(8)) == 0
    assert serve(world, "again", range(8)) == 8 * TOKENS


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("tier", ["memory", "file"])
def test_a_prompt_comes_back_from_a_tier(make: Make, tmp_path: Path, engine: str, tier: str) -> None:
    world = make("memory://" if tier == "memory" else f"file://{tmp_path}", engine=engine)
    serve(world, "first", range(8))
    forget(world)
    assert serve(world, "again", range(8)) == 8 * TOKENS


def test_only_the_head_that_is_there_is_loaded(make: Make) -> None:
    world = make("memory://")
    serve(world, "first", range(8))
    forget(world)
    assert serve(world, "longer", range(12)) == 8 * TOKENS


def test_what_the_device_has_is_not_promoted(make: Make) -> None:
    world = make("memory://")
    serve(world, "first", range(8))
    forget(world)
    request = world.arrive("again", range(8))
    world.cached.update(request.block_hashes[:5])
    while world.ask(request) is None:
        world.step(room=0)
    assert set(world.store.resident) == set(group_keys(request)[5:])


@pytest.mark.parametrize("chunks", [1, 3])  # 1 is what a recurrent state has
@pytest.mark.parametrize("engine", ENGINES)
def test_a_hybrid_model_gets_its_window(make: Make, engine: str, chunks: int) -> None:
    world = make("memory://", windows=(None, chunks * TOKENS), engine=engine)
    serve(world, "first", range(8))
    forget(world)
    assert serve(world, "again", range(8)) == 8 * TOKENS


def test_of_a_group_with_a_window_only_the_window_is_promoted(make: Make) -> None:
    world = make("memory://", windows=(None, 3 * TOKENS), engine="inline")
    serve(world, "first", range(8))
    forget(world)
    request = world.arrive("again", range(8))
    while world.ask(request) is None:
        world.step(room=0)
    windowed = [key for key in group_keys(request, 1) if key in world.store.resident]
    assert windowed == group_keys(request, 1)[-4:]  # the window, which may begin anywhere in its first chunk


def test_a_hole_in_the_window_shortens_the_head(make: Make) -> None:
    world = make("memory://", windows=(None, 2 * TOKENS))
    request = world.arrive("first", range(8))
    world.step()
    world.settle()
    assert world.store.flush(timeout=10)
    world.store.delete([group_keys(request, 1)[6]])
    world.store.clear()
    world.finish(request)
    assert serve(world, "again", range(8)) == 6 * TOKENS


def test_a_prompt_larger_than_the_host_is_stored_and_loaded_from_its_head(make: Make) -> None:
    world = make("memory://", slots=8)
    for end in (3, 6, 9, 12):  # little by little, as the queue of writes is as short as the host is small
        serve(world, f"up to {end}", range(end))
        assert world.store.flush(timeout=10)
    forget(world)
    assert serve(world, "again", range(12)) == 6 * TOKENS  # three quarters of the host


def test_stores_get_what_fits_from_the_head_in_the_order_given(make: Make) -> None:
    world = make(slots=4)
    request = world.arrive("first", range(6))
    context = world.scheduler._req_status["first"].req_context
    world.scheduler._req_status["first"].update_offload_keys()
    output = world.manager.prepare_store(group_keys(request), context)
    assert output is not None
    assert output.keys_to_store == group_keys(request)[:4]
    assert world.manager.prepare_store(group_keys(request)[4:], context) is None


def test_with_several_groups_the_head_of_all_is_stored(make: Make) -> None:
    world = make(slots=4, windows=(None, None))
    request = world.arrive("first", range(4))
    world.scheduler._req_status["first"].update_offload_keys()
    context = world.scheduler._req_status["first"].req_context
    output = world.manager.prepare_store(group_keys(request) + group_keys(request, 1), context)
    assert output is not None
    assert output.keys_to_store == group_keys(request)[:2] + group_keys(request, 1)[:2]


def test_what_is_there_already_is_not_stored_again(make: Make) -> None:
    world = make()
    serve(world, "first", range(4))
    request = world.arrive("again", range(6))
    world.scheduler._req_status["again"].update_offload_keys()
    context = world.scheduler._req_status["again"].req_context
    output = world.manager.prepare_store(group_keys(request), context)
    assert output is not None and output.keys_to_store == group_keys(request)[4:]
    output = world.manager.prepare_store(group_keys(request), context)
    assert output is not None and output.keys_to_store == []


def test_a_failed_copy_is_not_published(make: Make) -> None:
    world = make()
    request = world.arrive("first", range(4))
    world.step()
    world.rank.fails.update(copy.ticket for copy in world.rank.todo)
    world.settle()
    assert not world.store.resident
    world.finish(request)
    assert serve(world, "again", range(4)) == 0


def test_the_head_of_a_finished_request_is_evicted_last(make: Make) -> None:
    world = make(slots=6)
    serve(world, "first", range(4))
    request = world.arrive("other", range(100, 104))
    world.step()
    world.settle()
    first = world.arrive("probe", range(4))
    assert [key in world.store.resident for key in group_keys(first)] == [True, True, False, False]
    world.finish(request)


@pytest.mark.parametrize("params", [{"priority": 10}, {"tiers": []}])
def test_a_request_may_keep_its_chunks_out_of_the_tiers(make: Make, params: dict[str, object]) -> None:
    world = make("memory://")
    serve(world, "first", range(4), **params)
    assert len(world.store.resident) == 4
    assert world.store.stats().tiers[1].chunks == 0


def test_priority_decides_who_is_evicted(make: Make) -> None:
    world = make(slots=8, policy="priority")
    serve(world, "dear", range(4), priority=90)
    serve(world, "cheap", range(50, 54), priority=40)
    serve(world, "new", range(100, 104))
    dear, cheap = world.arrive("a", range(4)), world.arrive("b", range(50, 54))
    assert all(key in world.store.resident for key in group_keys(dear))
    assert not any(key in world.store.resident for key in group_keys(cheap))


def test_wishes_that_cannot_be_granted_are_told_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    world = make()
    for name in "ab":
        peer = {"remote_host": "10.0.0.1", "remote_port": 5710}
        serve(
            world,
            name,
            range(2),
            ttl=60,
            tiers="file",
            priority="high",
            remote_prefiller=peer,
            remote_kv_source=peer,
        )
    told = [record.getMessage().removeprefix("kv_transfer_params: ") for record in caplog.records]
    assert sorted(text.split()[0].strip(":") for text in told) == [
        "priority",
        "remote_kv_source",
        "remote_prefiller",
        "tiers",
        "ttl",
    ]


def test_max_load_tokens_limits_what_is_promoted(make: Make) -> None:
    world = make("memory://", engine="inline")
    serve(world, "first", range(8))
    forget(world)
    request = world.arrive("again", range(8), max_load_tokens=3 * TOKENS)
    while (found := world.ask(request)) is None:
        world.step(room=0)
    assert found == 3 * TOKENS
    assert set(world.store.resident) == set(group_keys(request)[:3])


@pytest.mark.parametrize(
    ("allowed", "loaded"),
    [([], 0), ([{"medium": "CPU"}], 0), ([{"medium": "STORAGE"}], 8), ([{"locality": "LOCAL"}], 8)],
)
def test_kv_load_tiers_decides_what_may_be_promoted(
    make: Make, tmp_path: Path, allowed: list[dict[str, str]], loaded: int
) -> None:
    world = make(f"file://{tmp_path}")
    serve(world, "first", range(8))
    forget(world)
    assert serve(world, "again", range(8), kv_load_tiers=allowed) == loaded * TOKENS


def test_store_threshold_counts_offers(make: Make) -> None:
    world = make(store_threshold=2)
    serve(world, "first", range(4))
    assert not world.store.resident
    serve(world, "second", range(4))
    assert len(world.store.resident) == 4


def test_a_hit_knows_its_source(make: Make) -> None:
    world = make("memory://")
    serve(world, "first", range(2))
    request = world.arrive("host", range(2))
    assert world.ask(request) == 2 * TOKENS
    context = world.scheduler._req_status["host"].req_context
    assert world.manager.get_load_source(group_keys(request)[0], context) is CacheHitSource.HOST
    world.finish(request)
    world.step()
    forget(world)
    request = world.arrive("tier", range(2))
    while world.ask(request) is None:
        world.step(room=0)
    world.step()
    context = world.scheduler._req_status["tier"].req_context
    assert world.manager.get_load_source(group_keys(request)[0], context) is CacheHitSource.DISK


def test_a_closed_store_is_no_error_of_the_engine(make: Make) -> None:
    world = make("memory://")
    request = world.arrive("first", range(4))
    world.store.close()
    context = world.scheduler._req_status["first"].req_context
    world.scheduler._req_status["first"].update_offload_keys()
    keys = group_keys(request)
    assert world.manager.lookup(keys[0], context) is LookupResult.MISS
    assert world.manager.prepare_store(keys, context) is None
    world.manager.on_schedule_end(ScheduleEndContext((), ()))
    world.manager.on_request_finished(context)
    world.manager.reset_cache()
    assert world.manager.get_stats() is None


def test_an_idle_engine_need_not_step(make: Make) -> None:
    world = make("memory://", engine="threads")
    world.arrive("first", range(4))
    world.step()
    world.settle()
    assert not world.manager.has_pending_work()
