"""A forked child has the parent's memory, but neither its workers nor its locks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import kvstore
from kvstore import ClosedError, Store
from support.chunks import CHUNK, chunk_key, payload

A, B = chunk_key(1), chunk_key(2)


def open_store(folder: Path, engine: str) -> Store:
    return kvstore.open("ram://?capacity=16KiB&pin=off", f"file://{folder}", chunk_size=CHUNK, engine=engine)


def in_child(check: Callable[[], object]) -> None:
    """Run `check` in a forked child; AssertionError unless it returns."""
    child = os.fork()
    if not child:
        signal.alarm(20)  # a deadlock is a failure, too
        code = 1
        try:
            check()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with status {status}"


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(ClosedError, match="fork"):
        call()


@pytest.mark.parametrize("engine", ["inline", "threads"])
def test_every_call_in_a_child_is_refused(tmp_path: Path, engine: str) -> None:
    with open_store(tmp_path, engine) as store:
        store.put(A, payload(A))

        def check() -> None:
            for call in (
                lambda: store.get(A),
                lambda: store.put(B, b"x"),
                lambda: store.lookup([A]),
                lambda: store.read([A]),
                lambda: store.reserve([B]),
                lambda: store.prefetch([A]),
                lambda: store.delete([A]),
                store.flush,
                store.stats,
                store.events,
                store.poll,
            ):
                refused(call)
            assert store.close() is True

        in_child(check)
        assert store.get(A) == payload(A), "the parent's store lives on"
        store.put(B, b"x")


def test_a_fork_while_another_thread_holds_the_lock(tmp_path: Path) -> None:
    with open_store(tmp_path, "threads") as store:
        holding, done = threading.Event(), threading.Event()

        def hold() -> None:
            with store._lock:
                holding.set()
                done.wait(20)

        thread = threading.Thread(target=hold)
        thread.start()
        holding.wait(20)

        def check() -> None:
            refused(store.poll)
            assert store.close() is True

        in_child(check)
        done.set()
        thread.join()


def test_leases_taken_before_the_fork_end_quietly_in_the_child(tmp_path: Path) -> None:
    with open_store(tmp_path, "threads") as store:
        store.put(A, payload(A))
        lease, filling = store.read([A]), store.reserve([B])

        def check() -> None:
            lease.release()
            refused(filling.commit)

        in_child(check)
        assert lease[A] == payload(A)
        assert store.stats().leased == 1
        lease.release()
        filling.abort()


def test_a_child_opens_a_store_of_its_own(tmp_path: Path) -> None:
    with open_store(tmp_path, "threads") as store:
        store.put(A, payload(A))
        assert store.flush(timeout=20)

        def check() -> None:
            with open_store(tmp_path, "threads") as mine:
                assert mine.get(A) == payload(A)

        in_child(check)
