"""Models whose layers do not all keep the whole context, or keep something else than keys and values.

Two kinds cannot be served on a CPU, by vLLM's own doing, and are tested without an engine. With prefix
caching, which offloading needs, its CPU build runs no recurrent states: Mamba 2 fails in its own scan, and
Mamba 1 has no kernel. And its latent attention there takes nothing from a cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from process_tree import start_error
from tiny_engines import LENGTH, Outputs, make_model, offloading, open_engine, prompts

#: Device caches for two and a half prompts: of one a sliding window is a small part, and groups share blocks.
OPTIONS: dict[str, dict[str, Any]] = {
    "gemma": {"num_gpu_blocks_override": 64},
    "mistral": {"num_gpu_blocks_override": 16, "max_model_len": 448},
}


@pytest.fixture(scope="module", params=list(OPTIONS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(request.param, tmp_path_factory.mktemp("kinds") / request.param)


@pytest.fixture(scope="module")
def right(model: Path) -> Outputs:
    with open_engine(model, **OPTIONS[model.name]) as engine:
        return engine.answers(prompts())


def test_answers_are_those_of_an_engine_without_offloading(
    model: Path, right: Outputs, tmp_path: Path
) -> None:
    extra = offloading(str(tmp_path), capacity=64 << 20)
    with open_engine(model, extra, **OPTIONS[model.name]) as engine:
        assert engine.answers(prompts()) == right
        engine.settle()
        assert engine.answers(prompts()) == right
        cached = engine.cached(prompts())
        assert min(cached) >= LENGTH // 2
        engine.settle()
    with open_engine(model, extra, **OPTIONS[model.name]) as engine:
        assert engine.answers(prompts()) == right
        assert engine.store.stats().tier("file").hits > 0


def test_wrong_bytes_would_be_seen(model: Path, right: Outputs) -> None:
    with open_engine(model, offloading(capacity=64 << 20), **OPTIONS[model.name]) as engine:
        assert engine.answers(prompts()) == right
        engine.settle()
        arena = engine.store.arena
        for slot in range(arena.slots):
            arena.view(slot)[:] = bytes(arena.slot_size)
        assert engine.answers(prompts()) != right


def test_chunks_of_several_blocks_are_refused(model: Path) -> None:
    error = start_error(model, offloading(blocks_per_chunk=2), **OPTIONS[model.name])
    assert "ConfigError: chunks of 2 blocks" in error
    assert "set blocks_per_chunk=1" in error


def test_latent_attention_that_takes_nothing_from_a_cache_is_refused(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = make_model("deepseek", tmp_path_factory.mktemp("kinds") / "deepseek")
    error = start_error(model, offloading(), num_gpu_blocks_override=64)
    assert "ConfigError: vLLM's latent attention (MLA)" in error
