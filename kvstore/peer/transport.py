"""What carries messages and payload between peers: the contract.

A *carrier* moves control messages in both directions, and what belongs to a chunk beside them: the frame's
header, and the payload unless that is read from the server's memory. It knows nothing of sessions, never
blocks, and is used by one thread.

Where both sides can, payload goes past the carrier: the server has its arena as a :class:`Region` and says
where a chunk lies; the client's :class:`Reader` reads it straight into the slot that it is for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import zmq

    from .books import Parcel

__all__ = [
    "NIXL",
    "STREAM",
    "ZMQ",
    "ClientCarrier",
    "Delivery",
    "Read",
    "Reader",
    "Region",
    "ServerCarrier",
    "Tag",
    "Wanted",
]

ZMQ, STREAM, NIXL = "zmq", "stream", "nixl"
"""Names of the transports of payload: beside the control messages, over a TCP connection of its own, and
one-sided over NIXL."""

Tag = tuple[int, int]
"""Names a read: request, and index of the chunk in it."""


class Wanted(NamedTuple):
    """A read to begin: fill `out` from `address` of the server."""

    tag: Tag
    address: int
    out: memoryview


class Read(NamedTuple):
    """A read that has ended; `error` is empty for none, `digest` is of the payload if it was computed.

    After an error that is not `over` its buffer may still be written to.
    """

    tag: Tag
    error: str = ""
    digest: bytes | None = None
    over: bool = True


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

    def has_lost_connection(self) -> bool:
        """Whether the connection has broken since this was last asked; `poller` wakes for that, too."""

    def receive(self) -> bytes | None:
        """The next control message; None when there is none. What came beside the last one is discarded."""

    def take(self, header: memoryview, payload: memoryview) -> int:
        """Take what came beside the last message into the buffers; returns its size, which may exceed
        theirs."""

    def close(self) -> None:
        """Disconnect."""


class Region(Protocol):
    """Memory of a server that clients may read."""

    metadata: bytes
    """What a client needs to reach it."""

    def serve(self, is_wanted: Callable[[Parcel], bool]) -> None:
        """Begin; `is_wanted` says whether a chunk is still held for whom it was offered to."""

    def offer(self, parcel: Parcel) -> int:
        """Where the client finds the payload."""


class Reader(Protocol):
    """Reads the memory of one server at a time; used by one thread.

    A read that was started may write into its buffer until it is reported as finished, or dropped.
    """

    name: str
    """Of the transport."""

    def attach(self, poller: zmq.Poller) -> None:
        """Use `poller` to wake whoever calls the other methods, when there is something to do."""

    def connect(self, metadata: bytes) -> None:
        """Read from the server that sent `metadata` from now on.

        Raises
        ------
        OSError
            It cannot be reached.
        """

    def start(self, wanted: Sequence[Wanted]) -> None:
        """Begin with some reads."""

    def finished(self) -> list[Read]:
        """Go on with what has been started; what has ended since the last call."""

    def drop(self, tag: Tag) -> bool:
        """Write no more for `tag`, and do not report it; False where that cannot be promised."""

    def disconnect(self) -> list[Tag]:
        """Drop the connection; what has been started ends now, and is not reported. Returns the reads for
        which that cannot be promised: their buffers may still be written to."""

    def close(self) -> None:
        """Disconnect, and let go of all memory."""
