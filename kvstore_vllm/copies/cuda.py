"""Copies between CUDA memory and slots: all pieces of a job in one call, on a stream per direction.

vLLM's operator hands a whole job to the copy engines at once; where this build of vLLM has none, torch
enqueues the pieces one by one. Both are asynchronous where the arena is page-locked in this process, and
right, but slow, where it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.arena import Arena

from ..acks import Direction
from .base import Copier, Transfer
from .layout import GroupLayout, Placed, RowLayout
from .strided import Blanks

__all__ = ["CudaCopier"]

_Ints = NDArray[np.int64]


class CudaCopier(Copier):
    """The copier for tensors of one CUDA device, which is the calling thread's current one.

    Parameters
    ----------
    layout : RowLayout
    arena : Arena
        Stays open until `close`.
    """

    def __init__(self, layout: RowLayout, arena: Arena) -> None:
        self._arena = arena
        self._fragments = [_Fragments(group, layout) for group in layout.groups]
        self._blanks = [Blanks(group, layout, arena) for group in layout.groups]
        self._streams: dict[Direction, Any] = {"store": torch.cuda.Stream(), "load": torch.cuda.Stream()}
        self._swap = _batch_operator() or _PieceByPiece(layout, arena)

    def start(self, direction: Direction, groups: Sequence[Placed]) -> Transfer:
        """See `Copier.start`."""
        storing = direction == "store"
        parts = []
        for placed in groups:
            if storing:
                self._blanks[placed.group].clear(placed)
            parts.append(self._fragments[placed.group].addresses(placed, self._arena, storing))
        device, host, sizes = np.concatenate(parts, axis=1) if parts else np.empty((3, 0), np.int64)
        source, target = (device, host) if storing else (host, device)
        stream = self._streams[direction]
        # A store reads what the model is still computing. A load must not be overtaken by the zeroing of
        # its blocks, which the engine has enqueued already.
        stream.wait_stream(torch.cuda.current_stream())
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        batch = [torch.from_numpy(np.ascontiguousarray(part)) for part in (source, target, sizes)]
        with torch.cuda.stream(stream):
            began.record(stream)
            if len(sizes):
                # Nothing on the device writes to a slot while it is read, so a load's reads need no order.
                self._swap(*batch, is_src_access_order_any=not storing)
            ended.record(stream)
        return _OnStream(int(sizes.sum()), began, ended, batch)

    def close(self) -> None:
        """See `Copier.close`."""
        for stream in self._streams.values():
            stream.synchronize()
        self._blanks.clear()


class _Fragments:
    """All contiguous fragments of a group's blocks, as columns."""

    def __init__(self, group: GroupLayout, layout: RowLayout) -> None:
        rows = [
            (
                layout.tensors[piece.tensor].address + piece.local + i * piece.local_step,
                layout.tensors[piece.tensor].stride,
                piece.row + i * piece.row_step,
                piece.stride,
                piece.size,
                piece.writers,
                piece.turn,
            )
            for piece in group.pieces
            for i in range(piece.fragments)
        ]
        self._columns = np.array(rows, np.int64).reshape(-1, 7).T

    def addresses(self, placed: Placed, arena: Arena, storing: bool) -> _Ints:
        """Device address, host address and size of all fragments of all blocks, shape (3, fragments)."""
        address, block_stride, row, stride, sizes, writers, turn = self._columns
        device = address + placed.blocks[:, None] * block_stride
        host = arena.base + placed.slots[:, None] * arena.slot_size + placed.subs[:, None] * stride + row
        table = np.stack((device, host, np.broadcast_to(sizes, device.shape)))
        if storing:
            return table[:, placed.pages[:, None] % writers == turn]
        return table.reshape(3, -1)


class _OnStream(Transfer):
    def __init__(self, nbytes: int, began: Any, ended: Any, batch: list[Any]) -> None:
        self.nbytes = nbytes
        self._began = began
        self._ended = ended
        self._batch = batch  # alive until the copy engines have read it

    def done(self) -> bool:
        return bool(self._ended.query())

    def wait(self) -> None:
        self._ended.synchronize()

    def seconds(self) -> float:
        return float(self._began.elapsed_time(self._ended)) * 1e-3


def _batch_operator() -> Any:
    """vLLM's operator, or None where this build has none."""
    from vllm import _custom_ops

    found = hasattr(torch.ops._C_cache_ops, "swap_blocks_batch")
    return _custom_ops.swap_blocks_batch if found else None


class _PieceByPiece:
    """The same call as vLLM's operator, through views of torch."""

    def __init__(self, layout: RowLayout, arena: Arena) -> None:
        flat = [_flat(tensor.owner) for tensor in layout.tensors]
        self._regions = [(view.data_ptr(), view) for view in flat]
        size = arena.slots * arena.slot_size
        whole = np.lib.stride_tricks.as_strided(np.asarray(arena.view(0)), (size,), (1,))
        self._regions.append((arena.base, torch.from_numpy(whole)))

    def __call__(self, sources: Any, targets: Any, sizes: Any, *, is_src_access_order_any: bool) -> None:
        for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
            self._at(target, size).copy_(self._at(source, size), non_blocking=True)

    def _at(self, address: int, size: int) -> Any:
        for start, view in self._regions:
            if start <= address and address + size <= start + view.numel():
                return view[address - start : address - start + size]
        raise ValueError(f"no tensor has {size} bytes at {address}")


def _flat(tensor: Any) -> Any:
    """All bytes of the memory that a tensor is a view of."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),))
