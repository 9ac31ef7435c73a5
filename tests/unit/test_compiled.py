"""The compiled part of the POSIX backend: where it is used, and what it has in common with the steps."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import pytest
from xxhash import xxh3_128_digest

from kvstore import frame
from kvstore.backends import compiled, create
from kvstore.backends.base import BackendContext
from kvstore.backends.compiled import CompiledBackend
from kvstore.backends.posix import PosixBackend
from kvstore.config import TierConfig
from kvstore.errors import CorruptChunkError
from kvstore.namespace import Namespace
from kvstore.testing.backend import make_key
from support.programs import run

SIZE = 600_000
CONTEXT = BackendContext(b"f" * 16, b"{}", SIZE)
KEY = make_key(1)

needs_it = pytest.mark.skipif(bool(compiled.why_not()), reason=f"nothing compiled here: {compiled.why_not()}")


def make_slot(content: bytes = b"") -> memoryview:
    slot = memoryview(mmap.mmap(-1, SIZE))
    slot[: len(content)] = content
    return slot


@pytest.fixture
def backend(tmp_path: Path) -> CompiledBackend:
    backend = CompiledBackend(CONTEXT, str(tmp_path))
    backend.open()
    (tmp_path / KEY.hex()[:2]).mkdir()
    return backend


def object_path(folder: Path) -> Path:
    return folder / KEY.hex()[:2] / f"{KEY.hex()}.kv"


# Where it is used.


def made_for(folder: Path) -> type:
    return type(create(TierConfig(url=f"file://{folder}"), Namespace({}, chunk_size=SIZE)))


@needs_it
def test_directories_get_it(tmp_path: Path) -> None:
    assert made_for(tmp_path) is CompiledBackend


def test_it_can_be_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_COMPILED", "off")
    assert compiled.why_not() == "KVSTORE_COMPILED=off"
    assert made_for(tmp_path) is PosixBackend


def test_a_store_works_where_nothing_was_compiled(tmp_path: Path) -> None:
    said = run(
        """
        import sys
        sys.modules["kvstore.backends._calls"] = None
        import kvstore
        from kvstore.backends import compiled

        with kvstore.open("ram://?capacity=1MiB", f"file://{sys.argv[1]}", chunk_size="64KiB") as store:
            store.put(bytes(16), b"hello")
        with kvstore.open("ram://?capacity=1MiB", f"file://{sys.argv[1]}", chunk_size="64KiB") as store:
            print(store.get(bytes(16)), compiled.why_not())
        """,
        tmp_path,
    )
    assert said == "b'hello' the package was built without a C compiler"


@needs_it
def test_a_library_without_the_hash_is_refused_and_changes_nothing(backend: CompiledBackend) -> None:
    from kvstore.backends import _calls

    for path, why in [(_calls.__file__, "keeps its functions to itself"), ("/nowhere/x.so", "/nowhere/x.so")]:
        with pytest.raises(ImportError, match=why):
            _calls.bind(path)
    assert backend.write(KEY, make_slot())
    assert backend.read_into(KEY, make_slot()) == SIZE


# What it has in common with the steps.


@needs_it
@pytest.mark.parametrize("size", [0, 1, 240, 241, 5000, 1 << 18, SIZE])
def test_it_writes_what_the_steps_would_have_written(
    backend: CompiledBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(frame.time, "time_ns", lambda: 12345)
    payload = os.urandom(size)
    assert backend.write(KEY, make_slot(payload)[:size])
    found = object_path(tmp_path).read_bytes()
    os.unlink(object_path(tmp_path))
    assert PosixBackend.put_object is CompiledBackend.put_object
    assert super(CompiledBackend, backend).write(KEY, make_slot(payload)[:size])
    assert object_path(tmp_path).read_bytes() == found


@needs_it
@pytest.mark.parametrize("piece", [1, 64, 1000, 1 << 18, 1 << 30])
def test_the_hash_is_that_of_the_package(backend: CompiledBackend, piece: int) -> None:
    from kvstore.backends import _calls

    data = os.urandom(50_000)
    for size in (*range(300), 1023, 1024, 1025, 50_000):
        assert _calls.digest(data[:size], piece) == xxh3_128_digest(data[:size])


@needs_it
@pytest.mark.parametrize(("age", "is_stamped"), [(30, False), (120, True)])
def test_what_is_read_counts_as_used(
    backend: CompiledBackend, tmp_path: Path, age: int, is_stamped: bool
) -> None:
    backend.write(KEY, make_slot())
    path = object_path(tmp_path)
    before = path.stat().st_mtime - age
    os.utime(path, (before, before))
    assert backend.read_into(KEY, make_slot()) == SIZE
    assert (path.stat().st_mtime > before + 1) is is_stamped


@needs_it
def test_who_only_reads_leaves_no_stamp(backend: CompiledBackend, tmp_path: Path) -> None:
    backend.write(KEY, make_slot())
    os.utime(object_path(tmp_path), (1000, 1000))
    reader = CompiledBackend(CONTEXT, str(tmp_path), stamp=False)
    reader.open()
    assert reader.read_into(KEY, make_slot()) == SIZE
    assert object_path(tmp_path).stat().st_mtime == 1000


@needs_it
@pytest.mark.parametrize("options", [{"durability": "data"}, {"durability": "full"}, {"mode": 0o666}])
def test_what_it_does_not_know_goes_by_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict
) -> None:
    monkeypatch.delattr("kvstore.backends._calls.put")
    backend = CompiledBackend(CONTEXT, str(tmp_path), **options)
    backend.open()
    assert backend.write(KEY, make_slot())
    assert backend.read_into(KEY, make_slot()) == SIZE


# What it does not do.


@needs_it
def test_nobody_waits_for_the_interpreter_meanwhile(backend: CompiledBackend, tmp_path: Path) -> None:
    """To open a FIFO takes until somebody else opens it, too: this thread, while the other is in its call."""
    os.mkfifo(object_path(tmp_path))
    failed: list[OSError] = []

    def read() -> None:
        try:
            backend.read_into(KEY, make_slot())
        except OSError as error:
            failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    with open(object_path(tmp_path), "wb"):
        pass
    reader.join()
    assert len(failed) == 1  # a FIFO cannot be read at a place


@needs_it
def test_it_keeps_no_buffer(backend: CompiledBackend) -> None:
    memory = mmap.mmap(-1, SIZE)
    slot = memoryview(memory)
    backend.write(KEY, slot)
    backend.write(KEY, slot)
    backend.read_into(KEY, slot)
    backend.read_into(make_key(2), slot)
    os.truncate(object_path(Path(backend.path)), 5000)
    with pytest.raises(CorruptChunkError):
        backend.read_into(KEY, slot)
    slot.release()
    memory.close()  # raises while anybody has a buffer of it


@needs_it
def test_nonsense_is_refused() -> None:
    from kvstore.backends import _calls

    header, slot = memoryview(bytearray(4096)), make_slot()
    with pytest.raises(ValueError, match="no room"):
        _calls.put("/nowhere/a", "/nowhere/b", 0o600, header, slot, 4080)
    with pytest.raises(ValueError, match="no room"):
        _calls.get("/nowhere/a", header, slot, -1, 0.0)
    with pytest.raises((TypeError, BufferError)):
        _calls.get("/nowhere/a", memoryview(bytes(4096)), slot, 32, 0.0)
    with pytest.raises(ValueError, match="null"):
        _calls.get("/no\0where", header, slot, 32, 0.0)
    assert _calls.get("/nowhere/a", header, slot, 32, 0.0) is None
