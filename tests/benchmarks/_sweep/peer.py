"""vLLM's own tiering on a CPU: its manager, host memory and tiers as they are, and the copies of our worker.

Stock ``TieringOffloadingSpec`` refuses the platform, but only where it makes its worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from mmap import PAGESIZE
from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstore_vllm.acks import AckWords
from kvstore_vllm.copies import CpuCopier, RowLayout
from kvstore_vllm.specs import SlotSpec
from kvstore_vllm.worker import KVStoreWorker

__all__ = ["TieringOnCPU"]


class TieringOnCPU(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiering; named as ``spec_name`` in the configuration."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """A worker that copies as the store's does."""
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            layout = RowLayout.of(
                kv_caches,
                rank=0,
                world_size=1,
                blocks_per_chunk=self.blocks_per_chunk,
                chunk_size=self.kv_bytes_per_chunk,
            )
            self._worker = _Worker(region, layout)
        return self._worker


class _Rows:
    """vLLM's host memory, in the shape of an arena."""

    def __init__(self, region: SharedOffloadRegion) -> None:
        self.slots = region.num_chunks
        self.slot_size = region.total_size_bytes // region.num_chunks
        self.base = region.base_tensor.data_ptr()
        self._memory = region.create_kv_memoryview()

    def view(self, slot: int) -> memoryview:
        """Memory of one row."""
        return self._memory.cast("B")[slot * self.slot_size : (slot + 1) * self.slot_size]


class _Worker(KVStoreWorker):
    """The store's worker; vLLM's manager knows no tickets, so they are made here."""

    def __init__(self, region: SharedOffloadRegion, layout: RowLayout) -> None:
        rows: Any = _Rows(region)
        acks = AckWords(memoryview(bytearray(PAGESIZE)), 1)
        super().__init__(rows, layout, CpuCopier(layout, rows), acks, 0)
        self._region = region
        self._tickets: dict[str, Iterator[int]] = {"store": count(1), "load": count(1)}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: CPULoadStoreSpec) -> bool:
        slots = SlotSpec(dst_spec.chunk_ids, next(self._tickets["store"]))
        return super().submit_store(job_id, src_spec, slots)

    def submit_load(
        self, job_id: int, src_spec: CPULoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        slots = SlotSpec(src_spec.chunk_ids, next(self._tickets["load"]))
        return super().submit_load(job_id, slots, dst_spec, expedited)

    def shutdown(self) -> None:
        super().shutdown()
        self._region.cleanup()
