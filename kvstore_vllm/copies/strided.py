"""Regular patterns in addresses, and arrays over them: many small copies become few calls.

numpy copies whole strided arrays at the speed of memcpy and without the interpreter's lock; a call costs a
microsecond or two of Python. So the work is to find what is regular: layers that lie at equal distances, in
device memory as in the row (a band), and blocks whose ids and slots go in equal steps (a run).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.arena import Arena

from .layout import Extent, GroupLayout, Placed, RowLayout

__all__ = ["Band", "Blanks", "block_runs", "device_bands", "runs"]

_Bytes = NDArray[np.uint8]
_Ints = NDArray[np.int64]


def runs(points: _Ints) -> Iterator[tuple[int, int, list[int]]]:
    """Split a sequence of points into pieces of equal steps, greedily from the front.

    Parameters
    ----------
    points : ndarray of int64, shape (n, coordinates)

    Yields
    ------
    start, length : int
    steps : list of int
        The step of each coordinate; zeros for a single point.
    """
    steps = np.diff(points, axis=0)
    ends = np.flatnonzero((steps[1:] != steps[:-1]).any(axis=1)) + 1
    start = 0
    for end in [*ends.tolist(), len(steps)]:
        if end > start:
            yield start, end - start + 1, steps[start].tolist()
            start = end + 1
    if start < len(points):
        yield start, 1, [0] * points.shape[1]


class _Pattern(NamedTuple):
    """Bytes at regular places in device memory and in a row; `axes` are (count, device step, row step)."""

    address: int
    row: int
    axes: tuple[tuple[int, int, int], ...]
    size: int
    stride: int  # of the row, from sub-block to sub-block
    block_stride: int = 0
    blocks: int = 0
    below: bool = False


class Band(NamedTuple):
    """Arrays over the same bytes of device memory and of the arena.

    Attributes
    ----------
    device : ndarray of uint8, shape (blocks, ..., size)
    host : ndarray of uint8, shape (slots, blocks_per_chunk, ..., size)
        The dimensions in the middle are those of `device`.
    """

    device: _Bytes
    host: _Bytes


def device_bands(group: GroupLayout, layout: RowLayout, arena: Arena) -> dict[tuple[int, int], list[Band]]:
    """The bytes of a group whose tensors are in this process's memory, in as few bands as can be.

    Returns
    -------
    dict
        (writers, turn), as in `Piece` -> bands.
    """
    patterns: dict[tuple[int, int], list[_Pattern]] = defaultdict(list)
    for piece in group.pieces:
        tensor = layout.tensors[piece.tensor]
        address = tensor.address + piece.local
        axes = ((piece.fragments, piece.local_step, piece.row_step),) if piece.fragments > 1 else ()
        # With the arena between the tensors of a band, numpy would take the two sides of a copy for
        # overlapping, and copy twice.
        below = address < arena.base
        patterns[piece.writers, piece.turn].append(
            _Pattern(address, piece.row, axes, piece.size, piece.stride, tensor.stride, tensor.blocks, below)
        )
    owners = [tensor.owner for tensor in layout.tensors]
    return {
        rotation: [
            Band(_device_array(found, owners), _host_array(found, layout.blocks_per_chunk, arena))
            for found in _folded(alike)
        ]
        for rotation, alike in patterns.items()
    }


class Blanks:
    """Zeroes what the stores of one group leave uncovered."""

    def __init__(self, group: GroupLayout, layout: RowLayout, arena: Arena) -> None:
        self._pages = [_host_array(found, layout.blocks_per_chunk, arena) for found in _extents(group.pages)]
        self._gaps = [_host_array(found, 1, arena) for found in _extents(group.gaps)]

    def clear(self, placed: Placed) -> None:
        """Zero the gaps of all slots, and the sub-blocks that have no block."""
        for gap in self._gaps:
            for start, length, (step,) in runs(placed.chunks[:, None]):
                slots = placed.chunks[start : start + length]
                if step:
                    gap[_span(int(slots[0]), step, length)] = 0
                else:
                    gap[slots] = 0
        for page in self._pages:
            for slot, sub in zip(placed.bare_slots.tolist(), placed.bare_subs.tolist(), strict=True):
                page[slot, sub] = 0


def block_runs(placed: Placed) -> Iterator[tuple[slice, tuple[slice | int, slice | int]]]:
    """Index the blocks of `Band.device`, and their places in `Band.host`, by as few slices as possible."""
    points = np.stack((placed.blocks, placed.slots, placed.subs), axis=1)
    for start, length, (block_step, slot_step, sub_step) in runs(points):
        block, slot, sub = points[start].tolist()
        if block_step and slot_step and not sub_step:
            yield _span(block, block_step, length), (_span(slot, slot_step, length), sub)
        elif block_step and sub_step and not slot_step:
            yield _span(block, block_step, length), (slot, _span(sub, sub_step, length))
        else:  # not along one axis of the host's array
            for block, slot, sub in points[start : start + length].tolist():
                yield _span(block, 1, 1), (slot, _span(sub, 1, 1))


def _folded(patterns: list[_Pattern]) -> list[_Pattern]:
    """Join patterns that differ in place only, and lie in equal steps, until no more can be joined."""
    alike: dict[_Pattern, list[_Pattern]] = defaultdict(list)
    for pattern in patterns:
        alike[pattern._replace(address=0, row=0)].append(pattern)
    joined = []
    for members in alike.values():
        places = np.array([(member.address, member.row) for member in members], np.int64)
        for start, length, steps in runs(places):
            axes = ((length, *steps),) if length > 1 else ()
            joined.append(members[start]._replace(axes=(*axes, *members[start].axes)))
    return _folded(joined) if len(joined) < len(patterns) else joined


def _extents(extents: Iterable[Extent]) -> list[_Pattern]:
    return _folded([_Pattern(0, extent.row, (), extent.size, extent.stride) for extent in extents])


def _device_array(pattern: _Pattern, owner: object) -> _Bytes:
    return _array(
        pattern.address,
        (pattern.blocks, *(count for count, _, _ in pattern.axes), pattern.size),
        (pattern.block_stride, *(step for _, step, _ in pattern.axes), 1),
        owner,
    )


def _host_array(pattern: _Pattern, blocks_per_chunk: int, arena: Arena) -> _Bytes:
    return _array(
        arena.base + pattern.row,
        (arena.slots, blocks_per_chunk, *(count for count, _, _ in pattern.axes), pattern.size),
        (arena.slot_size, pattern.stride, *(step for _, _, step in pattern.axes), 1),
        arena.view(0),  # keeps the mapping, even beyond the arena's `close`
    )


def _span(start: int, step: int, length: int) -> slice:
    end = start + step * length
    return slice(start, end if end >= 0 else None, step)


class _Memory:
    """Memory by address, for numpy; the array made of it keeps `owner` alive."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], owner: object) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (address, False),
            "shape": shape,
            "strides": strides,
        }
        self.owner = owner


def _array(address: int, shape: tuple[int, ...], strides: tuple[int, ...], owner: object) -> _Bytes:
    return np.asarray(_Memory(address, shape, strides, owner))
