"""One-sided reads over NIXL, which goes by UCX: RDMA where there is such a network, the memory of a process
on the same machine, or TCP. An agent, also one that only reads, listens wherever UCX finds a network, unless
it is for this machine only.

The server registers its arena once. Its agent has a thread for what UCX must do in answer to clients, which
sleeps between two looks. A client's agent has none: UCX works while somebody waits for a read.

NIXL's bindings are used as they are: its wrapper lets that thread spin, and asks for torch.
"""

from __future__ import annotations

import ctypes
import importlib
import secrets
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .transport import NIXL, Read, Reader, Region, Tag, Wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import zmq

    from .books import Parcel

__all__ = ["NixlReader", "NixlRegion", "is_installed"]

_PACKAGES = ("nixl_cu12", "nixl_cu13")
#: Microseconds that the thread of a server's agent sleeps between two looks: 0.01 to 0.02 of a core.
_DELAY = 200
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
        self._reads: dict[int, list[Tag]] = {}  # handle -> what it reads
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
        tags = [read.tag for read in wanted]
        try:
            for read in wanted:
                self._register(read.out)
            parts = [(read.address, _address_of(read.out), read.out.nbytes) for read in wanted]
            handle = self._agent.prepare(self._server, parts)
        except Exception as error:
            self._ended += [Read(tag, error=f"NIXL: {error}") for tag in tags]
            return
        self._reads[handle] = tags
        try:
            if self._agent.begin(handle):
                self._end(handle, "")
        except Exception as error:  # some of it may have begun
            self._end(handle, f"NIXL: {error}")

    def finished(self) -> list[Read]:
        for handle in list(self._reads):
            try:
                if self._agent.is_done(handle):
                    self._end(handle, "")
            except Exception as error:
                self._end(handle, f"NIXL: {error}")
        ended, self._ended = self._ended, []
        return ended

    def drop(self, tag: Tag) -> bool:
        return False

    def disconnect(self) -> list[Tag]:
        unreleased = [handle for handle in self._reads if not self._agent.release(handle)]
        adrift = [tag for handle in unreleased for tag in self._reads[handle]]
        adrift += [read.tag for read in self._ended if not read.over]
        self._reads.clear()
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

    def _end(self, handle: int, error: str) -> None:
        released = self._agent.release(handle)
        self._ended += [Read(tag, error, over=released or not error) for tag in self._reads.pop(handle)]


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

    def prepare(self, server: str, parts: Sequence[tuple[int, int, int]]) -> int:
        """A handle for reading `parts`: from where, to where, how many bytes."""
        nixl = self._nixl
        remote = nixl.nixlXferDList(nixl.DRAM_SEG, [(source, size, 0) for source, _, size in parts])
        local = nixl.nixlXferDList(nixl.DRAM_SEG, [(target, size, 0) for _, target, size in parts])
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
