"""What threads wait for that read from a peer."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import KVStoreError

__all__ = ["Arrived", "Call"]


class Arrived(NamedTuple):
    """A frame that is here: its size in bytes, and the digest of its payload if it was computed."""

    size: int
    digest: bytes | None = None


@dataclass(eq=False)
class Call:
    """What a thread waits for: a lookup of `keys`, or one chunk into two buffers; neither: the session."""

    deadline: float
    keys: list[bytes] = field(default_factory=list)
    buffers: tuple[memoryview, memoryview] | None = None
    states: bytes = b""
    arrived: Arrived | None = None
    error: KVStoreError | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def fail(self, error: KVStoreError) -> None:
        """End it with an error."""
        self.error = error
        self.done.set()
