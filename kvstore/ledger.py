"""What one instance knows to be in a tier with a ``capacity``, in order of last use, so that it can make
room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable

__all__ = ["Ledger"]


class Ledger:
    """Sizes of a tier's objects, least recently used first.

    Parameters
    ----------
    capacity : int
        Bytes that the objects may take, those being written included.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.expected = 0  # bytes of objects being written
        self._sizes: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def load(self, rows: Iterable[tuple[bytes, int, float]]) -> None:
        """Take over what a scan has found: (key, bytes, mtime); older objects go first."""
        for key, size, _ in sorted(rows, key=lambda row: row[2]):
            self.add(key, size)

    def add(self, key: bytes, size: int) -> None:
        """An object of `size` bytes is there now."""
        self.used += size - self._sizes.pop(key, 0)
        self._sizes[key] = size

    def size(self, key: bytes) -> int:
        """Bytes of the object of `key`, 0 when it is unknown."""
        return self._sizes.get(key, 0)

    def touch(self, key: bytes) -> None:
        """The object of `key` was read."""
        if key in self._sizes:
            self._sizes.move_to_end(key)

    def remove(self, key: bytes) -> int:
        """The object of `key` is gone; its size, 0 when it was unknown."""
        size = self._sizes.pop(key, 0)
        self.used -= size
        return size

    def fits(self, size: int) -> bool:
        """Whether another `size` bytes may be written now."""
        return self.used + self.expected + size <= self.capacity

    def victims(self, size: int, keep: Container[bytes]) -> list[bytes]:
        """Keys to delete so that `size` more bytes fit, least recently used first; as many as there are."""
        excess = self.used + self.expected + size - self.capacity
        victims = []
        for key, held in self._sizes.items():
            if excess <= 0:
                break
            if key not in keep:
                victims.append(key)
                excess -= held
        return victims
