"""The compiled part of the POSIX backend: where it is used, and what it has in common with the steps."""

from __future__ import annotations

import mmap
import os
import shutil
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
from kvstore.errors import ConfigError, CorruptChunkError
from kvstore.namespace import Namespace
from kvstore.testing.backend import make_key
from support.compiled import needs_compiled
from support.programs import run

SIZE = 600_000
CONTEXT = BackendContext(b"f" * 16, b"{}", SIZE)
KEY = make_key(1)


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


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)")
def test_it_is_there_where_a_compiler_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSTORE_COMPILED", raising=False)
    assert compiled.why_not() == ""


@needs_compiled
def test_directories_get_it(tmp_path: Path) -> None:
    assert made_for(tmp_path) is CompiledBackend


def test_it_can_be_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_COMPILED", "off")
    assert compiled.why_not() == "KVSTORE_COMPILED=off"
    assert made_for(tmp_path) is PosixBackend
    monkeypatch.setenv("KVSTORE_COMPILED", "no")
    with pytest.raises(ConfigError, match="KVSTORE_COMPILED is 'on' or 'off', not 'no'"):
        made_for(tmp_path)


def test_a_store_works_where_nothing_was_compiled(tmp_path: Path) -> None:
    said = run(
        """
        import os
        import sys

        os.environ.pop("KVSTORE_COMPILED", None)
        sys.modules["kvstore.backends._calls"] = None
        import kvstore
        from kvstore.backends import compiled

        for _ in range(2):
            with kvstore.open("ram://?capacity=1MiB", f"file://{sys.argv[1]}", chunk_size="64KiB") as store:
                print(store.get(bytes(16)))
                store.put(bytes(16), b"hello")
        print(compiled.why_not())
        """,
        tmp_path,
    )
    assert said.splitlines()[:2] == ["None", "b'hello'"]
    assert "its compiled part was not built, or cannot be loaded: " in said


@needs_compiled
def test_a_library_without_the_hash_is_refused_and_changes_nothing(backend: CompiledBackend) -> None:
    from kvstore.backends import _calls

    for path, why in [(_calls.__file__, "keeps its functions to itself"), ("/nowhere/x.so", "/nowhere/x.so")]:
        with pytest.raises(ImportError, match=why):
            _calls.bind(path)
    assert backend.write(KEY, make_slot())
    assert backend.read_into(KEY, make_slot()) == SIZE


@needs_compiled
def test_a_hash_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.backends._calls.digest", lambda data, piece: bytes(16))
    assert compiled._obstacle.__wrapped__() == "the functions of xxhash do not do what they should"


@needs_compiled
def test_a_module_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.backends._calls.INTERFACE", 0)
    assert "of another version" in compiled._obstacle.__wrapped__()
    monkeypatch.delattr("kvstore.backends._calls.INTERFACE")
    assert "of another version" in compiled._obstacle.__wrapped__()


@needs_compiled
def test_nothing_works_before_there_is_a_hash() -> None:
    said = run(
        """
        from kvstore.backends import _calls

        for call in (
            lambda: _calls.put("/nowhere", "/nowhere", 0, memoryview(bytearray(4096)), memoryview(b""), 48),
            lambda: _calls.digest(b"", 1),
        ):
            try:
                call()
            except RuntimeError as error:
                print(error)
        """
    )
    assert said.count("bind() comes first") == 2


# What it has in common with the steps.


@needs_compiled
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


@needs_compiled
@pytest.mark.parametrize("piece", [1, 64, 1000, 1 << 18, 1 << 30])
def test_the_hash_is_that_of_the_package(backend: CompiledBackend, piece: int) -> None:
    from kvstore.backends import _calls

    data = os.urandom(50_000)
    for size in (*range(300), 1023, 1024, 1025, 50_000):
        assert _calls.digest(data[:size], piece) == xxh3_128_digest(data[:size])


@needs_compiled
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


@needs_compiled
def test_who_only_reads_leaves_no_stamp(backend: CompiledBackend, tmp_path: Path) -> None:
    backend.write(KEY, make_slot())
    os.utime(object_path(tmp_path), (1000, 1000))
    reader = CompiledBackend(CONTEXT, str(tmp_path), stamp=False)
    reader.open()
    assert reader.read_into(KEY, make_slot()) == SIZE
    assert object_path(tmp_path).stat().st_mtime == 1000


@needs_compiled
@pytest.mark.parametrize(
    "options", [{"durability": "data"}, {"durability": "full"}, {"mode": 0o666}, {"direct": "on"}]
)
def test_what_it_does_not_know_goes_by_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict
) -> None:
    backend = CompiledBackend(CONTEXT, str(tmp_path), **options)
    backend.open()
    monkeypatch.delattr("kvstore.backends._calls.put")
    if "direct" in options:
        if not backend.capabilities.direct_io:
            pytest.skip("no direct I/O in this folder")
        monkeypatch.delattr("kvstore.backends._calls.get")
    assert backend.write(KEY, make_slot())
    assert backend.read_into(KEY, make_slot()) == SIZE


# What it does not do.


@needs_compiled
def test_a_temporary_file_of_somebody_else_stays(
    backend: CompiledBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = object_path(tmp_path).with_suffix(".tmp")
    theirs.write_bytes(b"theirs")
    monkeypatch.setattr(compiled, "temp_name", lambda target: str(theirs))
    with pytest.raises(FileExistsError):
        backend.write(KEY, make_slot())
    assert theirs.read_bytes() == b"theirs"
    assert not object_path(tmp_path).exists()


@needs_compiled
def test_a_header_that_announces_too_much_makes_it_read_nothing_else(
    backend: CompiledBackend, tmp_path: Path
) -> None:
    """Behind the slot there is memory that nobody may touch."""
    backend.write(KEY, make_slot())
    said = run(
        """
        import ctypes, mmap, sys
        from kvstore.backends import _calls, compiled

        assert not compiled.why_not()
        room, path = 2 << 20, sys.argv[1]
        memory = mmap.mmap(-1, room + 4096)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + room), ctypes.c_size_t(4096), 0) == 0
        with open(path, "r+b") as file:
            file.truncate(room + 2 * 4096)
            for length in (room, room + 1, room + 4096, 1 << 63, (1 << 64) - 1):
                file.seek(32)
                file.write(length.to_bytes(8, "little"))
                file.flush()
                size, _ = _calls.get(path, memoryview(bytearray(4096)), memoryview(memory)[:room], 32, 0.0)
                print(size)
        """,
        object_path(tmp_path),
    )
    assert said.split() == [str((2 << 20) + 2 * 4096)] * 5


@needs_compiled
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


@needs_compiled
def test_a_signal_is_handled_while_it_waits(backend: CompiledBackend, tmp_path: Path) -> None:
    """As Ctrl-C is, when storage hangs and the caller does the work."""
    os.mkfifo(object_path(tmp_path))
    said = run(
        """
        import signal, sys
        from kvstore.backends import _calls, compiled

        def give_up(number, frame):
            raise TimeoutError("it takes too long")

        assert not compiled.why_not()
        signal.signal(signal.SIGALRM, give_up)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            _calls.get(sys.argv[1], memoryview(bytearray(4096)), memoryview(bytearray(4096)), 32, 0.0)
        except TimeoutError as error:
            print(error)
        """,
        object_path(tmp_path),
    )
    assert said == "it takes too long"


@needs_compiled
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


@needs_compiled
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
