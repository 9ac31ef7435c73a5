"""Worker processes: how they start, what they are, what they leave."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.config import parse
from kvstore.opening import assemble
from support.gates import Gates, open_gated
from support.processes import Footprint, await_workers, children, engine_of, has_ended, wait_for
from support.world import Clock

HOST = "ram://?capacity=2MiB&pin=off"
CHUNK = "64KiB"


def open_store(*tiers: str | dict[str, Any]) -> kvstore.Store:
    return kvstore.open(HOST, *tiers, chunk_size=CHUNK, engine="processes")


def run(script: str, *arguments: object, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def footprint() -> Footprint:
    open_store().close()  # what is made once in a process is made by now
    return Footprint.now()


# How they start.


def test_a_worker_starts_in_half_a_second(tmp_path: Path) -> None:
    """By its own time, so that it does not matter what else this machine does."""
    with open_store(f"file://{tmp_path}") as store:
        for pid in engine_of(store).pids:
            user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            assert (int(user) + int(system)) / os.sysconf("SC_CLK_TCK") < 0.5


def test_workers_import_nothing_heavy(tmp_path: Path) -> None:
    for package in ("torch", "vllm", "s3fs", "fsspec", "numpy"):
        (tmp_path / "lib" / package).mkdir(parents=True)
        (tmp_path / "lib" / package / "__init__.py").write_text(
            f"open({str(tmp_path / package)!r}, 'w').close()"
        )
    script = """
        import sys, kvstore
        with kvstore.open("ram://?capacity=1MiB&pin=off", f"file://{sys.argv[1]}/kv", "memory://m",
                          chunk_size="64KiB", engine="processes") as store:
            with store.reserve([b"k" * 16]) as lease:
                lease[b"k" * 16][:] = bytes(1 << 16)
            assert store.flush(timeout=20)
    """
    run(script, tmp_path, PYTHONPATH=str(tmp_path / "lib"))
    imported = {path.name for path in tmp_path.iterdir()} - {"lib", "kv"}
    assert imported == set()


def test_inside_a_daemonic_process(tmp_path: Path) -> None:
    script = """
        import multiprocessing, sys, kvstore

        def main(pipe):
            with kvstore.open("ram://?capacity=1MiB&pin=off", f"file://{sys.argv[1]}",
                              chunk_size="64KiB", engine="processes") as store:
                key = store.add(b"some bytes")
                store.flush(timeout=20)
                pipe.send((multiprocessing.current_process().daemon, store.stats().tiers[1].writes))

        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=main, args=[theirs], daemon=True)
        process.start()
        print(*ours.recv())
        process.join()
    """
    assert run(script, tmp_path).split() == ["True", "1"]


def test_nice_and_affinity(tmp_path: Path) -> None:
    cpu = max(os.sched_getaffinity(0))
    config = parse(HOST, f"file://{tmp_path}", chunk_size=CHUNK, engine="processes")
    config = type(config).from_dict({**config.to_dict(), "nice": 7, "affinity": [cpu]})
    with assemble(config) as store:
        for pid in engine_of(store).pids:
            assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0) + 7
            assert os.sched_getaffinity(pid) == {cpu}


def test_a_cpu_that_is_not_there(tmp_path: Path, footprint: Footprint) -> None:
    config = parse(HOST, f"file://{tmp_path}", chunk_size=CHUNK, engine="processes")
    config = type(config).from_dict({**config.to_dict(), "affinity": [1023]})
    with pytest.raises(kvstore.ConfigError, match=r"affinity=\(1023,\)"):
        assemble(config)
    assert Footprint.now() == footprint


def test_options_that_no_message_can_carry() -> None:
    tier: dict[str, Any] = {"url": "memory://m", "name": "odd", "storage_options": {"lock": threading.Lock()}}
    with pytest.raises(kvstore.ConfigError, match="tier 'odd'.*worker process.*storage_options"):
        open_store(tier)


def test_a_backend_that_cannot_be_made(footprint: Footprint) -> None:
    with pytest.raises(kvstore.ConfigError, match="nosuchscheme"):
        open_store("nosuchscheme://bucket")
    assert Footprint.now() == footprint


# What they leave.


def test_closing_leaves_nothing(tmp_path: Path, footprint: Footprint) -> None:
    for number in range(10):
        with open_store(f"file://{tmp_path}/{number % 3}", "memory://m") as store:
            store.put(bytes([number]) * 16, b"x")
    assert Footprint.now() == footprint


def test_a_tier_that_cannot_be_opened_leaves_nothing(tmp_path: Path, footprint: Footprint) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(kvstore.BackendError, match="required=false"):
        open_store(f"file://{tmp_path}/good", f"file://{tmp_path}/file/kv")
    assert Footprint.now() == footprint


def test_a_tier_that_hangs_at_opening(tmp_path: Path, footprint: Footprint) -> None:
    gates = Gates(tmp_path / "gates")
    gates.shut("open")
    with pytest.raises(kvstore.BackendError, match="did not answer within 0.3 s"):
        open_gated(gates, HOST, f"file://{tmp_path}/kv?timeout=300ms", chunk_size=CHUNK, engine="processes")
    gates.close()
    assert Footprint.now() == footprint


def test_a_tier_that_hangs_at_opening_and_is_not_required(tmp_path: Path, lasting_breakers: None) -> None:
    gates = Gates(tmp_path / "gates")
    gates.shut("open")
    clock = Clock()
    url = f"file://{tmp_path}/kv?timeout=300ms&required=false&workers=1"
    with open_gated(gates, HOST, url, clock=clock, chunk_size=CHUNK, engine="processes") as store:
        pid = gates.await_arrival()
        assert store.stats().tiers[1].breaker.read == "open"
        assert store.get(b"k" * 16, timeout=5) is None
        gates.open("open")

        def is_up() -> bool:
            clock.skip(120.0)  # longer than a breaker is open
            return store.get(b"k" * 16) is None and store.stats().tiers[1].breaker.read == "closed"

        wait_for(is_up)
        wait_for(lambda: writes_again(store))
        assert not has_ended(pid, 0)
    gates.close()


def writes_again(store: kvstore.Store) -> bool:
    store.add(os.urandom(8))
    return store.flush(timeout=5) and store.stats().tiers[1].writes > 0


# With little room.


def test_few_descriptors(tmp_path: Path, footprint: Footprint) -> None:
    """Whichever descriptor is the one too many: an error, and nothing stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = numbers_to_be_had(60)
    failures = 0
    try:
        for room in range(3, 60):
            resource.setrlimit(resource.RLIMIT_NOFILE, (free[room], hard))
            try:
                open_store(f"file://{tmp_path}").close()
                break
            except (OSError, kvstore.KVStoreError):
                failures += 1
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert Footprint.now() == footprint, f"with room for {room} descriptors"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert 5 < failures < 50


