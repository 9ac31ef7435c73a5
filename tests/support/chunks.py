"""Chunks that say whose they are: from the bytes alone a test can tell which key and which version they are
of."""

from __future__ import annotations

import hashlib

__all__ = ["CHUNK", "chunk_key", "payload", "version_of"]

#: Chunk size of the stores in tests (bytes); in the arena a slot takes a page.
CHUNK = 64
_HEAD = 18


def chunk_key(number: int) -> bytes:
    """A key of 16 bytes that is easy to tell in a debugger."""
    return bytes([number]) * 16


def payload(key: bytes, version: int = 0) -> bytes:
    """Bytes of one version of a chunk; their length depends on the version."""
    head = key[:16] + version.to_bytes(2)
    body = hashlib.shake_256(head).digest(CHUNK - _HEAD)
    return (head + body)[: CHUNK - 5 * (version % 9)]


def version_of(key: bytes, data: bytes) -> int:
    """Version of `data`; AssertionError when it is not exactly a chunk of `key`."""
    version = int.from_bytes(data[16:_HEAD])
    assert data == payload(key, version), f"{data.hex()} was never stored under {key.hex()}"
    return version
