"""The CPU copier against one memcpy of as many bytes to (or from) the arena, for blocks of an 8B-class model.

16 tokens, 32 layers, 8 KV heads of 128 elements, K and V, bfloat16: 64 KiB per layer and block, 2 MiB per
chunk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from _paired import Side, compare
from pytest_benchmark.fixture import BenchmarkFixture

from kvstore.arena import Arena
from kvstore_vllm.acks import Direction
from kvstore_vllm.copies import CpuCopier, RowLayout

torch = pytest.importorskip("torch", reason="torch is not installed")

LAYERS = 32
PAGE = 16 * 2 * 8 * 128 * 2
CHUNK = LAYERS * PAGE
CHUNKS = 48
BLOCKS = 64
AT_LEAST = 0.8


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    with Arena.create(CHUNKS * CHUNK, CHUNK, pin="off") as created:
        yield created


def caches(*, one_storage: bool) -> SimpleNamespace:
    """Tensors as the engine allocates them, all layers in one piece; or each on its own."""
    if one_storage:
        tensors = list(torch.ones(LAYERS, BLOCKS, PAGE, dtype=torch.int8).unbind(0))
    else:
        tensors = [torch.ones(BLOCKS, PAGE, dtype=torch.int8) for _ in range(LAYERS)]
    refs = [SimpleNamespace(tensor_idx=layer, page_size_bytes=PAGE, mapping=None) for layer in range(LAYERS)]
    described = [SimpleNamespace(tensor=tensor, page_size_bytes=PAGE) for tensor in tensors]
    return SimpleNamespace(tensors=described, group_data_refs=[refs])


@pytest.mark.parametrize("order", ["consecutive", "scattered"])
@pytest.mark.parametrize("one_storage", [True, False], ids=["one storage", "separate"])
@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("clock", [time.process_time, time.perf_counter], ids=["cpu", "wall"])
def test_speed_against_memcpy(
    benchmark: BenchmarkFixture,
    arena: Arena,
    clock: Callable[[], float],
    direction: Direction,
    one_storage: bool,
    order: str,
) -> None:
    layout = RowLayout.of(
        caches(one_storage=one_storage), rank=0, world_size=1, blocks_per_chunk=1, chunk_size=CHUNK
    )
    copier = CpuCopier(layout, arena)
    ids = {"consecutive": np.arange, "scattered": np.random.default_rng(0).permutation}[order]
    blocks, slots = ids(BLOCKS)[:CHUNKS], ids(CHUNKS)
    spec = SimpleNamespace(block_ids=blocks, group_sizes=[CHUNKS], block_indices=[0])
    rows = np.asarray(memoryview(arena.view(0).obj)[: CHUNKS * CHUNK])
    source, target = np.ones_like(rows), rows
    if direction == "load":
        source, target = target, source

    def copy() -> None:
        placement = layout.place(spec, slots, arena.slots)
        transfer = copier.start(direction, placement.groups)
        transfer.wait()
        assert transfer.seconds() > 0

    ratios = compare(
        benchmark,
        Side("copier", copy),
        Side("memcpy", lambda: np.copyto(target, source)),
        rounds=49,
        clock=clock,
    )
    copier.close()
    assert ratios["memcpy"] >= AT_LEAST
