"""Objects in the memory of this process, for tests and for measuring what is not storage.

Backends that name the same store see the same objects. Every access to the dictionaries is under one lock;
copies of payload are made outside of it, from objects that nobody changes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .. import frame
from .base import BackendContext, Capabilities
from .files import FileBackend
from .layout import MANIFEST, Entry, aside_name, classify, follows, object_name

__all__ = ["MemoryBackend", "forget", "namespaces"]


class _File(NamedTuple):
    data: bytes
    mtime: float


_lock = threading.Lock()
_stores: dict[str, dict[str, dict[str, _File]]] = {}  # store -> namespace directory -> name -> file


class MemoryBackend(FileBackend):
    """One namespace of a named store of this process.

    Parameters
    ----------
    context : BackendContext
    store : str
        Name of the store; it comes into being when it is first asked for.
    directory : str
        Name of the namespace in it.
    """

    capabilities = Capabilities(atomic_create=True, first_writer_wins=True, quarantine=True, shared=False)

    def __init__(self, context: BackendContext, store: str, directory: str) -> None:
        super().__init__(context)
        with _lock:
            self._files = _stores.setdefault(store, {}).setdefault(directory, {})

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key has an object."""
        with _lock:
            return [object_name(key) in self._files for key in keys]

    def get_object(self, key: bytes, header: memoryview, payload: memoryview) -> int | None:
        """Copy an object into the buffers."""
        with _lock:
            file = self._files.get(object_name(key))
        if file is None:
            return None
        data = memoryview(file.data)
        head = data[: frame.HEADER_SIZE]
        body = data[frame.HEADER_SIZE :][: len(payload)]
        header[: len(head)] = head
        payload[: len(body)] = body
        return len(data)

    def put_object(self, key: bytes, header: memoryview, payload: memoryview) -> bool:
        """Keep a copy of the buffers."""
        if self.exists([key])[0]:
            return False
        return self.create_file(object_name(key), b"".join((header, payload)))

    def delete(self, keys: Sequence[bytes]) -> None:
        """Forget the objects of `keys`."""
        with _lock:
            for key in keys:
                self._files.pop(object_name(key), None)

    def set_aside(self, name: str) -> bool:
        """Rename a file; False where it is gone or sound."""
        with _lock:
            file = self._files.get(name)
            if file is None or self.is_sound(name, file.data):
                return False
            self._files[aside_name(name)] = self._files.pop(name)
        return True

    def remove_file(self, name: str) -> bool:
        """Forget a file; False where it is gone."""
        with _lock:
            return self._files.pop(name, None) is not None

    def entries(self, after: str = "") -> Iterator[Entry]:
        """Every file."""
        with _lock:
            names = [name for name in self._files if follows(name, after)]
        for name in sorted(names, key=lambda name: name.split("/")):
            file = self._files.get(name)
            if file is not None:
                kind, key = classify(name)
                yield Entry(name, kind, key, len(file.data), file.mtime)

    def read_file(self, name: str) -> bytes | None:
        """Content of a file."""
        with _lock:
            file = self._files.get(name)
        return None if file is None else file.data

    def create_file(self, name: str, data: bytes) -> bool:
        """Keep `data` under `name` unless something is there."""
        file = _File(data, time.time())
        with _lock:
            return self._files.setdefault(name, file) is file


def namespaces(store: str) -> Iterator[tuple[str, bytes | None]]:
    """Directory and manifest (None where absent) of each namespace of a store."""
    with _lock:
        found = [(directory, dict(files)) for directory, files in sorted(_stores.get(store, {}).items())]
    for directory, files in found:
        yield directory, files[MANIFEST].data if MANIFEST in files else None


def forget(store: str) -> None:
    """Drop a store and all that is in it; backends that are open keep what they hold."""
    with _lock:
        _stores.pop(store, None)
