"""What the examination of a storage finds out: each property is seen to hold, and seen to be violated."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest

from kvstore.backends.base import BackendContext, StoredObject
from kvstore.backends.layout import Entry
from kvstore.backends.memory import MemoryBackend, forget, namespaces
from kvstore.config import TierConfig
from kvstore.conformance import Finding, Report, examine

CHUNK = 4096
REQUIRED = {
    "round-trip", "absent", "visible", "deleted", "ranged-read", "short-object", "damaged-object", "manifest",
}  # fmt: skip


@pytest.fixture
def tier() -> Iterator[TierConfig]:
    yield TierConfig(url="memory://examined")
    forget("examined")


def by_name(report: Report) -> dict[str, Finding]:
    return {finding.name: finding for finding in report.findings}


def test_a_sound_storage(tier: TierConfig) -> None:
    told: list[str] = []
    report = examine(tier, chunk_size=CHUNK, quick=True, progress=told.append)
    assert report.ok
    found = by_name(report)
    unknown = {"first-process-wins", "time-outs"}  # one process; calls that take no time
    assert {name for name, finding in found.items() if finding.holds is not True} == unknown
    assert all(finding.holds is None for name, finding in found.items() if name in unknown)
    assert {finding.name for finding in report.findings if finding.required} == REQUIRED
    assert all(finding.detail and finding.consequence for finding in report.findings)
    assert told == [*found, "speed"]


def test_figures_make_sense(tier: TierConfig) -> None:
    speed = examine(tier, chunk_size=CHUNK, quick=True).speed
    assert speed is not None
    assert speed.operations == 32
    assert speed.clients == tier.workers
    for latency in (speed.probe, speed.write, speed.read):
        assert 0 < latency.p50 <= latency.p99 < 1
    assert speed.write_rate > CHUNK
    assert speed.read_rate > CHUNK


def test_everything_is_removed(tier: TierConfig) -> None:
    """And what others have in the same storage stays."""
    context = BackendContext(bytes(16), b"others", CHUNK)
    other = MemoryBackend(context, "examined", "others")
    other.open()
    other.write(bytes(16), memoryview(b"mine"))
    report = examine(tier, chunk_size=CHUNK, quick=True)
    assert dict(namespaces("examined")) == {"others": b"others", report.namespace: None}
    assert list(MemoryBackend(context, "examined", report.namespace).entries()) == []
    assert [row.key for row in other.scan()] == [bytes(16)]


def test_a_storage_that_cannot_be_opened() -> None:
    with pytest.raises(OSError):
        examine(TierConfig(url="file:///proc/nowhere"), quick=True)


# Storages that are broken on purpose.


class Damaging(MemoryBackend):
    def put_object(self, key: bytes, header: memoryview, payload: memoryview) -> bool:
        harmed = bytearray(payload)
        harmed[:1] = bytes([harmed[0] ^ 1]) if harmed else b""
        return super().put_object(key, header, memoryview(harmed))


class Inventing(MemoryBackend):
    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [True] * len(keys)


class RememberingAbsence(MemoryBackend):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.absent: set[bytes] = set()

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        found = [
            there and key not in self.absent for key, there in zip(keys, super().exists(keys), strict=True)
        ]
        self.absent.update(key for key, there in zip(keys, found, strict=True) if not there)
        return found


class NeverDeleting(MemoryBackend):
    def delete(self, keys: Sequence[bytes]) -> None:
        pass


class RememberingObjects(MemoryBackend):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen: dict[bytes, tuple[int, bytes, bytes]] = {}

    def get_object(self, key: bytes, header: memoryview, payload: memoryview) -> int | None:
        size = super().get_object(key, header, payload)
        if size is not None:
            self.seen[key] = size, bytes(header), bytes(payload)
        elif key in self.seen:
            size, header[:], payload[:] = self.seen[key]
        return size

    def delete(self, keys: Sequence[bytes]) -> None:
        super().delete(keys)
        for key in keys:
            self.seen.pop(key, None)


class RememberingListings(MemoryBackend):
    rows: list[StoredObject] | None = None

    def scan(self) -> Iterator[StoredObject]:
        if self.rows is None:
            self.rows = list(super().scan())
        return iter(self.rows)


class WritingInSteps(MemoryBackend):
    def put_object(self, key: bytes, header: memoryview, payload: memoryview) -> bool:
        created = super().put_object(key, header, payload[: len(payload) // 2])
        if created:
            time.sleep(0.002)
            super().delete([key])
            super().put_object(key, header, payload)
        return created


class Overwriting(MemoryBackend):
    def put_object(self, key: bytes, header: memoryview, payload: memoryview) -> bool:
        super().delete([key])
        super().put_object(key, header, payload)
        return True


class Trusting(MemoryBackend):
    def read_into(self, key: bytes, out: memoryview) -> int | None:
        size = self.get_object(key, memoryview(bytearray(CHUNK)), out)
        return None if size is None else max(0, min(size - 4096, len(out)))


class Unmovable(MemoryBackend):
    def set_aside(self, name: str) -> bool:
        return False


class Credulous(MemoryBackend):
    def _check(self, manifest: bytes) -> None:
        pass


class Ignorant(MemoryBackend):
    """Of the size of what it reads."""

    def get_object(self, key: bytes, header: memoryview, payload: memoryview) -> int | None:
        size = super().get_object(key, header, payload)
        return None if size is None else min(size, len(header) + len(payload))


class Slow(MemoryBackend):
    """Slower than what the test calls too slow."""

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        time.sleep(0.003)
        return super().exists(keys)


class OutOfTime(MemoryBackend):
    def entries(self, after: str = "") -> Iterator[Entry]:
        return (entry._replace(mtime=entry.mtime - 3600) for entry in super().entries(after))


BROKEN = {
    Damaging: {"round-trip", "visible", "atomic-create"},
    Inventing: {"absent", "visible", "deleted"},
    RememberingAbsence: {"visible"},
    NeverDeleting: {"deleted", "deletion-visible", "listed"},
    RememberingObjects: {"deletion-visible"},
    RememberingListings: {"listed"},
    WritingInSteps: {"atomic-create"},
    Overwriting: {"conditional-write", "first-writer-wins"},
    Trusting: {"short-object", "damaged-object"},
    Unmovable: {"quarantine"},
    Credulous: {"manifest"},
    Ignorant: {"ranged-read", "damaged-object"},
    Slow: {"time-outs"},
    OutOfTime: {"times"},
}


@pytest.mark.parametrize(
    ("broken", "expected"), BROKEN.items(), ids=lambda value: getattr(value, "__name__", "")
)
def test_a_broken_storage(
    tier: TierConfig, monkeypatch: pytest.MonkeyPatch, broken: type[MemoryBackend], expected: set[str]
) -> None:
    if broken is Slow:
        monkeypatch.setattr("kvstore.conformance._properties._NOTICED", 0.002)
    with patch("kvstore.backends.memory.MemoryBackend", broken):
        report = examine(tier, chunk_size=CHUNK, quick=True)
    violated = {finding.name for finding in report.findings if finding.holds is False}
    assert expected <= violated
    assert report.ok is not bool(violated & REQUIRED)
    if broken not in (Damaging, Inventing, NeverDeleting):  # which spoil nearly everything
        assert violated == expected
    assert (report.speed is None) is (broken is Damaging)
