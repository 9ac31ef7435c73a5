"""Where the bytes of a rank's KV blocks lie in a row of the arena. Arithmetic only: nothing is copied here.

A row is one chunk, and holds `blocks_per_chunk` blocks (its sub-blocks) of one group. Three layouts::

    direct      | rank 0 | rank 1 | ...      a rank's part: its tensors one after the other,
                                             tensor t taking page_size_t * blocks_per_chunk
    replicated  | one rank's part |          all ranks hold the same bytes; rank 0 stores, all load
    canonical   | canonical tensors |        one copy without parallelism; each rank knows by copy runs
                                             which bytes of a canonical page are its own

Rank 0 is the writer of the replicated layout because vLLM submits stores to no other rank there. In the
canonical layout ranks that hold equal bytes take turns: of N of them, number ``page % N`` stores a page,
where ``page = slot * blocks_per_chunk + sub-block`` is the same on every rank.

What a store does not cover is zeroed, so that a slot never carries bytes of the chunk it held before: the
gaps of a row (padding, tensors of other groups), and the sub-blocks for which there is no block. The rank
whose part it is does that; in the canonical layout, rank 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import ConfigError

__all__ = ["DeviceTensor", "Extent", "GroupLayout", "Piece", "Placed", "Placement", "RowLayout"]

_Ints = NDArray[np.int64]


class DeviceTensor(NamedTuple):
    """A tensor of blocks in device memory.

    Attributes
    ----------
    address : int
        Of block 0.
    stride : int
        Bytes from block to block.
    blocks : int
    page : int
        Bytes of a block.
    owner : torch.Tensor
        Keeps the memory alive.
    """

    address: int
    stride: int
    blocks: int
    page: int
    owner: Any


class Piece(NamedTuple):
    """Bytes of a block that lie at regular places of its row.

    Fragment ``i`` of sub-block ``j`` is at ``local + i * local_step`` of the block, and at
    ``row + j * stride + i * row_step`` of the row.

    Attributes
    ----------
    tensor : int
        Index of the tensor.
    local, row : int
        Byte offsets of fragment 0 of sub-block 0.
    stride : int
        Bytes of the row from sub-block to sub-block.
    size, fragments : int
        Bytes of a fragment, and number of fragments.
    local_step, row_step : int
        Bytes from fragment to fragment.
    writers, turn : int
        Number of ranks that take turns at storing it, and this rank's place among them.
    """

    tensor: int
    local: int
    row: int
    stride: int
    size: int
    fragments: int = 1
    local_step: int = 0
    row_step: int = 0
    writers: int = 1
    turn: int = 0


class Extent(NamedTuple):
    """Bytes of a row that repeat from sub-block to sub-block, every `stride` bytes."""

    row: int
    size: int
    stride: int = 0


class GroupLayout(NamedTuple):
    """One KV cache group.

    Attributes
    ----------
    pieces : tuple of Piece
        What a block of this group consists of.
    pages : tuple of Extent
        What this rank zeroes of a sub-block for which a store has no block.
    gaps : tuple of Extent
        What this rank zeroes of each row it stores to.
    blocks : int
        Number of blocks in the smallest tensor.
    """

    pieces: tuple[Piece, ...]
    pages: tuple[Extent, ...]
    gaps: tuple[Extent, ...]
    blocks: int


class Placed(NamedTuple):
    """The blocks of one group in one job, and their places.

    Attributes
    ----------
    group : int
    blocks, slots, subs, pages : ndarray of int64, shape (blocks,)
        Block id, slot, sub-block and canonical page number of each block.
    chunks : ndarray of int64, shape (chunks,)
        The slots, once each.
    bare_slots, bare_subs : ndarray of int64, shape (sub-blocks,)
        Sub-blocks of these slots that have no block.
    """

    group: int
    blocks: _Ints
    slots: _Ints
    subs: _Ints
    pages: _Ints
    chunks: _Ints
    bare_slots: _Ints
    bare_subs: _Ints

    def turn(self, writers: int, turn: int) -> Placed:
        """Only the blocks that are for number `turn` of `writers` ranks to store."""
        if writers == 1:
            return self
        mine = self.pages % writers == turn
        blocks, slots, subs, pages = (a[mine] for a in (self.blocks, self.slots, self.subs, self.pages))
        return self._replace(blocks=blocks, slots=slots, subs=subs, pages=pages)


class Placement(NamedTuple):
    """A job with every block in its place.

    Attributes
    ----------
    groups : tuple of Placed
        Groups that have blocks.
    whole : bool
        Whether every group ends with a chunk's last block. A job of the scheduler that does not has left out
        a block in the middle, and says not which: its blocks are then in the wrong places.
    """

    groups: tuple[Placed, ...]
    whole: bool


@dataclass(frozen=True)
class RowLayout:
    """Places of all groups of a rank; made by `of`.

    Attributes
    ----------
    tensors : tuple of DeviceTensor
    groups : tuple of GroupLayout
    blocks_per_chunk : int
    chunk_size : int
        Bytes of a row.
    stores : bool
        Whether this rank stores at all.
    """

    tensors: tuple[DeviceTensor, ...]
    groups: tuple[GroupLayout, ...]
    blocks_per_chunk: int
    chunk_size: int
    stores: bool

    @classmethod
    def of(
        cls,
        kv_caches: Any,
        *,
        rank: int,
        world_size: int,
        blocks_per_chunk: int,
        chunk_size: int,
        canonical: bool = False,
        replicated: bool = False,
    ) -> RowLayout:
        """The layout of `kv_caches`, a `vllm.v1.kv_offload.base.CanonicalKVCaches`.

        Parameters
        ----------
        kv_caches : CanonicalKVCaches
            This rank's tensors and groups.
        rank, world_size : int
        blocks_per_chunk : int
        chunk_size : int
            Bytes of a row: of the store's chunks.
        canonical, replicated : bool
            Which layout; neither is the direct one, and both are the canonical one.

        Raises
        ------
        ConfigError
            A row is too small, a tensor is no table of blocks, or a reference lacks what the canonical layout
            needs.
        """
        shared = canonical or replicated
        part = chunk_size if shared else chunk_size // world_size
        region = Extent(0 if shared else rank * part, part)
        tensors = tuple(_device_tensor(tensor) for tensor in kv_caches.tensors)
        sizes = _canonical_sizes(kv_caches) if canonical else [tensor.page for tensor in tensors]
        starts = [region.row, *(region.row + np.cumsum(sizes) * blocks_per_chunk).tolist()]
        needed = starts[-1] - region.row
        if needed > part:
            raise ConfigError(f"a rank's blocks need {needed} bytes of a chunk, and have {part}")
        clears = not shared or rank == 0
        groups = []
        for refs in kv_caches.group_data_refs:
            pieces: dict[Piece, None] = {}
            pages: dict[int, Extent] = {}
            for ref in refs:
                tensor = ref.tensor_idx
                found, page = _place_page(ref, starts[tensor], sizes[tensor], tensors[tensor].page, canonical)
                pieces.update(dict.fromkeys(found))
                pages[tensor] = max(page, pages.get(tensor, page))
            blocks = min((tensors[index].blocks for index in pages), default=0)
            gaps = _gaps(region, pages.values(), blocks_per_chunk)
            group = GroupLayout(tuple(pieces), tuple(pages.values()), gaps, blocks)
            groups.append(group if clears else group._replace(pages=(), gaps=()))
        stores = canonical or not replicated or rank == 0
        return cls(tensors, tuple(groups), blocks_per_chunk, chunk_size, stores)

    def place(self, spec: Any, slots: _Ints, slot_limit: int) -> Placement:
        """Put the blocks of a job into their places.

        Parameters
        ----------
        spec : vllm.v1.kv_offload.base.GPULoadStoreSpec
            Block ids, group by group. A group's blocks follow each other in the request, and the first of
            them is sub-block ``block_indices[group] % blocks_per_chunk`` of the group's first chunk.
        slots : ndarray of int64, shape (chunks,)
            One per chunk, group by group.
        slot_limit : int
            Number of slots in the arena.

        Raises
        ------
        ValueError
            The groups are not those of this layout, the number of chunks is another one, or a block or slot
            does not exist.
        """
        sizes, firsts = spec.group_sizes, spec.block_indices
        if len(sizes) != len(self.groups) or len(firsts) != len(self.groups):
            raise ValueError(f"the job has {len(sizes)} groups, the rank {len(self.groups)}")
        blocks = np.asarray(spec.block_ids, np.int64)
        _check_range("slot", slots, slot_limit)
        placed = []
        whole = True
        for group, (size, first) in enumerate(zip(sizes, firsts, strict=True)):
            if size == 0:
                continue
            skip = first % self.blocks_per_chunk
            count = -(-(skip + size) // self.blocks_per_chunk)
            _check_range("block", blocks[:size], self.groups[group].blocks)
            if count > len(slots):
                raise ValueError(
                    f"the job has {len(slots)} chunks left for group {group}, which needs {count}"
                )
            placed.append(self._place_group(group, blocks[:size], slots[:count], skip))
            whole = whole and (skip + size) % self.blocks_per_chunk == 0
            blocks, slots = blocks[size:], slots[count:]
        if len(slots) or len(blocks):
            raise ValueError(f"the job has {len(slots)} chunks and {len(blocks)} blocks of no group")
        return Placement(tuple(placed), whole)

    def _place_group(self, group: int, blocks: _Ints, chunks: _Ints, skip: int) -> Placed:
        n = self.blocks_per_chunk
        pages = (chunks[:, None] * n + np.arange(n)).ravel()
        slots, subs = np.divmod(pages, n)
        taken = slice(skip, skip + len(blocks))
        return Placed(
            group,
            blocks,
            slots[taken],
            subs[taken],
            pages[taken],
            chunks,
            np.delete(slots, taken),
            np.delete(subs, taken),
        )


def _device_tensor(described: Any) -> DeviceTensor:
    tensor, page = described.tensor, described.page_size_bytes
    width = tensor.element_size()
    if tensor.is_contiguous():  # of whatever shape: blocks follow each other
        blocks, rest = divmod(tensor.numel() * width, page)
        fits, stride = rest == 0, page
    else:
        blocks, stride = tensor.shape[0], tensor.stride(0) * width
        fits = tensor[0].is_contiguous() and tensor[0].numel() * width >= page
    if not fits:
        raise ConfigError(f"a KV tensor of shape {tuple(tensor.shape)} is no table of blocks of {page} bytes")
    return DeviceTensor(tensor.data_ptr(), stride, blocks, page, tensor)


def _canonical_sizes(kv_caches: Any) -> list[int]:
    """Bytes of a block of each tensor in the canonical layout: equal on all ranks."""
    sizes = [0] * len(kv_caches.tensors)
    for refs in kv_caches.group_data_refs:
        for ref in refs:
            if ref.mapping is None:
                raise ConfigError("canonical_layout: this model has KV layers without a canonical form")
            sizes[ref.tensor_idx] = max(sizes[ref.tensor_idx], ref.mapping.canonical_page_size_bytes)
    return sizes


def _place_page(ref: Any, start: int, stride: int, block: int, canonical: bool) -> tuple[list[Piece], Extent]:
    """A layer's pieces, and all of its page in the row, whichever rank's.

    Parameters
    ----------
    ref : CanonicalKVCacheRef
    start, stride : int
        Where the tensor begins in a row, and how much of it each sub-block has.
    block : int
        Bytes of a block in the tensor.
    canonical : bool
    """
    if not canonical:
        pieces = [Piece(ref.tensor_idx, 0, start, stride, ref.page_size_bytes)]
        page = Extent(start, ref.page_size_bytes, stride)
    else:
        mapping = ref.mapping
        pieces = [
            Piece(
                ref.tensor_idx,
                run.local_offset,
                start + run.canonical_offset,
                stride,
                run.fragment_size,
                run.num_fragments,
                run.local_stride,
                run.canonical_stride,
                mapping.num_writers,
                mapping.writer_index,
            )
            for run in mapping.runs
        ]
        page = Extent(start, mapping.canonical_page_size_bytes, stride)
    for piece in pieces:
        last = piece.fragments - 1
        of_block = piece.local + last * piece.local_step + piece.size
        of_page = piece.row - start + last * piece.row_step + piece.size
        if of_block > block or of_page > stride:  # it would be written over its neighbours
            raise ConfigError(f"a KV layer's page reaches beyond the blocks of {block} bytes it is part of")
    return pieces, page


def _gaps(region: Extent, pages: Iterable[Extent], blocks_per_chunk: int) -> tuple[Extent, ...]:
    """What the pages of all sub-blocks leave of a region, from front to back."""
    taken = [(page.row + sub * page.stride, page.size) for page in pages for sub in range(blocks_per_chunk)]
    gaps = []
    at = region.row
    for start, size in [*sorted(taken), (region.row + region.size, 0)]:
        if start > at:
            gaps.append(Extent(at, start - at))
        at = max(at, start + size)
    return tuple(gaps)


def _check_range(what: str, numbers: _Ints, limit: int) -> None:
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < limit:
        raise ValueError(f"the job names {what} {numbers.min()} to {numbers.max()}, and there are {limit}")
