"""What others do to a memory tier, without the code under test: another instance writes, somebody deletes,
bits rot."""

from __future__ import annotations

import time

from kvstore import frame
from kvstore.backends import memory
from support.chunks import payload, version_of

__all__ = ["Outsider"]


class Outsider:
    """Raw access to one tier.

    Parameters
    ----------
    store : str
        Name of the memory store.
    directory : str
        Name of the namespace in it.
    fingerprint : bytes
        Of the namespace.
    """

    def __init__(self, store: str, directory: str, fingerprint: bytes) -> None:
        self._store, self._directory, self._fingerprint = store, directory, fingerprint

    @property
    def _files(self) -> dict[str, memory._File]:
        return memory._stores.setdefault(self._store, {}).setdefault(self._directory, {})

    def has(self, key: bytes) -> bool:
        """Whether there is anything under `key`."""
        return _name(key) in self._files

    def write(self, key: bytes, version: int) -> None:
        """Store a sound object, unless there is one."""
        data = payload(key, version)
        header = bytearray(frame.HEADER_SIZE)
        frame.build(memoryview(header), memoryview(data), key=key, fingerprint=self._fingerprint)
        self._files.setdefault(_name(key), memory._File(bytes(header) + data, time.time()))

    def delete(self, key: bytes) -> None:
        """Delete an object."""
        self._files.pop(_name(key), None)

    def damage(self, key: bytes, place: int) -> None:
        """Flip a bit of a sound object (so that no second flip mends it), in the header or in the payload."""
        file = self._files.get(_name(key))
        if file is not None and self.versions(key):
            data = bytearray(file.data)
            data[place % len(data)] ^= 1
            self._files[_name(key)] = file._replace(data=bytes(data))

    def swap(self, one: bytes, other: bytes) -> None:
        """Put each of two sound objects under the other's name."""
        files = self._files
        if self.versions(one) and self.versions(other):
            files[_name(one)], files[_name(other)] = files[_name(other)], files[_name(one)]

    def versions(self, key: bytes) -> set[int]:
        """Version of the object of `key`, if it is a sound one."""
        file = self._files.get(_name(key))
        if file is None:
            return set()
        try:
            data = memoryview(file.data)
            head, body = data[: frame.HEADER_SIZE], data[frame.HEADER_SIZE :]
            frame.verify(head, body, len(data), key=key, fingerprint=self._fingerprint)
        except Exception:
            return set()
        return {version_of(key, bytes(body))}


def _name(key: bytes) -> str:
    return f"{key.hex()[:2]}/{key.hex()}.kv"
