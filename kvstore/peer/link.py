"""What a serving process and the owner of the arena say to each other, over a pair of sockets.

The owner alone knows which slot holds what. The serving process names keys and gets leases on slots; payload
never crosses the link.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "BEAT",
    "COMING_SLOT",
    "LINK_LIMIT",
    "MISSING_SLOT",
    "Ask",
    "Beat",
    "Down",
    "Forget",
    "FromOwner",
    "FromServer",
    "Lent",
    "Located",
    "Release",
    "Row",
    "Up",
    "decode_from_owner",
    "decode_from_server",
    "encode",
]

#: Seconds between two signs of life of the serving process.
BEAT = 1.0
#: Bytes of a message at most.
LINK_LIMIT = 128 << 10
#: Stands for a slot in a :data:`Row`: the key is not there.
MISSING_SLOT = -1
#: Stands for a slot in a :data:`Row`: the key is being filled, and another row will follow.
COMING_SLOT = -2

Row = tuple[int, int, int, int]
"""Index of a key in what was asked, slot (or one of the two that stand for it), bytes of payload, and the
slot's generation: while that is the same, so are the bytes."""


class _Tagged(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message of the link."""


# From the serving process.


class Ask(_Tagged, frozen=True):
    """Where are `keys`? With `lease` each slot that holds one is held until it is released, and for keys that
    are being filled the answer is completed later."""

    ticket: int
    keys: list[bytes]
    lease: bool


class Release(_Tagged, frozen=True):
    """End one lease on each of `slots`."""

    slots: list[int]


class Forget(_Tagged, frozen=True):
    """Nobody waits for the rest of the answer to `ticket`."""

    ticket: int


class Beat(_Tagged, frozen=True):
    """The serving process lives; `counters` are increments since the last beat."""

    counters: dict[str, int]


class Up(_Tagged, frozen=True):
    """It listens at `address`."""

    address: str


class Down(_Tagged, frozen=True):
    """It cannot listen, and ends."""

    error: str


# From the owner.


class Located(_Tagged, frozen=True):
    """Answers an :class:`Ask` without lease: one state of :class:`kvstore.peer.protocol.Found` per key."""

    ticket: int
    states: bytes


class Lent(_Tagged, frozen=True):
    """Answers an :class:`Ask` with lease, at first for every key, later for those that have come or will
    not."""

    ticket: int
    rows: list[Row]


FromServer = Ask | Release | Forget | Beat | Up | Down
FromOwner = Located | Lent

_encoder = msgspec.msgpack.Encoder(enc_hook=bytes)
_from_server = msgspec.msgpack.Decoder(FromServer)
_from_owner = msgspec.msgpack.Decoder(FromOwner)


def encode(message: FromServer | FromOwner) -> bytes:
    """`message` as bytes."""
    return _encoder.encode(message)


def decode_from_server(data: bytes | memoryview) -> FromServer:
    """What the serving process said."""
    return _from_server.decode(data)


def decode_from_owner(data: bytes | memoryview) -> FromOwner:
    """What the owner said."""
    return _from_owner.decode(data)
