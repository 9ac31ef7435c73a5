"""The host arena: one shared-memory region of equal slots, each holding one chunk.

The region is a memfd, so its size does not depend on /dev/shm, no name of it exists anywhere, and the kernel
frees it when the last process that maps it ends, however that ends. Layout, in bytes::

    0                          slot 0
    slot_size                  slot 1
    ...
    slots * slot_size          control page: a header of 64 bytes, then what users of the arena put there

Who does what: the creator pre-faults the pages (and pins them), up to 1 GiB before `Arena.create` returns
and the rest on a daemon thread; a process that attaches fills in its own page tables on such a thread.
`populated` is a word of the header that only the creator's filling writes. Slots are not guarded here:
who may touch one is up to the store.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import re
import secrets
import struct
import threading
from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, fcntl
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from . import memory
from .errors import ClosedError, ConfigError, NoSpaceError
from .pinning import PinMode, Pinning

__all__ = ["Arena"]

_log = logging.getLogger(__name__)

_PAGE = 4096
_MAGIC = b"KVARENA\0"
_VERSION = 1
_HEADER = struct.Struct("=8sQQQQ16sQ")
_POPULATED_WORD = 7  # index of the last field, in words of 8 bytes
_NAME = "kvstore-arena"
_HANDLE = re.compile(r"/proc/(\d+)/fd/(\d+)\?token=([0-9a-f]{32})")

_EAGER = 1 << 30  # populated before `create` returns
_STEP = 16 << 20  # populated per system call, and so what `close` may have to wait for


class _Geometry(NamedTuple):
    """What the header says of an arena."""

    chunk_size: int
    slot_size: int
    slots: int
    token: bytes

    @property
    def payload(self) -> int:
        """Bytes of all slots; the control page begins there."""
        return self.slots * self.slot_size

    @property
    def size(self) -> int:
        """Bytes of the whole region."""
        return self.payload + _PAGE


class Arena:
    """One process's mapping of an arena; made by `create`, `attach` or `from_fd`.

    Attributes
    ----------
    fd : int
        Descriptor of the region, not inheritable by default; -1 once closed.
    base : int
        Address of slot 0 in this process, page aligned; invalid once closed.
    chunk_size, slot_size : int
        Bytes. A slot is a chunk rounded up to 4096.
    slots : int
        Number of slots.
    handle : str
        Names the arena for `attach`, as long as this process lives and keeps it open.
    """

    def __init__(self, fd: int, geometry: _Geometry, *, owner: bool, pin: PinMode) -> None:
        self._mapping = _map(fd, geometry.size)
        self.fd = fd
        self.chunk_size, self.slot_size, self.slots, token = geometry
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self.handle = f"/proc/{os.getpid()}/fd/{fd}?token={token.hex()}"
        whole = memoryview(self._mapping)
        self._payload = whole[: geometry.payload]
        self._header = whole[geometry.payload : geometry.payload + _HEADER.size].cast("Q")
        self._control = whole[geometry.payload + _HEADER.size :]
        self._filler = _Filler(self.base, geometry, self._header if owner else None, pin)

    @classmethod
    def create(cls, capacity: int, chunk_size: int, *, pin: PinMode = "auto") -> Arena:
        """Make a new arena, of which this process is the owner.

        Parameters
        ----------
        capacity : int
            Bytes for slots; the control page comes on top.
        chunk_size : int
            Bytes.
        pin : {"auto", "on", "off"}
            Whether to page-lock it for CUDA; see `Pinning`.

        Raises
        ------
        ConfigError
            The capacity holds no slot, or there is no such way to pin.
        NoSpaceError
            The machine, a cgroup or a resource limit cannot hold it.
        """
        if chunk_size < 1:
            raise ConfigError(f"chunk_size must be at least 1 byte, not {chunk_size}")
        slot_size = -(-chunk_size // _PAGE) * _PAGE
        geometry = _Geometry(chunk_size, slot_size, capacity // slot_size, secrets.token_bytes(16))
        if geometry.slots < 1:
            raise ConfigError(f"capacity of {capacity} bytes holds no slot of {slot_size} bytes")
        memory.require(geometry.size, "the host arena")
        fd = _make_region(geometry)
        try:
            arena = cls(fd, geometry, owner=True, pin=pin)
        except BaseException:
            os.close(fd)
            raise
        try:
            arena._filler.run(min(_EAGER, geometry.payload))
        except OSError as error:
            arena.close()
            raise NoSpaceError(
                f"the host arena of {geometry.size} bytes cannot be filled in: {error}"
            ) from error
        arena._filler.start()
        return arena

    @classmethod
    def attach(cls, handle: str) -> Arena:
        """Map the arena of another process of the same user.

        Raises
        ------
        ClosedError
            Its owner is gone, or has closed it.
        ConfigError
            The handle is malformed, or names something that is not an arena of this user and version.
        NoSpaceError
            This process has no address space for it.
        """
        match = _HANDLE.fullmatch(handle)
        if match is None:
            raise ConfigError(f"not the handle of an arena: {handle!r}")
        pid, number, token = match.groups()
        fd = _open_region(f"/proc/{pid}/fd/{number}")
        try:
            if os.fstat(fd).st_uid != os.geteuid():
                raise ConfigError(f"the arena {handle} belongs to another user")
            geometry = _read_geometry(fd)
            if geometry.token != bytes.fromhex(token):
                raise ClosedError(f"the owner of the arena {handle} is gone: another one has taken its place")
            return cls._of_other(fd, geometry, "off")
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def from_fd(cls, fd: int, *, pin: PinMode = "off") -> Arena:
        """Map the arena behind a descriptor that this process was given; the arena takes the descriptor over.

        Parameters
        ----------
        fd : int
        pin : {"off", "auto", "on"}
            Whether to page-lock this mapping for CUDA: each process that owns a device does so for itself.

        Raises
        ------
        ConfigError
            It is not an arena of this version; the descriptor is left to the caller.
        NoSpaceError
            This process has no address space for it.
        """
        geometry = _read_geometry(fd)
        os.set_inheritable(fd, False)
        return cls._of_other(fd, geometry, pin)

    @classmethod
    def _of_other(cls, fd: int, geometry: _Geometry, pin: PinMode) -> Arena:
        arena = cls(fd, geometry, owner=False, pin=pin)
        arena._filler.start()
        return arena

    @property
    def populated(self) -> int:
        """How many leading slots the owner has pre-faulted; it only grows."""
        self._check_open()
        return self._header[_POPULATED_WORD]

    @property
    def pinned(self) -> bool:
        """Whether this process has page-locked all slots."""
        return self._filler.pinning.pinned

    @property
    def control(self) -> memoryview:
        """The control page beyond its header: 4032 bytes, zero at first, writable, 8-byte aligned."""
        self._check_open()
        return self._control[:]

    def view(self, slot: int) -> memoryview:
        """The bytes of a slot: writable, page aligned, exactly `slot_size` long.

        Raises
        ------
        IndexError
            There is no such slot.
        ClosedError
            The arena is closed.
        """
        if not 0 <= slot < self.slots:
            raise IndexError(f"no slot {slot} in an arena of {self.slots}")
        self._check_open()
        start = slot * self.slot_size
        return self._payload[start : start + self.slot_size]

    def close(self) -> None:
        """Stop filling, unpin, and drop this process's mapping. Repeated calls do nothing.

        Views handed out stay valid: the mapping then goes with the last of them.
        """
        if self.fd < 0:
            return
        self._filler.stop()
        fd, self.fd = self.fd, -1
        os.close(fd)
        for view in (self._payload, self._header, self._control):
            view.release()
        try:
            self._mapping.close()
        except BufferError:
            pass
        del self._payload, self._header, self._control, self._mapping

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_filler"):
            self.close()

    def _check_open(self) -> None:
        if self.fd < 0:
            raise ClosedError("the arena is closed")


class _Filler:
    """Populates (and pins) a mapping from its start; the arena refers to it, not it to the arena.

    Parameters
    ----------
    base : int
    geometry : _Geometry
    header : memoryview or None
        Words of the header, where the owner reports progress; None in other processes, whose pages exist
        already, or soon will.
    pin : PinMode
    """

    def __init__(self, base: int, geometry: _Geometry, header: memoryview | None, pin: PinMode) -> None:
        self.pinning = Pinning(base, geometry.payload, geometry.slot_size, pin)
        self._base = base
        self._geometry = geometry
        self._header = header
        self._done = 0
        self._stopped = False
        self._thread: threading.Thread | None = None

    def run(self, end: int) -> None:
        """Fill up to byte `end`, or until stopped."""
        while self._done < end and not self._stopped:
            length = min(_STEP, end - self._done)
            memory.populate(self._base + self._done, length, write=self._header is not None)
            self._done += length
            if self._header is not None:
                self._header[_POPULATED_WORD] = self._done // self._geometry.slot_size
            self.pinning.advance(self._done)

    def start(self) -> None:
        """Fill the rest in the background."""
        if self._done < self._geometry.payload:
            self._thread = threading.Thread(target=self._finish, name="kvstore-arena-fill", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the background thread, after the system call it is in, and unpin."""
        self._stopped = True
        if self._thread is not None:
            self._thread.join()
        self.pinning.release()
        self._header = None

    def _finish(self) -> None:
        try:
            self.run(self._geometry.payload)
        except OSError as error:
            _log.warning("the host arena is filled in up to byte %d only: %s", self._done, error)


