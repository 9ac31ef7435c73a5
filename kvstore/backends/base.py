"""The contract of a secondary tier's backend, and what every backend shares.

A backend moves framed objects between storage and memory. Its methods block, and are called only by the
engine's workers, each with a backend of its own; so an author writes no thread, no queue and no retry.

Two levels:

- The *verbs* (``exists, read_into, read_many, write, delete, scan, close``) are what workers call. Those that
  move payload live here: they build the frame, and they verify it, so that no backend can serve a byte that
  it should not.
- The *object verbs* (``get_object, put_object``, ...) are what an author implements: whole objects by key.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from mmap import mmap
from typing import NamedTuple

from .. import frame
from ..errors import BackendError

__all__ = ["Backend", "BackendContext", "Capabilities", "StoredObject"]


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do beyond the contract; every flag is positive, absent means no.

    Attributes
    ----------
    atomic_create : bool
        A reader sees a whole object or none, whatever happens to the writer.
    first_writer_wins : bool
        Of several writers of one key exactly one gets ``created=True``, and its bytes stay.
    direct_io : bool
        Objects move between the device and the slot without the page cache.
    quarantine : bool
        A bad object can be moved aside.
    retries : bool
        The backend's client repeats failed requests by a policy of its own, which gets the tier's
        ``retries``; the worker then repeats none.
    shared : bool
        Other processes that open the same URL see the same objects.
    bulk_exists : bool
        ``exists`` asks for any number of keys in one request.
    bulk_read : bool
        ``read_many`` has several chunks under way at a time; a worker then leaves whole batches to it.
    overlaps : bool
        ``read_many`` begins when it is called, and it may be called again, as may ``exists`` and
        ``read_into``, before its iterator has ended: a worker need not let one batch end to begin the next.
    """

    atomic_create: bool = False
    first_writer_wins: bool = False
    direct_io: bool = False
    quarantine: bool = False
    retries: bool = False
    shared: bool = True
    bulk_exists: bool = False
    bulk_read: bool = False
    overlaps: bool = False


@dataclass(frozen=True)
class BackendContext:
    """What a backend is told of the store it serves.

    Attributes
    ----------
    fingerprint : bytes
        Fingerprint of the namespace, 16 bytes; written into and checked in every frame.
    manifest : bytes
        Content of the namespace's ``namespace.json``.
    chunk_size : int
        Largest payload in bytes.
    check_manifest : callable, optional
        Raises `NamespaceMismatchError` when the manifest given, as found on storage, is not of this
        namespace; without it the two manifests must be equal.
    """

    fingerprint: bytes
    manifest: bytes
    chunk_size: int
    check_manifest: Callable[[bytes], None] | None = None


class StoredObject(NamedTuple):
    """One row of a scan: `size` in bytes on storage (frame included), `mtime` in seconds since the epoch."""

    key: bytes
    size: int
    mtime: float


class _Scratch(threading.local):
    """A page-aligned header buffer for each thread, so that headers never need an allocation per chunk."""

    def __init__(self) -> None:
        self.header = memoryview(mmap(-1, frame.HEADER_SIZE))


@dataclass
class Backend(ABC):
    """Blocking verbs of one secondary tier.

    Parameters
    ----------
    context : BackendContext

    Attributes
    ----------
    capabilities : Capabilities
        A class says what all its instances can do; :meth:`open` may say more about one.
    counters : dict
        Increments of the backend's own metrics since a worker last took them; the store sums them up.
    """

    context: BackendContext
    capabilities: Capabilities = field(default=Capabilities(), init=False)
    counters: dict[str, float] = field(default_factory=dict, init=False)
    _scratch: _Scratch = field(default_factory=_Scratch, init=False, repr=False)

    # What workers call.

    def open(self) -> None:  # noqa: B027  a backend without set-up has nothing to do
        """Connect, make what is missing and check the manifest.

        Raises
        ------
        NamespaceMismatchError
            The manifest contradicts the namespace asked for. Nothing has been touched.
        BackendError
            The tier cannot be reached.
        """

    def dial(self, address: str) -> None:
        """Serve from the peer at `address`, ``host:port``, instead of any before; only of a backend whose
        peers are named by requests.

        Raises
        ------
        BackendError
            The peer cannot be reached. It is tried again with each verb.
        """
        raise BackendError(f"this tier has no peers to choose from: {address}")

    @abstractmethod
    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key has an object; no payload moves."""

    def read_into(self, key: bytes, out: memoryview) -> int | None:
        """Read and verify one chunk.

        Parameters
        ----------
        key : bytes
        out : memoryview
            Writable, at least ``context.chunk_size`` bytes, page aligned. Its content is undefined after a
            miss or an error.

        Returns
        -------
        int or None
            Length of the payload now at the start of `out`; None when there is no such object.

        Raises
        ------
        CorruptChunkError
            There is an object, but not the one that key and namespace ask for.
        BackendError, OSError
            The storage failed.
        """
        header = self._scratch.header
        size = self.get_object(key, header, out)
        if size is None:
            return None
        return frame.verify(header, out, size, key=key, fingerprint=self.context.fingerprint)

    def read_many(
        self, keys: Sequence[bytes], outs: Sequence[memoryview]
    ) -> Iterator[int | Exception | None]:
        """Read and verify several chunks, one after another unless the backend knows better.

        Parameters
        ----------
        keys : sequence of bytes
        outs : sequence of memoryview
            One for each key, as for :meth:`read_into`.

        Yields
        ------
        int, Exception or None
            For each key, in order: what :meth:`read_into` returns for it, or raises. From then on its buffer
            is not written to; once the iterator has ended, or was closed, none is.
        """
        for key, out in zip(keys, outs, strict=True):
            try:
                yield self.read_into(key, out)
            except Exception as error:
                yield error

    def write(self, key: bytes, view: memoryview) -> bool:
        """Store one chunk unless the key has an object already.

        Parameters
        ----------
        key : bytes
        view : memoryview
            The payload, at most ``context.chunk_size`` bytes, at the start of a page-aligned slot.

        Returns
        -------
        bool
            True when this call created the object, False when it was there.
        """
        header = self._scratch.header
        frame.build(header, view, key=key, fingerprint=self.context.fingerprint)
        return self.put_object(key, header, view)

    @abstractmethod
    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete the objects of `keys`; absent ones are no error."""

    @abstractmethod
    def scan(self) -> Iterator[StoredObject]:
        """All chunks of the namespace, in no particular order; objects that come and go meanwhile may be
        missed."""

    def quarantine(self, key: bytes) -> bool:
        """Move the bad object of `key` aside; False where that cannot be done (it stays, and stays a
        miss)."""
        return False

    def close(self) -> None:  # noqa: B027  a backend without resources has nothing to do
        """Release what `open` acquired. Called once, also after a failed `open`."""

    # What an author implements.

    @abstractmethod
    def get_object(self, key: bytes, header: memoryview, payload: memoryview) -> int | None:
        """Read the object of `key` into the two buffers, in that order.

        Returns
        -------
        int or None
            Total size of the object in bytes (it may exceed the buffers: then it is not one of ours, and the
            caller refuses it); None when there is no object. A size below ``len(header)`` is a torn object.
        """

    @abstractmethod
    def put_object(self, key: bytes, header: memoryview, payload: memoryview) -> bool:
        """Create the object of `key` from the two buffers, in that order, atomically; False when there is
        one."""
