"""vLLM's own scheduler side of offloading, without an engine: any groups, one rank, chunks of one block."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import OffloadingManager, OffloadingSpec
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

__all__ = ["TOKENS", "make_scheduler"]

#: Tokens of a block, which is a chunk.
TOKENS = 16


class _Spec(OffloadingSpec):  # type: ignore[misc]
    """Hands out a manager that is there already."""

    def __init__(self, config: OffloadingConfig, manager: OffloadingManager) -> None:
        super().__init__(config)
        self._manager = manager

    def get_manager(self) -> OffloadingManager:
        return self._manager

    def get_worker(self, kv_caches: Any) -> Any:
        raise NotImplementedError


def make_scheduler(manager: OffloadingManager, windows: Sequence[int | None]) -> OffloadingConnectorScheduler:
    """vLLM's scheduler side of offloading over `manager`.

    Parameters
    ----------
    manager : OffloadingManager
    windows : sequence of int or None
        For each group the tokens of its sliding window; None for full attention.
    """
    config = OffloadingConfig(
        groups=tuple(OffloadingGroupConfig(TOKENS, (f"layer {i}",), i) for i in range(len(windows))),
        worker_kv_bytes_per_block=64,
        enable_kv_cache_events=True,
        extra_config={},
        engine_id="small world",
        model=OffloadingModelConfig("tiny", "float32"),
        cache=OffloadingCacheConfig(tokens_per_hash=TOKENS, blocks_per_chunk=1),
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
    )
    shape = {"block_size": TOKENS, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    specs = [
        FullAttentionSpec(**shape) if window is None else SlidingWindowSpec(**shape, sliding_window=window)
        for window in windows
    ]
    vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(prefix_cache_retention_interval=None, enable_prefix_caching=True),
        speculative_config=None,
        parallel_config=SimpleNamespace(world_size=1, decode_context_parallel_size=1),
    )
    groups = [KVCacheGroupSpec([f"layer {index}"], spec) for index, spec in enumerate(specs)]
    return OffloadingConnectorScheduler(
        _Spec(config, manager),
        vllm_config,
        SimpleNamespace(kv_cache_groups=groups),
    )