def _make_region(geometry: _Geometry) -> int:
    """A sealed memfd with a header: no process that attaches can change its size under the others."""
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, geometry.size)
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
        chunk_size, slot_size, slots, token = geometry
        header = _HEADER.pack(_MAGIC, _VERSION, chunk_size, slot_size, slots, token, 0)
        os.pwrite(fd, header, geometry.payload)
    except OSError as error:
        os.close(fd)
        raise NoSpaceError(f"cannot make a host arena of {geometry.size} bytes: {error}") from error
    return fd


def _open_region(path: str) -> int:
    """Open another process's memfd, and nothing else: to open a device or a pipe may act on it."""
    try:
        target = Path(path).readlink()
        if str(target).startswith(f"/memfd:{_NAME}"):
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError as error:
        raise ConfigError(f"the arena {path} is not this user's: {error}") from error
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ClosedError(f"the owner of the arena {path} is gone: {error}") from error
    raise ClosedError(f"the owner of the arena {path} is gone: {target} is there instead")


def _read_geometry(fd: int) -> _Geometry:
    size = os.fstat(fd).st_size
    header = os.pread(fd, _HEADER.size, size - _PAGE) if size > _PAGE else b""
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise ConfigError(f"descriptor {fd} is not a kvstore arena")
    _, version, chunk_size, slot_size, slots, token, _ = _HEADER.unpack(header)
    if version != _VERSION:
        raise ConfigError(f"the arena has version {version}, this kvstore reads version {_VERSION}")
    geometry = _Geometry(chunk_size, slot_size, slots, token)
    if geometry.size != size or slot_size % _PAGE or not 0 < chunk_size <= slot_size:
        raise ConfigError(
            f"the arena's header contradicts its size: {slots} slots of {slot_size} in {size} bytes"
        )
    return geometry


def _map(fd: int, size: int) -> mmap.mmap:
    try:
        mapping = mmap.mmap(fd, size)
    except OSError as error:
        raise NoSpaceError(f"cannot map a host arena of {size} bytes: {error}") from error
    # Huge pages if shmem may have them; chunks stay out of core dumps. Neither is needed for it to work.
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTDUMP):
        try:
            mapping.madvise(advice)
        except OSError:
            pass
    return mapping
