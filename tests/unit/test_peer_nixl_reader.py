"""What the NIXL reader says of reads that fail, and of those it has not begun."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing
from itertools import count

import pytest

from kvstore.frame import digest_of
from kvstore.peer import nixl_reader
from kvstore.peer.nixl_reader import NixlReader
from kvstore.peer.transport import Read, Wanted

zmq = pytest.importorskip("zmq", reason="no pyzmq (pip install '.[p2p]')")

PAGE = 4096


class Agent:
    """An agent whose reads never end; it can, or cannot, take them back."""

    def __init__(self, *, releases: bool = True) -> None:
        self.releases = releases
        self.released: list[int] = []
        self.begun = threading.Semaphore(0)
        self._handles = count(1)
        self.closed = False

    def register(self, address: int, size: int) -> None:
        pass

    def prepare(self, server: str, source: int, target: int, size: int) -> int:
        return next(self._handles)

    def begin(self, handle: int) -> bool:
        self.begun.release()
        return False

    def is_done(self, handle: int) -> bool:
        return False

    def release(self, handle: int) -> bool:
        self.released.append(handle)
        return self.releases

    def disconnect(self, server: str) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class Failing(Agent):
    """Its reads fail when they begin, some of their bytes perhaps under way."""

    def begin(self, handle: int) -> bool:
        raise RuntimeError("half of it has been posted")


class Dying(Agent):
    """Whoever lets go of its first read dies of it."""

    def is_done(self, handle: int) -> bool:
        return True

    def release(self, handle: int) -> bool:
        if handle == 1:
            raise RuntimeError("nobody has foreseen this")
        return super().release(handle)


class Copying(Agent):
    """Its reads are over when they have begun."""

    def begin(self, handle: int) -> bool:
        return True


@pytest.fixture
def reader() -> Iterator[NixlReader]:
    with closing(NixlReader(is_local=True)) as reader:
        yield reader


def wanted(reads: int) -> list[Wanted]:
    memory = memoryview(bytearray(reads * PAGE))
    return [Wanted((1, place), place * PAGE, memory[place * PAGE :][:PAGE]) for place in range(reads)]


def wait_for(reader: NixlReader, reads: int) -> list[Read]:
    """What has ended, when that is so much; the poller tells when to look."""
    poller = zmq.Poller()
    reader.attach(poller)
    ended: list[Read] = []
    while len(ended) < reads:
        assert poller.poll(10_000)
        ended += reader.finished()
    return sorted(ended, key=lambda read: read.tag)


@pytest.mark.parametrize("releases", [True, False])
def test_a_read_that_fails_at_its_beginning_is_over_when_it_is_released(
    monkeypatch: pytest.MonkeyPatch, reader: NixlReader, releases: bool
) -> None:
    agent = Failing(releases=releases)
    monkeypatch.setattr(reader, "_made", agent)
    reader.start(wanted(2))
    ended = wait_for(reader, 2)
    assert [read.tag for read in ended] == [(1, 0), (1, 1)]
    assert all("posted" in read.error for read in ended)
    assert [read.over for read in ended] == [releases] * 2
    assert len(agent.released) == 2
    assert reader.disconnect() == []
    assert agent.closed, "some of it may have begun"


def test_what_was_not_taken_back_is_adrift_until_the_connection_ends(
    monkeypatch: pytest.MonkeyPatch, reader: NixlReader
) -> None:
    monkeypatch.setattr(reader, "_made", Failing(releases=False))
    reader.start(wanted(1))
    poller = zmq.Poller()
    reader.attach(poller)
    assert poller.poll(10_000)
    assert reader.disconnect() == [(1, 0)]


@pytest.mark.parametrize("releases", [True, False])
def test_a_connection_that_ends_takes_back_what_is_under_way(
    monkeypatch: pytest.MonkeyPatch, reader: NixlReader, releases: bool
) -> None:
    agent = Agent(releases=releases)
    monkeypatch.setattr(reader, "_made", agent)
    reader.start(wanted(3))
    for _ in range(3):
        assert agent.begun.acquire(timeout=10)
    assert sorted(reader.disconnect()) == ([] if releases else [(1, 0), (1, 1), (1, 2)])
    assert sorted(agent.released) == [1, 2, 3]
    assert reader.finished() == []


def test_only_what_has_not_begun_can_be_dropped(monkeypatch: pytest.MonkeyPatch, reader: NixlReader) -> None:
    agent = Agent()
    monkeypatch.setattr(reader, "_made", agent)
    reader.start(wanted(100))
    under_way = nixl_reader._THREADS * nixl_reader._AT_ONCE
    for _ in range(under_way):
        assert agent.begun.acquire(timeout=10)
    assert [reader.drop((1, place)) for place in range(100)] == [False] * under_way + [True] * (
        100 - under_way
    )
    assert not reader.drop((1, 99))


def test_what_has_come_is_hashed_and_told(monkeypatch: pytest.MonkeyPatch, reader: NixlReader) -> None:
    agent = Copying()
    monkeypatch.setattr(reader, "_made", agent)
    memory = memoryview(os.urandom(50 * PAGE))
    reads = [
        Wanted((1, place), 0, memoryview(bytearray(memory[place * PAGE :][:PAGE]))) for place in range(50)
    ]
    reader.start(reads)
    ended = wait_for(reader, 50)
    assert [read.digest for read in ended] == [digest_of(read.out) for read in reads]
    assert not any(read.error for read in ended)
    assert sorted(agent.released) == list(range(1, 51))
    assert reader.disconnect() == []


def test_it_can_be_used_again_after_it_was_closed(
    monkeypatch: pytest.MonkeyPatch, reader: NixlReader
) -> None:
    for _ in range(2):
        monkeypatch.setattr(reader, "_made", Copying())
        reader.start(wanted(3))
        assert [read.tag for read in wait_for(reader, 3)] == [(1, 0), (1, 1), (1, 2)]
        reader.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "kvstore-nixl"]


def test_an_agent_that_had_reads_under_way_is_closed(
    monkeypatch: pytest.MonkeyPatch, reader: NixlReader
) -> None:
    """What it has released may be written all the same."""
    agent = Agent()
    monkeypatch.setattr(reader, "_made", agent)
    reader.start(wanted(1))
    assert agent.begun.acquire(timeout=10)
    assert reader.disconnect() == []
    assert agent.closed
    assert reader._made is None


def test_an_agent_that_had_none_is_kept(monkeypatch: pytest.MonkeyPatch, reader: NixlReader) -> None:
    agent = Copying()
    monkeypatch.setattr(reader, "_made", agent)
    reader.start(wanted(1))
    wait_for(reader, 1)
    assert reader.disconnect() == []
    assert not agent.closed


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_is_replaced_and_its_reads_are_adrift(
    monkeypatch: pytest.MonkeyPatch, reader: NixlReader
) -> None:
    monkeypatch.setattr(reader, "_made", Dying())
    reader.start(wanted(1))
    while all(thread.is_alive() for thread in reader._threads):
        reader._threads[0].join(0.01)
    assert reader.disconnect() == [(1, 0)]
    monkeypatch.setattr(reader, "_made", Copying())
    reader.start(wanted(20))
    assert len(wait_for(reader, 20)) == 20
    assert all(thread.is_alive() for thread in reader._threads)
