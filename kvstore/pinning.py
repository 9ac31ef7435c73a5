"""Page-locking of host memory for CUDA. It goes through torch, which is never imported unless asked for."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import Any, Literal

from .errors import ConfigError

__all__ = ["PinMode", "Pinning"]

PinMode = Literal["auto", "on", "off"]

_log = logging.getLogger(__name__)
_BLOCK = 1 << 30


class Pinning:
    """Registers a region with CUDA from its start, block by block, as it is pre-faulted.

    Blocks consist of whole slots, since CUDA refuses a copy that spans two registrations. It is all or
    nothing: when a block fails, one warning is logged, the blocks before it are released, and the region
    stays pageable.

    Parameters
    ----------
    base : int
        Address of the region.
    size : int
        Bytes, a multiple of `slot_size`.
    slot_size : int
        Bytes.
    mode : {"auto", "on", "off"}
        "auto" pins where torch has been imported and sees a CUDA device; "on" imports torch, and warns when
        it cannot pin.

    Raises
    ------
    ConfigError
        No such mode.
    """

    def __init__(self, base: int, size: int, slot_size: int, mode: PinMode) -> None:
        self._base = base
        self._size = size
        self._block = max(_BLOCK // slot_size, 1) * slot_size
        self._registered: list[int] = []
        self._done = 0
        self._pid = os.getpid()
        # Each thread has a current device: left alone, the pre-faulting one would use device 0.
        self._torch, self._device = _current_device(mode)

    @property
    def pinned(self) -> bool:
        """Whether the whole region is page-locked."""
        return self._torch is not None and self._done == self._size

    def advance(self, populated: int) -> None:
        """Register the blocks that end within the first `populated` bytes and have not been yet."""
        while self._torch is not None and self._done < self._size:
            end = min(self._done + self._block, self._size)
            if end > populated:
                return
            try:
                self._register(self._base + self._done, end - self._done)
            except RuntimeError as error:
                _warn(error)
                self.release()
            else:
                self._done = end

    def release(self) -> None:
        """Unregister everything, for good. A forked child has no part in its parent's registrations."""
        if self._torch is not None and os.getpid() == self._pid:
            for address in self._registered:
                self._torch.cuda.cudart().cudaHostUnregister(address)
        self._registered.clear()
        self._torch = None

    def _register(self, address: int, length: int) -> None:
        assert self._torch is not None
        with self._torch.cuda.device(self._device):
            status = int(self._torch.cuda.cudart().cudaHostRegister(address, length, 0))
        if status != 0:
            raise RuntimeError(f"cudaHostRegister of {length} bytes returned {status}")
        self._registered.append(address)


def _current_device(mode: PinMode) -> tuple[Any, int]:
    """The torch module, or None where memory is not to be pinned, and its device in this thread."""
    if mode not in ("auto", "on", "off"):
        raise ConfigError(f"pin must be auto, on or off, not {mode!r}")
    try:
        torch = importlib.import_module("torch") if mode == "on" else sys.modules.get("torch")
        if mode == "off" or torch is None:
            return None, 0
        if torch.cuda.is_available():
            return torch, torch.cuda.current_device()
        if mode == "on":
            _warn("torch sees no CUDA device")
    except (ImportError, RuntimeError) as error:
        _warn(error)
    return None, 0


def _warn(reason: object) -> None:
    _log.warning("cannot pin host memory, which stays pageable (slower device copies): %s", reason)
