"""Engines that read from one another's host memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process_tree import Tree, engine_process, start_error
from tiny_engines import BLOCK, CHUNK_BYTES, LENGTH, Engine, Outputs, offloading, open_engine, prompts

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
    return engine.store.stats().tier("peer").hits


def test_an_engine_serves_what_only_another_has_computed(
    llama: Path, expected: Outputs, first: Tree, port: int
) -> None:
    with open_engine(llama, offloading(peer(port, storage_options=SECRET))) as engine:
        assert engine.cached(prompts()[:1]) == [STORED]
        assert hits(engine) == CHUNKS
        assert engine.answers(prompts()) == expected
        assert engine.store.stats().tier("peer").writes == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_without_the_other_it_computes(
    llama: Path, expected: Outputs, first: Tree, port: int, how: int
) -> None:
    """Although it knows what the other had: a reset takes it from the device and from host memory only."""
    extra = offloading(peer(port, storage_options=SECRET), on_reset="keep")
    with open_engine(llama, extra) as engine:
        assert engine.answers(prompts()) == expected
        before = hits(engine)
        assert before >= CHUNKS
        engine.reset()
        for pid in first.living():
            os.kill(pid, how)
        assert engine.answers(prompts()) == expected
        assert hits(engine) == before
        engine.settle()
        engine.reset()
        assert engine.answers(prompts()) == expected


def test_engines_that_read_one_another_start_in_any_order(
    llama: Path, expected: Outputs, tmp_path: Path
) -> None:
    """The first is down for the other until it listens, and is found then."""
    here, there = free_ports(2)
    extra = serving(there)
    extra["secondary_tiers"].append({"type": "KVStoreTier", **peer(here)})
    with engine_process(llama, tmp_path / "other", extra) as other:
        ours = offloading(peer(there))
        ours["tiers"][0] += f"&serve=:{here}"
        with open_engine(llama, ours) as engine:
            assert engine.answers(prompts()) == expected
            engine.settle()
            wait_for(lambda: other.ask("cached")[-1] == STORED, 60)
            assert [tuple(answer) for answer in other.ask("answers")] == expected


def test_a_stranger_gets_nothing(llama: Path, expected: Outputs, first: Tree, port: int) -> None:
    """Wrong credentials are a wrong configuration; the first engine goes on."""
    wrong = offloading(peer(port, storage_options={"token": "not known to anybody"}))
    assert "token" in start_error(llama, wrong)
    assert [tuple(answer) for answer in first.ask("answers")] == expected


def test_an_address_that_is_taken_is_told_in_one_line(llama: Path, first: Tree, port: int) -> None:
    assert f"cannot serve peers on tcp://127.0.0.1:{port}" in start_error(llama, serving(port))
