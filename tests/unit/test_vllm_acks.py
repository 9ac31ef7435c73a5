"""Acknowledgements of the ranks, over the control page of a real arena."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.arena import Arena
from kvstore.errors import ConfigError
from kvstore_vllm.acks import AckWords


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(4096, 4096, pin="off") as created:
        yield created


def test_nothing_is_acknowledged_at_first(arena: Arena) -> None:
    words = AckWords(arena.control, 2)
    assert words.acknowledged("store") == words.acknowledged("load") == 0
    assert not words.failed(1)


def test_the_slowest_rank_counts(arena: Arena) -> None:
    words = AckWords(arena.control, 3)
    for rank, ticket in enumerate((7, 5, 9)):
        words.acknowledge(rank, "store", ticket)
    assert words.acknowledged("store") == 5
    assert words.acknowledged("load") == 0


def test_only_writers_count_for_stores(arena: Arena) -> None:
    words = AckWords(arena.control, 3, writers=1)
    words.acknowledge(0, "store", 4)
    words.acknowledge(0, "load", 4)
    assert words.acknowledged("store") == 4
    assert words.acknowledged("load") == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_that_fails_is_enough(arena: Arena, rank: int) -> None:
    words = AckWords(arena.control, 2)
    words.fail(rank, 3)
    assert [words.failed(ticket) for ticket in range(1, 6)] == [False, False, True, False, False]


def test_a_full_ring_forgets_no_failure(arena: Arena) -> None:
    words = AckWords(arena.control, 2)
    odd = range(1, 400, 2)
    for ticket in odd:
        words.fail(1, ticket)
    assert all(words.failed(ticket) for ticket in odd)
    assert not words.failed(398)
    assert not words.failed(401)


def test_other_mappings_see_the_same_words(arena: Arena) -> None:
    writing = AckWords(arena.control, 2)
    with Arena.attach(arena.handle) as other:
        reading = AckWords(other.control, 2)
        writing.fail(0, 2)
        writing.acknowledge(0, "store", 3)
        writing.acknowledge(1, "store", 2)
        assert reading.acknowledged("store") == 2
        assert reading.failed(2)
        assert not reading.failed(1)


def test_closed_words_let_the_arena_go(arena: Arena) -> None:
    words = AckWords(arena.control, 1)
    words.close()
    words.close()
    with pytest.raises(ValueError, match="released"):
        words.acknowledged("store")


@pytest.mark.parametrize("world_size", [1, 8, 31, 100])
def test_ranks_do_not_share_words(arena: Arena, world_size: int) -> None:
    words = AckWords(arena.control, world_size)
    for rank in range(world_size):
        words.acknowledge(rank, "store", rank + 10)
        words.acknowledge(rank, "load", rank + 500)
        words.fail(rank, rank + 1000)
    assert words.acknowledged("store") == 10
    assert words.acknowledged("load") == 500
    assert all(words.failed(rank + 1000) for rank in range(world_size))
    assert not words.failed(999)


def test_too_many_ranks_are_refused(arena: Arena) -> None:
    with pytest.raises(ConfigError, match="no room for 200 ranks"):
        AckWords(arena.control, 200)
