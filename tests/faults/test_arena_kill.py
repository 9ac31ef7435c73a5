"""Whatever ends the owner of an arena, nothing of it stays, and those attached keep what they have mapped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from kvstore.arena import Arena
from kvstore.errors import ClosedError

ROOT = Path(__file__).parents[2]
MIB = 1 << 20

OWNER = """
    import sys
    import kvstore.arena
    capacity, kvstore.arena._EAGER = map(int, sys.argv[1:])
    arena = kvstore.arena.Arena.create(capacity, 1 << 20, pin="off")
    arena.view(5)[:4] = b"kept"
    print(arena.handle, flush=True)
    sys.stdin.read()
"""


def start_owner(capacity: int, eager: int) -> tuple[subprocess.Popen[str], str]:
    """A process with an arena, and the arena's handle; `eager` bytes are populated before it is known."""
    command = [sys.executable, "-c", textwrap.dedent(OWNER), str(capacity), str(eager)]
    owner = subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdout
    return owner, owner.stdout.readline().strip()


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def shmem() -> int:
    """Bytes of shared memory that exist on this machine."""
    found = re.search(r"^Shmem:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def wait_for_shmem(limit: int) -> None:
    deadline = time.monotonic() + 10
    while shmem() > limit:
        assert time.monotonic() < deadline, (
            f"{shmem()} bytes of shared memory are left, expected {limit} at most"
        )
        time.sleep(0.01)


def test_killed_owner_leaves_nothing() -> None:
    names, before = set(os.listdir("/dev/shm")), shmem()
    owner, handle = start_owner(512 * MIB, 512 * MIB)
    with Arena.attach(handle) as attached:
        assert os.fstat(attached.fd).st_blocks * 512 >= 512 * MIB
        kill(owner)
        assert bytes(attached.view(5)[:4]) == b"kept"
        attached.view(6)[:4] = b"more"
        assert bytes(attached.view(6)[:4]) == b"more"
        with pytest.raises(ClosedError, match="gone"):
            Arena.attach(handle)
        with Arena.attach(attached.handle) as third:
            assert bytes(third.view(6)[:4]) == b"more"
        assert shmem() > before + 128 * MIB
    wait_for_shmem(before + 128 * MIB)
    assert {name for name in os.listdir("/dev/shm") if "kvstore" in name} <= names


def test_killed_while_it_fills() -> None:
    before = shmem()
    owner, handle = start_owner(2048 * MIB, 16 * MIB)
    with Arena.attach(handle) as attached:
        assert attached.populated < attached.slots
    kill(owner)
    wait_for_shmem(before + 128 * MIB)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small /dev/shm")
def test_larger_than_dev_shm() -> None:
    program = """
        import os
        from kvstore.arena import Arena
        room = os.statvfs("/dev/shm")
        assert room.f_blocks * room.f_frsize == 64 << 20
        with Arena.create(128 << 20, 1 << 20, pin="off") as arena:
            for slot in range(arena.slots):
                arena.view(slot)[:] = bytes([slot]) * (1 << 20)
            print(sum(arena.view(slot)[-1] == slot for slot in range(arena.slots)), os.listdir("/dev/shm"))
    """
    shell = 'mount -t tmpfs -o size=64m tmpfs /dev/shm || exit 77; exec "$0" -c "$1"'
    command = ["unshare", "-m", "sh", "-c", shell, sys.executable, textwrap.dedent(program)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=60)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no mount namespace can be had here: {done.stderr.strip()}")
    assert (done.stdout.strip(), done.stderr) == ("128 []", "")
