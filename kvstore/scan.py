"""Walks what a tier has on storage, reads every object and says what it found.

One scanner serves ``ls``, ``stat``, ``verify`` and :mod:`kvstore.repair`. It is a generator and changes
nothing: a consumer decides what to do about a finding, how fast to go on, and where to stop. Findings of a
namespace come in the order of their names.
"""

from __future__ import annotations

import mmap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from . import frame
from .backends import BackendContext, connect, create_files, namespaces
from .backends.layout import MANIFEST, Entry, Kind, is_namespace
from .errors import CorruptChunkError, NamespaceMismatchError
from .namespace import Namespace

if TYPE_CHECKING:
    from .backends.files import FileBackend
    from .config import TierConfig

__all__ = ["STALE_AFTER", "Finding", "Space", "Status", "Summary", "check_again", "is_torn", "scan", "spaces"]

STALE_AFTER = 600.0
"""Seconds after which a temporary file has lost its writer: far more than any write may take."""

_LARGEST_CHUNK = 1 << 30
_PROBLEM_STATUSES = ("corrupt", "foreign", "stale-temp", "manifest", "unreadable")


class Status(StrEnum):
    """What a file of a namespace is."""

    GOOD = "good"  # read and verified
    LISTED = "listed"  # an object by its name; not read
    CORRUPT = "corrupt"  # an object that is torn, damaged or of a newer format
    FOREIGN = "foreign"  # a sound object of another key or namespace, or a file that is not kvstore's
    TEMP = "temp"  # being written
    STALE_TEMP = "stale-temp"  # left by a writer that died
    QUARANTINED = "quarantined"  # moved aside earlier
    MANIFEST = "manifest"  # the manifest is torn, missing, or that of another namespace
    UNREADABLE = "unreadable"  # the storage failed

    @property
    def is_problem(self) -> bool:
        """Whether someone should do something about it."""
        return self.value in _PROBLEM_STATUSES


class Finding(NamedTuple):
    """One file.

    ``name`` is relative to the namespace's directory, ``size`` in bytes on storage, ``mtime`` in seconds
    since the epoch; ``reason`` says why a file is not good.
    """

    name: str
    status: Status
    key: bytes | None
    size: int
    mtime: float
    reason: str = ""


@dataclass(frozen=True)
class Space:
    """One namespace of a tier.

    Attributes
    ----------
    directory : str
    namespace : Namespace or None
        None when the manifest is not sound.
    problem : str
        What is wrong with the manifest; empty when nothing is.
    backend : FileBackend
        Attached for reading. Nothing has been created or changed.
    """

    directory: str
    namespace: Namespace | None
    problem: str
    backend: FileBackend


@dataclass
class Summary:
    """Findings by status.

    Attributes
    ----------
    counts, sizes : Counter of Status
        How many files, and how many bytes on storage.
    """

    counts: Counter[Status] = field(default_factory=Counter)
    sizes: Counter[Status] = field(default_factory=Counter)

    def add(self, finding: Finding) -> None:
        """Count one finding."""
        self.counts[finding.status] += 1
        self.sizes[finding.status] += finding.size

    @property
    def ok(self) -> bool:
        """Whether nothing wrong was found."""
        return not any(status.is_problem for status in self.counts)


def spaces(tier: TierConfig) -> Iterator[Space]:
    """The namespaces side by side in a tier, in the order of their directories.

    A backend is closed when the next one is asked for.

    Raises
    ------
    OSError
        The tier cannot be listed.
    """
    for directory, manifest in namespaces(tier):
        namespace, problem = _identify(directory, manifest)
        if namespace is not None:
            backend = create_files(tier, namespace)
        else:
            fingerprint = bytes.fromhex(directory) if is_namespace(directory) else bytes(16)
            backend = connect(tier, BackendContext(fingerprint, b"", _LARGEST_CHUNK), directory)
        backend.attach()
        try:
            yield Space(directory, namespace, problem, backend)
        finally:
            backend.close()