def numbers_to_be_had(count: int) -> list[int]:
    """The lowest descriptors that the system would give now; threads that wait in ``accept`` keep some
    others."""
    numbers = [os.dup(0) for _ in range(count)]
    for number in numbers:
        os.close(number)
    return numbers


def test_many_descriptors(tmp_path: Path) -> None:
    """Numbers above 1024, where select() ends."""
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        with open_store(f"file://{tmp_path}") as store:
            key = store.add(b"x")
            assert store.flush(timeout=20)
            store.delete([key])
    finally:
        for fd in fds:
            os.close(fd)


def test_nothing_to_execute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, footprint: Footprint) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(kvstore.BackendError, match="/no/such/python"):
        open_store(f"file://{tmp_path}")
    assert Footprint.now() == footprint


def test_an_interpreter_that_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that is not required goes on without workers, and gets them when they can be had."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/no/such/python")
        store = open_store(f"file://{tmp_path}?required=false&timeout=1s")
    with store:
        await_workers(store, 2)
        wait_for(lambda: writes_again(store))


# Several stores.


def test_twenty_stores_on_one_directory(tmp_path: Path, footprint: Footprint) -> None:
    stores = [open_store(f"file://{tmp_path}?workers=1") for _ in range(20)]
    data = {bytes([number]) * 16: bytes([number]) * 1000 for number in range(20)}
    for store, (key, value) in zip(stores, data.items(), strict=True):
        store.put(key, value)
    assert all(store.flush(timeout=20) for store in stores)
    assert stores[7].get_many(list(data)) == data
    closers = [threading.Thread(target=store.close) for store in stores]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join()
    assert Footprint.now() == footprint
    assert not children() - footprint.children
