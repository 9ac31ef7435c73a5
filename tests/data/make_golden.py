"""Writes the golden files of the current format version into ``golden/v<version>``; run it once for each
version.

Golden files never change: a difference means that the format did, and asks for a new version.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from kvstore import frame
from kvstore.backends.layout import MANIFEST, object_name
from kvstore.namespace import Namespace

FOLDER = Path(__file__).parent / "golden"
NAMESPACE = Namespace({"model": "golden", "dtype": "bfloat16"}, chunk_size=8192)
CREATED_NS = 1_700_000_000_123_456_789
CHUNKS = [  # length of the key, length of the payload, padded
    (16, 8192, True),
    (16, 5000, True),
    (17, 5000, False),
    (32, 1, True),
    (64, 0, True),
]


def make_payload(number: int, size: int) -> bytes:
    """The payload of the golden chunk `number`."""
    return hashlib.shake_256(b"payload %d" % number).digest(size)


def make_key(number: int, size: int) -> bytes:
    """The key of the golden chunk `number`."""
    return hashlib.shake_256(b"key %d" % number).digest(size)


def main() -> None:
    """Write all golden files."""
    folder = FOLDER / f"v{frame.FORMAT_VERSION}" / NAMESPACE.directory
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_bytes(NAMESPACE.manifest)
    for number, (key_size, size, padded) in enumerate(CHUNKS):
        key, payload = make_key(number, key_size), make_payload(number, size)
        header = memoryview(bytearray(frame.HEADER_SIZE))
        frame.build(
            header,
            memoryview(payload),
            key=key,
            fingerprint=NAMESPACE.fingerprint,
            created_ns=CREATED_NS + number,
        )
        path = folder / object_name(key)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(header) + payload + bytes(-size % frame.ALIGNMENT if padded else 0))


if __name__ == "__main__":
    main()
