"""What passes between caller and workers: sizes that fit, and what a poll costs in system calls."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore.config import parse
from kvstore.engine.base import BATCH_LIMIT, Batch, Engine, Result, Status, Verb
from kvstore.opening import assemble
from support.processes import engine_of
from support.wordy import make_wordy

SLOTS = 1 << 15
HOST = f"ram://?capacity={SLOTS * 4096}&pin=off"


@pytest.fixture
def store() -> Iterator[kvstore.Store]:
    """A store whose one worker has long answers."""
    config = parse(HOST, "memory://wordy", chunk_size=4096, engine="processes")
    with assemble(config, make_wordy) as store:
        yield store


def long_keys(count: int) -> list[bytes]:
    return [number.to_bytes(64, "little") for number in range(count)]


def run(engine: Engine, batch: Batch) -> tuple[list[Result], list[tuple[bytes, int, float]]]:
    """Results in order, and rows."""
    results: dict[int, Result] = {}
    rows = []
    engine.submit(batch)
    while len(results) < max(1, len(batch.keys)):
        engine.wait(20)
        for completion in engine.poll():
            assert completion.id == batch.id
            rows += completion.rows
            for index, result in enumerate(completion.results, completion.first):
                assert index not in results
                results[index] = result
    return [results[index] for index in range(len(results))], rows


@pytest.mark.parametrize("verb", [Verb.PROBE, Verb.READ, Verb.DELETE, Verb.WRITE])
@pytest.mark.parametrize("count", [256, BATCH_LIMIT])
def test_batches_of_the_longest_keys(store: kvstore.Store, verb: Verb, count: int) -> None:
    keys = long_keys(count)
    moves = verb in (Verb.READ, Verb.WRITE)
    slots = range(SLOTS - count, SLOTS)  # large numbers: long messages
    batch = Batch(1 << 40, 0, verb, keys, list(slots) * moves, [4096] * count * moves)
    results, _ = run(engine_of(store), batch)
    assert len(results) == count
    # Every error is as long as errors come, and its end is cut off.
    expected = Status.MISSING if verb is Verb.PROBE else Status.FAILED
    assert {result.status for result in results} == {expected}
    assert all(len(result.error) <= 500 for result in results)


def test_scan_of_twenty_thousand_objects_with_the_longest_keys(store: kvstore.Store) -> None:
    results, rows = run(engine_of(store), Batch(1 << 40, 0, Verb.SCAN, [b""], [], []))
    assert [result.status for result in results] == [Status.OK]
    assert [key for key, _, _ in rows] == long_keys(20_000)


def test_probe_of_a_hundred_thousand_keys(tmp_path: Path) -> None:
    keys = [number.to_bytes(64, "little") for number in range(100_000)]
    with kvstore.open(HOST, f"file://{tmp_path}", chunk_size=4096, engine="processes") as store:
        store.put_many({key: key for key in keys[::1000]})
        assert store.flush(timeout=20)
    with kvstore.open(HOST, f"file://{tmp_path}", chunk_size=4096, engine="processes") as store:
        answers: dict[bytes, kvstore.Lookup] = {}
        while asked := [key for key in keys if key not in answers]:
            given = zip(asked, store.lookup(asked), strict=True)
            # They are noted as they come: a busy machine may take longer than an absence is remembered.
            answers.update((key, answer) for key, answer in given if answer is not kvstore.Lookup.RETRY)
            assert store.wait_until(lambda: not store.busy, 60)
    assert Counter(answers.values()) == {kvstore.Lookup.PENDING: 100, kvstore.Lookup.MISS: 99_900}


# System calls.

IDLE = """
    import os, sys, kvstore
    with kvstore.open("ram://?capacity=1MiB&pin=off", f"file://{sys.argv[1]}?workers=8",
                      chunk_size="64KiB", engine="processes") as store:
        store.put(b"k" * 16, b"x")
        store.flush()
        poll = store._engine.poll
        for _ in range(3):
            store._engine.wait(0.1)
            poll()
        os.access("/begin", 0)
        for _ in range(1000):
            poll()
        os.access("/end", 0)
"""


@pytest.fixture
def strace() -> str:
    path = shutil.which("strace")
    if path is None:
        pytest.skip("strace is not installed (apt-get install strace)")
    if subprocess.run([path, "true"], capture_output=True).returncode:
        pytest.skip("strace may not trace here")
    return path


def test_an_idle_poll_is_one_system_call(tmp_path: Path, strace: str) -> None:
    log = tmp_path / "calls"
    script = textwrap.dedent(IDLE)
    subprocess.run([strace, "-o", log, sys.executable, "-c", script, tmp_path / "kv"], check=True, timeout=60)
    calls = re.split(r'access\("/(?:begin|end)".*\n', log.read_text())[1].splitlines()
    names = Counter(call.partition("(")[0] for call in calls)
    assert names.pop("epoll_wait") == 1000  # no receive, not even one that fails
    assert all(re.search(r", 0\) += 0$", call) for call in calls if call.startswith("epoll_wait"))
    # The interpreter's own: its lock, now and then, and its memory.
    assert set(names) <= {"futex", "brk", "mmap", "munmap", "madvise", "sched_yield"}
    assert names.total() <= 20


def test_full_sockets_lose_nothing(store: kvstore.Store) -> None:
    """More batches than a socket holds: they wait with the caller, who never blocks."""
    engine, keys = engine_of(store), long_keys(256)
    for number in range(400):
        engine.submit(Batch(number + 1, 0, Verb.PROBE, keys, [], []))
    left = 400 * len(keys)
    while left:
        engine.wait(20)
        left -= sum(len(completion.results) for completion in engine.poll())
    assert engine.poll() == []
