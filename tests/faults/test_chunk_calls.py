"""System calls that fail, stop short, are interrupted, or are the last of their process: what is left is
whole, or is told, whether the calls are made from Python or by the compiled part.

``support/faulty_calls.c`` stands between the process and the C library.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.backends.base import BackendContext
from kvstore.backends.posix import PosixBackend
from kvstore.config import TierConfig
from kvstore.namespace import Namespace
from kvstore.scan import Status, scan, spaces
from kvstore.testing.backend import make_key
from support.compiled import needs_compiled

SIZE = 600_000  # of several pieces, and no multiple of a block
NAMESPACE = Namespace({"model": "calls"}, chunk_size=SIZE)
SOURCE = Path(__file__).parents[1] / "support" / "faulty_calls.c"

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None, reason="no C compiler (cc) to build the faults with"
)

#: What every program begins with. The compiled part must do by itself what is asked of it then.
BEGINNING = """
import mmap, os, sys
from kvstore.backends.base import BackendContext
from kvstore.backends.compiled import CompiledBackend, why_not
from kvstore.backends.posix import PosixBackend
from kvstore.namespace import Namespace
from kvstore.testing.backend import make_key

SIZE, (_, kind, folder) = 600_000, sys.argv
NAMESPACE = Namespace({"model": "calls"}, chunk_size=SIZE)
KEY = make_key(0)

def make_slot(fill):
    slot = memoryview(mmap.mmap(-1, SIZE))
    slot[:] = bytes([fill]) * SIZE
    return slot

