"""A backend whose every answer is as long as it can be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore import Namespace, TierConfig
from kvstore.backends import Backend, BackendContext, StoredObject

__all__ = ["WordyBackend", "make_wordy"]


class WordyBackend(Backend):
    """Has nothing to say for probes, 20,000 objects with the longest keys in a scan, and long errors."""

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys)

    def get_object(self, key: bytes, header: memoryview, payload: memoryview) -> int | None:
        raise OSError("no " * 10_000)

    def put_object(self, key: bytes, header: memoryview, payload: memoryview) -> bool:
        raise OSError("no " * 10_000)

    def delete(self, keys: Sequence[bytes]) -> None:
        raise OSError("no " * 10_000)

    def scan(self) -> Iterator[StoredObject]:
        for number in range(20_000):
            yield StoredObject(number.to_bytes(64, "little"), 8192, 1.7e9 + number)


def make_wordy(tier: TierConfig, namespace: Namespace) -> WordyBackend:
    """A backend factory."""
    return WordyBackend(BackendContext(namespace.fingerprint, namespace.manifest, namespace.chunk_size))
