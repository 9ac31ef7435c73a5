"""The process that opened the store ends, forks or is interrupted: workers and memory do not outlive it."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvstore
from support.gates import Gates
from support.processes import engine_of, has_ended, mappers

ROOT = Path(__file__).parents[2]
#: A program with a store, and a forked child that holds a copy of every descriptor.
PARENT = """
    import json, os, signal, sys, time
    from pathlib import Path
    from support.gates import Gates, open_gated

    folder, end = Path(sys.argv[1]), sys.argv[2]
    gates = Gates.__new__(Gates)
    gates.folder = folder / "gates"
    store = open_gated(gates, "ram://?capacity=32MiB&pin=off", f"file://{folder}/kv?workers=2",
                       chunk_size="64KiB", engine="processes")
    store.put(b"k" * 16, b"x")
    child = os.fork()
    if not child:
        os.setsid()
        signal.pause()
    print(json.dumps({"workers": store._engine.pids, "child": child,
                      "inode": os.fstat(store.arena.fd).st_ino}), flush=True)
    if end == "return":
        sys.exit(0)
    if end == "raise":
        raise RuntimeError("on purpose")
    if end == "_exit":
        os._exit(3)
    signal.pause()
"""


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


@contextmanager
def started(folder: Path, end: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The program, and what it says of itself; its child is ended afterwards."""
    command = [sys.executable, "-c", textwrap.dedent(PARENT), str(folder), end]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        facts = json.loads(process.stdout.readline())
        try:
            yield process, facts
        finally:
            process.stdout.close()  # the child holds it, too
            if not has_ended(facts["child"], 0):
                os.kill(facts["child"], signal.SIGKILL)


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[Gates]:
    gates = Gates(tmp_path / "gates")
    yield gates
    gates.close()


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "in a call that hangs"])
@pytest.mark.parametrize("end", ["kill", "_exit", "raise", "return"])
def test_workers_end_within_a_second_and_memory_is_freed(
    tmp_path: Path, gates: Gates, end: str, busy: bool
) -> None:
    in_shm = set(os.listdir("/dev/shm"))
    if busy:
        gates.shut("put")
    with started(tmp_path, end) as (process, facts):
        if busy:
            assert gates.await_arrival() in facts["workers"]
        if end == "kill":
            process.kill()
        process.wait(20)
        over = time.monotonic() + 1
        assert all(has_ended(pid, max(0.0, over - time.monotonic())) for pid in facts["workers"])
        assert not has_ended(facts["child"], 0), "the child outlives its parent, with all its descriptors"
        assert mappers(facts["inode"]) <= {facts["child"]}
    assert has_ended(facts["child"], 5)
    assert mappers(facts["inode"]) == set()
    assert set(os.listdir("/dev/shm")) <= in_shm


def test_closing_does_not_wait_for_forked_children(tmp_path: Path) -> None:
    """A child holds a copy of the sockets: the workers must hear of the end all the same."""
    store = kvstore.open(
        "ram://?capacity=1MiB&pin=off", f"file://{tmp_path}", chunk_size="64KiB", engine="processes"
    )
    child = os.fork()
    if not child:
        signal.pause()
    try:
        pids = engine_of(store).pids
        begun = time.monotonic()
        store.close(timeout=10)
        assert time.monotonic() - begun < 2
        assert all(has_ended(pid, 0) for pid in pids)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_forked_child_is_told_and_harms_nothing(tmp_path: Path) -> None:
    with kvstore.open(
        "ram://?capacity=1MiB&pin=off", f"file://{tmp_path}", chunk_size="64KiB", engine="processes"
    ) as store:
        store.put(b"k" * 16, b"x")
        child = os.fork()
        if not child:
            code = 1
            try:
                store.get(b"k" * 16)
            except kvstore.ClosedError:
                store.close()
                del store
                code = 0
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert store.flush(timeout=10)
        assert store.get(b"k" * 16) == b"x"
        assert store.stats().tiers[1].errors == 0


def test_ctrl_c_reaches_the_caller_and_no_worker(tmp_path: Path) -> None:
    """Typed at the terminal that the program runs in the foreground of."""
    script = textwrap.dedent("""
        import json, os, sys, time, kvstore
        store = kvstore.open("ram://?capacity=1MiB&pin=off", f"file://{sys.argv[1]}",
                             chunk_size="64KiB", engine="processes")
        before = store._engine.pids
        try:
            print(json.dumps(before), flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            store.put(b"k" * 16, b"x")
            store.flush()
            same = before == store._engine.pids
            print("INTERRUPTED", same, store.stats().tiers[1].writes, flush=True)
        store.close()
    """)
    pid, terminal = pty.fork()
    if not pid:
        os.execve(sys.executable, [sys.executable, "-c", script, str(tmp_path)], environment())
    lines = os.fdopen(terminal, "r", errors="replace")
    workers = json.loads(lines.readline())
    os.write(terminal, b"\x03")
    shown = next(line for line in lines if "INTERRUPTED" in line)
    assert "INTERRUPTED True 1" in shown
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    lines.close()
    assert all(has_ended(worker, 1) for worker in workers)
