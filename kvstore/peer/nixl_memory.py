"""One-sided reads over NIXL, which goes by UCX: RDMA where there is such a network, the memory of a process
on the same machine, or TCP.

The server registers its arena once. Its agent has a thread for what UCX must do in answer to clients, which
sleeps between two looks. A client's agent has none: UCX works while somebody waits for a read.

NIXL's bindings are used as they are: its wrapper lets that thread spin, and asks for torch.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import secrets
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .transport import NIXL, Read, Reader, Region, Tag

if TYPE_CHECKING:
    from collections.abc import Callable

    import zmq

    from .books import Parcel

__all__ = ["NixlReader", "NixlRegion", "is_installed"]

_PACKAGES = ("nixl_cu12", "nixl_cu13")
#: Microseconds that the thread of a server's agent sleeps between two looks: 0.02 of a core.
_DELAY = 100
#: What both libraries print would end up between the lines of the program that they work for.
_QUIET = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}


def is_installed() -> bool:
    """Whether there is a package of NIXL; imports nothing."""
    return any(map(find_spec, _PACKAGES))


class NixlRegion(Region):
    """A server's memory: slots of equal size from `base` on.

    Raises
    ------
    Exception
        Of NIXL's own kinds: there is no transport here, or it cannot register that much memory.
    """

    def __init__(self, base: int, slot_size: int, slots: int) -> None:
        self._base = base
        self._slot_size = slot_size
        self._agent = _Agent(has_thread=True)
        self._agent.register(base, slots * slot_size)
        self.metadata = self._agent.metadata

    def serve(self, is_wanted: Callable[[Parcel], bool]) -> None:
        pass

    def offer(self, parcel: Parcel) -> int:
        return self._base + parcel.slot * self._slot_size


class NixlReader(Reader):
    """Reads into any memory of this process; what a buffer is part of gets registered as a whole, once, and
    stays until :meth:`close`.

    Raises
    ------
    Exception
        Of NIXL's own kinds: there is no transport here.
    """

    name = NIXL
    wakes = False

    def __init__(self) -> None:
        self._agent = _Agent(has_thread=False)
        self._server = ""
        self._reads: dict[Tag, int] = {}  # -> handle
        self._ended: list[Read] = []
        self._regions: dict[int, object] = {}  # id of what exports a buffer -> what keeps it where it is

    def attach(self, poller: zmq.Poller) -> None:
        pass

    def connect(self, metadata: bytes) -> None:
        self.disconnect()
        try:
            self._server = self._agent.connect(metadata)
        except Exception as error:
            raise ConnectionError(f"NIXL: {error}") from error

    def start(self, tag: Tag, address: int, out: memoryview) -> None:
        try:
            self._register(out)
            handle, done = self._agent.read(self._server, address, _address_of(out), out.nbytes)
        except Exception as error:
            self._ended.append(Read(tag, error=f"NIXL: {error}"))
            return
        if done:
            self._end(tag, handle, "")
        else:
            self._reads[tag] = handle

    def finished(self) -> list[Read]:
        for tag, handle in list(self._reads.items()):
            try:
                if self._agent.is_done(handle):
                    self._end(self._forget(tag), handle, "")
            except Exception as error:
                self._end(self._forget(tag), handle, f"NIXL: {error}")
        ended, self._ended = self._ended, []
        return ended

    def drop(self, tag: Tag) -> bool:
        return False

    def disconnect(self) -> None:
        for handle in self._reads.values():
            self._agent.release(handle)
        self._reads.clear()
        self._ended.clear()
        if self._server:
            self._agent.disconnect(self._server)
            self._server = ""

    def close(self) -> None:
        self.disconnect()
        self._agent.close()
        self._regions.clear()

    def _register(self, out: memoryview) -> None:
        if id(out.obj) not in self._regions:
            whole = memoryview(out.obj)
            self._agent.register(_address_of(whole), whole.nbytes)
            self._regions[id(out.obj)] = whole

    def _forget(self, tag: Tag) -> Tag:
        del self._reads[tag]
        return tag

    def _end(self, tag: Tag, handle: int, error: str) -> None:
        self._agent.release(handle)
        self._ended.append(Read(tag, error))


class _Agent:
    """What is used of an agent of NIXL; every method raises what NIXL raises, unless it says otherwise."""

    def __init__(self, *, has_thread: bool) -> None:
        self._nixl = nixl = _load()
        config = nixl.nixlAgentConfig()
        config.useProgThread = has_thread
        config.pthrDelay = _DELAY
        config.useListenThread = False
        self._agent = nixl.nixlAgent(f"kvstore-{secrets.token_hex(8)}", config)
        self._ucx = [self._agent.createBackend("UCX", {})]

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

    def read(self, server: str, source: int, target: int, size: int) -> tuple[int, bool]:
        """Begin to read; returns a handle, and whether that was all."""
        nixl = self._nixl
        local, remote = (nixl.nixlXferDList(nixl.DRAM_SEG, [(where, size, 0)]) for where in (target, source))
        handle: int = self._agent.createXferReq(nixl.NIXL_READ, local, remote, server, "", self._ucx)
        try:
            done = self._agent.postXferReq(handle, "") == nixl.NIXL_SUCCESS
        except Exception:
            self.release(handle)
            raise
        return handle, done

    def is_done(self, handle: int) -> bool:
        return bool(self._agent.getXferStatus(handle) == self._nixl.NIXL_SUCCESS)

    def release(self, handle: int) -> None:
        """Raises nothing: what cannot be released goes with the agent."""
        try:
            self._agent.releaseXferReq(handle)
        except Exception:
            pass

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
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    package = next(filter(find_spec, _PACKAGES))
    return importlib.import_module(f"{package}._bindings")


def _address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
