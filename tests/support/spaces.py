"""Two namespaces in one root, filled and damaged past any store: what scanner, repair and prune work on."""

from __future__ import annotations

from pathlib import Path

from kvstore.backends import create
from kvstore.backends.layout import object_name
from kvstore.config import TierConfig
from kvstore.namespace import Namespace
from kvstore.testing.backend import make_key

__all__ = ["CHUNK", "NAMESPACE", "OTHER", "file_of", "fill"]

CHUNK = 8192
NAMESPACE = Namespace({"model": "this"}, chunk_size=CHUNK)
OTHER = Namespace({"model": "other"}, chunk_size=CHUNK)


def fill(tier: TierConfig, *numbers: int, namespace: Namespace = NAMESPACE) -> None:
    """Store the chunks with these numbers; each byte of a payload is its number."""
    backend = create(tier, namespace)
    backend.open()
    for number in numbers:
        assert backend.write(make_key(number), memoryview(bytes([number]) * CHUNK))
    backend.close()


def file_of(folder: Path, number: int) -> Path:
    """Object of the chunk with this number, below the directory of its namespace."""
    return folder / object_name(make_key(number))
