"""A bad object is moved aside, but not a good one that has taken its place since it was read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.backends.base import BackendContext
from kvstore.backends.files import FileBackend
from kvstore.backends.generic import GenericBackend
from kvstore.backends.layout import Kind, object_name
from kvstore.backends.memory import MemoryBackend, forget
from kvstore.backends.posix import PosixBackend
from kvstore.backends.s3 import S3Backend
from kvstore.errors import CorruptChunkError
from kvstore.testing.backend import make_key
from support.object_store import Bucket

SIZE = 8192
SPACE = "00ff" * 8
CONTEXT = BackendContext(bytes.fromhex(SPACE), b"{}", SIZE)
KEY = make_key(1)
GOOD = bytes(range(256)) * 32

Maker = Callable[[], FileBackend]


@pytest.fixture(params=["posix", "generic", "memory", "s3"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Maker]:
    """Makes backends of one storage, each as a store of its own would."""
    bucket: Bucket | None = request.getfixturevalue("moto_bucket") if request.param == "s3" else None
    made: list[FileBackend] = []

    def make_one() -> FileBackend:
        backend: FileBackend
        match request.param:
            case "posix":
                backend = PosixBackend(CONTEXT, f"{tmp_path}/{SPACE}")
            case "generic":
                backend = GenericBackend(CONTEXT, f"file://{tmp_path}", SPACE)
            case "memory":
                backend = MemoryBackend(CONTEXT, str(tmp_path), SPACE)
            case _:
                assert bucket is not None
                backend = S3Backend(CONTEXT, bucket.url, SPACE, bucket.options)
        made.append(backend)
        backend.open()
        return backend

    yield make_one
    for backend in made:
        backend.close()
    forget(str(tmp_path))


def read(backend: FileBackend) -> bytes | None:
    out = memoryview(bytearray(SIZE))
    length = backend.read_into(KEY, out)
    return None if length is None else bytes(out[:length])


def kinds(backend: FileBackend) -> list[Kind]:
    found = [entry.kind for entry in backend.entries()]
    return sorted((kind for kind in found if kind is not Kind.MANIFEST), key=lambda kind: kind.value)


@pytest.fixture
def late(make: Maker) -> FileBackend:
    """Has read a bad object, and is about to move it aside."""
    backend = make()
    assert backend.create_file(object_name(KEY), b"torn")
    with pytest.raises(CorruptChunkError):
        read(backend)
    return backend


def test_a_bad_object_is_moved(late: FileBackend) -> None:
    assert late.quarantine(KEY)
    assert kinds(late) == [Kind.QUARANTINED]


def test_a_good_object_that_took_its_place_stays(late: FileBackend, make: Maker) -> None:
    faster = make()
    assert faster.quarantine(KEY)
    assert faster.write(KEY, memoryview(GOOD))
    assert not late.quarantine(KEY)
    assert read(late) == GOOD
    assert kinds(late) == [Kind.OBJECT, Kind.QUARANTINED]


def test_a_good_object_too_large_for_a_chunk_is_moved(make: Maker, tmp_path: Path) -> None:
    """It is refused each time, so it must not come back."""
    backend = make()
    assert backend.write(KEY, memoryview(GOOD * 2))
    assert backend.quarantine(KEY)
    assert kinds(backend) == [Kind.QUARANTINED]


@pytest.mark.parametrize("make", ["posix", "generic"], indirect=True)
def test_a_name_that_is_taken_once_more_stays_so(
    late: FileBackend, make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While what was moved is examined, the chunk is written anew: one of the two, which are equal, goes."""
    faster = make()
    assert faster.quarantine(KEY)
    assert faster.write(KEY, memoryview(GOOD))
    examine = late.is_sound

    def write_meanwhile(name: str, data: bytes) -> bool:
        assert faster.write(KEY, memoryview(GOOD))
        return examine(name, data)

    monkeypatch.setattr(late, "is_sound", write_meanwhile)
    assert not late.quarantine(KEY)
    assert read(late) == GOOD
    assert kinds(late) == [Kind.OBJECT, Kind.QUARANTINED]
