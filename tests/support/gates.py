"""A backend that other processes can stop: gates in its verbs, opened and shut through fifos.

A gate is a fifo in a folder, named after a verb or a verb and a key. The worker that comes to a shut gate
reports its process id, and blocks in the kernel until the gate is opened.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvstore import Namespace, Store, TierConfig
from kvstore.backends import BackendContext, StoredObject
from kvstore.backends.posix import PosixBackend
from kvstore.config import parse
from kvstore.opening import assemble

__all__ = ["GatedBackend", "Gates", "make_gated", "open_gated"]

_ARRIVALS = "arrivals"


class Gates:
    """The test's side.

    Parameters
    ----------
    folder : Path
        Made if absent.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        os.mkfifo(folder / _ARRIVALS)
        self._arrivals = os.open(folder / _ARRIVALS, os.O_RDWR | os.O_NONBLOCK)
        self._opened: list[int] = []

    def shut(self, verb: str, key: bytes = b"") -> None:
        """Let nobody through: `verb` for `key`, or the verb at all."""
        os.mkfifo(self.folder / _name(verb, key))

    def open(self, verb: str, key: bytes = b"") -> None:
        """Let those through who wait, and all who come."""
        path = self.folder / _name(verb, key)
        self._opened.append(os.open(path, os.O_RDWR | os.O_NONBLOCK))  # whoever waits for a writer goes on
        path.unlink()

    def await_arrival(self, timeout: float = 20.0) -> int:
        """Process id of the next worker that has come to a shut gate."""
        assert self.has_arrival(timeout), "no worker has come to a gate"
        return int.from_bytes(os.read(self._arrivals, 4), "little")

    def has_arrival(self, timeout: float = 0.0) -> bool:
        """Whether another worker comes to a shut gate within `timeout` seconds."""
        poller = select.poll()
        poller.register(self._arrivals, select.POLLIN)
        return bool(poller.poll(timeout * 1000))

    def close(self) -> None:
        """End the reports."""
        for fd in (self._arrivals, *self._opened):
            os.close(fd)


class GatedBackend(PosixBackend):
    """A directory, with a gate before each verb."""

    def __init__(self, context: BackendContext, root: str, gates: str) -> None:
        super().__init__(context, root)
        self._gates = gates

    def open(self) -> None:
        self._pass("open")
        super().open()

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        self._pass("exists")
        return super().exists(keys)

    def get_object(self, key: bytes, header: memoryview, payload: memoryview) -> int | None:
        self._pass("get", key)
        return super().get_object(key, header, payload)

    def put_object(self, key: bytes, header: memoryview, payload: memoryview) -> bool:
        self._pass("put", key)
        return super().put_object(key, header, payload)

    def delete(self, keys: Sequence[bytes]) -> None:
        self._pass("delete")
        super().delete(keys)

    def scan(self) -> Iterator[StoredObject]:
        self._pass("scan")
        return super().scan()

    def _pass(self, verb: str, key: bytes = b"") -> None:
        for name in {_name(verb, b""), _name(verb, key)}:
            path = os.path.join(self._gates, name)
            if os.path.exists(path):
                arrivals = os.open(os.path.join(self._gates, _ARRIVALS), os.O_WRONLY)
                os.write(arrivals, os.getpid().to_bytes(4, "little"))
                os.close(arrivals)
                try:
                    os.close(os.open(path, os.O_RDONLY))
                except FileNotFoundError:  # opened just now
                    pass


def make_gated(gates: str, tier: TierConfig, namespace: Namespace) -> PosixBackend:
    """A backend factory, once its first argument is bound; a tier called ``free`` has no gates."""
    context = BackendContext(namespace.fingerprint, namespace.manifest, namespace.chunk_size)
    root = os.path.join(tier.path, namespace.directory)
    return PosixBackend(context, root) if tier.name == "free" else GatedBackend(context, root, gates)


def open_gated(
    gates: Gates, *tiers: str, clock: Callable[[], float] = time.monotonic, **options: Any
) -> Store:
    """A store whose ``file://`` tiers have gates; other arguments as for :func:`kvstore.open`."""
    return assemble(parse(*tiers, **options), partial(make_gated, str(gates.folder)), clock=clock)


def _name(verb: str, key: bytes) -> str:
    return f"{verb}-{key.hex()}" if key else verb
