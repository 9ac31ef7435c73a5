"""What threads wait for that read from a peer."""

from __future__ import annotations

import threading
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from ..errors import BackendError, ConfigError, KVStoreError, NamespaceMismatchError

__all__ = ["Arrived", "Call", "failure", "refusal"]

#: Errors for what a peer refuses; anything else may pass.
_ERRORS: dict[str | None, type[KVStoreError]] = {
    "namespace": NamespaceMismatchError,
    "version": ConfigError,
    "authentication": ConfigError,
    "transport": ConfigError,
}


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

    def wait(self) -> Self:
        """Wait for its end; raises what it has failed with."""
        self.done.wait()
        if self.error is not None:
            raise copy(self.error)  # several threads may get the same
        return self


def failure(peer: str, why: str, *, retryable: bool = True) -> BackendError:
    """What a call to `peer` fails with."""
    return BackendError(f"the peer {peer}: {why}", retryable=retryable)


def refusal(peer: str, reason: str | None, detail: str) -> KVStoreError:
    """What all calls fail with when `peer` refuses a session; no `reason` when it says nothing."""
    kind = _ERRORS.get(reason)
    if kind is None:
        return failure(peer, detail, retryable=reason is not None)
    return kind(f"the peer {peer} refuses: {detail}")
