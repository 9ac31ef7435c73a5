"""Whatever ends the owner of an arena, nothing of it stays, and those attached keep what they have mapped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest

from kvstore.arena import Arena
from kvstore.errors import ClosedError
from support.processes import mappers, wait_for

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


def holders(inode: int) -> set[int]:
    """Processes that map the arena whose memfd has this inode, or have a descriptor of it.

    When there are none, the kernel frees it."""
    found = mappers(inode)
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended, or is not ours
            if str(link.readlink()).startswith("/memfd:kvstore-arena") and link.stat().st_ino == inode:
                found.add(int(link.parts[2]))
    return found


def test_killed_owner_leaves_nothing() -> None:
    names = set(os.listdir("/dev/shm"))
    owner, handle = start_owner(512 * MIB, 512 * MIB)
    with Arena.attach(handle) as attached:
        assert os.fstat(attached.fd).st_blocks * 512 >= 512 * MIB
        inode = os.fstat(attached.fd).st_ino
        assert holders(inode) == {owner.pid, os.getpid()}
        kill(owner)
        assert bytes(attached.view(5)[:4]) == b"kept"
        attached.view(6)[:4] = b"more"
        assert bytes(attached.view(6)[:4]) == b"more"
        with pytest.raises(ClosedError, match="gone"):
            Arena.attach(handle)
        with Arena.attach(attached.handle) as third:
            assert bytes(third.view(6)[:4]) == b"more"
        assert holders(inode) == {os.getpid()}
    wait_for(lambda: not holders(inode))
    assert {name for name in os.listdir("/dev/shm") if "kvstore" in name} <= names


def test_killed_while_it_fills() -> None:
    owner, handle = start_owner(2048 * MIB, 16 * MIB)
    with Arena.attach(handle) as attached:
        inode = os.fstat(attached.fd).st_ino
        assert attached.populated < attached.slots
    kill(owner)
    wait_for(lambda: not holders(inode))


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
