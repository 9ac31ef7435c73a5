"""The client's side of one session, without I/O: requests and messages in, messages and events out.

States of a session::

    CLOSED --greet--> GREETING --Welcome--> OPEN
      ^                  |                    |
      +------------------+---- Refused, or no answer in time, or no connection

A request lives from :meth:`ClientSession.lookup` or :meth:`ClientSession.fetch` until it is answered in
whole, is overdue, or its session ends; whatever comes later for it is dropped and counted. Every loss of a
session ends all its requests, so that nothing waits for a server that does not know it.
"""

from __future__ import annotations

import hmac
import secrets
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from .protocol import (
    NONCE_BYTES,
    VERSION,
    Ack,
    Answer,
    Cancel,
    Challenge,
    Chunk,
    Failed,
    Fetch,
    Found,
    Goodbye,
    Hello,
    Lookup,
    Message,
    Missing,
    Offer,
    Proof,
    Reason,
    Refused,
    Welcome,
    decode_answer,
    prove,
)
from .transport import ZMQ

__all__ = [
    "Absent",
    "Arriving",
    "ClientIdentity",
    "ClientSession",
    "Event",
    "Located",
    "Lost",
    "Offered",
    "Opened",
    "Rejected",
    "State",
]


@dataclass(frozen=True)
class ClientIdentity:
    """What a client says of itself.

    Attributes
    ----------
    fingerprint : bytes
    chunk_size : int
        Bytes.
    manifest : bytes
        The namespace's, from which a server names differing fields.
    token : bytes
        What client and server know; empty for nothing.
    transports : tuple of str
        Those by which payload may travel.
    """

    fingerprint: bytes
    chunk_size: int
    manifest: bytes
    token: bytes = field(default=b"", repr=False)
    transports: tuple[str, ...] = (ZMQ,)


class State(Enum):
    """State of a session; the module's picture says how they follow each other."""

    CLOSED = 0
    GREETING = 1
    OPEN = 2


class Opened(NamedTuple):
    """The session is open; payload goes by `transport`, with the server's `metadata`."""

    transport: str
    metadata: bytes


class Rejected(NamedTuple):
    """The session did not come to be, or has ended; `reason` is empty when the server said nothing."""

    reason: Reason | None
    detail: str


class Located(NamedTuple):
    """The answer to a lookup."""

    id: int
    states: bytes


class Arriving(NamedTuple):
    """The chunk at `place` of a fetch is here, to be taken and acknowledged."""

    id: int
    place: int
    size: int


class Offered(NamedTuple):
    """Chunks of a fetch are to be read, and acknowledged; so many `headers` are here.

    Each is given by the number of its header among them, its place in the fetch, its size in bytes, and its
    address.
    """

    id: int
    headers: int
    chunks: list[tuple[int, int, int, int]]


class Absent(NamedTuple):
    """The chunks at `indexes` of a fetch will not come."""

    id: int
    indexes: list[int]


class Lost(NamedTuple):
    """A request has failed, or what is left of it."""

    id: int
    detail: str
    overdue: bool = False


Event = Opened | Rejected | Located | Arriving | Offered | Absent | Lost


@dataclass(eq=False)
class _Pending:
    """A request without its whole answer; `indexes` of a fetch that nothing has been heard of."""

    deadline: float
    count: int
    indexes: set[int] | None


