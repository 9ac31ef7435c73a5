"""Writers of one directory that are killed between any two steps of the protocol, and that race."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.backends.base import BackendContext
from kvstore.backends.posix import PosixBackend
from kvstore.config import TierConfig
from kvstore.namespace import Namespace
from kvstore.scan import Status, scan, spaces
from kvstore.testing.backend import make_key

SIZE = 64 * 1024
NAMESPACE = Namespace({"model": "kill"}, chunk_size=SIZE)
CONTEXT = BackendContext(NAMESPACE.fingerprint, NAMESPACE.manifest, SIZE)
STEPS = ["_create_temp", "_gather", "_sync_file", "_publish", "_unlink_temp", "_sync_directory"]
KEYS = 40


class KilledBackend(PosixBackend):
    """Kills its process before or after one step of an object's way."""

    step = ""
    moment = ""

    def __getattribute__(self, name: str) -> object:
        found = super().__getattribute__(name)
        if name != type(self).step:
            return found

        def run(*arguments: object) -> object:
            if self.moment == "half":
                fd, buffers = arguments
                os.pwritev(fd, [memoryview(buffer)[: len(buffer) // 2] for buffer in buffers], 0)
            elif self.moment == "after":
                found(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        return run


def make_slot(fill: int) -> memoryview:
    slot = memoryview(mmap.mmap(-1, SIZE))
    slot[:] = bytes([fill]) * SIZE
    return slot


def be_killed(folder: str, step: str, moment: str) -> None:
    backend = KilledBackend(CONTEXT, folder, durability="full")
    backend.open()
    os.makedirs(os.path.join(folder, make_key(0).hex()[:2]))  # else making it would sync a directory early
    KilledBackend.step, KilledBackend.moment = step, moment
    backend.write(make_key(0), make_slot(1))


def be_racing(folder: str, fill: str) -> None:
    """Write all keys with a content of our own, starting when the parent says so; report what we created."""
    backend = PosixBackend(CONTEXT, folder)
    backend.open()
    slot = make_slot(int(fill))
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps([backend.write(make_key(number), slot) for number in range(KEYS)]), flush=True)


def start(role: str, *arguments: str) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, __file__, role, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / NAMESPACE.directory


def statuses(folder: Path, stale_after: float) -> list[Status]:
    (space,) = spaces(TierConfig(url=f"file://{folder.parent}"))
    return [finding.status for finding in scan(space, stale_after=stale_after)]


@pytest.mark.parametrize(
    ("step", "moment"),
    [(step, moment) for step in STEPS for moment in ("before", "after")] + [("_gather", "half")],
)
def test_a_killed_writer_leaves_nothing_wrong(folder: Path, step: str, moment: str) -> None:
    with start("be_killed", str(folder), step, moment) as writer:
        assert writer.wait() == -signal.SIGKILL
    published = STEPS.index(step) > 3 or (step, moment) == ("_publish", "after")
    has_temp = STEPS.index(step) <= 4 and (step, moment) not in {
        ("_create_temp", "before"),
        ("_unlink_temp", "after"),
    }
    expected = [Status.GOOD] * published + [Status.STALE_TEMP] * has_temp
    assert statuses(folder, stale_after=0) == expected
    assert statuses(folder, stale_after=600) == [
        Status.TEMP if status is Status.STALE_TEMP else status for status in expected
    ]

    backend = PosixBackend(CONTEXT, str(folder))
    backend.open()
    out = make_slot(0)
    assert backend.read_into(make_key(0), out) == (SIZE if published else None)
    assert backend.write(make_key(0), make_slot(2)) is not published
    assert backend.read_into(make_key(0), out) == SIZE
    assert out == make_slot(1 if published else 2)


def test_of_racing_processes_one_wins_each_key(folder: Path) -> None:
    writers = [start("be_racing", str(folder), str(fill)) for fill in (1, 2, 3)]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    created = [json.loads(writer.communicate()[0]) for writer in writers]

    backend = PosixBackend(CONTEXT, str(folder))
    backend.open()
    out = make_slot(0)
    for number in range(KEYS):
        winners = [fill for fill, mine in enumerate(created, 1) if mine[number]]
        assert backend.read_into(make_key(number), out) == SIZE
        assert winners == [out[0]]
        assert out == make_slot(out[0])
    assert statuses(folder, stale_after=0) == [Status.GOOD] * KEYS


if __name__ == "__main__":
    {"be_killed": be_killed, "be_racing": be_racing}[sys.argv[1]](*sys.argv[2:])