def scan(
    space: Space,
    *,
    read: bool = True,
    stale_after: float = STALE_AFTER,
    after: str = "",
    pace: Callable[[int], None] | None = None,
) -> Iterator[Finding]:
    """Everything in a namespace but a sound manifest.

    Parameters
    ----------
    space : Space
    read : bool
        Whether objects are read and verified; if not, they are ``LISTED`` by name.
    stale_after : float
        Seconds after which a temporary file is stale.
    after : str
        Name of a finding: only those that follow it are wanted.
    pace : callable, optional
        Called with the size in bytes of each object that is about to be read; may wait.

    Yields
    ------
    Finding
        First that of the manifest, if there is one.
    """
    if space.problem:
        yield Finding(MANIFEST, Status.MANIFEST, None, 0, 0.0, space.problem)
    reader = _Reader(space.backend)
    now = time.time()
    for entry in space.backend.entries(after):
        match entry.kind:
            case Kind.OBJECT if read:
                if pace is not None:
                    pace(entry.size)
                finding = reader.check(entry)
                if finding is not None:
                    yield finding
            case Kind.OBJECT:
                yield _finding(entry, Status.LISTED)
            case Kind.TEMP:
                yield _judge_temp(entry, now, stale_after)
            case Kind.QUARANTINED:
                yield _finding(entry, Status.QUARANTINED)
            case Kind.FOREIGN:
                yield _finding(entry, Status.FOREIGN, "no name that kvstore gives")


def check_again(space: Space, finding: Finding) -> Finding | None:
    """Read the object of a finding once more; None when there is none any more."""
    return _Reader(space.backend).check(
        Entry(finding.name, Kind.OBJECT, finding.key, space.backend.context.chunk_size, finding.mtime)
    )


def is_torn(manifest: bytes) -> bool:
    """Whether a manifest cannot be made out at all; one of another namespace or version can."""
    try:
        Namespace.from_manifest(manifest)
    except NamespaceMismatchError as error:
        return "manifest" in error.differing
    return False


class _Reader:
    """Reads objects into one buffer, which grows to the largest so far."""

    def __init__(self, backend: FileBackend) -> None:
        self._backend = backend
        self._buffer = memoryview(b"")

    def check(self, entry: Entry) -> Finding | None:
        """Read and verify; None when the object vanished meanwhile."""
        assert entry.key is not None
        try:
            length = self._backend.read_into(entry.key, self._room_for(entry.size))
        except frame.ForeignChunkError as error:
            return _finding(entry, Status.FOREIGN, str(error))
        except CorruptChunkError as error:
            return _finding(entry, Status.CORRUPT, str(error))
        except OSError as error:
            return _finding(entry, Status.UNREADABLE, str(error))
        return None if length is None else _finding(entry, Status.GOOD)

    def _room_for(self, size: int) -> memoryview:
        """Pages for an object of `size` bytes, but never more than a chunk can have."""
        wanted = min(size, self._backend.context.chunk_size)
        if wanted > self._buffer.nbytes or not self._buffer:
            self._buffer = memoryview(mmap.mmap(-1, max(wanted, 1)))
        return self._buffer[:wanted]


def _identify(directory: str, manifest: bytes | None) -> tuple[Namespace | None, str]:
    """The namespace that a manifest describes, or what is wrong with it."""
    if manifest is None:
        return None, f"{MANIFEST} is missing"
    try:
        namespace = Namespace.from_manifest(manifest)
    except NamespaceMismatchError as error:
        return None, str(error)
    if namespace.directory != directory:
        return None, f"the manifest is that of {namespace.directory}"
    return namespace, ""


def _judge_temp(entry: Entry, now: float, stale_after: float) -> Finding:
    # A clock that was set back makes ages negative: such a file is taken for new.
    age = max(0.0, now - entry.mtime)
    if age < stale_after:
        return _finding(entry, Status.TEMP)
    return _finding(entry, Status.STALE_TEMP, f"left behind {age:.0f} s ago")


def _finding(entry: Entry, status: Status, reason: str = "") -> Finding:
    return Finding(entry.name, status, entry.key, entry.size, entry.mtime, reason)
