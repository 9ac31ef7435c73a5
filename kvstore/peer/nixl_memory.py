"""One-sided reads over NIXL, which goes by UCX: RDMA where there is such a network, the memory of a process
on the same machine, or TCP. An agent, also one that only reads, listens wherever UCX finds a network, unless
it is for this machine only.

The server registers its arena once. Its agent has a thread for what UCX must do in answer to clients, which
sleeps between two looks. A client's agent has none: UCX works while somebody waits for a read.

A chunk is read in pieces, which are hashed in order as they come. Where processes share memory UCX copies
it when a read begins: then each piece is hashed while it is in the cache. Over a network all of them are
under way together.

NIXL's bindings are used as they are: its wrapper lets that thread spin, and asks for torch.
"""

from __future__ import annotations

import ctypes
import importlib
import secrets
from collections import deque
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from ..frame import RunningDigest
from .transport import NIXL, Read, Reader, Region, Tag, Wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import zmq

    from .books import Parcel

__all__ = ["NixlReader", "NixlRegion", "is_installed"]

_PACKAGES = ("nixl_cu12", "nixl_cu13")
#: Microseconds that the thread of a server's agent sleeps between two looks: 0.01 to 0.02 of a core.
_DELAY = 200
#: Bytes that are read at a time, to be hashed while the processor's cache has them.
_PIECE = 512 << 10
#: Keeps UCX to the loopback interface, beside memory that processes share.
_LOCAL = {"engine_config": "NET_DEVICES=lo"}


def is_installed() -> bool:
    """Whether there is a package of NIXL; imports nothing."""
    return any(map(find_spec, _PACKAGES))


class NixlRegion(Region):
    """A server's memory: slots of equal size from `base` on; where it `is_local`, for this machine only.

    Raises
    ------
    Exception
        Of NIXL's own kinds: there is no transport here, or it cannot register that much memory.
    """

    def __init__(self, base: int, slot_size: int, slots: int, *, is_local: bool) -> None:
        self._base = base
        self._slot_size = slot_size
        self._agent = _Agent(has_thread=True, is_local=is_local)
        self._agent.register(base, slots * slot_size)
        self.metadata = self._agent.metadata

    def serve(self, is_wanted: Callable[[Parcel], bool]) -> None:
        pass

    def offer(self, parcel: Parcel) -> int:
        return self._base + parcel.slot * self._slot_size


class _Piece(NamedTuple):
    """Memory that is being filled."""

    handle: int
    memory: memoryview


@dataclass(eq=False)
class _Reading:
    """A chunk: `pieces` that have begun, and bytes `left` that have not."""

    tag: Tag
    left: int
    pieces: deque[_Piece] = field(default_factory=deque)
    digest: RunningDigest = field(default_factory=RunningDigest)


