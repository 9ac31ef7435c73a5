"""What backends share that keep a namespace as named files: the manifest, and a listing of everything."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from .. import frame
from ..errors import CorruptChunkError, NamespaceMismatchError
from .base import Backend, StoredObject
from .layout import MANIFEST, Entry, Kind, classify, object_name

__all__ = ["FileBackend"]


class FileBackend(Backend):
    """A backend whose objects have the names of :mod:`kvstore.backends.layout`; the scanner reads these."""

    def open(self) -> None:
        """Connect; write the manifest if there is none (the first writer's stays), else check it."""
        self.attach()
        found = self.read_file(MANIFEST)
        if found is None and not self.create_file(MANIFEST, self.context.manifest):
            found = self.read_file(MANIFEST)
        if found is not None:
            self._check(found)

    def _check(self, manifest: bytes) -> None:
        if self.context.check_manifest is not None:
            self.context.check_manifest(manifest)
        elif manifest != self.context.manifest:
            raise NamespaceMismatchError(f"{MANIFEST} is that of another namespace")

    def scan(self) -> Iterator[StoredObject]:
        """All objects by name, in the order of their names."""
        for entry in self.entries():
            if entry.kind is Kind.OBJECT and entry.key is not None:
                yield StoredObject(entry.key, entry.size, entry.mtime)

    def attach(self) -> None:
        """Connect and touch nothing: what reading needs, and all that it needs."""

    def quarantine(self, key: bytes) -> bool:
        """Move the bad object of `key` into ``quarantine/``; False where that cannot be done, or where a good
        one has taken its place."""
        return self.set_aside(object_name(key))

    def is_sound(self, name: str, data: bytes) -> bool:
        """Whether `data` is a whole object of the key that `name` stands for; False where that is none."""
        _, key = classify(name)
        if key is None:
            return False
        header, payload = memoryview(data)[: frame.HEADER_SIZE], memoryview(data)[frame.HEADER_SIZE :]
        room = payload[: self.context.chunk_size]
        try:
            frame.verify(header, room, len(data), key=key, fingerprint=self.context.fingerprint)
        except CorruptChunkError:
            return False
        return True

    @abstractmethod
    def entries(self, after: str = "") -> Iterator[Entry]:
        """Every file of the namespace whose name follows `after`, in the order of names (that of
        :func:`~kvstore.backends.layout.follows`); few of them are in memory at a time."""

    @abstractmethod
    def set_aside(self, name: str) -> bool:
        """Move a file into ``quarantine/``; False where it is gone or cannot be moved.

        Another store may have done so since the file was found bad, and a third have written a good object in
        its place: what turns out to be sound is put back, where the storage allows.
        """

    @abstractmethod
    def remove_file(self, name: str) -> bool:
        """Remove a file; False where it is gone or cannot be removed."""

    @abstractmethod
    def read_file(self, name: str) -> bytes | None:
        """Content of a small file; None when it is absent."""

    @abstractmethod
    def create_file(self, name: str, data: bytes) -> bool:
        """Create a small file whole, with the directories it needs; False when it is there already."""
