"""What single requests say about tiers and peers, under vLLM's own scheduler side."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from small_world import TOKENS, Prompt, World, content, group_keys, open_world
from vllm.v1.kv_offload.base import OffloadPolicy

import kvstore
from kvstore.address import Address
from support.chunks import CHUNK
from support.object_store import free_ports
from support.processes import wait_for

Make = Callable[..., World]


@pytest.fixture
def make() -> Iterator[Make]:
    """Opens worlds, and closes their stores."""
    worlds: list[World] = []

    def opened(*tiers: Any, **options: Any) -> World:
        worlds.append(open_world(*tiers, **options))
        return worlds[-1]

    yield opened
    for world in worlds:
        world.manager.shutdown()


@pytest.fixture
def other() -> Iterator[kvstore.Store]:
    """The store of another instance, which serves."""
    with kvstore.open(
        "ram://?capacity=1MiB&pin=off",
        serve=":0",
        namespace={"model": "tiny"},
        chunk_size=CHUNK,
        engine="inline",
    ) as store:
        yield store


def role(store: kvstore.Store, **changes: Any) -> dict[str, Any]:
    """What a request says of the peer that it names."""
    assert store.served_at is not None
    address = Address.parse(store.served_at)
    return {
        "kv_request_id": "any",
        "remote_host": address.host,
        "remote_port": address.port,
        **changes,
    }


def chunks_of(path: range) -> dict[bytes, bytes]:
    """What an instance that has computed a prompt holds of it."""
    prompt = Prompt("elsewhere", tuple(path))
    return {
        key: content(chunk_hash, 0, 0)
        for key, chunk_hash in zip(group_keys(prompt), prompt.block_hashes, strict=True)
    }


def serve(world: World, name: str, path: Sequence[int], **params: Any) -> int:
    """Serve one request to its end; returns how many tokens of it were loaded."""
    request = world.arrive(name, path, **params)
    loaded = 0

    def runs() -> bool:
        nonlocal loaded
        world.step()
        if request.state == "loading":
            loaded = request.num_computed_tokens
        world.settle()
        return request.state == "running"

    wait_for(runs, 20)
    world.finish(request)
    world.step()
    world.settle()
    world.step()
    return loaded


def two_tiers() -> list[dict[str, Any]]:
    return [
        {"url": f"memory://{uuid.uuid4()}", "name": name, "locality": locality}
        for name, locality in (("near", "LOCAL"), ("far", "REMOTE"))
    ]


def forget(world: World) -> None:
    assert world.store.flush(timeout=10)
    world.store.clear()


def test_chunks_go_to_the_tiers_that_a_request_names(make: Make) -> None:
    world = make(*two_tiers())
    serve(world, "near", range(4), tiers=["near"])
    serve(world, "host", range(20, 24), tiers=["host"])
    forget(world)
    stats = world.store.stats()
    assert (stats.tier("near").writes, stats.tier("far").writes) == (4, 0)


def test_a_tier_that_is_not_there_is_left_out(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    world = make(*two_tiers())
    for name in "ab":
        serve(world, name, range(ord(name), ord(name) + 2), tiers=["far", "middle"])
    forget(world)
    assert world.store.stats().tier("far").writes == 4
    [told] = [record.getMessage() for record in caplog.records]
    assert "'middle' is no tier that is written (those are: near, far)" in told


@pytest.mark.parametrize(("allowed", "loaded"), [("LOCAL", (4, 0)), ("REMOTE", (0, 4))])
def test_a_request_loads_from_the_tiers_that_it_allows(
    make: Make, allowed: str, loaded: tuple[int, int]
) -> None:
    world = make(*two_tiers())
    near, far = range(4), range(20, 24)
    serve(world, "near", near, tiers=["near"])
    serve(world, "far", far, tiers=["far"])
    forget(world)
    asked = {"kv_load_tiers": [{"locality": allowed}]}
    found = serve(world, "again-near", near, **asked), serve(world, "again-far", far, **asked)
    assert found == tuple(chunks * TOKENS for chunks in loaded)


def test_tiers_that_are_not_allowed_are_not_even_asked(make: Make) -> None:
    world = make(*two_tiers())
    serve(world, "first", range(4), kv_load_tiers=[{"locality": "LOCAL"}])
    assert [world.store.stats().tier(name).latency["lookup"].count for name in ("near", "far")] == [4, 0]


def test_only_a_request_that_names_a_peer_asks_it(make: Make, other: kvstore.Store) -> None:
    world = make("peer://")
    path, unasked = range(8), range(20, 24)
    other.put_many(chunks_of(path) | chunks_of(unasked))
    assert serve(world, "stranger", unasked) == 0
    assert serve(world, "friend", path, remote_kv_source=role(other)) == 8 * TOKENS
    assert world.store.stats().tier("peer-1").hits == 8


def test_a_filter_of_tiers_is_for_peers_too(make: Make, other: kvstore.Store) -> None:
    world = make({"url": "peer://", "locality": "REMOTE"})
    other.put_many(chunks_of(range(4)))
    local = [{"locality": "LOCAL"}]
    assert serve(world, "friend", range(4), remote_kv_source=role(other), kv_load_tiers=local) == 0


def test_what_a_peer_does_not_have_is_computed(make: Make, other: kvstore.Store) -> None:
    world = make("peer://")
    other.put_many(chunks_of(range(3)))
    assert serve(world, "friend", range(8), remote_kv_source=role(other)) == 3 * TOKENS


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"remote_host": "10.9.9.9"}, "no tier lets requests name '10.9.9.9'"),
        ({"remote_host": "eth0;127.0.0.1"}, "no tier lets requests name 'eth0;127.0.0.1'"),
        ({"remote_port": "many"}, "takes remote_host and remote_port"),
    ],
)
def test_a_peer_that_may_not_be_named_is_not_dialled(
    make: Make,
    other: kvstore.Store,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    words: str,
) -> None:
    world = make("peer://")
    other.put_many(chunks_of(range(4)) | chunks_of(range(20, 24)))
    for path in (range(4), range(20, 24)):
        assert serve(world, str(path), path, remote_kv_source=role(other, **changes)) == 0
    [told] = [record.getMessage() for record in caplog.records]
    assert words in told


def test_a_decoder_waits_for_what_its_prefiller_is_computing(make: Make, other: kvstore.Store) -> None:
    world = make("peer://")
    chunks = list(chunks_of(range(8)).items())
    request = world.arrive("decode", range(8), remote_prefiller=role(other))

    def stepped(key: bytes) -> bool:
        world.step()
        return key in world.store.resident

    for key, data in chunks:
        assert request.state == "waiting"
        other.put(key, data)
        wait_for(partial(stepped, key), 20)
    world.step()
    assert request.state == "loading"
    assert request.num_computed_tokens == 8 * TOKENS
    world.settle()


def test_a_decoder_that_waits_asks_its_prefiller_and_no_other_tier_again(
    make: Make, other: kvstore.Store
) -> None:
    world = make(*two_tiers(), "peer://?peers=1")
    other.put_many(dict(list(chunks_of(range(8)).items())[:3]))
    request = world.arrive("decode", range(8), remote_prefiller=role(other))

    def asked(tier: str) -> int:
        return world.store.stats().tier(tier).latency["lookup"].count

    def asked_often() -> bool:
        world.step()
        return asked("peer") > 8 + 10

    wait_for(asked_often, 20)
    other.put_many(chunks_of(range(8)))

    def loads() -> bool:
        world.step()
        return request.state == "loading"

    wait_for(loads, 20)
    assert request.num_computed_tokens == 8 * TOKENS
    assert (asked("near"), asked("far")) == (8, 8)
    world.settle()


def test_a_decoder_waits_no_longer_than_it_is_told_to(make: Make, other: kvstore.Store) -> None:
    world = make("peer://", prefill_timeout="300ms")
    other.put_many(chunks_of(range(2)))
    began = world.store.clock()
    assert serve(world, "decode", range(8), remote_prefiller=role(other)) == 2 * TOKENS
    assert 0.3 <= world.store.clock() - began < 5


def test_a_prefiller_that_is_gone_is_not_waited_for(make: Make, other: kvstore.Store) -> None:
    [port] = free_ports(1)
    world = make("peer://")
    began = world.store.clock()
    assert serve(world, "decode", range(8), remote_prefiller=role(other, remote_port=port)) == 0
    assert world.store.clock() - began < 15


def test_a_prefiller_stores_all_that_its_decoder_will_ask_for(make: Make) -> None:
    world = make(store_threshold=2)
    request = world.arrive("prefill", range(4), remote_decoder={"kv_request_id": "any"})
    context = world.scheduler._req_status["prefill"].req_context
    assert world.manager.on_new_request(context).policy is OffloadPolicy.REQUEST_LEVEL
    world.step()
    world.settle()
    assert set(world.store.resident) == set(group_keys(request))
