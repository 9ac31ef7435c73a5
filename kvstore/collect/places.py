"""Where the books of a namespace are, and of its neighbours below the same root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..backends import BackendContext, connect
from ..backends.files import FileBackend
from ..backends.layout import is_namespace
from .limits import SHARED

if TYPE_CHECKING:
    from ..backends import Backend
    from ..backends._s3_versions import VersionedObjects
    from ..backends.s3 import S3Backend
    from ..config import TierConfig
    from .books import Books

__all__ = ["Root", "books_beside", "books_of"]

#: Share of a tier's timeout for which a turn may work, or wait for the accounts.
_PART = 0.25
#: Of no chunk: names and small objects are all that is asked for.
_NO_CHUNKS = BackendContext(bytes(16), b"", 0)


def books_of(tier: TierConfig, directory: str) -> Books | None:
    """The books of the namespace `directory` in `tier`, or with an empty name those of its root; None on
    storage where none can be kept."""
    if tier.scheme == "file":
        return _directory_books(tier, directory)
    if tier.scheme in SHARED:
        return books_beside(tier, _s3(connect(tier, _NO_CHUNKS, directory)))
    return None


def _directory_books(tier: TierConfig, directory: str) -> Books:
    from .directory import DirectoryBooks

    path = f"{tier.path.rstrip('/')}/{directory}".rstrip("/")
    return DirectoryBooks(path, tier.mode, patience=tier.timeout * _PART)


def books_beside(tier: TierConfig, backend: FileBackend) -> Books:
    """Books in a bucket, by way of the client of `backend`."""
    return _bucket_books(tier, _s3(backend).versioned())


def _bucket_books(tier: TierConfig, objects: VersionedObjects) -> Books:
    from .bucket import BucketBooks

    return BucketBooks(objects, timeout=tier.timeout, patience=tier.timeout * _PART)


def _s3(backend: Backend) -> S3Backend:
    from ..backends.s3 import S3Backend

    assert isinstance(backend, S3Backend)
    return backend


class Root:
    """The namespaces of a tier, as a collector of one of them gets at the others.

    Parameters
    ----------
    tier : TierConfig
        On storage where books can be kept.
    backend : Backend
        Of one of the namespaces; in a bucket its client is used for all, if it is an S3 backend.
    """

    def __init__(self, tier: TierConfig, backend: Backend) -> None:
        self._tier = tier
        self._client: S3Backend | None = None
        self._own = False
        if tier.scheme != "file":
            self._own = not isinstance(backend, FileBackend)  # one around another one
            self._client = _s3(connect(tier, _NO_CHUNKS, "") if self._own else backend)

    def books(self) -> Books:
        """The books of the root."""
        if self._client is None:
            return _directory_books(self._tier, "")
        return _bucket_books(self._tier, self._client.versioned_in_root())

    def directories(self) -> list[str]:
        """Names of the namespaces that are there.

        Raises
        ------
        OSError
            The root cannot be listed.
        """
        if self._client is not None:
            return self._client.neighbours()
        with os.scandir(self._tier.path) as found:
            return sorted(entry.name for entry in found if is_namespace(entry.name) and entry.is_dir())

    @contextmanager
    def enter(self, directory: str) -> Iterator[tuple[FileBackend, Books]]:
        """A namespace: its files, for listing and deleting, and its books."""
        if self._client is None:
            backend = connect(self._tier, _NO_CHUNKS, directory)
            books = _directory_books(self._tier, directory)
        else:
            backend = self._client.beside(directory)
            books = books_beside(self._tier, backend)
        try:
            yield backend, books
        finally:
            books.close()

    def close(self) -> None:
        """Close what was opened here."""
        if self._own and self._client is not None:
            self._client.close()
