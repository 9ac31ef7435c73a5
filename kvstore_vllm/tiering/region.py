"""Host memory that vLLM has laid out, as slots that kvstore's engines move bytes to and from.

vLLM hands a tier a view of its rows, and nothing that other processes could map. The memory behind it is a
shared file that vLLM keeps open, so the kernel is asked which one (``/proc/self/maps``), and its descriptor
is found among those of this process by device and inode. Worker processes inherit a copy of it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvstore.errors import ConfigError

__all__ = ["Region"]


class Region:
    """Rows of equal size, each a slot.

    Attributes
    ----------
    slots : int
        Number of rows.
    slot_size : int
        Bytes of a row.
    fd : int
        Descriptor of the memory, owned by this object; -1 where it has none that others could map.
    """

    def __init__(self, payload: memoryview, slot_size: int, fd: int = -1, offset: int = 0) -> None:
        self.slots = payload.nbytes // slot_size
        self.slot_size = slot_size
        self.fd = fd
        self._payload = payload
        self._offset = offset

    @classmethod
    def of(cls, rows: memoryview) -> Region:
        """The memory of vLLM's view of its rows, of shape (number, bytes).

        Raises
        ------
        ConfigError
            It is no contiguous, writable block of whole pages, as backends need it.
        """
        count, slot_size = rows.shape if rows.shape and rows.ndim == 2 else (0, 0)
        if not count or rows.readonly or not rows.c_contiguous or slot_size % mmap.PAGESIZE:
            raise ConfigError(
                f"vLLM's host memory has shape {rows.shape} and strides {rows.strides}, "
                f"where rows of whole pages ({mmap.PAGESIZE} bytes), one after the other, are expected"
            )
        payload = rows.cast("B")
        address = ctypes.addressof(ctypes.c_char.from_buffer(payload))
        fd, offset = _backing(address, payload.nbytes)
        return cls(payload, slot_size, fd, offset)

    @classmethod
    def attach(cls, fd: int, *, offset: int, slots: int, slot_size: int) -> Region:
        """The same memory in a process that has inherited its descriptor."""
        payload = memoryview(mmap.mmap(fd, slots * slot_size, offset=offset))
        return cls(payload, slot_size, fd, offset)

    @property
    def attacher(self) -> Callable[[int], Region]:
        """Makes of an inherited descriptor what this is here; picklable."""
        return partial(Region.attach, offset=self._offset, slots=self.slots, slot_size=self.slot_size)

    def view(self, slot: int, /) -> memoryview:
        """The bytes of one row.

        Raises
        ------
        IndexError
            There is no such row.
        """
        if not 0 <= slot < self.slots:
            raise IndexError(f"no row {slot} among {self.slots}")
        return self._payload[slot * self.slot_size : (slot + 1) * self.slot_size]

    def close(self) -> None:
        """Let go of the memory, which stays vLLM's."""
        self._payload.release()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _backing(address: int, size: int) -> tuple[int, int]:
    """A descriptor of the shared file mapped at `address`, and the offset there; (-1, 0) if there is none."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, permissions, offset, device, inode = line.split(maxsplit=5)[:5]
            start, end = (int(bound, 16) for bound in span.split("-"))
            if start <= address < end:
                if permissions[3] != "s":
                    break
                major, minor = (int(number, 16) for number in device.split(":"))
                found = int(offset, 16) + address - start
                fd = _descriptor(os.makedev(major, minor), int(inode), found + size)
                return (fd, found) if fd >= 0 else (-1, 0)
    return -1, 0


def _descriptor(device: int, inode: int, size: int) -> int:
    """A new descriptor of an open file, by its identity; -1 when it is not open, or shorter than `size`."""
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed since, as that of the listing itself
            status = os.fstat(int(entry.name))
            if (status.st_dev, status.st_ino) == (device, inode) and status.st_size >= size:
                return os.dup(int(entry.name))
    return -1
