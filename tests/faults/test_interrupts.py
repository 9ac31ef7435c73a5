"""Ctrl-C at every place of the store's calls where the interpreter looks for signals.

Those places are the starts of functions and the ends of calls of functions in C: there a profile function
sees the interpreter pass, and what it raises is raised as a signal handler's exception would be. So every
place is tried, one after the other, and none by chance.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from os.path import basename
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

import kvstore
from kvstore import ClosedError, Store
from support.chunks import CHUNK, chunk_key, payload

KEYS = [chunk_key(number) for number in range(12)]
EXTRA = chunk_key(100)
PATIENCE = 10.0
#: Threads that other tests have left to the process.
ELSEWHERE: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def elsewhere_before() -> None:
    ELSEWHERE.clear()
    ELSEWHERE.update(threading.enumerate())


class Place(NamedTuple):
    """Where the interpreter looks for signals: the start of a function, or the end of a call in a line."""

    file: str
    function: str
    line: int
    called: str


def place_of(frame: FrameType, event: str, what: Any) -> Place | None:
    code = frame.f_code
    if event not in ("call", "c_return") or code.co_filename == __file__:
        return None
    called = getattr(what, "__qualname__", "") if event == "c_return" else ""
    return Place(basename(code.co_filename), code.co_qualname, frame.f_lineno, called)


def places_of(call: Callable[[], object]) -> list[Place]:
    """Every place that `call` passes in this thread."""
    seen: dict[Place, None] = {}

    def watch(frame: FrameType, event: str, what: Any) -> None:
        place = place_of(frame, event, what)
        if place is not None:
            seen[place] = None

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(seen)


def interrupt(call: Callable[[], object], where: Place) -> None:
    """Interrupt `call` when it first comes to a place; if it never does, it ends by itself."""

    def watch(frame: FrameType, event: str, what: Any) -> None:
        if place_of(frame, event, what) == where:
            raise KeyboardInterrupt  # which ends the watch, too

    with suppress(KeyboardInterrupt, ClosedError):
        sys.setprofile(watch)
        try:
            call()
        finally:
            sys.setprofile(None)


def elsewhere(call: Callable[[], bool]) -> bool:
    """What another thread gets from `call`, which must not hang; False where the store is closed."""
    outcome: list[bool | BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except ClosedError:
            outcome.append(False)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "a thread hangs"
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def use(store: Store) -> None:
    """Every kind of call, with more chunks than host memory holds."""
    store.put_many({key: payload(key) for key in KEYS}, timeout=PATIENCE)
    store.flush(timeout=PATIENCE)
    store.get_many(KEYS, timeout=PATIENCE)
    job = store.prefetch(KEYS[:4])
    job.done()
    job.result(timeout=PATIENCE)
    store.prefetch(KEYS[4:]).cancel()
    with store.reserve([EXTRA], wait=PATIENCE) as lease:
        lease[EXTRA][:] = payload(EXTRA)
    store.reserve([chunk_key(101)], wait=PATIENCE).abort()
    with store.read(KEYS) as read:
        dict(read.items())
    store.lookup(KEYS)
    store.stats()
    store.delete([*KEYS[:2], EXTRA], timeout=PATIENCE)


def check_use(store: Store) -> bool:
    """It serves, and nothing is leased or lost; True, for it is not closed."""
    assert store.flush(timeout=PATIENCE)
    store.delete([EXTRA], timeout=PATIENCE)
    assert store.put(EXTRA, payload(EXTRA), timeout=PATIENCE)
    assert store.get(EXTRA) == payload(EXTRA)
    assert store.get_many(KEYS).items() <= {key: payload(key) for key in KEYS}.items()
    assert store.flush(timeout=PATIENCE)
    assert store.stats().leased == 0
    catalog = store._catalog
    assert catalog.free + len(catalog.ready) == catalog.slots
    catalog.audit()
    return True


def check_close(store: Store) -> None:
    """It closes without waiting for anything, and nothing of it goes on."""
    elsewhere(lambda: store.close(6 * PATIENCE))
    assert store.arena.fd == -1
    left = set(threading.enumerate()) - ELSEWHERE
    assert not [thread.name for thread in left if thread.name.startswith("kvstore-")]


@contextmanager
def blaming(place: Place) -> Iterator[None]:
    """Errors name the place."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"interrupted at {place}")
        raise


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[], Store]]:
    stores: list[Store] = []

    def open_one() -> Store:
        tiers = f"ram://?capacity={6 * 4096}&pin=off", f"file://{tmp_path}?workers=1"
        stores.append(kvstore.open(*tiers, chunk_size=CHUNK))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close(1.0)


def test_calls(opened: Callable[[], Store]) -> None:
    """Interrupted anywhere, a store serves as before, or refuses every call and closes at once."""
    store = opened()
    use(store)
    places = places_of(partial(use, store))
    alive = 0
    for place in places:
        with blaming(place):
            interrupt(partial(use, store), place)
            if elsewhere(partial(check_use, store)):
                alive += 1
            else:
                check_close(store)
                store = opened()
    assert 50 < alive < len(places)


def test_closing(opened: Callable[[], Store]) -> None:
    """A close that was interrupted ends when it is called again."""

    def owing() -> Store:
        store = opened()
        store.put_many({key: payload(key) for key in KEYS[:4]})
        return store

    places = places_of(owing().close)
    assert len(places) > 50
    for place in places:
        store = owing()
        with blaming(place):
            interrupt(store.close, place)
            check_close(store)


def test_a_lease_that_nobody_has_any_more(opened: Callable[[], Store]) -> None:
    store = opened()
    for take in (store.read, store.hold, store.reserve):
        store.put(KEYS[0], payload(KEYS[0]))
        take(KEYS[:2])
        assert check_use(store)


def test_those_who_wait_learn_that_the_store_was_interrupted(opened: Callable[[], Store]) -> None:
    store = opened()
    waiting = threading.Event()

    def never() -> bool:
        waiting.set()
        return False

    outcome: list[BaseException] = []

    def wait() -> None:
        try:
            store.wait_until(never, PATIENCE)
        except ClosedError as error:
            outcome.append(error)

    threads = [threading.Thread(target=wait, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert waiting.wait(PATIENCE)
    job = store.prefetch(KEYS)
    place = next(place for place in places_of(store.poll) if place.function == "Serving._serve")
    interrupt(store.poll, place)
    for thread in threads:
        thread.join(PATIENCE)
    assert len(outcome) == 2
    with pytest.raises(ClosedError, match="interrupted"):
        job.future.result(timeout=0)
    assert store.close() is False
