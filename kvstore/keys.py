"""Chunk keys: what a key is, content keys, and chains of keys over token prefixes.

Keys are made with xxh3-128. It is fast and spreads well, but it is no cryptographic hash: it keeps honest
users apart, and does not withstand somebody who constructs collisions.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import xxhash

from .errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Buffer

__all__ = [
    "MAX_KEY_BYTES",
    "MIN_KEY_BYTES",
    "ChunkKey",
    "Fingerprinted",
    "check_keys",
    "content_key",
    "fingerprint_of",
    "plain_fields",
    "prefix_keys",
]

MIN_KEY_BYTES = 16
MAX_KEY_BYTES = 64
_TOKEN_BYTES = 8
_T = TypeVar("_T")


class ChunkKey(bytes):
    """Name of a chunk: 16 to 64 bytes. Equal to, and hashed as, the same plain ``bytes``.

    Raises
    ------
    TypeError
        The value is not bytes-like.
    ConfigError
        It has the wrong length.

    Examples
    --------
    >>> ChunkKey(bytes(range(16))).hex()
    '000102030405060708090a0b0c0d0e0f'
    >>> ChunkKey.fromhex("00" * 16) == bytes(16)
    True
    """

    __slots__ = ()

    def __new__(cls, value: Buffer) -> Self:
        """Check `value` and copy it."""
        key = super().__new__(
            cls, memoryview(value)
        )  # bytes(16) would be sixteen zeros: refuse what is no buffer
        _check_length(len(key), "the key")
        return key


class Fingerprinted(Protocol):
    """Anything with a fingerprint, such as a :class:`kvstore.Namespace`."""

    @property
    def fingerprint(self) -> bytes:
        """Digest of the identity fields."""


def check_keys(keys: Iterable[bytes]) -> list[bytes]:
    """List of `keys`, each checked to be 16 to 64 bytes.

    Parameters
    ----------
    keys : iterable of bytes

    Returns
    -------
    list of bytes
        A new list.

    Raises
    ------
    TypeError
        `keys` is a single key, or one of them is not ``bytes``.
    ConfigError
        One of them has the wrong length.

    Examples
    --------
    >>> check_keys([b"0123456789abcdef"])
    [b'0123456789abcdef']
    """
    if isinstance(keys, bytes | bytearray | memoryview | str):
        raise TypeError(f"keys must be an iterable of bytes, not one {type(keys).__name__}")
    found = list(keys)
    # This runs on every look-up of the caller's thread: only C loops where all is well.
    if not all(issubclass(kind, bytes) for kind in _distinct(list(map(type, found)))):
        index, wrong = next((i, key) for i, key in enumerate(found) if not isinstance(key, bytes))
        raise TypeError(f"key {index} must be bytes, not {type(wrong).__name__}")
    lengths = list(map(len, found))
    for length in _distinct(lengths):
        _check_length(length, "key", lengths)
    return found


def _distinct(values: list[_T]) -> set[_T]:
    """Set of `values`; counting the first one is faster than hashing all where they are the same."""
    if values and values.count(values[0]) == len(values):
        return {values[0]}
    return set(values)


def _check_length(length: int, what: str, lengths: Sequence[int] = ()) -> None:
    if not MIN_KEY_BYTES <= length <= MAX_KEY_BYTES:
        which = f"{what} {lengths.index(length)}" if lengths else what
        raise ConfigError(f"{which} has {length} bytes; keys have {MIN_KEY_BYTES} to {MAX_KEY_BYTES}")


def content_key(data: Buffer) -> ChunkKey:
    """Key of the bytes themselves: their xxh3-128 digest, 16 bytes, big-endian.

    Parameters
    ----------
    data : buffer
        Anything with a C-contiguous buffer: bytes, a memoryview, a NumPy array.

    Examples
    --------
    >>> content_key(b"abc").hex()
    '06b05ab6733a618578af5f94892f3950'
    """
    return ChunkKey(xxhash.xxh3_128_digest(memoryview(data)))


def plain_fields(fields: Mapping[str, object], what: str = "namespace") -> dict[str, Any]:
    """Copy of `fields` in plain JSON types: tuples become lists, subclasses their base types.

    Raises
    ------
    ConfigError
        A value, at any depth, has no exact form in JSON; the message names its field.
    """
    if not isinstance(fields, Mapping):
        raise ConfigError(f"{what} must be a mapping of fields, not {type(fields).__name__}")
    plain = {}
    for name, value in fields.items():
        if not isinstance(name, str):
            raise ConfigError(f"{what}: field names are strings, not {name!r}")
        plain[str.__str__(name)] = _plain(value, f"{what}.{name}")
    return plain


def _plain(value: object, where: str) -> object:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, Mapping):
        return plain_fields(value, where)
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    shown = repr(value) if isinstance(value, float) else type(value).__name__
    raise ConfigError(
        f"{where!r} is {shown}, which JSON cannot hold; use text, finite numbers, booleans, lists, mappings"
    )


def fingerprint_of(fields: Mapping[str, object]) -> bytes:
    """Digest of identity fields: xxh3-128 of their canonical JSON, 16 bytes.

    Canonical JSON is ASCII, without white space, with sorted names. The order of fields does not matter; the
    types of values do: 1, 1.0, True and "1" are different.

    Raises
    ------
    ConfigError
        A value has no exact form in JSON.

    Examples
    --------
    >>> fingerprint_of({"model": "m", "layers": 2}) == fingerprint_of({"layers": 2, "model": "m"})
    True
    >>> fingerprint_of({"layers": 2}) == fingerprint_of({"layers": 2.0})
    False
    """
    text = json.dumps(plain_fields(fields), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return xxhash.xxh3_128_digest(text.encode("ascii"))


def prefix_keys(
    token_ids: Sequence[int] | npt.NDArray[np.integer[Any]],
    chunk_tokens: int,
    namespace: Mapping[str, object] | Fingerprinted | None = None,
    extra: bytes | str | None = None,
) -> list[ChunkKey]:
    """Keys of the full chunks of a token sequence; each key stands for all tokens up to the end of its chunk.

    ``key[i]`` is the xxh3-128 digest of ``key[i - 1]`` followed by the tokens of chunk `i` as little-endian
    64-bit unsigned integers. Before the first chunk stands a seed made of `namespace` and `extra`.

    Parameters
    ----------
    token_ids : sequence or array of int, shape (n,)
        Tokens, not negative.
    chunk_tokens : int
        Tokens in a chunk, at least 1. Tokens after the last full chunk get no key.
    namespace : mapping or Namespace, optional
        Identity fields that keep keys apart; None is the same as no fields. A mapping counts as it is,
        whereas a ``Namespace`` has its chunk size and format among its fields, so the two give different
        keys.
    extra : bytes or str, optional
        What else tells requests apart: a tenant's salt, an adapter's identity. A str counts as its UTF-8
        bytes.

    Returns
    -------
    list of ChunkKey
        ``n // chunk_tokens`` keys of 16 bytes.

    Raises
    ------
    ConfigError
        `chunk_tokens` is below 1, or a token is negative or has more than 64 bits.
    TypeError
        The tokens are not one row of integers.

    Examples
    --------
    >>> keys = prefix_keys([1, 2, 3, 4, 5], chunk_tokens=2, namespace={"model": "m"}, extra="tenant-1")
    >>> len(keys), keys[:1] == prefix_keys([1, 2, 9], 2, {"model": "m"}, b"tenant-1")
    (2, True)
    """
    if chunk_tokens < 1:
        raise ConfigError(f"chunk_tokens must be at least 1, not {chunk_tokens}")
    tokens = _encode_tokens(token_ids).data.cast("B")
    step = chunk_tokens * _TOKEN_BYTES
    previous = _chain_seed(namespace, extra)
    keys = []
    for start in range(0, len(tokens) - step + 1, step):
        previous = xxhash.xxh3_128_digest(previous + tokens[start : start + step])
        keys.append(ChunkKey(previous))
    return keys


def _encode_tokens(token_ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.uint64]:
    import numpy as np  # see store.py: workers are to start fast

    if not isinstance(token_ids, np.ndarray):
        # np.asarray makes floats of large integers, and array() reads bytes as raw memory unless iterated.
        try:
            return np.array(array("Q", iter(token_ids)), "<u8")
        except OverflowError:
            raise ConfigError("token_ids: a token is negative or has more than 64 bits") from None
    if token_ids.dtype.kind not in "iu" or token_ids.ndim != 1:
        shape = f"{token_ids.ndim} dimensions of {token_ids.dtype}"
        raise TypeError(f"token_ids must be one row of integers, not {shape}")
    if token_ids.size and token_ids.min() < 0:
        raise ConfigError(f"token_ids: a token is negative: {token_ids.min()}")
    return np.ascontiguousarray(token_ids, "<u8")


def _chain_seed(namespace: Mapping[str, object] | Fingerprinted | None, extra: bytes | str | None) -> bytes:
    if namespace is None or isinstance(namespace, Mapping):
        fingerprint = fingerprint_of(namespace or {})
    else:
        fingerprint = namespace.fingerprint
    salt = extra.encode() if isinstance(extra, str) else extra
    # The marker keeps "no extra" and "an empty extra" apart.
    return xxhash.xxh3_128_digest(fingerprint + (b"\0" if salt is None else b"\1" + salt))
