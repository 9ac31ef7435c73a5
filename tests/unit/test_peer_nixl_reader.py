"""What the NIXL reader says of reads that fail: whether the bytes may still come."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvstore.peer.nixl_memory import NixlReader
from kvstore.peer.transport import Wanted

PAGE = 4096


class Failing:
    """An agent whose reads fail when they begin, some of their parts perhaps under way; it can, or cannot,
    take them back."""

    def __init__(self, *, releases: bool) -> None:
        self.releases = releases
        self.released: list[int] = []

    def register(self, address: int, size: int) -> None:
        pass

    def prepare(self, server: str, parts: Sequence[tuple[int, int, int]]) -> int:
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
    assert agent.released == [7]


def test_what_was_not_taken_back_is_adrift_until_the_connection_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = NixlReader(is_local=True)
    monkeypatch.setattr(reader, "_made", Failing(releases=False))
    reader.start([Wanted((1, 0), 0, memoryview(bytearray(PAGE)))])
    assert reader.disconnect() == [(1, 0)]
