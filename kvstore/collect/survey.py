"""A survey of a namespace: how much there is, and which objects have not been used for longest."""

from __future__ import annotations

import time
from collections.abc import Iterable
from heapq import heappush, heappushpop
from typing import Protocol

__all__ = ["MOST_VICTIMS", "Oldest", "Survey", "Surveyed"]

MOST_VICTIMS = 1 << 17
"""Objects that a survey remembers, some 25 MB of them; the next survey finds the next ones."""
#: Objects between two looks at the clock.
_STRIDE = 64


class Surveyed(Protocol):
    """An object as it is listed: `size` in bytes on storage, `mtime` in seconds since the epoch."""

    @property
    def key(self) -> bytes:
        """Its key."""

    @property
    def size(self) -> int:
        """Its bytes."""

    @property
    def mtime(self) -> float:
        """When it was last used."""


class Oldest:
    """The objects that were used least recently, out of any number, in bounded memory.

    Parameters
    ----------
    most : int
        How many are kept.
    """

    def __init__(self, most: int = MOST_VICTIMS) -> None:
        self._most = most
        self._heap: list[tuple[float, int, bytes]] = []  # the youngest first, by negative time
        self.passed = False

    def add(self, key: bytes, size: int, mtime: float) -> None:
        """Consider an object."""
        if len(self._heap) < self._most:
            heappush(self._heap, (-mtime, size, key))
            return
        self.passed = True
        if -mtime > self._heap[0][0]:
            heappushpop(self._heap, (-mtime, size, key))

    def take(self) -> list[tuple[float, int, bytes]]:
        """Those kept, as (mtime, size, key), youngest first, so that the oldest can be popped off the end."""
        heap, self._heap = self._heap, []
        heap.sort()
        return [(-mtime, size, key) for mtime, size, key in heap]


class Survey:
    """Goes through a listing a little at a time.

    Parameters
    ----------
    objects : iterable
        Each with a `key`, a `size` and an `mtime`.
    most : int
        Objects that are remembered.

    Attributes
    ----------
    chunks, size : int
        Objects seen, and their bytes.
    """

    def __init__(self, objects: Iterable[Surveyed], most: int = MOST_VICTIMS) -> None:
        self._objects = iter(objects)
        self.oldest = Oldest(most)
        self.chunks = 0
        self.size = 0

    def advance(self, until: float) -> bool:
        """Go on until the listing ends, then True, or until `until` (by ``time.monotonic``)."""
        add = self.oldest.add
        for found in self._objects:
            add(found.key, found.size, found.mtime)
            self.chunks += 1
            self.size += found.size
            if not self.chunks % _STRIDE and time.monotonic() >= until:
                return False
        return True
