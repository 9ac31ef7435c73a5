"""Places of blocks in rows, and the patterns found in them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from block_tables import Job, Model, Table, heads
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

from kvstore.errors import ConfigError
from kvstore_vllm.copies.layout import Extent, Piece, RowLayout
from kvstore_vllm.copies.strided import block_runs, runs


def layout_of(model: Model, chunk_size: int, **options: object) -> RowLayout:
    given_options = {"rank": 0, "world_size": 1, "blocks_per_chunk": 1, **options}
    return RowLayout.of(model.caches(), chunk_size=chunk_size, **given_options)  # type: ignore[arg-type]


def one_tensor(tensor: torch.Tensor, page: int) -> CanonicalKVCaches:
    return CanonicalKVCaches([CanonicalKVCacheTensor(tensor, page)], [[CanonicalKVCacheRef(0, page)]])


class TestRows:
    def test_of_two_ranks(self) -> None:
        model = Model([Table(10), Table(6)], [[(0, 9), (1, 6)], [(1, 5)]], blocks=4)
        layout = layout_of(model, 80, rank=1, world_size=2, blocks_per_chunk=2)
        first, second = layout.groups
        assert first.pieces == (Piece(0, 0, 40, 10, 9), Piece(1, 0, 60, 6, 6))
        assert first.gaps == (Extent(49, 1), Extent(59, 1), Extent(72, 8))
        assert second.pieces == (Piece(1, 0, 60, 6, 5),)
        assert second.gaps == (Extent(40, 20), Extent(65, 1), Extent(71, 9))

    def test_canonical_ones_are_the_same_on_every_rank(self) -> None:
        for rank in range(4):
            mapping = heads(rank, shards=2, replicas=2, tokens=4, width=3)
            model = Model([Table(12)] * 2, [[(0, 12), (1, 12)]], 4, [mapping] * 2)
            layout = layout_of(model, 4 * 24, rank=rank, world_size=4, blocks_per_chunk=2, canonical=True)
            shard, turn = divmod(rank, 2)
            assert layout.groups[0].pieces == (
                Piece(0, 0, shard * 3, 24, 3, 4, 3, 6, 2, turn),
                Piece(1, 0, 48 + shard * 3, 24, 3, 4, 3, 6, 2, turn),
            )
            assert layout.groups[0].gaps == ()
            assert bool(layout.groups[0].pages) == (rank == 0)

    def test_of_a_packed_block(self) -> None:
        layout = RowLayout.of(
            one_tensor(torch.zeros(5, 96, dtype=torch.int8), 96),
            rank=0,
            world_size=1,
            blocks_per_chunk=1,
            chunk_size=96,
        )
        assert [(tensor.stride, tensor.blocks) for tensor in layout.tensors] == [(96, 5)]

    def test_of_a_tensor_in_elements(self) -> None:
        tensor = torch.zeros(5, 2, 8, 3, dtype=torch.float16)
        layout = RowLayout.of(one_tensor(tensor, 96), rank=0, world_size=1, blocks_per_chunk=1, chunk_size=96)
        assert [(found.stride, found.blocks) for found in layout.tensors] == [(96, 5)]

    def test_of_a_view_with_something_between_blocks(self) -> None:
        tensor = torch.zeros(5 * 50, dtype=torch.float16).as_strided((5, 48), (50, 1), 2)
        layout = RowLayout.of(
            one_tensor(tensor[:-1], 96), rank=0, world_size=1, blocks_per_chunk=1, chunk_size=96
        )
        (found,) = layout.tensors
        assert (found.stride, found.blocks, found.address) == (100, 4, tensor.data_ptr())


class TestRefused:
    def test_rows_too_small(self) -> None:
        model = Model([Table(10), Table(6)], [[(0, 10)]], blocks=4)
        layout_of(model, 64, world_size=2, blocks_per_chunk=2)
        with pytest.raises(ConfigError, match="need 32 bytes of a chunk, and have 31"):
            layout_of(model, 62, world_size=2, blocks_per_chunk=2)

    def test_canonical_without_mappings(self) -> None:
        with pytest.raises(ConfigError, match="canonical_layout"):
            layout_of(Model([Table(10)], [[(0, 10)]], blocks=4), 10, canonical=True)

    @pytest.mark.parametrize("tensor", [torch.zeros(5, 7), torch.zeros(8, 5).t()])
    def test_tensors_that_are_no_table(self, tensor: torch.Tensor) -> None:
        caches = one_tensor(tensor, 16)
        with pytest.raises(ConfigError, match="no table of blocks of 16 bytes"):
            RowLayout.of(caches, rank=0, world_size=1, blocks_per_chunk=1, chunk_size=64)

    def test_pages_beyond_their_blocks(self) -> None:
        with pytest.raises(ConfigError, match="beyond the blocks of 10 bytes"):
            layout_of(Model([Table(10)], [[(0, 11)]], blocks=4), 64)


class TestJobs:
    @pytest.fixture
    def layout(self) -> RowLayout:
        model = Model([Table(8)], [[(0, 8)], [(0, 8)]], blocks=20)
        return layout_of(model, 32, blocks_per_chunk=4)

    def test_places(self, layout: RowLayout) -> None:
        job = Job([[11, 12, 13, 14, 15, 16], [3]], [6, 3], [5, 2, 7])
        placement = layout.place(job.spec(), np.array(job.slots), 8)
        first, second = placement.groups
        assert first.slots.tolist() == [5, 5, 2, 2, 2, 2]
        assert first.subs.tolist() == [2, 3, 0, 1, 2, 3]
        assert first.pages.tolist() == [22, 23, 8, 9, 10, 11]
        assert (first.bare_slots.tolist(), first.bare_subs.tolist()) == ([5, 5], [0, 1])
        assert (second.slots.tolist(), second.subs.tolist()) == ([7], [3])
        assert placement.whole

    def test_groups_without_blocks_take_no_slots(self, layout: RowLayout) -> None:
        placement = layout.place(Job([[], [1]], [0, 0], [3]).spec(), np.array([3]), 8)
        assert [placed.group for placed in placement.groups] == [1]
        assert not placement.whole

    @pytest.mark.parametrize(
        ("blocks", "firsts", "slots", "complaint"),
        [
            ([[0, 1, 2, 3], []], [0, 0], [8], "slot 8 to 8, and there are 8"),
            ([[0, 1, 2, 3], []], [0, 0], [-1], "slot -1 to -1"),
            ([[0, 1, 2, 20], []], [0, 0], [1], "block 0 to 20, and there are 20"),
            ([[0, 1, 2, -1], []], [0, 0], [1], "block -1 to 2"),
            ([[0, 1, 2, 3], []], [1, 0], [1], "1 chunks left for group 0, which needs 2"),
            ([[0, 1, 2, 3], []], [0, 0], [1, 2], "1 chunks and 0 blocks of no group"),
            ([[0]], [0], [1], "1 groups, the rank 2"),
        ],
    )
    def test_that_make_no_sense_are_refused(
        self, layout: RowLayout, blocks: list[list[int]], firsts: list[int], slots: list[int], complaint: str
    ) -> None:
        with pytest.raises(ValueError, match=complaint):
            layout.place(Job(blocks, firsts, slots).spec(), np.array(slots), 8)


class TestRuns:
    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=30))
    def test_are_the_points_again(self, points: list[tuple[int, int]]) -> None:
        again: list[tuple[int, ...]] = []
        for start, length, steps in runs(np.array(points, np.int64).reshape(-1, 2)):
            assert start == len(again)
            again += [
                tuple(first + i * step for first, step in zip(points[start], steps, strict=True))
                for i in range(length)
            ]
        assert again == points

    @pytest.mark.parametrize(
        ("points", "lengths"),
        [
            ([], []),
            ([4], [1]),
            ([4, 5, 6, 7], [4]),
            ([4, 5, 9, 8, 7], [2, 3]),
            ([1, 2, 3, 7, 8, 9], [3, 3]),
            ([0, 1, 3, 7, 15], [2, 2, 1]),
        ],
    )
    def test_are_long(self, points: list[int], lengths: list[int]) -> None:
        found = runs(np.array(points, np.int64)[:, None])
        assert [length for _, length, _ in found] == lengths

    @given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=20), st.integers(1, 3))
    def test_index_every_block_and_its_place(self, pairs: list[tuple[int, int]], n: int) -> None:
        """Repeated blocks and slots included, though no engine asks for them."""
        layout = layout_of(Model([Table(1)], [[(0, 1)]], blocks=6), n, blocks_per_chunk=n)
        blocks = [block for block, _ in pairs]
        slots = [slot for _, slot in pairs[: -(-len(pairs) // n)]]
        placement = layout.place(Job([blocks], [0], slots).spec(), np.array(slots, np.int64), 10)
        ids, pages = np.arange(6), np.arange(10 * n).reshape(10, n)
        found: list[tuple[int, int]] = []
        for placed in placement.groups:
            for block, place in block_runs(placed):
                found += zip(ids[block].tolist(), pages[place].tolist(), strict=True)
        wanted = [(b, slot * n + sub) for _, b, slot, sub in Job([blocks], [0], slots).places(n)]
        assert found == wanted
