"""The on-storage frame of a chunk: a 4096-byte header, then the payload.

``docs/reference/format.md`` specifies the bytes. Everything in the header is covered by the header's
checksum, the payload by its own; both are xxh3-128. An object may be followed by zeros up to a multiple of
4096 bytes.
"""

from __future__ import annotations

import struct
import time
from typing import NamedTuple, NoReturn

from xxhash import xxh3_128, xxh3_128_digest

from .errors import CorruptChunkError

__all__ = [
    "ALIGNMENT",
    "DIGEST_OFFSET",
    "FORMAT_VERSION",
    "HEADER_SIZE",
    "LENGTH_OFFSET",
    "MAX_KEY",
    "ForeignChunkError",
    "Header",
    "RunningDigest",
    "announced_length",
    "build",
    "digest_of",
    "draft",
    "is_whole",
    "object_size",
    "parse",
    "verify",
]

HEADER_SIZE = 4096
ALIGNMENT = 4096
"""Local files are padded with zeros to a multiple of this, which direct I/O asks for."""

FORMAT_VERSION = 1
MAX_KEY = 64
LENGTH_OFFSET = 32
"""Where a header has the length of the payload, 64 bits, little-endian."""

DIGEST_OFFSET = 48
"""Where a header has the checksum of the payload, 16 bytes."""

_MAGIC = b"\x93KVCHNK\n"
_FLAGS = 0
_FIELDS = struct.Struct(f"<8sHHHxx16sQQ16s{MAX_KEY}s")
_START = struct.Struct("<8sH")
_LENGTH = struct.Struct("<Q")
_DIGEST_SIZE = 16
_COVERED = HEADER_SIZE - _DIGEST_SIZE


#: Computes the checksum of a payload that comes piece by piece.
RunningDigest = xxh3_128


