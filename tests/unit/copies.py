"""Chunks that tests of copying put into a tier, and what they find in another."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import kvstore
from kvstore.config import TierConfig
from kvstore.scan import Summary, scan, spaces

__all__ = [
    "BYTES",
    "CHUNK",
    "CHUNKS",
    "DATA",
    "DIRECTORY",
    "KEYS",
    "chunk_file",
    "fill",
    "flip",
    "keys_in",
    "nothing_wrong",
    "served",
]

CHUNK = 4096
#: More than two batches for each of two workers.
CHUNKS = 100
MODEL = {"model": "m"}
DIRECTORY = kvstore.Namespace(MODEL, CHUNK).directory


def payload(number: int) -> bytes:
    return bytes([number]) * (CHUNK - number)


def key_of(number: int) -> bytes:
    return bytes([number]) * 16


DATA = {key_of(number): payload(number) for number in range(CHUNKS)}
KEYS = list(DATA)
BYTES = sum(map(len, DATA.values()))


def fill(root: Path, model: dict[str, str] = MODEL, keys: Iterable[bytes] = KEYS) -> Path:
    """Store chunks in a tier, and return the directory of their namespace."""
    with kvstore.open("ram://?capacity=2MiB", str(root), namespace=model, chunk_size=CHUNK) as store:
        store.put_many({key: DATA[key] for key in keys})
    return root / kvstore.Namespace(model, CHUNK).directory


def chunk_file(folder: Path, key: bytes) -> Path:
    return folder / key.hex()[:2] / f"{key.hex()}.kv"


def flip(path: Path) -> None:
    """Change a bit of a chunk's payload."""
    data = bytearray(path.read_bytes())
    data[4096] ^= 1
    path.write_bytes(data)


def keys_in(folder: Path) -> set[bytes]:
    return {bytes.fromhex(path.stem) for path in folder.glob("*/*.kv")}


def served(root: Path, model: dict[str, str] = MODEL) -> dict[bytes, bytes]:
    """What a store that opens the tier serves."""
    with kvstore.open("ram://?capacity=2MiB", str(root), namespace=model, chunk_size=CHUNK) as store:
        return store.get_many(KEYS)


def nothing_wrong(root: Path) -> bool:
    summary = Summary()
    for space in spaces(TierConfig(url=str(root))):
        for finding in scan(space):
            summary.add(finding)
    return summary.ok
