"""What a tier may take, and when to make room."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple, Self

from ..frame import object_size

if TYPE_CHECKING:
    from ..config import TierConfig

__all__ = ["GRANT_SECONDS", "SHARED", "Free", "Limits", "is_shared"]

SHARED = frozenset({"file", "s3", "s3a"})
"""Schemes of tiers whose limits instances keep together; elsewhere each has a ``capacity`` for itself."""

GRANT_SECONDS = 30.0
"""How long a grant in a bucket is good for, without another answer of the collector."""
#: Share of a capacity between two watermarks, and between the higher one and the capacity.
_STEP = 20


def is_shared(tier: TierConfig) -> bool:
    """Whether the instances that write to `tier` keep to its limits together."""
    limits = (tier.capacity, tier.min_free, tier.ttl, tier.total)
    return tier.scheme in SHARED and tier.write != "off" and any(limit is not None for limit in limits)


class Free(NamedTuple):
    """Room on a file system: bytes and inodes that anybody may have, of how many."""

    bytes: int
    of_bytes: int
    inodes: int
    of_inodes: int

    @classmethod
    def at(cls, path: str) -> Self:
        """Room where `path` is."""
        found = os.statvfs(path)
        return cls(
            found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize, found.f_favail, found.f_files
        )

    @classmethod
    def endless(cls) -> Self:
        """Room on object storage."""
        return cls(1 << 62, 0, 0, 0)


class Limits(NamedTuple):
    """Limits of one namespace.

    Attributes
    ----------
    capacity : int or None
        Most bytes on storage.
    min_free : int or None
        Bytes of the file system to be left free; of the inodes, the same share.
    ttl : float or None
        Seconds without use after which an object goes.
    largest : int
        Bytes of the largest object.
    """

    capacity: int | None
    min_free: int | None
    ttl: float | None
    largest: int

    @classmethod
    def of(cls, tier: TierConfig, chunk_size: int) -> Self:
        """Limits that `tier` sets for chunks of up to `chunk_size` bytes."""
        return cls(tier.capacity, tier.min_free, tier.ttl, object_size(chunk_size))

    @property
    def step(self) -> int:
        """Bytes between two watermarks; 0 where that is less than an object: then room is made one by one."""
        step = (self.capacity or 0) // _STEP
        return step if step >= self.largest else 0

    @property
    def high(self) -> int:
        """The high watermark of the capacity; endless without one."""
        return Free.endless().bytes if self.capacity is None else self.capacity - self.step

    def room(self, size: int, claimed: int, free: Free) -> int:
        """Bytes that may still be granted, when `size` are stored and `claimed` granted."""
        room = self.capacity - size - claimed if self.capacity is not None else free.bytes - claimed
        if self.min_free is not None:
            room = min(room, free.bytes - self.min_free - claimed)
            if self._missing_inodes(free):
                room = 0
        return max(0, room)

    def excess(self, size: int, claimed: int, needed: int, free: Free, average: int) -> int:
        """Bytes to evict so that `needed` more may be granted and the watermarks are kept.

        Above the high watermark, down to the low one; below, only what is needed.
        """
        excess = 0
        if self.capacity is not None:
            needed = min(needed, self.capacity)
            excess = max(0, size + claimed + needed - self.capacity)
            if size > self.high:
                excess = max(excess, size - self.capacity + 2 * self.step)
        if self.min_free is not None:
            if free.bytes < self.min_free:
                excess = max(excess, self.min_free + self.min_free // _STEP - free.bytes)
            excess = max(excess, self.min_free + claimed + needed - free.bytes)
            excess = max(excess, self._missing_inodes(free) * average)
        return min(excess, size)

    def _missing_inodes(self, free: Free) -> int:
        if not self.min_free or not free.of_inodes or not free.of_bytes:
            return 0
        return max(0, int(free.of_inodes * (self.min_free / free.of_bytes)) - free.inodes)
