"""One directory on a network file system, used from two mounts of it, as from two machines.

What was stored by one mount is there by the other, whole, and stays. This file system does not decide between
writers at the same moment: both may take the object for theirs, or it may be lost, which is a miss. Its locks
are those of one mount, within which a capacity holds. ``docs/how-to/share-a-directory.md`` says what follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from kvstore.backends import BackendContext
from kvstore.backends.posix import PosixBackend
from kvstore.errors import CorruptChunkError
from support.fleet import CHUNK, CHUNKS, Fleet, content, key_of, open_store
from support.fleets import DirectoryFleet

KEYS = 50
ONE, OTHER = b"1" * CHUNK, b"2" * CHUNK
#: Of all that a fleet may store.
EXPECTED = {key_of(number): content(number) for number in range(10 * CHUNKS)}


class MountedFleet(Fleet):
    """A fleet without limits whose processes are on the mounts by turns."""

    def __init__(self, roots: tuple[Path, Path], folder: Path) -> None:
        self.tiers: list[dict[str, Any]] = [{"url": f"file://{root}", "capacity": None} for root in roots]
        super().__init__(self.tiers[0], folder)

    def start(self, model: str = "fleet") -> None:
        self.tier = self.tiers[len(self.processes) % 2]
        super().start(model)

    def used(self) -> int:
        raise AssertionError("it has no limits")

    def leader(self) -> int | None:
        raise AssertionError("it has no limits")


@pytest.fixture
def roots(two_mounts: tuple[Path, Path]) -> tuple[Path, Path]:
    """A new directory, by both mounts."""
    name = f"kv-{uuid4().hex[:12]}"
    first, second = (mount / name for mount in two_mounts)
    first.mkdir()
    return first, second


@pytest.fixture
def fleet(roots: tuple[Path, Path], tmp_path: Path) -> Iterator[MountedFleet]:
    fleet = MountedFleet(roots, tmp_path)
    yield fleet
    fleet.close()


@pytest.fixture
def backends(roots: tuple[Path, Path]) -> list[PosixBackend]:
    """One namespace, by both mounts."""
    context = BackendContext(bytes(16), b"manifest", CHUNK)
    backends = [PosixBackend(context, f"{root}/{bytes(16).hex()}") for root in roots]
    for backend in backends:
        backend.open()
    return backends


def read(backend: PosixBackend, number: int) -> bytes | None:
    out = memoryview(bytearray(CHUNK))
    try:
        length = backend.read_into(key_of(number), out)
    except CorruptChunkError:  # to a store it is a miss
        return None
    return None if length is None else bytes(out[:length])


def test_the_first_writer_wins_across_mounts(backends: list[PosixBackend]) -> None:
    for number in range(KEYS):
        first, second = backends if number % 2 else reversed(backends)
        assert first.write(key_of(number), memoryview(ONE))
        assert not second.write(key_of(number), memoryview(OTHER))
        assert [read(backend, number) for backend in backends] == [ONE, ONE]


def test_after_writes_at_the_same_moment_nobody_reads_anything_else(backends: list[PosixBackend]) -> None:
    with ThreadPoolExecutor(2) as pool:
        for number in range(KEYS):
            writes = [
                pool.submit(backend.write, key_of(number), memoryview(payload))
                for backend, payload in zip(backends, (ONE, OTHER), strict=True)
            ]
            assert any(write.result() for write in writes)
            for backend in backends:
                assert read(backend, number) in (ONE, OTHER, None)


@pytest.mark.timeout(300)
def test_a_fleet_on_two_mounts_reads_what_was_stored(fleet: MountedFleet) -> None:
    for _ in range(4):
        fleet.start()
    fleet.all_write(120)
    fleet.all_write(120)
    fleet.close()
    assert fleet.complaints() == []
    found = []
    for tier in fleet.tiers:
        with open_store({**tier, "write": "off"}) as store:
            found.append(store.get_many(sorted(EXPECTED)))
    for chunks in found:
        assert all(EXPECTED[key] == data for key, data in chunks.items())
    assert found[0].keys() & found[1].keys(), "what is stored is there by both mounts"


@pytest.fixture
def fleet_of_one_mount(roots: tuple[Path, Path]) -> Iterator[DirectoryFleet]:
    fleet = DirectoryFleet(roots[0])
    yield fleet
    fleet.close()


@pytest.mark.timeout(300)
def test_a_capacity_holds_within_a_mount(fleet_of_one_mount: DirectoryFleet) -> None:
    fleet = fleet_of_one_mount
    for _ in range(3):
        fleet.start()
    fleet.fill(timeout=120)
    fleet.all_write(120, meanwhile=fleet.check)
    fleet.close()
    assert fleet.complaints() == []
