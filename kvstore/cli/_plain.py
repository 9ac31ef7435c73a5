"""The loops that ``bench`` compares a store with: the same work on the same storage, and nothing else."""

# ruff: noqa: PTH103, PTH116 - system calls by their names

from __future__ import annotations

import ctypes
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from mmap import ACCESS_COPY, PAGESIZE, mmap
from typing import Any

from xxhash import xxh3_128_digest

from .. import frame
from ..backends.layout import object_name
from ..config import TierConfig

__all__ = ["FsspecLoop", "LocalLoop", "Loop", "drop_pages", "make_loop", "remove_namespace"]

_libc = ctypes.CDLL(None)


class Loop(ABC):
    """Writes chunks from memory and reads them back into it, with a given number of threads.

    Parameters
    ----------
    sources : sequence of memoryview
        Payloads of one size.
    threads : int
    """

    #: What it does, for people.
    what: str

    def __init__(self, sources: Sequence[memoryview], threads: int) -> None:
        self._sources = sources
        size = -(-sources[0].nbytes // frame.ALIGNMENT) * frame.ALIGNMENT
        self._slots = [memoryview(mmap(-1, size)) for _ in sources]
        for slot in self._slots:
            slot[:: frame.ALIGNMENT] = bytes(len(slot[:: frame.ALIGNMENT]))  # so that no page is new
        self._pool = ThreadPoolExecutor(threads)
        self._wait(range(threads), lambda _: None)

    def put(self) -> None:
        """Copy every payload into a slot, hash it, and write it."""
        self._wait(range(len(self._sources)), self._put)

    def get(self, part: slice) -> None:
        """Read some of the chunks into their slots, and hash them."""
        self._wait(range(len(self._sources))[part], self._get)

    def copy(self) -> list[bytes]:
        """Copies of all slots."""
        return [bytes(slot[: source.nbytes]) for slot, source in zip(self._slots, self._sources, strict=True)]

    @abstractmethod
    def clear(self) -> None:
        """Delete the chunks, so that they can be written again."""

    def close(self) -> None:
        """End the threads, and delete everything that was made."""
        self._pool.shutdown()

    @abstractmethod
    def _put(self, index: int) -> None: ...

    @abstractmethod
    def _get(self, index: int) -> None: ...

    def _filled(self, index: int) -> memoryview:
        source = self._sources[index]
        slot = self._slots[index][: source.nbytes]
        slot[:] = source
        return slot

    def _wait(self, indices: Iterable[int], move: Callable[[int], None]) -> None:
        for _ in self._pool.map(move, indices):
            pass


class LocalLoop(Loop):
    """The system calls of a local tier, one by one, one for each transfer."""

    what = "plain system calls and one hash, in a bare loop"

    def __init__(self, sources: Sequence[memoryview], threads: int, path: str) -> None:
        super().__init__(sources, threads)
        self._path = path
        self._header = bytes(frame.HEADER_SIZE)
        for name in self.paths:
            os.makedirs(os.path.dirname(name), exist_ok=True)

    @property
    def paths(self) -> list[str]:
        """Files that are written."""
        return [self._name(index) for index in range(len(self._sources))]

    def clear(self) -> None:
        """Delete the files; their directories stay, as those of a tier do."""
        for name in self.paths:
            with suppress(FileNotFoundError):
                os.unlink(name)

    def close(self) -> None:
        """As the base does."""
        super().close()
        shutil.rmtree(self._path, ignore_errors=True)

    def _name(self, index: int) -> str:
        return f"{self._path}/{object_name(xxh3_128_digest(index.to_bytes(8, 'big')))}"

    def _put(self, index: int) -> None:
        name, temp = self._name(index), f"{self._name(index)}.tmp"
        payload = self._filled(index)
        xxh3_128_digest(payload)
        os.access(name, os.F_OK)
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.pwritev(fd, [self._header, payload], 0)
        os.close(fd)
        os.link(temp, name)
        os.unlink(temp)

    def _get(self, index: int) -> None:
        name = self._name(index)
        payload = self._slots[index][: self._sources[index].nbytes]
        os.stat(name)
        fd = os.open(name, os.O_RDONLY)
        os.preadv(fd, [bytearray(frame.HEADER_SIZE), payload], 0)
        os.close(fd)
        xxh3_128_digest(payload)


class FsspecLoop(Loop):
    """``pipe_file`` and ``cat_file`` of the filesystem itself."""

    what = "plain fsspec: pipe_file, cat_file and a copy"

    def __init__(self, sources: Sequence[memoryview], threads: int, fs: Any, root: str) -> None:
        super().__init__(sources, threads)
        self._fs, self._root = fs, root
        self._fs.makedirs(root, exist_ok=True)

    def clear(self) -> None:
        """Delete the files."""
        for index in range(len(self._sources)):
            self._fs.rm_file(f"{self._root}/{index}")

    def close(self) -> None:
        """As the base does."""
        super().close()
        if self._fs.exists(self._root):
            self._fs.rm(self._root, recursive=True)

    def _put(self, index: int) -> None:
        self._fs.pipe_file(f"{self._root}/{index}", bytes(self._sources[index]))

    def _get(self, index: int) -> None:
        slot = self._slots[index][: self._sources[index].nbytes]
        slot[:] = self._fs.cat_file(f"{self._root}/{index}")


def make_loop(tier: TierConfig, sources: Sequence[memoryview], name: str) -> Loop:
    """The loop for the storage of `tier`, in a directory `name` beside its namespaces."""
    if tier.scheme == "file":
        return LocalLoop(sources, tier.workers, f"{tier.path}/{name}")
    from fsspec.core import url_to_fs

    fs, root = url_to_fs(tier.url, **tier.storage_options)
    return FsspecLoop(sources, tier.workers, fs, f"{root.rstrip('/')}/{name}")


def remove_namespace(tier: TierConfig, directory: str) -> None:
    """Remove the directory of a namespace from the storage of `tier`."""
    if tier.scheme == "file":
        shutil.rmtree(f"{tier.path}/{directory}", ignore_errors=True)
    elif tier.scheme != "memory":  # whose namespaces are in no filesystem, and go with the process
        from fsspec.core import url_to_fs

        fs, root = url_to_fs(tier.url, **tier.storage_options)
        fs.rm(f"{root.rstrip('/')}/{directory}", recursive=True)


def drop_pages(paths: Iterable[str]) -> bool:
    """Put files out of the page cache; False where it cannot be shown that they are."""
    dropped = True
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            dropped = dropped and not _is_cached(fd)
        finally:
            os.close(fd)
    return dropped


def _is_cached(fd: int) -> bool:
    """Whether any page of a file is in the page cache. (A read with RWF_NOWAIT would start to fill it.)"""
    size = os.fstat(fd).st_size
    with mmap(fd, size, access=ACCESS_COPY) as region:
        pages = bytearray(-(-size // PAGESIZE))
        start = ctypes.c_char.from_buffer(region)
        status = (ctypes.c_ubyte * len(pages)).from_buffer(pages)
        failed = _libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), status)
        del start
    return bool(failed) or any(page & 1 for page in pages)
