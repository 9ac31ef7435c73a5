"""The host arena, its limits and its pinning, in one process and across two."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import re
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import arena as arena_module
from kvstore import memory, pinning
from kvstore.arena import Arena
from kvstore.errors import ClosedError, ConfigError, NoSpaceError

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
PAGE = 4096


def run(code: str, *args: object, **options: Any) -> str:
    """Output of a Python program in a process of its own."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.run(
        command, cwd=ROOT, text=True, check=True, timeout=60, stdout=subprocess.PIPE, **options
    ).stdout.strip()


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(8 * MIB, 1 * MIB, pin="off") as created:
        yield created


def mapped(base: int, field: str) -> int:
    """A figure in bytes of this process's mapping at `base`."""
    of_mapping = Path("/proc/self/smaps").read_text().partition(f"{base:x}-")[2]
    found = re.search(rf"^{field}:\s+(\d+) kB", of_mapping, re.MULTILINE)
    assert found
    return int(found[1]) * 1024


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


class TestPopulation:
    def test_every_page_is_there_when_create_returns(self, arena: Arena) -> None:
        assert arena.populated == arena.slots
        assert mapped(arena.base, "Rss") >= 8 * MIB

    def test_the_bytes_of_a_slot_survive_it(self, arena: Arena) -> None:
        arena.view(0)[:4] = b"data"
        memory.populate(arena.base, MIB, write=True)
        memory.touch(arena.base, MIB)
        assert bytes(arena.view(0)[:5]) == b"data\0"

    @pytest.mark.parametrize(
        "fill",
        [
            lambda address, length: memory.populate(address, length, write=True),
            lambda address, length: memory.populate(address, length, write=False),
            memory.touch,
        ],
        ids=["write", "read", "touch"],
    )
    def test_each_way_fills_in_pages(self, fill: Callable[[int, int], None]) -> None:
        region = mmap.mmap(-1, 4 * MIB)
        exported = ctypes.c_char.from_buffer(region)
        base = ctypes.addressof(exported)
        before = mapped_total("RssShmem")
        fill(base, 4 * MIB)
        assert mapped_total("RssShmem") - before >= 4 * MIB

    def test_memory_that_cannot_be_had(self) -> None:
        with pytest.raises(OSError):
            memory.populate(0, PAGE, write=True)

    def test_the_interpreter_runs_meanwhile(self) -> None:
        region = mmap.mmap(-1, 128 * MIB)
        exported = ctypes.c_char.from_buffer(region)
        entered, left = threading.Event(), threading.Event()

        def fill() -> None:
            entered.set()
            memory.populate(ctypes.addressof(exported), 128 * MIB, write=True)
            left.set()

        interval, turns = sys.getswitchinterval(), 0
        sys.setswitchinterval(60)  # the filling thread gives up the GIL of its own accord, or not at all
        try:
            thread = threading.Thread(target=fill)
            thread.start()
            entered.wait()
            while not left.wait(0.001):
                turns += 1
        finally:
            sys.setswitchinterval(interval)
            thread.join()
        assert turns >= 3

    def test_beyond_one_gib_in_the_background(self) -> None:
        with Arena.create(1280 * MIB, MIB, pin="off") as made:
            seen = {made.populated}
            assert min(seen) >= 1024
            while (slot := made.populated) < made.slots:
                made.view(slot)[:4] = b"busy"  # ahead of the filling, which must not undo it
                assert bytes(made.view(slot)[:4]) == b"busy"
                seen.add(slot)
            assert len(seen) > 3
            assert mapped(made.base, "Rss") >= 1280 * MIB

    def test_close_while_it_goes_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(arena_module, "_EAGER", 16 * MIB)
        made = Arena.create(512 * MIB, MIB, pin="off")
        view = made.view(0)
        thread = made._filler._thread
        assert thread is not None
        assert thread.daemon
        made.close()
        assert not thread.is_alive()
        assert mapped(np.frombuffer(view, np.uint8).ctypes.data, "Rss") < 512 * MIB

    def test_an_attached_process_fills_in_its_page_tables(self, arena: Arena) -> None:
        with Arena.attach(arena.handle) as other:
            assert other.populated == arena.slots
            assert other._filler._thread is not None
            other._filler._thread.join()
            assert mapped(other.base, "Rss") >= 8 * MIB


