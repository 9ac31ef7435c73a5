"""The POSIX backend beyond what every backend must do: permissions, padding, fallbacks, short transfers.

By its steps in Python, and with the compiled part.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.backends import publish, retryable
from kvstore.backends.base import BackendContext
from kvstore.backends.compiled import CompiledBackend
from kvstore.backends.posix import PosixBackend
from kvstore.errors import BackendError, CorruptChunkError, NamespaceMismatchError
from kvstore.testing.backend import make_key
from support.compiled import needs_compiled

SIZE = 64 * 1024
CONTEXT = BackendContext(b"f" * 16, b"{}", SIZE)
KEY = make_key(1)


def make_slot(fill: int = 7) -> memoryview:
    slot = memoryview(mmap.mmap(-1, SIZE))
    slot[:] = bytes([fill]) * SIZE
    return slot


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "root" / "space"


@pytest.fixture(
    params=[
        pytest.param(PosixBackend, id="steps"),
        pytest.param(CompiledBackend, id="compiled", marks=needs_compiled),
    ]
)
def make(request: pytest.FixtureRequest) -> type[PosixBackend]:
    found: type[PosixBackend] = request.param
    return found


@pytest.fixture
def backend(make: type[PosixBackend], folder: Path) -> PosixBackend:
    backend = make(CONTEXT, str(folder))
    backend.open()
    return backend


@pytest.fixture
def set_umask() -> Iterator[Callable[[int], None]]:
    before = os.umask(0o022)
    yield lambda mask: os.umask(mask) and None
    os.umask(before)


# Layout and permissions.


def test_files_are_padded_to_whole_blocks(backend: PosixBackend, folder: Path) -> None:
    backend.write(KEY, make_slot()[:5000])
    path = folder / KEY.hex()[:2] / f"{KEY.hex()}.kv"
    assert path.stat().st_size == 4096 + 8192
    assert path.read_bytes()[4096 + 5000 :] == bytes(8192 - 5000)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o177])
@pytest.mark.parametrize(("mode", "directory_mode"), [(0o600, 0o700), (0o640, 0o750), (0o666, 0o777)])
def test_permissions_do_not_depend_on_the_umask(
    make: type[PosixBackend],
    folder: Path,
    set_umask: Callable[[int], None],
    umask: int,
    mode: int,
    directory_mode: int,
) -> None:
    set_umask(umask)
    backend = make(CONTEXT, str(folder), mode=mode)
    backend.open()
    backend.write(KEY, make_slot())
    backend.write(make_key(2), make_slot())
    backend.quarantine(make_key(2))
    for path in [folder, *folder.rglob("*")]:
        expected = directory_mode if path.is_dir() else mode
        assert path.stat().st_mode & 0o777 == expected, path


def test_open_refuses_another_manifest_and_touches_nothing(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "namespace.json").write_bytes(b"someone else's")
    with pytest.raises(NamespaceMismatchError):
        PosixBackend(CONTEXT, str(folder), direct="on").open()
    assert files_below(folder) == ["namespace.json"]


def test_open_asks_the_context_about_the_manifest(folder: Path) -> None:
    seen: list[bytes] = []
    folder.mkdir(parents=True)
    (folder / "namespace.json").write_bytes(b"other bytes, same namespace")
    PosixBackend(BackendContext(b"f" * 16, b"{}", SIZE, check_manifest=seen.append), str(folder)).open()
    assert seen == [b"other bytes, same namespace"]


# What others do to the directory.


def test_tree_grows_again_after_it_was_deleted(backend: PosixBackend, folder: Path) -> None:
    backend.write(KEY, make_slot())
    os.rename(folder.parent, folder.parent.with_name("gone"))
    assert backend.read_into(KEY, make_slot()) is None
    assert backend.exists([KEY]) == [False]
    assert list(backend.entries()) == []
    assert backend.quarantine(KEY) is False
    assert backend.write(KEY, make_slot()) is True
    assert backend.read_into(KEY, make_slot(0)) == SIZE


def test_deleted_manifest_is_no_disaster(backend: PosixBackend, folder: Path) -> None:
    (folder / "namespace.json").unlink()
    assert backend.write(KEY, make_slot()) is True
    assert backend.read_into(KEY, make_slot(0)) == SIZE
    again = PosixBackend(CONTEXT, str(folder))
    again.open()
    assert (folder / "namespace.json").read_bytes() == b"{}"


def test_a_file_in_the_place_of_the_root_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "root").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        PosixBackend(CONTEXT, str(tmp_path / "root" / "space")).open()


def test_full_disk_leaves_no_file(backend: PosixBackend, folder: Path) -> None:
    """A limit on the size of files makes the kernel write a part, then refuse, as a full disk does."""
    before = files_below(folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError) as failed:
            backend.write(KEY, make_slot())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert failed.value.errno == errno.EFBIG
    assert files_below(folder) == before
    assert backend.exists([KEY]) == [False]


# Short transfers.


@pytest.fixture
def short_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every call from Python move at most 10,000 bytes, as the kernel may when a signal or a server
    interrupts it; ``faults/test_chunk_calls.py`` does so to the compiled part."""
    preadv, pwritev = os.preadv, os.pwritev

    def cut(buffers: list[memoryview]) -> list[memoryview]:
        kept, room = [], 10_000
        for buffer in buffers:
            kept.append(buffer[:room])
            room -= len(kept[-1])
        return kept

    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, cut(buffers), offset))
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: pwritev(fd, cut(buffers), offset))


