"""A reader of kvstore's objects written from docs/reference/format.md alone; it imports nothing of
kvstore."""

from __future__ import annotations

import struct
from pathlib import Path

import xxhash


def read_object(path: Path) -> tuple[bytes, bytes, int, bytes]:
    """Key, namespace fingerprint, creation time in nanoseconds and payload of the object at `path`."""
    data = path.read_bytes()
    header, rest = data[:4096], data[4096:]
    assert len(header) == 4096, "torn header"
    assert header[0:8] == bytes.fromhex("93 4b 56 43 48 4e 4b 0a"), "magic"
    version, flags, key_length = struct.unpack("<HHH", header[8:14])
    assert version == 1, "version"
    assert xxhash.xxh3_128(header[:4080]).digest() == header[4080:], "header checksum"
    assert flags == 0, "flags"
    fingerprint = header[16:32]
    length, created = struct.unpack("<QQ", header[32:48])
    key = header[64 : 64 + key_length]
    assert 0 < key_length <= 64 and header[64 + key_length : 4080].strip(b"\0") == b"", "key"
    assert len(rest) in (length, (length + 4095) // 4096 * 4096), "size"
    payload = rest[:length]
    assert xxhash.xxh3_128(payload).digest() == header[48:64], "payload checksum"
    assert path.name == key.hex() + ".kv" and path.parent.name == key.hex()[:2], "name"
    assert path.parent.parent.name == fingerprint.hex(), "namespace"
    return key, fingerprint, created, payload
