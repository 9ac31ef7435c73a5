"""What the POSIX tier does to a chunk, with nothing around it: plain system calls, one hash of its bytes.

Written from ``docs/reference/format.md`` and the numbered steps of the backend; it shares no code with them.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from xxhash import xxh3_128_digest

HEADER = 4096

#: Works on one chunk: key, and memory that holds or gets its payload.
Move = Callable[[bytes, memoryview], object]


class Bare:
    """Objects of a directory, written and read without a store.

    Parameters
    ----------
    path : str
        Directory of the objects; its 256 directories are made here.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._local = threading.local()
        for number in range(256):
            os.makedirs(f"{path}/{number:02x}", exist_ok=True)

    def write(self, key: bytes, payload: memoryview) -> None:
        """``access, open, pwritev, close, link, unlink``."""
        name = self.name(key)
        if os.access(name, os.F_OK):
            return
        header = self._buffers()[0]
        header[:16] = xxh3_128_digest(payload)
        temp = f"{name}.tmp"
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.pwritev(fd, [header, payload], 0)
        finally:
            os.close(fd)
        os.link(temp, name)
        os.unlink(temp)

    def read(self, key: bytes, payload: memoryview) -> bytes:
        """``open, preadv, close``; the digest of what was read."""
        fd = os.open(self.name(key), os.O_RDONLY)
        try:
            header, tail = self._buffers()
            os.preadv(fd, [header, payload, tail], 0)
        finally:
            os.close(fd)
        return xxh3_128_digest(payload)

    def name(self, key: bytes) -> str:
        """Path of an object."""
        digits = key.hex()
        return f"{self._path}/{digits[:2]}/{digits}.kv"

    def _buffers(self) -> Sequence[memoryview]:
        """A page for the header and one for what follows the payload, of the calling thread."""
        if not hasattr(self._local, "buffers"):
            self._local.buffers = [memoryview(mmap.mmap(-1, HEADER)) for _ in range(2)]
        buffers: Sequence[memoryview] = self._local.buffers
        return buffers


class Crew:
    """Threads that take chunk after chunk from one list."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)

    def run(self, move: Move, keys: Sequence[bytes], views: Sequence[memoryview]) -> None:
        """Call ``move(key, view)`` for each pair, and wait for the last."""
        pairs = iter(list(zip(keys, views, strict=True)))  # a list's iterator: threads may share it
        for done in [self._pool.submit(_work, move, pairs) for _ in range(self._threads)]:
            done.result()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def _work(move: Move, pairs: Iterator[tuple[bytes, memoryview]]) -> None:
    for key, view in pairs:
        move(key, view)
