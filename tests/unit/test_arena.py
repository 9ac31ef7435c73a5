"""The host arena in one process and across two: its slots, its handle, its end."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.arena import Arena
from kvstore.errors import ClosedError, ConfigError
from support.memory import mapped
from support.programs import run

MIB = 1 << 20
PAGE = 4096


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(8 * MIB, 1 * MIB, pin="off") as created:
        yield created


class TestGeometry:
    @pytest.mark.parametrize(
        ("capacity", "chunk", "slots", "slot"),
        [
            (1 * MIB, 65536, 16, 65536),
            (1 * MIB, 65537, 15, 69632),
            (4096, 1, 1, 4096),
            (10_000, 4096, 2, 4096),
        ],
    )
    def test_slots_are_chunks_in_whole_pages(self, capacity: int, chunk: int, slots: int, slot: int) -> None:
        with Arena.create(capacity, chunk, pin="off") as made:
            assert (made.slots, made.slot_size, made.chunk_size) == (slots, slot, chunk)
            assert os.fstat(made.fd).st_size == slots * slot + PAGE

    @pytest.mark.parametrize(("capacity", "chunk"), [(4095, 4096), (0, 1), (4096, 0), (4096, -1), (-4096, 1)])
    def test_needs_room_for_a_slot(self, capacity: int, chunk: int) -> None:
        with pytest.raises(ConfigError):
            Arena.create(capacity, chunk)

    def test_views_are_the_aligned_pieces_of_the_region(self, arena: Arena) -> None:
        for slot in range(arena.slots):
            view = arena.view(slot)
            address = np.frombuffer(view, np.uint8).ctypes.data
            assert len(view) == arena.slot_size
            assert address == arena.base + slot * arena.slot_size
            assert address % PAGE == 0
            view[:] = bytes([slot + 1]) * arena.slot_size
        rows = np.frombuffer((ctypes.c_ubyte * (8 * MIB)).from_address(arena.base), np.uint8).reshape(8, -1)
        assert [set(np.unique(row)) for row in rows] == [{slot + 1} for slot in range(8)]

    @pytest.mark.parametrize("slot", [-1, 8, 10**9])
    def test_there_is_no_slot_beyond(self, arena: Arena, slot: int) -> None:
        with pytest.raises(IndexError, match="of 8"):
            arena.view(slot)

    def test_control_page_is_apart_from_header_and_slots(self, arena: Arena) -> None:
        before = arena.populated
        assert bytes(arena.control) == bytes(4032)
        assert np.frombuffer(arena.control, np.uint8).ctypes.data % 8 == 0
        arena.control[:] = b"\xff" * 4032
        assert arena.populated == before
        assert bytes(arena.view(7)) == bytes(MIB)
        with Arena.from_fd(os.dup(arena.fd)) as other:
            assert bytes(other.control) == b"\xff" * 4032


class TestOtherProcesses:
    WRITE = """
        import os, sys
        from kvstore.arena import Arena
        arena = Arena.attach(sys.argv[1]) if sys.argv[1].startswith("/") else Arena.from_fd(int(sys.argv[1]))
        seen = bytes(arena.view(1)[:5])
        arena.view(2)[:6] = b"theirs"
        arena.control[8:12] = b"ctrl"
        print(arena.slots, arena.slot_size, arena.chunk_size, seen.decode(), os.get_inheritable(arena.fd))
    """

    def test_attached_by_handle(self, arena: Arena) -> None:
        arena.view(1)[:5] = b"mine!"
        assert run(self.WRITE, arena.handle) == f"8 {MIB} {MIB} mine! False"
        assert bytes(arena.view(2)[:6]) == b"theirs"
        assert bytes(arena.control[8:12]) == b"ctrl"

    def test_from_an_inherited_descriptor(self, arena: Arena) -> None:
        arena.view(1)[:5] = b"mine!"
        assert run(self.WRITE, arena.fd, pass_fds=[arena.fd]) == f"8 {MIB} {MIB} mine! False"
        assert bytes(arena.view(2)[:6]) == b"theirs"

    def test_the_geometry_of_an_odd_chunk_size_is_passed_on(self) -> None:
        with Arena.create(MIB, 5000, pin="off") as made, Arena.attach(made.handle) as other:
            assert (other.slots, other.slot_size, other.chunk_size) == (128, 8192, 5000)

    def test_a_fork_that_drops_it_leaves_the_parent_alone(self) -> None:
        program = """
            import os
            from kvstore.arena import Arena
            import kvstore.arena
            kvstore.arena._EAGER = 0
            arena = Arena.create(64 << 20, 65536, pin="off")
            child = os.fork()
            if child == 0:
                view = arena.view(3)
                view[:5] = b"child"
                arena.close()
                del arena, view
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            arena._filler._thread.join()
            print(bytes(arena.view(3)[:5]).decode(), arena.populated, len(Arena.attach(arena.handle).view(0)))
        """
        assert run(program) == "child 1024 65536"

    def test_nobody_can_resize_it(self, arena: Arena) -> None:
        with Arena.attach(arena.handle) as other, pytest.raises(PermissionError):
            os.ftruncate(other.fd, PAGE)


class TestRefusedHandles:
    @pytest.mark.parametrize("handle", ["", "/proc/1/fd/3", "/proc/x/fd/3?token=" + "0" * 32, "/dev/shm/x"])
    def test_malformed(self, handle: str) -> None:
        with pytest.raises(ConfigError, match="not the handle"):
            Arena.attach(handle)

    def test_wrong_token(self, arena: Arena) -> None:
        path, _, token = arena.handle.rpartition("=")
        other = token.translate(str.maketrans("0123456789abcdef", "123456789abcdef0"))
        with pytest.raises(ClosedError, match="another one"):
            Arena.attach(f"{path}={other}")

    def test_closed_by_its_owner(self) -> None:
        with Arena.create(MIB, 65536, pin="off") as made:
            handle = made.handle
        with pytest.raises(ClosedError, match="gone"):
            Arena.attach(handle)

    def test_something_else_has_the_descriptor_now(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")  # to open its writing end for reading would wait for ever
        fd = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        try:
            with pytest.raises(ClosedError, match="instead"):
                Arena.attach(f"/proc/{os.getpid()}/fd/{fd}?token={'0' * 32}")
        finally:
            os.close(fd)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
    def test_of_another_user(self, arena: Arena) -> None:
        program = """
            import os, sys
            from kvstore.arena import Arena
            os.setuid(65534)
            Arena.attach(sys.argv[1])
        """
        with pytest.raises(subprocess.CalledProcessError) as failed:
            run(program, arena.handle, stderr=subprocess.PIPE)
        assert "ConfigError" in failed.value.stderr

    @pytest.mark.parametrize(
        ("offset", "patch", "message"),
        [(0, b"X", "not a kvstore arena"), (8, b"\x63", "version 99"), (24, b"\xff", "contradicts")],
        ids=["magic", "version", "slots"],
    )
    def test_damaged_header(self, arena: Arena, offset: int, patch: bytes, message: str) -> None:
        with Arena.create(MIB, 4096, pin="off") as made:
            os.pwrite(made.fd, patch, MIB + offset)
            with pytest.raises(ConfigError, match=message):
                Arena.attach(made.handle)
            with pytest.raises(ConfigError, match=message):
                Arena.from_fd(made.fd)

    @pytest.mark.parametrize("size", [0, PAGE, 3 * PAGE])
    def test_a_descriptor_of_something_else(self, tmp_path: Path, size: int) -> None:
        with open(tmp_path / "file", "w+b") as file:
            file.truncate(size)
            with pytest.raises(ConfigError, match="not a kvstore arena"):
                Arena.from_fd(file.fileno())


class TestClose:
    def test_again_and_after(self, arena: Arena) -> None:
        fd = arena.fd
        arena.close()
        arena.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        for use in (lambda: arena.view(0), lambda: arena.control, lambda: arena.populated):
            with pytest.raises(ClosedError):
                use()
        assert not arena.pinned

    def test_a_view_keeps_the_mapping(self) -> None:
        made = Arena.create(MIB, 65536, pin="off")
        view, base = np.frombuffer(made.view(3), np.uint8), made.base
        made.view(3)[:4] = b"kept"
        made.close()
        assert bytes(view[:4]) == b"kept"
        assert mapped(base, "Size") >= MIB
        del view
        assert f"{base:x}-" not in Path("/proc/self/maps").read_text()

    def test_a_dropped_arena_is_closed(self) -> None:
        made = Arena.create(MIB, 65536, pin="off")
        fd, base = made.fd, made.base
        del made
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        assert f"{base:x}-" not in Path("/proc/self/maps").read_text()
