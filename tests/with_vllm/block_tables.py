"""KV caches as vLLM describes them, made up; and a naive model of what a store leaves in a row.

The model is written from vLLM's definitions of its classes, byte by byte, and shares no code with the copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CanonicalPageMapping,
    CopyRun,
    GPULoadStoreSpec,
)

Bytes = NDArray[np.uint8]


@dataclass
class Table:
    """One tensor of blocks: `apart` bytes lie between two of them, and belong to somebody else."""

    page: int
    apart: int = 0


@dataclass
class Model:
    """A model's caches on one rank.

    Attributes
    ----------
    tables : list of Table
    groups : list of list of (int, int)
        Per group: index of the tensor and bytes of the page, without padding.
    blocks : int
    mappings : list of CanonicalPageMapping, optional
        Of each tensor.
    """

    tables: list[Table]
    groups: list[list[tuple[int, int]]]
    blocks: int
    mappings: list[CanonicalPageMapping] | None = None
    device: str = "cpu"
    storages: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.storages = [
            torch.zeros(self.blocks * (table.page + table.apart), dtype=torch.int8, device=self.device)
            for table in self.tables
        ]

    def fill(self, seed: int) -> None:
        """Give all bytes values, those between the blocks included."""
        rng = np.random.default_rng(seed)
        for storage in self.storages:
            values = rng.integers(1, 128, storage.numel()).astype(np.int8)
            storage.copy_(torch.from_numpy(values))

    def caches(self) -> CanonicalKVCaches:
        tensors = []
        for table, storage in zip(self.tables, self.storages, strict=True):
            view = storage.as_strided((self.blocks, table.page), (table.page + table.apart, 1))
            tensors.append(CanonicalKVCacheTensor(view, table.page))
        refs = [
            [
                CanonicalKVCacheRef(tensor, size, self.mappings[tensor] if self.mappings else None)
                for tensor, size in group
            ]
            for group in self.groups
        ]
        return CanonicalKVCaches(tensors, refs)

    def bytes(self) -> list[Bytes]:
        """Copies of the tensors' memory, shape (blocks, page + apart)."""
        return [
            storage.cpu().numpy().view(np.uint8).reshape(self.blocks, -1).copy() for storage in self.storages
        ]


@dataclass
class Job:
    """Blocks of each group, from the sub-block where the first of them belongs; and the slots."""

    blocks: list[list[int]]
    firsts: list[int]
    slots: list[int]

    def spec(self) -> GPULoadStoreSpec:
        return GPULoadStoreSpec(
            [block for group in self.blocks for block in group],
            group_sizes=[len(group) for group in self.blocks],
            block_indices=self.firsts,
        )

    def places(self, blocks_per_chunk: int) -> list[tuple[int, int, int, int]]:
        """(group, block, slot, sub-block) of every block."""
        found = []
        slots = iter(self.slots)
        for group, (blocks, first) in enumerate(zip(self.blocks, self.firsts, strict=True)):
            slot = -1
            for number, block in enumerate(blocks):
                sub = (first + number) % blocks_per_chunk
                if number == 0 or sub == 0:
                    slot = next(slots)
                found.append((group, block, slot, sub))
        return found


def store_direct(rows: Bytes, model: Model, job: Job, blocks_per_chunk: int, part: tuple[int, int]) -> None:
    """What a store makes of `rows`, shape (slots, bytes), in this rank's part (start, size) of them."""
    start, size = part
    rows[job.slots, start : start + size] = 0
    device = model.bytes()
    for group, block, slot, sub in job.places(blocks_per_chunk):
        for tensor, used in model.groups[group]:
            before = sum(table.page for table in model.tables[:tensor]) * blocks_per_chunk
            at = start + before + sub * model.tables[tensor].page
            rows[slot, at : at + used] = device[tensor][block, :used]


def store_canonical(
    rows: Bytes, ranks: Sequence[Model], jobs: Sequence[Job], blocks_per_chunk: int, chunk_size: int
) -> None:
    """What the stores of all ranks make of `rows`."""
    rows[jobs[0].slots, :chunk_size] = 0
    for model, job in zip(ranks, jobs, strict=True):
        assert model.mappings is not None
        device = model.bytes()
        for group, block, slot, sub in job.places(blocks_per_chunk):
            for tensor, _ in model.groups[group]:
                mapping = model.mappings[tensor]
                if not mapping.is_writer(slot * blocks_per_chunk + sub):
                    continue
                before = sum(m.canonical_page_size_bytes for m in model.mappings[:tensor]) * blocks_per_chunk
                at = before + sub * mapping.canonical_page_size_bytes
                for local, canonical in mapped_bytes(mapping):
                    rows[slot, at + canonical] = device[tensor][block, local]


def mapped_bytes(mapping: CanonicalPageMapping) -> list[tuple[int, int]]:
    """(local, canonical) offset of every byte of a page."""
    return [
        (
            run.local_offset + i * run.local_stride + byte,
            run.canonical_offset + i * run.canonical_stride + byte,
        )
        for run in mapping.runs
        for i in range(run.num_fragments)
        for byte in range(run.fragment_size)
    ]


def heads(
    rank: int, *, shards: int, replicas: int, tokens: int, width: int, per_head: bool = False
) -> CanonicalPageMapping:
    """Heads sharded over `shards`, each held by `replicas` ranks: token by token, or head by head."""
    shard, index = divmod(rank, replicas)
    page = tokens * width
    if per_head:
        runs = (CopyRun(0, shard * page, page, 1, page, page),)
    else:
        runs = (CopyRun(0, shard * width, width, tokens, width, shards * width),)
    return CanonicalPageMapping(shards * page, page, runs, replicas, index, True)
