"""What carries messages between peers: the contract.

A carrier moves control messages in both directions, and for a :class:`~kvstore.peer.protocol.Chunk` the
frame's header and the payload beside it. It knows nothing of sessions, never blocks, and is used by one
thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import zmq

__all__ = ["ClientCarrier", "Delivery", "ServerCarrier"]


class Delivery(NamedTuple):
    """What a client sent: who, by the carrier's own name for it, and the control message."""

    peer: bytes
    control: bytes


class ServerCarrier(Protocol):
    """The server's side."""

    address: str
    """Where it listens."""
    dropped: int
    """Messages that no client of ours can have sent, so far."""

    def register(self, poller: zmq.Poller) -> None:
        """Have `poller` wake when there is something to receive."""

    def receive(self) -> Delivery | None:
        """The next message; None when there is none."""

    def send(
        self, peer: bytes, control: bytes, header: memoryview | None = None, payload: memoryview | None = None
    ) -> bool:
        """Send a message, `payload` without a copy; False when there is no connection to `peer`."""

    def close(self) -> None:
        """Stop listening."""


class ClientCarrier(Protocol):
    """The client's side: one connection, made again whenever it breaks."""

    def register(self, poller: zmq.Poller) -> None:
        """Have `poller` wake when there is something to receive."""

    def send(self, control: bytes) -> bool:
        """Send a message; False when there is no connection."""

    def receive(self) -> bytes | None:
        """The next control message; None when there is none. What came beside the last one is discarded."""

    def take(self, header: memoryview, payload: memoryview) -> int:
        """Take what came beside the last message into the buffers; returns its size, which may exceed
        theirs."""

    def close(self) -> None:
        """Disconnect."""