def object_size(length: int) -> int:
    """Bytes that a chunk of `length` payload bytes takes on storage: header, payload, padding."""
    return HEADER_SIZE + -(-length // ALIGNMENT) * ALIGNMENT


class ForeignChunkError(CorruptChunkError):
    """The header is sound, but it is that of another key or another namespace."""

    kind = "foreign"


class Header(NamedTuple):
    """What a sound header says.

    ``length`` is that of the payload in bytes, ``created_ns`` the writer's clock in nanoseconds since the
    epoch, ``digest`` the xxh3-128 of the payload in canonical (big-endian) form.
    """

    key: bytes
    fingerprint: bytes
    length: int
    created_ns: int
    digest: bytes


def build(
    header: memoryview,
    payload: memoryview,
    *,
    key: bytes,
    fingerprint: bytes,
    created_ns: int | None = None,
    digest: bytes | None = None,
) -> None:
    """Fill `header` for `payload`.

    Parameters
    ----------
    header : memoryview
        Writable, :data:`HEADER_SIZE` bytes; all of it is overwritten.
    payload : memoryview
        The chunk, contiguous bytes.
    key : bytes
        At most :data:`MAX_KEY` bytes.
    fingerprint : bytes
        Of the namespace, 16 bytes.
    created_ns : int, optional
        Nanoseconds since the epoch; now, if not given.
    digest : bytes, optional
        Checksum of the payload, for a writer that has computed it before; see :func:`digest_of`.

    Raises
    ------
    ValueError
        The key or the fingerprint has a length that the format has no room for.
    """
    digest = digest_of(payload) if digest is None else digest
    covered = _pack(key, fingerprint, payload.nbytes, created_ns, digest)
    header[:_COVERED] = covered
    header[_COVERED:] = xxh3_128_digest(covered)


def draft(header: memoryview, length: int, *, key: bytes, fingerprint: bytes) -> None:
    """Fill `header` as :func:`build` does, but for the two checksums: whoever has the payload puts its own at
    :data:`DIGEST_OFFSET`, and behind all of it that of all of it."""
    header[:_COVERED] = _pack(key, fingerprint, length, None, bytes(_DIGEST_SIZE))


def _pack(key: bytes, fingerprint: bytes, length: int, created_ns: int | None, digest: bytes) -> bytes:
    if not 0 < len(key) <= MAX_KEY or len(fingerprint) != _DIGEST_SIZE:
        raise ValueError(f"no frame for a key of {len(key)} and a fingerprint of {len(fingerprint)} bytes")
    created = time.time_ns() if created_ns is None else created_ns
    packed = _FIELDS.pack(_MAGIC, FORMAT_VERSION, _FLAGS, len(key), fingerprint, length, created, digest, key)
    return packed.ljust(_COVERED, b"\0")


def digest_of(payload: memoryview) -> bytes:
    """Checksum of a payload, as it stands in the header."""
    return xxh3_128_digest(payload)


def parse(header: memoryview) -> Header:
    """Read a header and check it in itself.

    Raises
    ------
    CorruptChunkError
        It is no header, is of a newer format, or its checksum does not hold.
    """
    magic, version = _START.unpack_from(header)
    if magic != _MAGIC:
        _refuse("bad magic: this is no kvstore object")
    if version > FORMAT_VERSION:
        _refuse(f"format version {version} is newer than the {FORMAT_VERSION} that this kvstore reads")
    if xxh3_128_digest(header[:_COVERED]) != header[_COVERED:]:
        _refuse("header checksum does not hold")
    _, version, flags, key_length, fingerprint, length, created, digest, key = _FIELDS.unpack_from(header)
    if version != FORMAT_VERSION or flags != _FLAGS or not 0 < key_length <= MAX_KEY:
        _refuse(f"impossible header: version {version}, flags {flags:#x}, key of {key_length} bytes")
    return Header(key[:key_length], fingerprint, length, created, digest)


def announced_length(header: memoryview) -> int:
    """Length of the payload in bytes, as an unchecked `header` has it."""
    (length,) = _LENGTH.unpack_from(header, LENGTH_OFFSET)
    return int(length)


def is_whole(header: memoryview, size: int) -> bool:
    """Whether `size` bytes are all of the object that an unchecked `header` starts, padded or not."""
    if size < HEADER_SIZE:
        return False
    length = announced_length(header)
    rest = size - HEADER_SIZE
    return rest == length or rest == length + -length % ALIGNMENT


def verify(
    header: memoryview,
    out: memoryview,
    size: int,
    *,
    key: bytes,
    fingerprint: bytes,
    digest: bytes | None = None,
) -> int:
    """Check that an object is the one asked for, byte by byte.

    Parameters
    ----------
    header : memoryview
        The object's first :data:`HEADER_SIZE` bytes.
    out : memoryview
        What follows, as far as it fits.
    size : int
        Total size of the object in bytes.
    key, fingerprint : bytes
        What the object must be.
    digest : bytes, optional
        Checksum of the announced length of `out`, for a reader that has computed it on the way.

    Returns
    -------
    int
        Length of the payload, which is at the start of `out`.

    Raises
    ------
    ForeignChunkError
        It is an object of another key or namespace.
    CorruptChunkError
        It is torn, damaged, or of a newer format; the message says which.
    """
    try:
        if size < HEADER_SIZE:
            _refuse(f"torn: {size} bytes are less than a header")
        found = parse(header)
        if found.fingerprint != fingerprint:
            _refuse_foreign(f"of another namespace, {found.fingerprint.hex()}")
        if found.key != key:
            _refuse_foreign(f"of another key, {found.key.hex()}")
        length = found.length
        if not is_whole(header, size):
            _refuse(f"torn: {size} bytes, but the header announces a payload of {length}")
        if length > out.nbytes:
            _refuse(f"length: a payload of {length} does not fit a chunk of {out.nbytes} bytes")
        if (xxh3_128_digest(out[:length]) if digest is None else digest) != found.digest:
            _refuse("payload checksum does not hold")
    except CorruptChunkError as error:
        error.key = key
        raise
    return length


def _refuse(reason: str) -> NoReturn:
    raise CorruptChunkError(reason)


def _refuse_foreign(reason: str) -> NoReturn:
    raise ForeignChunkError(reason)
