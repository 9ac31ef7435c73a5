"""What peers say to each other: every message, its bounds, and how a shared token is proved.

A message is an array in msgpack that begins with its name and the number of its session. Fields that a newer
peer adds at the end are ignored, so that two versions can at least tell each other which they are.
"""

from __future__ import annotations

import hmac
from typing import Annotated, Literal

import msgspec

__all__ = [
    "COMING",
    "CONTROL_LIMIT",
    "HERE",
    "MISSING",
    "MOST_KEYS",
    "MOST_OFFERS",
    "NONCE_BYTES",
    "VERSION",
    "Ack",
    "Answer",
    "Cancel",
    "Challenge",
    "Chunk",
    "Failed",
    "Fetch",
    "Found",
    "Goodbye",
    "Hello",
    "Lookup",
    "Message",
    "Missing",
    "Offer",
    "Proof",
    "Reason",
    "Refused",
    "Request",
    "Welcome",
    "decode_answer",
    "decode_request",
    "encode",
    "prove",
]

#: Version of the protocol; peers of different versions refuse each other.
VERSION = 1
#: Keys in one message at most.
MOST_KEYS = 1024
#: Chunks in one :class:`Offer` at most; their headers, which come with it, fit a control message.
MOST_OFFERS = 32
#: Bytes of a control message at most; payload travels beside it.
CONTROL_LIMIT = 192 << 10
NONCE_BYTES = 16
"""Random bytes that each side contributes to a proof."""

MISSING, HERE, COMING = range(3)
"""States of a key in :class:`Found`: not there, in host memory, being filled."""

_MAC_BYTES = 32
_MOST_MANIFEST = 64 << 10
_MOST_DETAIL = 2000
_MOST_METADATA = 16 << 10
_MOST_MILLISECONDS = 3_600_000

_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Key = Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
_Keys = Annotated[list[_Key], msgspec.Meta(min_length=1, max_length=MOST_KEYS)]
_Index = Annotated[int, msgspec.Meta(ge=0, lt=MOST_KEYS)]
_Indexes = Annotated[list[_Index], msgspec.Meta(min_length=1, max_length=MOST_KEYS)]
_Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=_MOST_MILLISECONDS)]
_Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Mac = Annotated[bytes, msgspec.Meta(max_length=_MAC_BYTES)]
_Detail = Annotated[str, msgspec.Meta(max_length=_MOST_DETAIL)]
Reason = Literal["version", "authentication", "namespace", "transport", "no-session", "full"]
"""Why a session is refused."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message of one session; its number was drawn by the client."""

    session: _Number


# From the client.


class Hello(Message, frozen=True):
    """Begins a session, and with it a new number: what the client is, and what it wants to read.

    `manifest` is the namespace's ``namespace.json``, from which differing fields can be named; `transports`
    are the carriers of payload that the client can use.
    """

    version: _Number
    nonce: _Nonce
    fingerprint: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    chunk_size: _Number
    manifest: Annotated[bytes, msgspec.Meta(max_length=_MOST_MANIFEST)]
    transports: Annotated[list[_Detail], msgspec.Meta(max_length=8)]


class Proof(Message, frozen=True):
    """Answers a :class:`Challenge`: the client knows the token."""

    mac: _Mac


class Lookup(Message, frozen=True):
    """Which of `keys` are there? `id` is larger than that of every earlier request of the session."""

    id: _Number
    keys: _Keys


class Fetch(Message, frozen=True):
    """Send the chunks of `keys`.

    Those that are being filled are waited for, `wait` milliseconds at most; after `patience` milliseconds
    nobody wants any of them any more.
    """

    id: _Number
    keys: _Keys
    wait: _Milliseconds
    patience: _Milliseconds


class Ack(Message, frozen=True):
    """The chunks at `indexes` of a fetch have been taken in whole: their leases may end."""

    id: _Number
    indexes: _Indexes


class Cancel(Message, frozen=True):
    """Nothing of the fetch `id` is wanted any more; the client looks at no byte of it from now on."""

    id: _Number


class Goodbye(Message, frozen=True):
    """Ends the session, and everything in it."""


# From the server.


class Challenge(Message, frozen=True):
    """Prove that you know the token."""

    nonce: _Nonce


class Welcome(Message, frozen=True):
    """The session is open, and payload goes by `transport`, for which the client needs `metadata`.

    `mac` proves that the server knows the token; it is empty where there is none.
    """

    version: _Number
    mac: _Mac
    transport: _Detail
    metadata: Annotated[bytes, msgspec.Meta(max_length=_MOST_METADATA)] = b""


class Refused(Message, frozen=True):
    """There is no such session, or there will be none; `detail` is for people."""

    reason: Reason
    detail: _Detail


class Found(Message, frozen=True):
    """Answers a lookup: one state for each key."""

    id: _Number
    states: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MOST_KEYS)]


class Chunk(Message, frozen=True):
    """The chunk at `index` of a fetch; its frame's header and its payload of `size` bytes come with it."""

    id: _Number
    index: _Index
    size: _Number


class Offer(Message, frozen=True):
    """Some chunks of a fetch: index, size of the payload in bytes, and address of each. Their headers come
    with it, one after another; the payload is to be read from the server's memory at the address, as long as
    the client has not acknowledged it or lost patience."""

    id: _Number
    chunks: Annotated[
        list[tuple[_Index, _Number, _Number]], msgspec.Meta(min_length=1, max_length=MOST_OFFERS)
    ]


class Missing(Message, frozen=True):
    """The chunks at `indexes` of a fetch are not there, or did not come in time."""

    id: _Number
    indexes: _Indexes


class Failed(Message, frozen=True):
    """A request is not served; the same may be asked again a little later."""

    id: _Number
    detail: _Detail


Request = Hello | Proof | Lookup | Fetch | Ack | Cancel | Goodbye
"""What a client sends."""
Answer = Challenge | Welcome | Refused | Found | Chunk | Offer | Missing | Failed
"""What a server sends."""

_encoder = msgspec.msgpack.Encoder(enc_hook=bytes)  # a key of any subclass of bytes is bytes
_requests = msgspec.msgpack.Decoder(Request)
_answers = msgspec.msgpack.Decoder(Answer)
# What the decoder raises for bytes that are no message; nesting too deep is a RecursionError.
_NO_MESSAGE = (msgspec.MsgspecError, ValueError, RecursionError)


def encode(message: Message) -> bytes:
    """`message` as bytes."""
    return _encoder.encode(message)


def decode_request(data: bytes) -> Request | None:
    """What a client sent; None when it is no message of a client."""
    if len(data) > CONTROL_LIMIT:
        return None
    try:
        return _requests.decode(data)
    except _NO_MESSAGE:
        return None


def decode_answer(data: bytes) -> Answer | None:
    """What a server sent; None when it is no message of a server."""
    if len(data) > CONTROL_LIMIT:
        return None
    try:
        return _answers.decode(data)
    except _NO_MESSAGE:
        return None


def prove(token: bytes, role: Literal["client", "server"], hello: Hello, nonce: bytes) -> bytes:
    """Proof that whoever plays `role` knows `token`, for the session of `hello` and the server's `nonce`.

    The whole hello is covered, so that nobody in between can have changed it.
    """
    said = b"\0".join((b"kvstore-peer", role.encode(), nonce, encode(hello)))
    return hmac.digest(token, said, "sha256")
