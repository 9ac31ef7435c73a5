"""The NIXL reader: chunks in pieces, and whether the bytes of reads that fail may still come."""

from __future__ import annotations

import ctypes
import os

import pytest
from xxhash import xxh3_128_digest

from kvstore.peer.nixl_memory import NixlReader
from kvstore.peer.transport import Read, Wanted

PAGE = 4096
PIECE = 512 << 10


class Failing:
    """An agent whose reads fail when they begin, some of their parts perhaps under way; it can, or cannot,
    take them back."""

    def __init__(self, *, releases: bool) -> None:
        self.releases = releases
        self.released: list[int] = []

    def register(self, address: int, size: int) -> None:
        pass

    def prepare(self, server: str, source: int, target: int, size: int) -> int:
        return 7

    def begin(self, handle: int) -> bool:
        raise RuntimeError("half of it has been posted")

    def release(self, handle: int) -> bool:
        self.released.append(handle)
        return self.releases

    def disconnect(self, server: str) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("releases", [True, False])
def test_a_read_that_fails_at_its_beginning_is_over_when_it_is_released(
    monkeypatch: pytest.MonkeyPatch, releases: bool
) -> None:
    agent = Failing(releases=releases)
    reader = NixlReader(is_local=True)
    monkeypatch.setattr(reader, "_made", agent)
    memory = memoryview(bytearray(2 * PAGE))
    reader.start([Wanted((1, place), place * PAGE, memory[place * PAGE :][:PAGE]) for place in range(2)])
    ended = reader.finished()
    assert [read.tag for read in ended] == [(1, 0), (1, 1)]
    assert all("posted" in read.error for read in ended)
    assert [read.over for read in ended] == [releases] * 2
    assert agent.released == [7, 7]


def test_what_was_not_taken_back_is_adrift_until_the_connection_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = NixlReader(is_local=True)
    monkeypatch.setattr(reader, "_made", Failing(releases=False))
    reader.start([Wanted((1, 0), 0, memoryview(bytearray(PAGE)))])
    assert reader.disconnect() == [(1, 0)]


class Slow:
    """An agent that fills memory when the test says so, in any order."""

    def __init__(self, source: bytes) -> None:
        self._source = source
        self._parts: list[tuple[int, int, int]] = []
        self._done: set[int] = set()
        self.held: set[int] = set()

    def register(self, address: int, size: int) -> None:
        pass

    def prepare(self, server: str, source: int, target: int, size: int) -> int:
        self._parts.append((source, target, size))
        self.held.add(len(self._parts) - 1)
        return len(self._parts) - 1

    def begin(self, handle: int) -> bool:
        return False

    def arrive(self, handle: int) -> None:
        source, target, size = self._parts[handle]
        ctypes.memmove(target, self._source[source : source + size], size)
        self._done.add(handle)

    def is_done(self, handle: int) -> bool:
        return handle in self._done

    def release(self, handle: int) -> bool:
        self.held.discard(handle)
        return True


def test_pieces_of_a_chunk_are_under_way_together_and_come_in_any_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = os.urandom(3 * PIECE - 100)
    agent = Slow(source)
    reader = NixlReader(is_local=True)
    monkeypatch.setattr(reader, "_made", agent)
    memory = memoryview(bytearray(len(source)))
    reader.start([Wanted((1, 0), 0, memory)])
    assert len(agent.held) == 3
    for handle in (2, 1):
        agent.arrive(handle)
        assert reader.finished() == []
    agent.arrive(0)
    assert reader.finished() == [Read((1, 0), digest=xxh3_128_digest(source))]
    assert memory == source
    assert not agent.held
    assert reader.finished() == []