class ClientSession:
    """One client's session with one server.

    Parameters
    ----------
    identity : ClientIdentity
    draw : callable
        Source of nonces and session numbers: so many random bytes.

    Attributes
    ----------
    state : State
    outbox : deque of message
        To be sent, in order.
    counters : Counter
        What was dropped, since the last look.
    """

    def __init__(self, identity: ClientIdentity, draw: Callable[[int], bytes] = secrets.token_bytes) -> None:
        self.state = State.CLOSED
        self.outbox: deque[Message] = deque()
        self.counters: Counter[str] = Counter()
        self._identity = identity
        self._draw = draw
        self._hello: Hello | None = None
        self._nonce = b""  # of the server
        self._deadline = float("inf")  # for the welcome
        self._last_id = 0
        self._pending: dict[int, _Pending] = {}
        self._one_sided = False  # whether the server's memory can be read

    # What the caller wants.

    def greet(self, deadline: float) -> None:
        """Begin a session, which has to be open by `deadline`; the state must be CLOSED."""
        identity = self._identity
        self._hello = Hello(
            session=int.from_bytes(self._draw(8)) >> 1,
            version=VERSION,
            nonce=self._draw(NONCE_BYTES),
            fingerprint=identity.fingerprint,
            chunk_size=identity.chunk_size,
            manifest=identity.manifest,
            transports=list(identity.transports),
        )
        self._nonce = b""
        self._deadline = deadline
        self.state = State.GREETING
        self.outbox.append(self._hello)

    def lookup(self, keys: list[bytes], deadline: float) -> int:
        """Ask where `keys` are; returns the number of the request. The state must be OPEN."""
        number = self._begin(deadline, len(keys), None)
        self.outbox.append(Lookup(self._session, number, keys))
        return number

    def fetch(self, keys: list[bytes], wait: float, deadline: float, now: float) -> int:
        """Ask for chunks, waiting up to `wait` seconds for those that are being filled; returns the number of
        the request. The state must be OPEN."""
        number = self._begin(deadline, len(keys), set(range(len(keys))))
        patience = round(max(0.0, deadline - now) * 1000)
        self.outbox.append(Fetch(self._session, number, keys, round(wait * 1000), patience))
        return number

    def acknowledge(self, number: int, indexes: list[int]) -> None:
        """The chunks at `indexes` of a fetch have been taken in whole."""
        if self.state is State.OPEN:
            self.outbox.append(Ack(self._session, number, indexes))

    def goodbye(self) -> None:
        """End the session."""
        if self.state is not State.CLOSED:
            self.outbox.append(Goodbye(self._session))
        self._close()

    # What happens.

    def received(self, data: bytes) -> Event | None:
        """The server has sent `data`; payload that came with it is to be taken only for an `Arriving`."""
        message = decode_answer(data)
        if message is None:
            self.counters["malformed"] += 1
            return None
        if self._hello is None or message.session != self._session:
            self.counters["stale"] += 1
            return None
        if isinstance(message, Refused):
            return self._refused(message)
        if self.state is State.GREETING:
            return self._greeted(message)
        return self._answered(message)

    def expire(self, now: float) -> list[Event]:
        """Give up what is overdue."""
        if self.state is State.GREETING and now >= self._deadline:
            self._close()
            return [Rejected(None, "it does not answer")]
        overdue = [number for number, pending in self._pending.items() if now >= pending.deadline]
        for number in overdue:
            if self._pending.pop(number).indexes is not None:
                self.outbox.append(Cancel(self._session, number))
        return [Lost(number, "it did not answer in time", overdue=True) for number in overdue]

    def give_up(self, transport: str) -> bool:
        """Ask for `transport` no more; False when there is no other. The session ends."""
        self._close()
        others = tuple(name for name in self._identity.transports if name != transport)
        if others:
            self._identity = replace(self._identity, transports=others)
        return bool(others)

    def disconnected(self) -> None:
        """There is no connection: the session ends, and every request with it."""
        self._close()

    @property
    def next_deadline(self) -> float:
        """Nothing is overdue before this time."""
        greeting = self._deadline if self.state is State.GREETING else float("inf")
        return min((pending.deadline for pending in self._pending.values()), default=greeting)

    # Inside.

    @property
    def _session(self) -> int:
        assert self._hello is not None
        return self._hello.session

    def _begin(self, deadline: float, count: int, indexes: set[int] | None) -> int:
        assert self.state is State.OPEN
        self._last_id += 1
        self._pending[self._last_id] = _Pending(deadline, count, indexes)
        return self._last_id

    def _close(self) -> None:
        self.state = State.CLOSED
        self._hello = None
        self._pending.clear()

    def _refused(self, message: Refused) -> Event | None:
        if message.reason == "no-session" and self.state is State.GREETING:
            self.counters["stale"] += 1  # a proof that overtook its hello; the deadline decides
            return None
        self._close()
        return Rejected(message.reason, message.detail)

    def _greeted(self, message: Answer) -> Event | None:
        assert self._hello is not None
        token = self._identity.token
        if isinstance(message, Challenge) and not self._nonce:
            if not token:
                self._close()
                return Rejected("authentication", "it asks for a token, and this side has none")
            self._nonce = message.nonce
            self.outbox.append(Proof(self._session, prove(token, "client", self._hello, message.nonce)))
            return None
        if not isinstance(message, Welcome):
            self.counters["unexpected"] += 1
            return None
        expected = prove(token, "server", self._hello, self._nonce) if token else b""
        if not hmac.compare_digest(expected, message.mac) or (token and not self._nonce):
            self._close()
            return Rejected("authentication", "it does not prove that it knows the token")
        if message.transport not in self._identity.transports:
            self._close()
            return Rejected("transport", f"transport: found {message.transport!r}")
        self.state = State.OPEN
        self._one_sided = message.transport != ZMQ
        return Opened(message.transport, message.metadata)

    def _answered(self, message: Answer) -> Event | None:
        if isinstance(message, Challenge | Welcome | Refused):
            self.counters["replayed"] += 1
            return None
        pending = self._pending.get(message.id)
        if pending is None:
            self.counters["stale"] += 1
            return None
        if isinstance(message, Failed):
            del self._pending[message.id]
            return Lost(message.id, message.detail)
        if isinstance(message, Found):
            return self._found(pending, message)
        if isinstance(message, Offer) and not self._one_sided:
            self.counters["unexpected"] += 1
            return None
        return self._fetched(pending, message)

    def _found(self, pending: _Pending, message: Found) -> Event | None:
        if pending.indexes is not None or len(message.states) != pending.count:
            self.counters["unexpected"] += 1
            return None
        del self._pending[message.id]
        return Located(message.id, message.states)

    def _fetched(self, pending: _Pending, message: Chunk | Offer | Missing) -> Event | None:
        indexes = [index for index in dict.fromkeys(_named(message)) if index in (pending.indexes or ())]
        if not indexes or pending.indexes is None:
            self.counters["replayed"] += 1
            return None
        pending.indexes.difference_update(indexes)
        if not pending.indexes:
            del self._pending[message.id]
        if isinstance(message, Chunk):
            return Arriving(message.id, message.index, message.size)
        if isinstance(message, Missing):
            return Absent(message.id, indexes)
        found: dict[int, tuple[int, int, int, int]] = {}
        for number, chunk in enumerate(message.chunks):
            found.setdefault(chunk[0], (number, *chunk))
        return Offered(message.id, len(message.chunks), [found[index] for index in indexes])


def _named(message: Chunk | Offer | Missing) -> list[int]:
    if isinstance(message, Offer):
        return [index for index, _, _ in message.chunks]
    return message.indexes if isinstance(message, Missing) else [message.index]
