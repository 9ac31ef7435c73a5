"""What is used of NIXL, which goes by UCX: RDMA where there is such a network, the memory of a process on the
same machine, or TCP. An agent, also one that only reads, listens wherever UCX finds a network, unless it is
for this machine only.

NIXL's bindings are used as they are: its wrapper lets the agent's thread spin, and asks for torch.
"""

from __future__ import annotations

import ctypes
import importlib
import secrets
from functools import cache
from importlib.util import find_spec
from typing import Any

__all__ = ["Agent", "address_of", "is_installed"]

_PACKAGES = ("nixl_cu12", "nixl_cu13")
#: Microseconds that the thread of a server's agent sleeps between two looks, which NIXL rounds up to whole
#: milliseconds: 0.014 to 0.017 of a core.
_DELAY = 2000
#: Keeps UCX to the loopback interface, beside memory that processes share.
_LOCAL = {"engine_config": "NET_DEVICES=lo"}


def is_installed() -> bool:
    """Whether there is a package of NIXL; imports nothing."""
    return any(map(find_spec, _PACKAGES))


class Agent:
    """An agent of NIXL; every method raises what NIXL raises, unless it says otherwise.

    Parameters
    ----------
    has_thread : bool
        One does what UCX must do in answer to others; without it UCX works while somebody waits for a read.
    is_local : bool
        For this machine only.
    threads : int
        How many may read at a time: UCX has a worker for each.
    """

    def __init__(self, *, has_thread: bool, is_local: bool, threads: int = 1) -> None:
        self._nixl = nixl = _load()
        config = nixl.nixlAgentConfig()
        config.useProgThread = has_thread
        config.pthrDelay = _DELAY
        config.useListenThread = False
        config.syncMode = nixl.NIXL_THREAD_SYNC_RW
        self._agent = nixl.nixlAgent(f"kvstore-{secrets.token_hex(8)}", config)
        parameters = {"num_workers": str(threads)} | (_LOCAL if is_local else {})
        self._ucx = [self._agent.createBackend("UCX", parameters)]

    def register(self, address: int, size: int) -> None:
        """Let memory be read, or read into."""
        nixl = self._nixl
        self._agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, [(address, size, 0, b"")]), self._ucx)

    @property
    def metadata(self) -> bytes:
        """What others need to read what is registered here."""
        metadata: bytes = self._agent.getLocalMD()
        return metadata

    def connect(self, metadata: bytes) -> str:
        """Get to know another agent; its name."""
        name: bytes = self._agent.loadRemoteMD(metadata)
        return name.decode()

    def prepare(self, server: str, source: int, target: int, size: int) -> int:
        """A handle for reading `size` bytes at `source` of `server` to `target`."""
        nixl = self._nixl
        remote = nixl.nixlXferDList(nixl.DRAM_SEG, [(source, size, 0)])
        local = nixl.nixlXferDList(nixl.DRAM_SEG, [(target, size, 0)])
        handle: int = self._agent.createXferReq(nixl.NIXL_READ, local, remote, server, "", self._ucx)
        return handle

    def begin(self, handle: int) -> bool:
        """Begin to read; whether that was all."""
        return bool(self._agent.postXferReq(handle, "") == self._nixl.NIXL_SUCCESS)

    def is_done(self, handle: int) -> bool:
        """Whether all is here."""
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


def address_of(view: memoryview) -> int:
    """Where in this process writable memory lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
