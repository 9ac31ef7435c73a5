"""Parts of the tier below vLLM's own tiering that need no vLLM: its memory, its options, its jobs."""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore_vllm.tiering.jobs import Jobs
from kvstore_vllm.tiering.options import TierOptions, visible_fields
from kvstore_vllm.tiering.region import Region

ROWS, ROW = 4, 2 * mmap.PAGESIZE


def as_rows(memory: mmap.mmap, offset: int = 0) -> memoryview:
    """Rows as vLLM shows them: a view of an array of two dimensions."""
    return memoryview(np.frombuffer(memory, np.int8, ROWS * ROW, offset).reshape(ROWS, ROW))


@pytest.fixture
def shared() -> Iterator[tuple[mmap.mmap, int]]:
    """A shared file, mapped; and its descriptor."""
    fd = os.memfd_create("rows")
    os.ftruncate(fd, 3 * mmap.PAGESIZE + ROWS * ROW)
    yield mmap.mmap(fd, 3 * mmap.PAGESIZE + ROWS * ROW), fd
    os.close(fd)


# The region.


def test_row_is_a_slot(shared: tuple[mmap.mmap, int]) -> None:
    region = Region.of(as_rows(shared[0]))
    assert (region.slots, region.slot_size) == (ROWS, ROW)
    region.view(2)[:3] = b"abc"
    assert shared[0][2 * ROW : 2 * ROW + 3] == b"abc"
    with pytest.raises(IndexError):
        region.view(ROWS)


def test_another_mapping_of_the_descriptor_is_the_same_memory(shared: tuple[mmap.mmap, int]) -> None:
    region = Region.of(as_rows(shared[0], 3 * mmap.PAGESIZE))
    assert os.fstat(region.fd).st_ino == os.fstat(shared[1]).st_ino
    other = pickle.loads(pickle.dumps(region.attacher))(os.dup(region.fd))
    other.view(3)[:3] = b"abc"
    assert bytes(region.view(3)[:3]) == b"abc"
    assert shared[0][3 * mmap.PAGESIZE + 3 * ROW :][:3] == b"abc"


def test_closing_leaves_the_memory_to_its_owner(shared: tuple[mmap.mmap, int]) -> None:
    region = Region.of(as_rows(shared[0]))
    fd = region.fd
    region.close()
    assert region.fd == -1
    with pytest.raises(OSError):
        os.fstat(fd)
    os.fstat(shared[1])


def test_memory_that_others_cannot_map_has_no_descriptor() -> None:
    assert Region.of(as_rows(mmap.mmap(-1, ROWS * ROW, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))).fd == -1


@pytest.mark.parametrize(
    "rows",
    [
        memoryview(bytearray(ROWS * ROW)),
        memoryview(np.zeros((ROWS, ROW), np.int8))[::2],
        memoryview(np.zeros((ROWS, 100), np.int8)),
        memoryview(bytes(ROWS * ROW)).cast("B", (ROWS, ROW)),
    ],
    ids=["one dimension", "gaps", "half pages", "read-only"],
)
def test_memory_of_another_shape_is_refused(rows: memoryview) -> None:
    with pytest.raises(ConfigError, match="rows of whole pages"):
        Region.of(rows)


# Options.


def test_entry_with_defaults() -> None:
    options = TierOptions.parse({"url": "s3://bucket/kv?timeout=2s"})
    assert (options.engine, options.on_reset, options.namespace) == ("processes", "rekey", None)
    assert (options.tier.config.timeout, options.tier.config.required) == (2.0, False)


def test_configuration_of_the_engine_has_the_rows_as_its_host() -> None:
    options = TierOptions.parse({"url": "s3://bucket/kv", "namespace": {"weights": "w"}, "nice": 5})
    config = options.store_config({"model": "m"}, 10, 8192)
    assert (config.host.capacity, config.chunk_size, config.nice) == (81920, 8192, 5)
    assert config.namespace == {"model": "m", "given": {"weights": "w"}}


def test_namespace_that_nobody_gives_is_of_one_run() -> None:
    options = TierOptions.parse({"url": "s3://bucket/kv"})
    one, other = (options.store_config({}, 1, 4096).namespace for _ in range(2))
    assert one != other


@pytest.mark.parametrize("namespace", ["text", {}, [1], {"x": object()}])
def test_namespace_must_be_a_mapping_with_something_in_it(namespace: object) -> None:
    with pytest.raises(ConfigError, match="namespace"):
        TierOptions.parse({"url": "s3://bucket/kv", "namespace": namespace})


def offloading(**changes: Any) -> SimpleNamespace:
    """What vLLM tells a tier, as far as it is read."""
    sizes = dict.fromkeys(("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size"), 1)
    parallel = {name: changes.pop(name, size) for name, size in sizes.items()}
    fields = {
        "model": SimpleNamespace(name="some/model", dtype="bfloat16"),
        "groups": (SimpleNamespace(tokens_per_block=16, layer_names=("layers.0",)),),
        "cache": SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        "canonical_layout": False,
        "kv_cache_layout": "NHD",
        "parallel": SimpleNamespace(is_parallelism_agnostic=True, **parallel),
    }
    return SimpleNamespace(**{**fields, **changes})


@pytest.mark.parametrize(
    "change",
    [
        {"model": SimpleNamespace(name="other/model", dtype="bfloat16")},
        {"model": SimpleNamespace(name="some/model", dtype="float16")},
        {"groups": (SimpleNamespace(tokens_per_block=32, layer_names=("layers.0",)),)},
        {"groups": (SimpleNamespace(tokens_per_block=16, layer_names=("layers.1",)),)},
        {"cache": SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=1)},
        {"cache": SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=2)},
        {"canonical_layout": True},
        {"kv_cache_layout": "HND"},
        {"world_size": 2},
        {"tp_size": 2},
        {"pp_size": 2},
        {"pcp_size": 2},
        {"dcp_size": 2},
    ],
    ids=str,
)
def test_every_field_tells_rows_apart(change: dict[str, Any]) -> None:
    usual = visible_fields(offloading(), replicated=False)
    assert visible_fields(offloading(**change), replicated=False) != usual


def test_one_copy_for_all_ranks_is_not_a_part_of_each() -> None:
    assert visible_fields(offloading(), replicated=True) != visible_fields(offloading(), replicated=False)


def test_files_of_a_model_tell_its_rows_apart(tmp_path: Path) -> None:
    weights = tmp_path / "weights.bin"
    found = []
    for content in (b"one", b"two"):
        weights.write_bytes(content * 1000)
        model = SimpleNamespace(name=str(tmp_path), dtype="bfloat16")
        found.append(visible_fields(offloading(model=model), replicated=False))
    assert found[0] != found[1]


# Jobs.


def test_job_ends_with_its_last_chunk() -> None:
    now = 1.0
    jobs = Jobs(lambda: now)
    job = jobs.start(7, [b"a", b"b", b"c"])
    jobs.settle(job, 2, True, 100)
    jobs.settle(job, 0, False)
    assert (jobs.take(), jobs.active) == ([], 1)
    now = 3.5
    jobs.settle(job, 1, True, 100)
    assert (jobs.take(), jobs.active, jobs.take()) == ([job], 0, [])
    assert (job.complete, job.good_keys, job.moved, job.seconds) == (False, [b"c", b"b"], 200, 2.5)


def test_job_without_chunks_ends_at_once() -> None:
    jobs = Jobs(lambda: 0.0)
    job = jobs.start(1, [])
    assert jobs.take() == [job]
    assert job.complete
