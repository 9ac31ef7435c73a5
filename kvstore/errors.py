"""Exceptions, grouped by what a handler would do about them.

Each class has a stable ``kind`` string, for logs, metrics and ``--json`` output. A miss is a value
(``None``, :data:`Lookup.MISS <kvstore.Lookup>`), never an exception.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "BackendError",
    "ClosedError",
    "ConfigError",
    "CorruptChunkError",
    "KVStoreError",
    "NamespaceMismatchError",
    "NoSpaceError",
    "WorkerDiedError",
]


class KVStoreError(Exception):
    """Base of everything that kvstore raises on purpose."""

    kind: ClassVar[str] = "error"


class ConfigError(KVStoreError, ValueError):
    """The configuration is wrong; the message names the option, the tier and the remedy."""

    kind = "config"


class NamespaceMismatchError(KVStoreError):
    """A manifest contradicts its directory or the identity fields asked for.

    Attributes
    ----------
    differing : dict
        Field name -> ``(found, expected)``.
    """

    kind = "namespace-mismatch"

    def __init__(self, message: str, differing: dict[str, tuple[object, object]] | None = None) -> None:
        super().__init__(message)
        self.differing = dict(differing or {})


class NoSpaceError(KVStoreError):
    """There is no room: in the machine, in its cgroup, or in the host tier within the time given."""

    kind = "no-space"


class CorruptChunkError(KVStoreError):
    """A stored object is not what its key and namespace say it must be.

    Raised by backends and handled by the workers that call them; a caller of the store sees a miss.
    """

    kind = "corrupt"

    def __init__(self, message: str, key: bytes | None = None) -> None:
        super().__init__(message)
        self.key = key


class BackendError(KVStoreError, OSError):
    """A secondary tier failed.

    Attributes
    ----------
    tier : str
        Name of the tier, empty when raised below the level that knows it.
    key : bytes or None
        The chunk concerned, if it is about one.
    retryable : bool
        Whether the same call may succeed when it is made again a little later.
    """

    kind = "backend"

    def __init__(
        self, message: str, *, tier: str = "", key: bytes | None = None, retryable: bool = False
    ) -> None:
        super().__init__(message)
        self.tier = tier
        self.key = key
        self.retryable = retryable


class WorkerDiedError(KVStoreError):
    """A worker ended with jobs in its hands; they have failed, and it is replaced."""

    kind = "worker-died"


class ClosedError(KVStoreError):
    """The store is closed, or this process is a fork of the one that opened it."""

    kind = "closed"
