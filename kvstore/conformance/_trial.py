"""The namespace in which a storage is examined, and what is needed to fill it."""

from __future__ import annotations

import itertools
import random
import shutil
import uuid
from contextlib import ExitStack, closing, suppress
from mmap import mmap

from .. import frame
from ..backends import create_files
from ..backends.files import FileBackend
from ..config import TierConfig
from ..namespace import Namespace

__all__ = ["Trial", "make_slot"]

#: Bytes of a chunk where its size does not matter.
_SMALL = 64 << 10


def make_slot(size: int, content: bytes = b"") -> memoryview:
    """Page-aligned memory of `size` bytes that starts with `content`."""
    slot = memoryview(mmap(-1, max(1, size)))[:size]
    slot[: len(content)] = content
    return slot


class Trial:
    """A namespace of its own in `tier`; a context manager, which removes all that was made.

    Parameters
    ----------
    tier : TierConfig
    chunk_size : int
        Bytes.
    quick : bool
        Whether to be content with few repetitions.

    Attributes
    ----------
    rounds : int
        Repetitions of what may go well by chance.
    """

    def __init__(self, tier: TierConfig, chunk_size: int, quick: bool) -> None:
        self.tier = tier
        self.namespace = Namespace({"conformance": uuid.uuid4().hex}, chunk_size)
        self.quick = quick
        self.rounds = 8 if quick else 32
        self._serial = itertools.count()
        self._clients: list[FileBackend] = []
        self._opened = ExitStack()

    def __enter__(self) -> Trial:
        """Nothing to do."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close all connections, and remove the namespace."""
        self._opened.close()
        with suppress(OSError):  # it never came into being, or the storage is gone
            self._remove_files()
        self._remove_directories()

    @property
    def chunk_size(self) -> int:
        """Bytes in a chunk."""
        return self.namespace.chunk_size

    def clients(self, count: int) -> list[FileBackend]:
        """So many clients that are open; the same ones each time, as stores have theirs for long."""
        while len(self._clients) < count:
            backend = self._opened.enter_context(closing(create_files(self.tier, self.namespace)))
            backend.open()
            self._clients.append(backend)
        return self._clients[:count]

    def new_keys(self, count: int) -> list[bytes]:
        """Keys that have not been used yet, all over the namespace."""
        return [random.Random(next(self._serial)).randbytes(16) for _ in range(count)]

    def new_key(self) -> bytes:
        """A key that has not been used yet."""
        return self.new_keys(1)[0]

    def payload(self, number: int, size: int | None = None) -> memoryview:
        """Bytes that are the same for the same number: a small chunk, unless `size` says otherwise."""
        length = min(_SMALL, self.chunk_size) if size is None else size
        return make_slot(length, random.Random(~number).randbytes(length))

    def read(self, backend: FileBackend, key: bytes) -> memoryview | None:
        """The chunk of `key`; None when there is none."""
        out = make_slot(self.chunk_size)
        length = backend.read_into(key, out)
        return None if length is None else out[:length]

    def framed(self, key: bytes, payload: memoryview) -> bytearray:
        """The object that a chunk becomes."""
        header = bytearray(frame.HEADER_SIZE)
        frame.build(memoryview(header), payload, key=key, fingerprint=self.namespace.fingerprint)
        return header + payload

    def plant(self, backend: FileBackend, key: bytes, data: bytes) -> None:
        """Make `data` the object of `key`, which has none, whatever it is."""
        head, rest = data[: frame.HEADER_SIZE], data[frame.HEADER_SIZE :]
        backend.put_object(key, make_slot(len(head), head), make_slot(len(rest), rest))

    def _remove_files(self) -> None:
        backend = create_files(self.tier, self.namespace)
        with closing(backend):
            backend.attach()
            backend.delete([row.key for row in backend.scan()])
            for entry in list(backend.entries()):
                backend.remove_file(entry.name)

    def _remove_directories(self) -> None:
        tier, directory = self.tier, self.namespace.directory
        if tier.scheme == "file":
            shutil.rmtree(f"{tier.path}/{directory}", ignore_errors=True)
        elif tier.scheme not in ("memory", "s3", "s3a"):  # in these, there are none
            from fsspec.core import url_to_fs

            with suppress(Exception):  # they are empty, and cost nothing
                fs, root = url_to_fs(tier.url, **tier.storage_options)
                fs.rm(f"{root.rstrip('/')}/{directory}", recursive=True)
