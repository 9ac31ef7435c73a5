"""A program that stores and loads through spec, worker and manager as an engine would, without an engine.

Runs on whichever vLLM is on its path; the last line that it prints is ``right`` when every byte is.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kvstore_vllm import KVStoreOffloadingSpec

PAGE, BLOCKS, STORED = 256, 64, 12


def _config(folder: str) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("0", "1"), group_id=0),),
        worker_kv_bytes_per_block=2 * PAGE,
        enable_kv_cache_events=True,
        extra_config={
            "tiers": [
                "ram://?capacity=1MiB",
                {"url": folder, "enable_kv_events": True, "locality": "REMOTE"},
            ],
            "engine": "threads",
        },
        engine_id=f"round trip {folder}",
        model=OffloadingModelConfig(name="tiny", dtype="float32"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
        kv_cache_layout="LBHNC",
    )


@dataclass
class _Run:
    """One process that is scheduler and worker."""

    manager: Any
    worker: Any
    caches: list[torch.Tensor]
    job: int = 0

    def store(self, keys: list[bytes], blocks: list[int], context: ReqContext) -> None:
        made = self.manager.prepare_store(keys, context)
        assert made is not None
        assert made.keys_to_store == keys
        self.job += 1
        assert self.worker.submit_store(self.job, _blocks(blocks), made.store_spec)
        self._await()
        self.manager.complete_store(set(keys), context)

    def load(self, keys: list[bytes], blocks: list[int], context: ReqContext) -> None:
        assert [self.manager.lookup(key, context) for key in keys] == [LookupResult.HIT] * len(keys)
        spec = self.manager.prepare_load(keys, context)
        self.job += 1
        assert self.worker.submit_load(self.job, spec, _blocks(blocks))
        self._await()
        self.manager.complete_load(set(keys), context)

    def _await(self) -> None:
        self.worker.wait({self.job})
        [result] = self.worker.get_finished()
        assert result.success
        assert result.job_id == self.job


def _blocks(blocks: list[int]) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])


def _request(name: str, manager: Any, keys: list[bytes]) -> ReqContext:
    context = ReqContext(req_id=name)
    manager.on_new_request(context)
    for number, key in enumerate(keys):
        context.set_offload_key_position(key, 16 * (number + 1))
    return context


def _await_events(manager: Any) -> None:
    """Take events until all chunks are said to be in both media, the second where its configuration says."""
    deadline = time.monotonic() + 20
    found: list[Any] = []
    while {event.medium for event in found} != set(Medium) or sum(
        len(event.keys) for event in found
    ) < 2 * STORED:
        assert time.monotonic() < deadline, found
        manager.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))
        found += manager.take_events()
    stored = [event for event in found if event.medium is Medium.STORAGE]
    assert all(event.locality is Locality.REMOTE and event.ownership == "file" for event in stored)


def main(folder: str) -> None:
    """Store, overwrite the blocks, load into others, compare; forget everything, miss."""
    tensors = [torch.randint(-128, 127, (BLOCKS, PAGE), dtype=torch.int8) for _ in range(2)]
    wanted = [tensor[:STORED].clone() for tensor in tensors]
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, PAGE) for tensor in tensors],
        [[CanonicalKVCacheRef(index, PAGE) for index in range(2)]],
    )
    spec = KVStoreOffloadingSpec(_config(folder))
    run = _Run(worker=spec.get_worker(caches), manager=spec.get_manager(), caches=tensors)
    keys = [make_offload_key(bytes([number]) * 32, 0) for number in range(STORED)]

    context = _request("first", run.manager, keys)
    run.store(keys, list(range(STORED)), context)
    run.manager.on_request_finished(context)
    for tensor in tensors:
        tensor.zero_()
    context = _request("second", run.manager, keys)
    run.load(keys, list(range(40, 40 + STORED)), context)
    run.manager.on_request_finished(context)
    for tensor, content in zip(tensors, wanted, strict=True):
        assert torch.equal(tensor[40 : 40 + STORED], content)
        assert not tensor[:40].any()
    _await_events(run.manager)
    assert run.manager.get_stats() is not None

    run.manager.reset_cache()
    getattr(run.manager, "on_reset_flushed", lambda: None)()
    context = _request("third", run.manager, keys)
    assert run.manager.lookup(keys[0], context) in (LookupResult.MISS, LookupResult.RETRY)
    run.worker.shutdown()
    run.manager.shutdown()
    print("right")


if __name__ == "__main__":
    main(sys.argv[1])