class NixlReader(Reader):
    """Reads into any memory of this process; what a buffer is part of gets registered as a whole, once, and
    stays until :meth:`close`. Nothing is opened before the first server is met.

    Parameters
    ----------
    is_local : bool
        All servers are on this machine, and nobody else is to reach the agent.
    """

    name = NIXL
    wakes = False

    def __init__(self, *, is_local: bool) -> None:
        self.is_local = is_local
        self._made: _Agent | None = None
        self._server = ""
        self._readings: dict[Tag, _Reading] = {}
        self._ended: list[Read] = []
        self._regions: dict[int, object] = {}  # id of what exports a buffer -> what keeps it where it is

    def attach(self, poller: zmq.Poller) -> None:
        pass

    def connect(self, metadata: bytes) -> None:
        self.disconnect()
        try:
            self._server = self._agent.connect(metadata)
        except Exception as error:
            raise ConnectionError(f"NIXL does not work here: {error}") from error

    def start(self, wanted: Sequence[Wanted]) -> None:
        for read in wanted:
            reading = self._readings[read.tag] = _Reading(read.tag, read.out.nbytes)
            try:
                self._register(read.out)
                self._begin(reading, read)
            except Exception as error:
                self._fail(reading, error)

    def finished(self) -> list[Read]:
        for reading in list(self._readings.values()):
            try:
                while self._agent.is_done(reading.pieces[0].handle):
                    if self._take(reading):
                        break
            except Exception as error:
                self._fail(reading, error)
        ended, self._ended = self._ended, []
        return ended

    def drop(self, tag: Tag) -> bool:
        return False

    def disconnect(self) -> list[Tag]:
        adrift = [reading.tag for reading in self._readings.values() if not self._release(reading)]
        adrift += [read.tag for read in self._ended if not read.over]
        self._readings.clear()
        self._ended.clear()
        if self._server:
            self._agent.disconnect(self._server)
            self._server = ""
        return adrift

    def close(self) -> None:
        self.disconnect()
        if self._made is not None:
            self._made.close()
            self._made = None
        self._regions.clear()

    @property
    def _agent(self) -> _Agent:
        if self._made is None:
            self._made = _Agent(has_thread=False, is_local=self.is_local)
        return self._made

    def _register(self, out: memoryview) -> None:
        if id(out.obj) not in self._regions:
            whole = memoryview(out.obj)
            self._agent.register(_address_of(whole), whole.nbytes)
            self._regions[id(out.obj)] = whole

    def _begin(self, reading: _Reading, read: Wanted) -> None:
        """Begin with all pieces. Where this thread does the copying, each is here at once, and is hashed
        before the next."""
        target = _address_of(read.out)
        for start in range(0, read.out.nbytes, _PIECE):
            memory = read.out[start : start + _PIECE]
            handle = self._agent.prepare(self._server, read.address + start, target + start, memory.nbytes)
            reading.pieces.append(_Piece(handle, memory))  # if it fails to begin, some of it may have begun
            is_here = self._agent.begin(handle)
            reading.left -= memory.nbytes
            if is_here and len(reading.pieces) == 1:
                self._take(reading)

    def _take(self, reading: _Reading) -> bool:
        """The first piece is here; whether that was the last one."""
        piece = reading.pieces.popleft()
        self._agent.release(piece.handle)
        reading.digest.update(piece.memory)
        if reading.pieces or reading.left:
            return False
        self._ended.append(Read(reading.tag, digest=reading.digest.digest()))
        del self._readings[reading.tag]
        return True

    def _fail(self, reading: _Reading, error: Exception) -> None:
        over = self._release(reading)
        self._ended.append(Read(reading.tag, f"NIXL: {error}", over=over))
        del self._readings[reading.tag]

    def _release(self, reading: _Reading) -> bool:
        """Take back what has not ended; whether nothing of it can come any more."""
        released = [self._agent.release(piece.handle) for piece in reading.pieces]
        return all(released)


class _Agent:
    """What is used of an agent of NIXL; every method raises what NIXL raises, unless it says otherwise."""

    def __init__(self, *, has_thread: bool, is_local: bool) -> None:
        self._nixl = nixl = _load()
        config = nixl.nixlAgentConfig()
        config.useProgThread = has_thread
        config.pthrDelay = _DELAY
        config.useListenThread = False
        self._agent = nixl.nixlAgent(f"kvstore-{secrets.token_hex(8)}", config)
        self._ucx = [self._agent.createBackend("UCX", _LOCAL if is_local else {})]

    def register(self, address: int, size: int) -> None:
        nixl = self._nixl
        self._agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, [(address, size, 0, b"")]), self._ucx)

    @property
    def metadata(self) -> bytes:
        metadata: bytes = self._agent.getLocalMD()
        return metadata

    def connect(self, metadata: bytes) -> str:
        name: bytes = self._agent.loadRemoteMD(metadata)
        return name.decode()

    def prepare(self, server: str, source: int, target: int, size: int) -> int:
        """A handle for reading `size` bytes, from where to where."""
        nixl = self._nixl
        remote = nixl.nixlXferDList(nixl.DRAM_SEG, [(source, size, 0)])
        local = nixl.nixlXferDList(nixl.DRAM_SEG, [(target, size, 0)])
        handle: int = self._agent.createXferReq(nixl.NIXL_READ, local, remote, server, "", self._ucx)
        return handle

    def begin(self, handle: int) -> bool:
        """Begin to read; whether that was all."""
        return bool(self._agent.postXferReq(handle, "") == self._nixl.NIXL_SUCCESS)

    def is_done(self, handle: int) -> bool:
        return bool(self._agent.getXferStatus(handle) == self._nixl.NIXL_SUCCESS)

    def release(self, handle: int) -> bool:
        """Raises nothing: what cannot be released goes with the agent, and is under way until then."""
        try:
            return bool(self._agent.releaseXferReq(handle) == self._nixl.NIXL_SUCCESS)
        except Exception:
            return False

    def disconnect(self, server: str) -> None:
        """Raises nothing: a server may be gone."""
        try:
            self._agent.invalidateRemoteMD(server)
        except Exception:
            pass

    def close(self) -> None:
        """Frees everything; raises nothing."""
        del self._agent


@cache
def _load() -> Any:
    package = next(filter(find_spec, _PACKAGES))
    return importlib.import_module(f"{package}._bindings")


def _address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
