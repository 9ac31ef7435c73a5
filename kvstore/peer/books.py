"""What a server knows of its peers: sessions, fetches, questions to the owner."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from .limits import Bucket
from .protocol import Hello

__all__ = ["Fetching", "Parcel", "Session", "Ticket"]


@dataclass(eq=False)
class Fetching:
    """A fetch that is not answered in whole."""

    keys: list[bytes]
    wait_until: float
    deadline: float
    todo: deque[int]
    asked: dict[int, int] = field(default_factory=dict)  # index -> ticket
    coming: set[int] = field(default_factory=set)  # those of them that are being filled
    held: dict[int, int] = field(default_factory=dict)  # index -> slot

    @property
    def over(self) -> bool:
        """Whether nothing of it is left."""
        return not (self.todo or self.asked or self.held)


@dataclass(eq=False)
class Session:
    """One peer, from its hello on."""

    peer: bytes
    hello: Hello
    bucket: Bucket
    nonce: bytes = b""
    open: bool = False
    transport: str = ""  # once it is open
    highest: int = -1  # id of the latest request
    fetches: dict[int, Fetching] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """Number that the client has drawn for it."""
        return self.hello.session

    @property
    def leases(self) -> int:
        """Slots it holds or has asked for."""
        return sum(len(f.asked) + len(f.held) for f in self.fetches.values())

    @property
    def waiting(self) -> int:
        """Keys that wait for leases to come free."""
        return sum(len(f.todo) for f in self.fetches.values())


class Parcel(NamedTuple):
    """A chunk to be sent: `size` bytes in `slot` at its `generation`, which answer key number `place` of the
    request `id`."""

    session: Session
    id: int
    place: int
    key: bytes
    slot: int
    size: int
    generation: int


class Ticket(NamedTuple):
    """A question to the owner."""

    session: Session
    id: int
    indexes: list[int]  # empty for a lookup
    deadline: float