@pytest.mark.parametrize("direct", ["off", "on"])
@pytest.mark.parametrize("size", [0, 3000, 5000, SIZE - 1, SIZE])
def test_short_transfers_are_continued(folder: Path, short_transfers: None, direct: str, size: int) -> None:
    backend = PosixBackend(CONTEXT, str(folder), direct=direct)
    backend.open()
    slot = memoryview(mmap.mmap(-1, SIZE))
    slot[:] = os.urandom(SIZE)
    assert backend.write(KEY, slot[:size])
    out = make_slot(0)
    assert backend.read_into(KEY, out) == size
    assert out[:size] == slot[:size]


def test_direct_io_takes_unaligned_memory(folder: Path) -> None:
    backend = PosixBackend(CONTEXT, str(folder), direct="on")
    backend.open()
    if not backend.capabilities.direct_io:
        pytest.skip("no direct I/O in this folder")
    slot = memoryview(mmap.mmap(-1, SIZE + 4096))[1 : SIZE + 1]
    slot[:] = os.urandom(SIZE)
    assert backend.write(KEY, slot)
    out = memoryview(mmap.mmap(-1, SIZE + 4096))[1 : SIZE + 1]
    assert backend.read_into(KEY, out) == SIZE
    assert out == slot


# Payloads that are read and hashed in pieces.

PIECE = 512 << 10  # of the steps; twice that of the compiled part
LARGE = 3 * PIECE + 8192


@pytest.fixture
def large(make: type[PosixBackend], folder: Path) -> PosixBackend:
    backend = make(BackendContext(b"f" * 16, b"{}", LARGE), str(folder))
    backend.open()
    return backend


def make_large() -> memoryview:
    slot = memoryview(mmap.mmap(-1, LARGE))
    slot[:] = os.urandom(LARGE)
    return slot


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 3 * PIECE, LARGE - 1, LARGE])
def test_payloads_of_several_pieces(large: PosixBackend, size: int) -> None:
    slot, out = make_large(), make_large()
    assert large.write(KEY, slot[:size])
    assert large.read_into(KEY, out) == size
    assert out[:size] == slot[:size]


def test_short_transfers_of_several_pieces(folder: Path, short_transfers: None) -> None:
    large = PosixBackend(BackendContext(b"f" * 16, b"{}", LARGE), str(folder))
    large.open()
    slot, out = make_large(), make_large()
    assert large.write(KEY, slot)
    assert large.read_into(KEY, out) == LARGE
    assert out == slot


@pytest.mark.parametrize("place", [0, PIECE - 1, PIECE, 2 * PIECE + 5, LARGE - 1])
def test_a_wrong_byte_in_any_piece_is_found(large: PosixBackend, folder: Path, place: int) -> None:
    large.write(KEY, make_large())
    with (folder / KEY.hex()[:2] / f"{KEY.hex()}.kv").open("r+b") as file:
        file.seek(4096 + place)
        byte = file.read(1)[0]
        file.seek(4096 + place)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(CorruptChunkError):
        large.read_into(KEY, make_large())


@pytest.mark.parametrize("size", [PIECE, 2 * PIECE, LARGE])
@pytest.mark.parametrize("change", [1, 4096, -1, -4096, -PIECE])
def test_a_wrong_size_is_found_where_pieces_meet(
    large: PosixBackend, folder: Path, size: int, change: int
) -> None:
    large.write(KEY, make_large()[:size])
    path = folder / KEY.hex()[:2] / f"{KEY.hex()}.kv"
    os.truncate(path, path.stat().st_size + change)
    with pytest.raises(CorruptChunkError):
        large.read_into(KEY, make_large())


# File systems without hard links.


@pytest.mark.parametrize("function", [publish.link, publish.rename_noreplace, publish.rename_after_look])
def test_every_way_to_publish_keeps_the_first(tmp_path: Path, function: Callable[[str, str], bool]) -> None:
    target = tmp_path / "target"
    for content, created in [("first", True), ("second", False)]:
        temp = tmp_path / content
        temp.write_text(content)
        assert function(str(temp), str(target)) is created
        assert target.read_text() == "first"


def test_own_link_found_again_is_ours(tmp_path: Path) -> None:
    temp, target = tmp_path / "temp", tmp_path / "target"
    temp.write_text("once")
    os.link(temp, target)
    assert publish.link(str(temp), str(target)) is True


@pytest.mark.parametrize("levels", [1, 2])
def test_falls_back_where_links_are_not_supported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, levels: int
) -> None:
    backend = PosixBackend(CONTEXT, str(folder))
    backend.open()

    def refuse(temp: str, target: str) -> bool:
        raise OSError(errno.EPERM, "no such operation here", target)

    ways = [publish.link, publish.rename_noreplace, publish.rename_after_look]
    monkeypatch.setattr("kvstore.backends.posix._PUBLISHERS", (*[refuse] * levels, *ways[levels:]))
    assert backend.write(KEY, make_slot(1)) is True
    assert backend.write(KEY, make_slot(2)) is False
    assert backend.read_into(KEY, out := make_slot(0)) == SIZE
    assert out[0] == 1
    assert len(files_below(folder)) == 2
    assert backend.capabilities.first_writer_wins is (levels == 1)


# Which errors may pass.


@pytest.mark.parametrize("number", [errno.EIO, errno.EAGAIN, errno.ETIMEDOUT, errno.ESTALE, errno.ECONNRESET])
def test_passing_errors(number: int) -> None:
    assert retryable(OSError(number, ""))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.ENOENT, errno.EDQUOT])
def test_lasting_errors(number: int) -> None:
    assert not retryable(OSError(number, ""))


def test_errors_that_say_so_themselves() -> None:
    assert retryable(BackendError("", retryable=True))
    assert not retryable(BackendError(""))
    assert retryable(TimeoutError())
    assert not retryable(ValueError())
