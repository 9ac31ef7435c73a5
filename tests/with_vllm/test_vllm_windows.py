"""How much of a prefix each kind of layer needs, from what vLLM's layers say of their caches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvstore_vllm._compat import window_chunks

BLOCK = 16
SHAPE: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)


def sliding(tokens: int, **options: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(**SHAPE, sliding_window=tokens, **options)


def found(*specs: KVCacheSpec, blocks_per_chunk: int = 1, **told: int) -> int | None:
    """The window of a group whose layers have these caches."""
    names = [f"layer {number}" for number in range(len(specs))]
    layers = {
        name: SimpleNamespace(get_kv_cache_spec=lambda _config, spec=spec: spec)
        for name, spec in zip(names, specs, strict=True)
    }
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    group = SimpleNamespace(tokens_per_block=BLOCK, layer_names=names, **told)
    (window,) = window_chunks([group], config, blocks_per_chunk)
    return window


@pytest.mark.parametrize(
    ("spec", "chunks"),
    [
        (FULL, None),
        (MLAAttentionSpec(**SHAPE), None),
        (MambaSpec(block_size=BLOCK, shapes=((4, 4),), dtypes=(torch.float32,)), 1),
        (sliding(3 * BLOCK), 3),
        (sliding(3 * BLOCK + 1), 4),
        (sliding(3 * BLOCK, extra_retained_tokens=2), 4),
        (ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=2 * BLOCK), 2),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, KVCacheSpec) else str(value),
)
def test_each_kind(spec: KVCacheSpec, chunks: int | None) -> None:
    assert found(spec, spec) == chunks


def test_chunks_of_several_blocks_hold_more_of_a_window() -> None:
    assert found(sliding(3 * BLOCK), blocks_per_chunk=2) == 2


def test_layers_that_differ_need_everything() -> None:
    assert found(sliding(3 * BLOCK), FULL) is None
    assert found(sliding(3 * BLOCK), sliding(5 * BLOCK)) is None


def test_what_vllm_says_itself_counts() -> None:
    assert found(FULL, sliding_window_size_in_chunks=7) == 7


def test_without_a_configuration_only_that_is_known() -> None:
    groups = [SimpleNamespace(), SimpleNamespace(sliding_window_size_in_chunks=2)]
    assert window_chunks(groups, None, 1) == [None, 2]
