"""The rank's worker: results, fences, acknowledgements, and failures that vLLM never sees."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from block_tables import Job, Model, Table
from vllm.v1.kv_offload.base import OffloadingWorker

from kvstore.arena import Arena
from kvstore_vllm.acks import AckWords, Direction
from kvstore_vllm.copies import Copier, CpuCopier, RowLayout, Transfer
from kvstore_vllm.copies.layout import Placed
from kvstore_vllm.specs import SlotSpec
from kvstore_vllm.worker import KVStoreWorker

PAGE = 64
SLOTS = 6


class Gated(Copier):
    """The real copier behind a gate: transfers look unfinished until it is open."""

    def __init__(self, copier: CpuCopier) -> None:
        self.copier = copier
        self.open = threading.Event()
        self.closed = False

    def start(self, direction: Direction, groups: Sequence[Placed]) -> Transfer:
        return _GatedTransfer(self.copier.start(direction, groups), self.open)

    def close(self) -> None:
        self.open.set()
        self.closed = True
        self.copier.close()


class _GatedTransfer(Transfer):
    def __init__(self, transfer: Transfer, gate: threading.Event) -> None:
        self._transfer = transfer
        self._gate = gate

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self._transfer.nbytes

    def done(self) -> bool:
        return self._gate.is_set() and self._transfer.done()

    def wait(self) -> None:
        assert self._gate.wait(10)
        self._transfer.wait()

    def seconds(self) -> float:
        return self._transfer.seconds()


class Rank:
    """A worker with one tensor of 8 blocks, two blocks per chunk, over a real arena."""

    def __init__(self, arena: Arena, rank: int = 0, **layout: object) -> None:
        self.arena = arena
        self.model = Model([Table(PAGE)], [[(0, PAGE)]], blocks=8)
        self.model.fill(1)
        self.layout = RowLayout.of(
            self.model.caches(),
            rank=rank,
            world_size=2,
            blocks_per_chunk=2,
            chunk_size=4 * PAGE,
            **layout,  # type: ignore[arg-type]
        )
        self.copier = Gated(CpuCopier(self.layout, arena))
        self.copier.open.set()
        self.acks = AckWords(arena.control, 2, writers=1)
        self.worker = KVStoreWorker(arena, self.layout, self.copier, self.acks, rank)

    def store(self, job: int, ticket: int, blocks: list[int], slots: list[int], first: int = 0) -> None:
        source = Job([blocks], [first], []).spec()
        assert self.worker.submit_store(job, source, SlotSpec(np.array(slots), ticket))

    def load(self, job: int, ticket: int, blocks: list[int], slots: list[int], first: int = 0) -> None:
        target = Job([blocks], [first], []).spec()
        assert self.worker.submit_load(job, SlotSpec(np.array(slots), ticket), target)

    def finished(self) -> list[int]:
        results = self.worker.get_finished()
        assert all(result.success for result in results)
        return [result.job_id for result in results]

    def rows(self) -> list[bytes]:
        return [bytes(self.arena.view(slot)) for slot in range(SLOTS)]


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(SLOTS * 4096, 4 * PAGE, pin="off") as created:
        yield created


@pytest.fixture
def rank(arena: Arena) -> Iterator[Rank]:
    made = Rank(arena)
    yield made
    if not made.copier.closed:
        made.worker.shutdown()


def test_is_a_worker_of_vllm(rank: Rank) -> None:
    assert isinstance(rank.worker, OffloadingWorker)


def test_what_is_stored_can_be_loaded_elsewhere(rank: Rank) -> None:
    before = rank.model.bytes()[0]
    rank.store(1, 1, [0, 1, 2, 3], [4, 2])
    rank.worker.wait({1})
    (result,) = rank.worker.get_finished()
    assert (result.job_id, result.success, result.transfer_size) == (1, True, 4 * PAGE)
    assert result.transfer_time is not None
    rank.load(2, 1, [7, 6, 5], [4, 2], first=1)
    rank.worker.wait({2})
    assert rank.finished() == [2]
    np.testing.assert_array_equal(rank.model.bytes()[0][[7, 6, 5]], before[[1, 2, 3]])


def test_results_come_once_and_only_when_copied(rank: Rank) -> None:
    rank.copier.open.clear()
    rank.store(1, 1, [0, 1], [0])
    rank.store(2, 2, [2, 3], [1])
    assert rank.finished() == []
    assert rank.acks.acknowledged("store") == 0
    rank.copier.open.set()
    rank.worker.wait({1, 2})
    assert rank.acks.acknowledged("store") == 2
    assert rank.finished() == [1, 2]
    assert rank.finished() == []


def test_wait_returns_only_when_copied(rank: Rank) -> None:
    rank.copier.open.clear()
    rank.store(1, 1, [0, 1], [0])
    waiting = threading.Thread(target=rank.worker.wait, args=({1},))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    rank.copier.open.set()
    waiting.join(10)
    assert not waiting.is_alive()
    assert rank.finished() == [1]


def test_wait_for_unknown_jobs_returns(rank: Rank) -> None:
    rank.copier.open.clear()
    rank.store(1, 1, [0, 1], [0])
    rank.worker.wait({5, 6})
    assert rank.finished() == []


def test_a_job_flushed_ahead_of_an_earlier_one_is_acknowledged_after_it(rank: Rank) -> None:
    rank.store(2, 2, [2, 3], [1])
    rank.worker.wait({2})
    assert rank.finished() == [2]
    assert rank.acks.acknowledged("store") == 0
    rank.store(1, 1, [0, 1], [0])
    rank.worker.wait({1})
    assert rank.acks.acknowledged("store") == 2


def test_directions_are_acknowledged_apart(arena: Arena) -> None:
    ranks = [Rank(arena, number) for number in range(2)]
    for number, made in enumerate(ranks):
        made.load(1, 1, [0, 1], [3])
        made.worker.wait({1})
        assert made.acks.acknowledged("load") == number  # the last of all ranks counts
        assert made.acks.acknowledged("store") == 0
        made.worker.shutdown()


@pytest.mark.parametrize(
    ("blocks", "slots"),
    [
        ([0, 1], [SLOTS]),
        ([0, 1], [-1]),
        ([0, 8], [1]),
        ([0, 1], [1, 2]),
        ([0, 1, 2, 3], [1]),
    ],
)
def test_a_store_that_makes_no_sense_touches_nothing_and_fails_for_the_manager_only(
    rank: Rank, caplog: pytest.LogCaptureFixture, blocks: list[int], slots: list[int]
) -> None:
    before = rank.rows()
    with caplog.at_level(logging.WARNING):
        rank.store(1, 1, blocks, slots)
        rank.worker.wait({1})
    assert rank.finished() == [1]
    assert rank.acks.failed(1)
    assert rank.acks.acknowledged("store") == 1
    assert rank.rows() == before
    assert "the chunks of store 1 are not kept" in caplog.text


def test_a_store_with_a_hole_in_it_is_not_kept(rank: Rank) -> None:
    """Three blocks for two chunks: whichever is missing, those behind it would land one place too early."""
    rank.store(1, 1, [0, 1, 2], [1, 2])
    rank.store(2, 2, [3, 4, 5], [3, 4], first=1)
    rank.worker.wait({1, 2})
    assert rank.finished() == [1, 2]
    assert [rank.acks.failed(ticket) for ticket in (1, 2)] == [True, False]


def test_an_error_of_the_copies_spoils_a_store_and_raises_from_a_load(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise OSError("no such memory")

    monkeypatch.setattr(rank.copier.copier, "_copy", broken)
    rank.store(1, 1, [0, 1], [1])
    rank.worker.wait({1})
    assert rank.finished() == [1]
    assert rank.acks.failed(1)
    assert rank.acks.acknowledged("store") == 1
    rank.load(2, 1, [0, 1], [1])
    with pytest.raises(RuntimeError, match="could not be loaded: no such memory"):
        rank.worker.wait({2})


def test_a_load_that_makes_no_sense_raises(rank: Rank) -> None:
    before = rank.model.bytes()[0]
    with pytest.raises(ValueError, match="slot 6 to 6"):
        rank.load(1, 1, [0, 1], [SLOTS])
    np.testing.assert_array_equal(rank.model.bytes()[0], before)


def test_a_rank_that_does_not_write_reports_without_copying(arena: Arena) -> None:
    made = Rank(arena, 1, replicated=True)
    before = made.rows()
    made.store(1, 1, [0, 1], [1])
    assert made.finished() == [1]
    made.worker.shutdown()
    assert made.rows() == before


def test_shutdown_finishes_what_was_submitted(rank: Rank) -> None:
    rank.store(1, 1, [0, 1], [0])
    rank.store(2, 2, [2, 3], [1])
    rank.worker.shutdown()
    assert AckWords(rank.arena.control, 2, writers=1).acknowledged("store") == 2
    assert rank.finished() == [1, 2]
    rank.worker.shutdown()


def test_shutdown_leaves_nothing_that_keeps_the_arena_mapped(arena: Arena) -> None:
    made = Rank(arena)
    made.store(1, 1, [0, 1], [0])
    made.worker.shutdown()
    base = f"{arena.base:x}-"
    maps = Path("/proc/self/maps")
    assert base in maps.read_text()
    arena.close()
    assert base not in maps.read_text()


def test_specs_travel_to_other_processes() -> None:
    again = pickle.loads(pickle.dumps(SlotSpec(np.array([3, 1], np.int32), 7)))
    assert (again.slots.tolist(), again.slots.dtype, again.ticket) == ([3, 1], np.int64, 7)