def mapped_total(field: str) -> int:
    """A figure in bytes of this whole process."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


class TestRefusedCapacity:
    def test_more_than_the_machine_has(self) -> None:
        with pytest.raises(NoSpaceError, match=r"16,777,216 MiB, but .* leaves [\d,]+ MiB"):
            Arena.create(16 << 40, MIB)

    def test_more_than_is_available(self) -> None:
        free = min(limit.free for limit in memory.limits())
        with pytest.raises(NoSpaceError):
            Arena.create(free + free // 4, MIB)

    @pytest.mark.parametrize(("name", "limit"), [("RLIMIT_FSIZE", 64 * MIB), ("RLIMIT_AS", 1024 * MIB)])
    def test_more_than_a_resource_limit_allows(self, name: str, limit: int) -> None:
        program = f"""
            import resource
            from kvstore.arena import Arena
            from kvstore.errors import NoSpaceError
            resource.setrlimit(resource.{name}, ({limit}, {limit}))
            Arena.create(32 << 20, 65536, pin="off").close()
            try:
                Arena.create({limit}, 65536, pin="off")
            except NoSpaceError as error:
                print(error)
        """
        assert name in run(program)

    def test_more_than_a_real_cgroup_allows(self) -> None:
        program = """
            from kvstore.arena import Arena
            from kvstore.errors import NoSpaceError
            Arena.create(64 << 20, 65536, pin="off").close()
            try:
                Arena.create(512 << 20, 65536, pin="off")
            except NoSpaceError as error:
                print(error)
        """
        group = Path("/sys/fs/cgroup/memory") / f"kvstore-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError as error:
            pytest.skip(f"no memory cgroup can be made here: {error}")
        try:
            (group / "memory.limit_in_bytes").write_text(str(256 * MIB))
            enter = f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
            message = run(enter + textwrap.dedent(program))
        finally:
            group.rmdir()
        assert f"512 MiB, but the cgroup's {group}/memory.limit_in_bytes leaves" in message
        assert int(re.findall(r"(\d+) MiB;", message)[0]) <= 256


class TestLimits:
    """The figures are read from files made for the purpose, as few machines have all kinds of cgroups."""

    @pytest.fixture
    def machine(self, tmp_path: Path) -> Callable[[dict[str, str]], dict[str, int]]:
        def limits(files: dict[str, str]) -> dict[str, int]:
            for name, text in {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 4096 kB\n", **files}.items():
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).write_text(text)
            found = memory.limits(tmp_path)
            return {name.replace(f"the cgroup's {tmp_path}/", ""): free for name, free in found}

        return limits

    def test_machine_alone(self, machine: Callable[[dict[str, str]], dict[str, int]]) -> None:
        assert machine({}) == {"the machine (MemAvailable)": 4 * MIB}

    def test_version_2_nested(self, machine: Callable[[dict[str, str]], dict[str, int]]) -> None:
        found = machine(
            {
                "proc/self/cgroup": "0::/outer/inner\n",
                "proc/self/mountinfo": "41 31 0:38 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n",
                "sys/fs/cgroup/outer/memory.max": "1000000\n",
                "sys/fs/cgroup/outer/memory.current": "400000\n",
                "sys/fs/cgroup/outer/memory.stat": "anon 1\nactive_file 1000\ninactive_file 200\n"
                "slab_reclaimable 30\nshmem 5000\n",
                "sys/fs/cgroup/outer/inner/memory.max": "max\n",
                "sys/fs/cgroup/outer/inner/memory.high": "300000\n",
                "sys/fs/cgroup/outer/inner/memory.current": "350000\n",
            }
        )
        del found["the machine (MemAvailable)"]
        assert found == {
            "sys/fs/cgroup/outer/memory.max": 601230,
            "sys/fs/cgroup/outer/inner/memory.high": 0,
        }

    def test_version_1_in_a_container(self, machine: Callable[[dict[str, str]], dict[str, int]]) -> None:
        found = machine(
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/c\n4:memory:/docker/abc/job\n0::/\n",
                "proc/self/mountinfo": "34 31 0:31 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n"
                "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
                "36 31 0:33 / /sys/fs/cgroup/unified ro - cgroup2 cgroup2 rw\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000000\n",
                "sys/fs/cgroup/memory/memory.stat": "inactive_file 7\ntotal_inactive_file 500000\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "2000000\n",
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "100000\n",
            }
        )
        del found["the machine (MemAvailable)"]
        assert found == {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 2500000,
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": 1900000,
        }

    @pytest.mark.parametrize("path", ["/../elsewhere", "/of/the/host"])
    def test_a_path_that_cannot_be_seen(
        self, machine: Callable[[dict[str, str]], dict[str, int]], path: str
    ) -> None:
        found = machine(
            {
                "proc/self/cgroup": f"0::{path}\n",
                "proc/self/mountinfo": "41 31 0:38 /pod /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
                "sys/fs/cgroup/memory.max": "1000\n",
                "sys/fs/cgroup/memory.current": "400\n",
            }
        )
        assert found["sys/fs/cgroup/memory.max"] == 600


class Cuda:
    """What pinning uses of torch, with a record of what is registered."""

    def __init__(self, fail_at: int = -1) -> None:
        self.fail_at = fail_at
        self.registered: dict[int, int] = {}
        self.calls = 0
        self.devices: list[int] = []

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 3

    def device(self, index: int) -> Any:
        self.devices.append(index)
        return nullcontext()

    def cudart(self) -> Cuda:
        return self

    def cudaHostRegister(self, address: int, length: int, flags: int) -> int:
        self.calls += 1
        if self.calls == self.fail_at:
            return 2
        self.registered[address] = length
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


class TestPinning:
    @pytest.fixture
    def use(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[Cuda], Cuda]:
        """Let the process have this device, and blocks of three slots of 1 MiB at most."""

        def install(cuda: Cuda) -> Cuda:
            torch = types.ModuleType("torch")
            torch.cuda = cuda  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, "torch", torch)
            monkeypatch.setattr(pinning, "_BLOCK", 4 * MIB - 1)
            return cuda

        return install

    @pytest.mark.parametrize("pin", ["auto", "on"])
    def test_whole_slots_of_all_the_region_until_closed(
        self, use: Callable[[Cuda], Cuda], pin: pinning.PinMode
    ) -> None:
        cuda = use(Cuda())
        with Arena.create(8 * MIB, MIB, pin=pin) as made:
            assert made.pinned
            blocks = [(made.base, 3 * MIB), (made.base + 3 * MIB, 3 * MIB), (made.base + 6 * MIB, 2 * MIB)]
            assert list(cuda.registered.items()) == blocks
            assert set(cuda.devices) == {3}
        assert cuda.registered == {}
        assert not made.pinned

    def test_a_failure_leaves_all_of_it_pageable(
        self, use: Callable[[Cuda], Cuda], caplog: pytest.LogCaptureFixture
    ) -> None:
        cuda = use(Cuda(fail_at=2))
        with Arena.create(32 * MIB, MIB, pin="auto") as made:
            assert not made.pinned
            assert made.populated == made.slots
            assert (cuda.registered, cuda.calls) == ({}, 2)
        assert ["returned 2" in record.message for record in caplog.records] == [True]

    def test_off(self, use: Callable[[Cuda], Cuda]) -> None:
        cuda = use(Cuda())
        with Arena.create(MIB, MIB, pin="off") as made:
            assert not made.pinned
        assert cuda.calls == 0

    def test_on_without_a_device_warns_once(self, caplog: pytest.LogCaptureFixture) -> None:
        try:
            import torch

            if torch.cuda.is_available():
                pytest.skip("this machine can pin")
        except ImportError:
            pass
        with Arena.create(MIB, MIB, pin="on") as made:
            assert not made.pinned
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "pageable" in caplog.text

    def test_auto_never_imports_torch(self, tmp_path: Path) -> None:
        (tmp_path / "torch.py").write_text("raise SystemExit('imported')")
        program = """
            import sys
            from kvstore.arena import Arena
            print(Arena.create(65536, 65536).pinned, "torch" in sys.modules)
        """
        assert run(program, env={**os.environ, "PYTHONPATH": str(tmp_path)}) == "False False"

    def test_no_such_mode(self) -> None:
        with pytest.raises(ConfigError, match="auto, on or off"):
            Arena.create(MIB, MIB, pin="yes")  # type: ignore[arg-type]