def print_error_of(call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        print(error.errno)

assert kind == "steps" or not why_not(), why_not()
backend = {"steps": PosixBackend, "compiled": CompiledBackend}[kind](
    BackendContext(NAMESPACE.fingerprint, NAMESPACE.manifest, SIZE), folder
)
backend.open()
for number in range(256):
    os.makedirs(f"{folder}/{number:02x}", exist_ok=True)
if kind == "compiled":
    put_object, backend.put_object, backend.get_object = backend.put_object, None, None
"""

Run = Callable[[str, str], subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("faults") / "faulty_calls.so"
    subprocess.run(["cc", "-O1", "-Wall", "-shared", "-fPIC", "-o", built, SOURCE, "-ldl"], check=True)
    return built


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / NAMESPACE.directory


@pytest.fixture(params=["steps", pytest.param("compiled", marks=needs_compiled)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run(library: Path, folder: Path, kind: str) -> Run:
    """Run a program that goes on from BEGINNING with this plan of faults."""

    def run(plan: str, code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", "-c", BEGINNING + textwrap.dedent(code), kind, str(folder)],
            env={**os.environ, "LD_PRELOAD": str(library), "FAULTY_CALLS": plan},
            text=True,
            timeout=60,
            capture_output=True,
        )

    return run


def statuses(folder: Path) -> list[Status]:
    (space,) = spaces(TierConfig(url=f"file://{folder.parent}"))
    return [finding.status for finding in scan(space, stale_after=0)]


ROUND_TRIP = """
slot, out = make_slot(0), make_slot(1)
slot[:] = os.urandom(SIZE)
for number, size in enumerate([0, 1, 4096, 100_000, 1 << 18, SIZE - 1, SIZE]):
    assert backend.write(make_key(number), slot[:size])
    assert not backend.write(make_key(number), slot[:size])
    assert backend.read_into(make_key(number), out) == size
    assert out[:size] == slot[:size]
"""


@pytest.mark.parametrize("plan", ["none", "short=10000", "short=4096", "short=1001"])
def test_short_transfers_are_continued(run: Run, folder: Path, plan: str) -> None:
    done = run(plan, ROUND_TRIP)
    assert done.returncode == 0, done.stderr
    assert statuses(folder) == [Status.GOOD] * 7


@pytest.mark.parametrize("call", ["open", "pwritev", "preadv"])
def test_interrupted_calls_are_repeated(run: Run, folder: Path, call: str) -> None:
    done = run(f"interrupt={call}", ROUND_TRIP)
    assert done.returncode == 0, done.stderr
    assert statuses(folder) == [Status.GOOD] * 7


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("open", errno.EMFILE),
        ("pwritev", errno.ENOSPC),
        ("close", errno.EDQUOT),
        ("close", errno.EINTR),
        ("link", errno.EIO),
    ],
)
def test_a_write_that_fails_leaves_nothing_and_says_why(
    run: Run, folder: Path, call: str, number: int
) -> None:
    done = run(
        f"{call}={number}",
        "print_error_of(backend.write, KEY, make_slot(1))",
    )
    assert done.stdout.split() == [str(number)], done.stderr
    assert statuses(folder) == []


@pytest.mark.parametrize(("call", "number"), [("open", errno.EACCES), ("preadv", errno.EIO)])
def test_a_read_that_fails_says_why(run: Run, folder: Path, call: str, number: int) -> None:
    assert run("none", "backend.write(KEY, make_slot(1))").returncode == 0
    done = run(
        f"{call}={number}",
        "print_error_of(backend.read_into, KEY, make_slot(0))",
    )
    assert done.stdout.split() == [str(number)], done.stderr


def test_without_hard_links_there_is_another_way(run: Run, folder: Path) -> None:
    done = run(
        f"link={errno.EPERM}",
        """
        if kind == "compiled":
            backend.put_object = put_object
        for _ in range(2):
            print(backend.write(KEY, make_slot(1)), backend.write(make_key(1), make_slot(2)))
        print(backend.read_into(KEY, make_slot(0)))
        """,
    )
    assert done.stdout.split() == ["True", "True", "False", "False", str(SIZE)], done.stderr
    assert statuses(folder) == [Status.GOOD] * 2


def test_a_link_whose_answer_was_lost_is_ours(run: Run, folder: Path) -> None:
    done = run("lost=link", "print(backend.write(KEY, make_slot(1)), backend.write(KEY, make_slot(2)))")
    assert done.stdout.split() == ["True", "False"], done.stderr
    assert statuses(folder) == [Status.GOOD]


def test_a_temporary_file_that_stays_is_no_error(run: Run, folder: Path) -> None:
    done = run(f"unlink={errno.EIO}", "print(backend.write(KEY, make_slot(1)))")
    assert done.stdout.split() == ["True"], done.stderr
    assert statuses(folder) == [Status.GOOD, Status.STALE_TEMP]


CALLS = ["access", "open", "pwritev", "close", "link", "unlink"]
MOMENTS = [(moment, call) for call in CALLS for moment in ("before", "after")] + [("half", "pwritev")]


@pytest.mark.parametrize(("moment", "call"), MOMENTS)
def test_a_killed_writer_leaves_nothing_wrong(run: Run, folder: Path, moment: str, call: str) -> None:
    assert run("none", "backend.write(make_key(1), make_slot(1))").returncode == 0
    done = run(f"{moment}={call}", "backend.write(KEY, make_slot(1))")
    assert done.returncode == -signal.SIGKILL, done.stderr
    place = CALLS.index(call) + (moment == "after")
    published = place > CALLS.index("link")
    has_temp = CALLS.index("open") < place <= CALLS.index("unlink")
    found = statuses(folder)
    assert found.count(Status.GOOD) == 1 + published
    assert found.count(Status.STALE_TEMP) == has_temp
    assert len(found) == 1 + published + has_temp

    backend = PosixBackend(BackendContext(NAMESPACE.fingerprint, NAMESPACE.manifest, SIZE), str(folder))
    out = memoryview(bytearray(SIZE))
    assert backend.read_into(make_key(0), out) == (SIZE if published else None)
    assert backend.write(make_key(0), memoryview(bytes([2]) * SIZE)) is not published
