"""Engines that read from one another's host memory."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from process_tree import Tree, engine_process, start_error
from tiny_engines import BLOCK, CHUNK_BYTES, LENGTH, Engine, Outputs, offloading, open_engine, prompts

import kvstore
from kvstore.address import Address
from support.object_store import free_ports
from support.processes import wait_for

CHUNKS = LENGTH // BLOCK
STORED = CHUNKS * BLOCK
SECRET = {"token": "known to both engines"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def serving(port: int, **options: Any) -> dict[str, Any]:
    """``kv_connector_extra_config`` of an engine that serves, as vLLM's own tiering has it."""
    return {
        "spec_name": "KVStoreOffloadingSpec",
        "spec_module_path": "kvstore_vllm",
        "cpu_bytes_to_use": 200 * CHUNK_BYTES,
        "secondary_tiers": [{"type": "p2p", "host": "127.0.0.1", "port": port, **options}],
    }


def peer(port: int, **options: Any) -> dict[str, Any]:
    return {"url": f"peer://127.0.0.1:{port}", "name": "peer", **options}


@pytest.fixture
def port() -> int:
    [port] = free_ports(1)
    return port


@pytest.fixture
def first(llama: Path, expected: Outputs, tmp_path: Path, port: int) -> Iterator[Tree]:
    """An engine that has answered every prompt, and serves what it has computed."""
    with engine_process(llama, tmp_path / "first", serving(port, storage_options=SECRET)) as tree:
        assert [tuple(answer) for answer in tree.ask("answers")] == expected
        assert tree.ask("cached")[0] == STORED  # it has gone through some more steps
        yield tree


def hits(engine: Engine) -> int:
    return sum(tier.hits for tier in engine.store.stats() if tier.scheme == "peer")


def role(port: int) -> dict[str, Any]:
    """What a request says of the engine that serves at `port`."""
    return {"kv_request_id": "one of a test", "remote_host": "127.0.0.1", "remote_port": port}


def is_up(engine: Engine) -> bool:
    """Whether the peer has answered; it is asked again now and then for as long as it has not."""
    engine.store.lookup([os.urandom(16)])
    return engine.store.stats().tier("peer").breaker.read == "closed"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_serves_what_only_it_has_computed_until_it_is_gone(
    llama: Path, expected: Outputs, first: Tree, port: int, how: int
) -> None:
    """Afterwards the other computes, although it knows what was there: a reset keeps that knowledge."""
    extra = offloading(peer(port, storage_options=SECRET), on_reset="keep")
    with open_engine(llama, extra) as engine:
        assert engine.cached(prompts()[:1]) == [STORED]
        assert hits(engine) == CHUNKS
        assert engine.answers(prompts()) == expected
        assert engine.store.stats().tier("peer").writes == 0
        engine.reset()
        before = hits(engine)
        for pid in first.living():
            with suppress(ProcessLookupError):  # it has ended with another one
                os.kill(pid, how)
        assert engine.answers(prompts()) == expected
        assert hits(engine) == before
        engine.settle()
        assert engine.answers(prompts()) == expected


def test_engines_read_one_another_whichever_starts_first(
    llama: Path, expected: Outputs, tmp_path: Path
) -> None:
    """The second is down for the first until it listens, and is found then."""
    here, there = free_ports(2)
    ours = offloading(peer(there))
    ours["tiers"][0] += f"&serve=:{here}"
    theirs = serving(there)
    theirs["secondary_tiers"].append({"type": "KVStoreTier", **peer(here)})
    known, new = prompts()[:3], prompts()[3:]
    with open_engine(llama, ours) as engine:
        assert engine.answers(known) == expected[:3]
        engine.settle()
        with engine_process(llama, tmp_path / "second", theirs) as second:
            found = second.ask("cached")
            assert (found[0], found[3:]) == (STORED, [0] * len(new))
            wait_for(lambda: is_up(engine), 60)
            assert engine.cached(new[:1]) == [STORED]
            assert hits(engine) == CHUNKS
            assert [tuple(answer) for answer in second.ask("answers")] == expected


def test_requests_name_the_engine_that_has_their_prefix(
    llama: Path, expected: Outputs, first: Tree, port: int
) -> None:
    """Load balancing: nobody is asked unless a request says so, and then only who it says."""
    [mine] = free_ports(1)
    with open_engine(llama, serving(mine, storage_options=SECRET)) as engine:
        known = prompts()
        assert engine.cached(known[:1]) == [0]
        assert engine.cached(known[1:2], remote_kv_source=role(port)) == [STORED]
        assert hits(engine) == CHUNKS
        assert engine.answers(known, remote_kv_source=role(port)) == expected
        assert hits(engine) > CHUNKS


def test_a_decoder_takes_over_what_its_prefiller_is_computing(
    llama: Path, expected: Outputs, tmp_path: Path
) -> None:
    """Both get their requests at the same time, as routers send them."""
    here, there = free_ports(2)
    with (
        engine_process(llama, tmp_path / "prefill", serving(there)) as prefill,
        open_engine(llama, serving(here) | {"prefill_timeout": "60s"}) as decode,
    ):
        prefill.tell(f"answers {json.dumps({'remote_decoder': {'kv_request_id': 'one of a test'}})}")
        assert decode.answers(prompts(), remote_prefiller=role(there)) == expected
        assert hits(decode) == len(prompts()) * CHUNKS
        assert [tuple(answer) for answer in prefill.line()] == [answer[:1] for answer in expected]


def test_a_stranger_does_not_start(llama: Path) -> None:
    """Wrong credentials are a wrong configuration."""
    wrong = {"token": "not known to anybody"}
    with kvstore.open("ram://?capacity=4MiB&pin=off", serve=":0", storage_options={"host": SECRET}) as owner:
        assert owner.served_at is not None
        port = Address.parse(owner.served_at).port
        assert "token" in start_error(llama, offloading(peer(port, storage_options=wrong)))


def test_an_address_that_is_taken_is_told_in_one_line(llama: Path, port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        assert f"cannot serve peers on tcp://127.0.0.1:{port}" in start_error(llama, serving(port))
