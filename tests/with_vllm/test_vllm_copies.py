"""Copies between blocks and slots, against a naive model, for every layout."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from block_tables import Bytes, Job, Model, Table, heads, mapped_bytes, store_canonical, store_direct
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.arena import Arena
from kvstore_vllm.copies import Copier, CpuCopier, RowLayout, make_copier
from kvstore_vllm.copies.strided import Blanks

BLOCKS = 16
SLOTS = 9
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
    ),
]
every_device = pytest.mark.parametrize("device", DEVICES)
checked = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@contextmanager
def arena_of(chunk_size: int, slots: int = SLOTS) -> Iterator[tuple[Arena, Bytes]]:
    """An arena full of another chunk's bytes, and its rows."""
    with Arena.create(slots * (-(-chunk_size // 4096) * 4096), chunk_size) as arena:
        for slot in range(slots):
            arena.view(slot)[:] = bytes([255 - slot]) * arena.slot_size
        yield arena, rows_of(arena)


def rows_of(arena: Arena) -> Bytes:
    return np.stack([np.frombuffer(arena.view(slot), np.uint8) for slot in range(arena.slots)])


def copy(copier: Copier, layout: RowLayout, direction: str, job: Job, arena: Arena) -> None:
    placement = layout.place(job.spec(), np.array(job.slots, np.int64), arena.slots)
    transfer = copier.start(direction, placement.groups)  # type: ignore[arg-type]
    transfer.wait()
    assert transfer.done()
    assert transfer.seconds() >= 0


@st.composite
def models(draw: st.DrawFn, device: str) -> Model:
    """Several tensors, padded pages, bytes of others between blocks, groups over the same tensors."""
    tables = draw(
        st.lists(
            st.builds(Table, st.integers(1, 40), st.sampled_from([0, 0, 0, 5, 24])), min_size=1, max_size=5
        )
    )
    if draw(st.booleans()):  # as most models are: all layers alike
        tables = [tables[0]] * len(tables)
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        chosen = draw(st.lists(st.integers(0, len(tables) - 1), min_size=1, unique=True))
        groups.append(
            [
                (index, tables[index].page - draw(st.integers(0, min(3, tables[index].page - 1))))
                for index in chosen
            ]
        )
    return Model(tables, groups, BLOCKS, device=device)


@st.composite
def jobs(draw: st.DrawFn, groups: int, blocks_per_chunk: int) -> Job:
    """Any chunks, with an unaligned first block and an unaligned end in each group."""
    slots = draw(st.permutations(range(SLOTS)))
    blocks: list[list[int]] = []
    firsts = []
    used = 0
    for _ in range(groups):
        skip = draw(st.integers(0, blocks_per_chunk - 1))
        room = min((SLOTS - used) * blocks_per_chunk - skip, BLOCKS)
        size = draw(st.integers(0, max(0, min(room, 3 * blocks_per_chunk))))
        if draw(st.booleans()):
            start = draw(st.integers(0, BLOCKS - size))
            chosen = list(range(start, start + size))
        else:
            chosen = draw(st.permutations(range(BLOCKS)))[:size]
        blocks.append(chosen)
        firsts.append(draw(st.integers(0, 5)) * blocks_per_chunk + skip)
        used += -(-(skip + size) // blocks_per_chunk) if size else 0
    return Job(blocks, firsts, slots[:used])


def moved(job: Job, seed: int) -> Job:
    """The same chunks, to be loaded into other blocks."""
    others = random.Random(seed).sample(range(BLOCKS), BLOCKS)
    return Job([[others[block] for block in group] for group in job.blocks], job.firsts, job.slots)


@every_device
@checked
@given(data=st.data())
def test_direct_layout(device: str, data: st.DataObject) -> None:
    model = data.draw(models(device))
    n = data.draw(st.integers(1, 4))
    world = data.draw(st.integers(1, 3))
    rank = data.draw(st.integers(0, world - 1))
    part = sum(table.page for table in model.tables) * n + data.draw(st.sampled_from([0, 0, 17]))
    job = data.draw(jobs(len(model.groups), n))
    model.fill(1)
    with arena_of(part * world) as (arena, expected):
        layout = RowLayout.of(
            model.caches(), rank=rank, world_size=world, blocks_per_chunk=n, chunk_size=part * world
        )
        copier = make_copier(layout, arena)
        store_direct(expected, model, job, n, (rank * part, part))
        before = model.bytes()
        copy(copier, layout, "store", job, arena)
        np.testing.assert_array_equal(rows_of(arena), expected)

        model.fill(2)
        target = moved(job, 3)
        wanted = model.bytes()
        for (group, source, _, _), (_, block, _, _) in zip(job.places(n), target.places(n), strict=True):
            for tensor, used in model.groups[group]:
                wanted[tensor][block, :used] = before[tensor][source, :used]
        if not overlapping(model, target):
            copy(copier, layout, "load", target, arena)
            for got, want in zip(model.bytes(), wanted, strict=True):
                np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(rows_of(arena), expected)
        copier.close()


def overlapping(model: Model, job: Job) -> bool:
    """Whether two groups load into the same block of a tensor: no engine does, and the order is open."""
    targets = [
        (tensor, block)
        for group, blocks in zip(model.groups, job.blocks, strict=True)
        for tensor, _ in group
        for block in blocks
    ]
    return len(targets) != len(set(targets))


@every_device
@checked
@given(data=st.data())
def test_canonical_layout(device: str, data: st.DataObject) -> None:
    """All ranks store in some order, with writers taking turns; one with other sharding loads everything."""
    n = data.draw(st.integers(1, 3))
    shards, replicas = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (1, 3)]))
    world = shards * replicas
    layers = data.draw(st.integers(1, 4))
    tokens, width = 4, 6
    per_head = data.draw(st.booleans())
    shape = {"tokens": tokens, "per_head": per_head}

    def rank_model(rank: int, shards: int, replicas: int, width: int) -> Model:
        mappings = [heads(rank, shards=shards, replicas=replicas, width=width, **shape)] * layers  # type: ignore[arg-type]
        page = tokens * width
        groups = [[(layer, page) for layer in range(layers)]] * 2
        return Model([Table(page, 8)] * layers, groups, BLOCKS, mappings, device)

    ranks = [rank_model(rank, shards, replicas, width) for rank in range(world)]
    chunk_size = layers * shards * tokens * width * n + 11
    job = data.draw(jobs(2, n))
    for rank, model in enumerate(ranks):
        model.fill(rank)  # replicas would hold equal bytes: these tell whose were stored
    with arena_of(chunk_size) as (arena, expected):
        store_canonical(expected, ranks, [job] * world, n, chunk_size)
        for rank in data.draw(st.permutations(range(world))):
            layout = RowLayout.of(
                ranks[rank].caches(),
                rank=rank,
                world_size=world,
                blocks_per_chunk=n,
                chunk_size=chunk_size,
                canonical=True,
                replicated=data.draw(st.booleans()),
            )
            copier = make_copier(layout, arena)
            copy(copier, layout, "store", job, arena)
            copier.close()
        np.testing.assert_array_equal(rows_of(arena), expected)

        whole = rank_model(0, 1, 1, width * shards)
        layout = RowLayout.of(
            whole.caches(), rank=0, world_size=1, blocks_per_chunk=n, chunk_size=chunk_size, canonical=True
        )
        copier = make_copier(layout, arena)
        target = moved(job, 5)
        if not overlapping(whole, target):
            copy(copier, layout, "load", target, arena)
            device_bytes = whole.bytes()
            held = [model.bytes() for model in ranks]
            places = zip(job.places(n), target.places(n), strict=True)
            for (_, source, slot, sub), (_, block, _, _) in places:
                for layer in range(layers):
                    for model, kept in zip(ranks, held, strict=True):
                        assert model.mappings
                        if not model.mappings[layer].is_writer(slot * n + sub):
                            continue
                        for local, canonical in mapped_bytes(model.mappings[layer]):
                            assert device_bytes[layer][block, canonical] == kept[layer][source, local]
        copier.close()


@every_device
def test_replicated_layout_is_stored_by_rank_0(device: str) -> None:
    model = Model([Table(24), Table(40)], [[(0, 24), (1, 40)]], BLOCKS, device=device)
    model.fill(1)
    job = Job([[3, 5, 4]], [0], [2, 7, 1])
    with arena_of(64) as (arena, expected):
        store_direct(expected, model, job, 1, (0, 64))
        layouts = [
            RowLayout.of(
                model.caches(), rank=rank, world_size=2, blocks_per_chunk=1, chunk_size=64, replicated=True
            )
            for rank in range(2)
        ]
        assert [layout.stores for layout in layouts] == [True, False]
        copiers = [make_copier(layout, arena) for layout in layouts]
        copy(copiers[0], layouts[0], "store", job, arena)
        np.testing.assert_array_equal(rows_of(arena), expected)
        kept = model.bytes()
        model.fill(2)
        copy(copiers[1], layouts[1], "load", job, arena)
        for tensor, before in zip(model.bytes(), kept, strict=True):
            np.testing.assert_array_equal(tensor[[3, 5, 4]], before[[3, 5, 4]])
        for copier in copiers:
            copier.close()


def test_layers_alike_are_copied_in_one_call_per_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight layers in one storage and six blocks in two runs of consecutive ids and slots: two calls."""
    layers, page = 8, 32
    storage = torch.arange(layers * BLOCKS * page, dtype=torch.int64).to(torch.int8)
    model = Model([Table(page)] * layers, [[(layer, page) for layer in range(layers)]], BLOCKS)
    model.storages = list(storage.view(layers, -1).unbind(0))
    calls = []
    real = np.copyto
    monkeypatch.setattr(np, "copyto", lambda *args: (calls.append(args[0].shape), real(*args)))
    with arena_of(layers * page) as (arena, expected):
        layout = RowLayout.of(
            model.caches(), rank=0, world_size=1, blocks_per_chunk=1, chunk_size=layers * page
        )
        copier = CpuCopier(layout, arena)
        job = Job([[4, 5, 6, 11, 10, 9]], [0], [0, 1, 2, 8, 7, 6])
        store_direct(expected, model, job, 1, (0, layers * page))
        copy(copier, layout, "store", job, arena)
        np.testing.assert_array_equal(rows_of(arena), expected)
        copier.close()
    assert calls == [(3, layers, page)] * 2


class TestOrder:
    """Of the transfers that the CPU copier has been given while it was busy."""

    def test_is_kept_per_direction_with_loads_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = Model([Table(8)], [[(0, 8)]], BLOCKS)
        model.fill(1)
        gate, reached = threading.Event(), threading.Event()
        seen: list[tuple[str, int]] = []
        with arena_of(8) as (arena, _):
            layout = RowLayout.of(model.caches(), rank=0, world_size=1, blocks_per_chunk=1, chunk_size=8)
            copier = CpuCopier(layout, arena)
            real = copier._copy

            def watched(direction: str, placed: object) -> int:
                seen.append((direction, int(placed.blocks[0])))  # type: ignore[attr-defined]
                reached.set()
                assert gate.wait(10)
                return real(direction, placed)  # type: ignore[arg-type]

            monkeypatch.setattr(copier, "_copy", watched)

            def start(direction: str, block: int) -> object:
                placement = layout.place(Job([[block]], [0], [block]).spec(), np.array([block]), SLOTS)
                return copier.start(direction, placement.groups)  # type: ignore[arg-type]

            transfers = [start("store", 0)]
            assert reached.wait(10)
            transfers += [start("store", 1), start("load", 2), start("store", 3), start("load", 4)]
            assert not any(transfer.done() for transfer in transfers)  # type: ignore[attr-defined]
            gate.set()
            copier.close()
            assert all(transfer.done() for transfer in transfers)  # type: ignore[attr-defined]
        assert seen == [("store", 0), ("load", 2), ("load", 4), ("store", 1), ("store", 3)]


def test_a_caller_who_asks_in_a_loop_does_not_hold_it_up() -> None:
    """As an engine does that has nothing else to do: here the interpreter changes threads only when it is
    given up."""
    model = Model([Table(8)], [[(0, 8)]], BLOCKS)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        with arena_of(8) as (arena, _):
            layout = RowLayout.of(model.caches(), rank=0, world_size=1, blocks_per_chunk=1, chunk_size=8)
            copier = CpuCopier(layout, arena)
            placement = layout.place(Job([[3]], [0], [3]).spec(), np.array([3]), SLOTS)
            transfer = copier.start("store", placement.groups)
            assert any(transfer.done() for _ in range(50_000))
            copier.close()
    finally:
        sys.setswitchinterval(interval)


def test_arrays_of_a_closed_arena_stay_mapped() -> None:
    """A copier that outlives its arena must not write to memory that is gone."""
    model = Model([Table(8)], [[(0, 8)]], BLOCKS)
    with arena_of(8) as (arena, _):
        layout = RowLayout.of(model.caches(), rank=0, world_size=1, blocks_per_chunk=1, chunk_size=8)
        copier = CpuCopier(layout, arena)
        placement = layout.place(Job([[1]], [0], [1]).spec(), np.array([1]), SLOTS)
    transfer = copier.start("store", placement.groups)
    transfer.wait()
    assert transfer.seconds() >= 0
    copier.close()


@checked
@given(data=st.data())
def test_addresses_for_the_copy_engine(data: st.DataObject) -> None:
    """What the CUDA copier would hand to the device, carried out here: no device is needed to check it."""
    from kvstore_vllm.copies.cuda import _Fragments, _PieceByPiece

    model = data.draw(models("cpu"))
    n = data.draw(st.integers(1, 4))
    chunk_size = sum(table.page for table in model.tables) * n + 5
    job = data.draw(jobs(len(model.groups), n))
    model.fill(1)
    with arena_of(chunk_size) as (arena, expected):
        layout = RowLayout.of(model.caches(), rank=0, world_size=1, blocks_per_chunk=n, chunk_size=chunk_size)
        store_direct(expected, model, job, n, (0, chunk_size))
        swap = _PieceByPiece(layout, arena)
        placement = layout.place(job.spec(), np.array(job.slots, np.int64), arena.slots)
        for placed in placement.groups:
            group = layout.groups[placed.group]
            Blanks(group, layout, arena).clear(placed)
            table = _Fragments(group, layout).addresses(placed, arena, storing=True)
            swap(*(torch.from_numpy(column.copy()) for column in table), is_src_access_order_any=False)
        np.testing.assert_array_equal(rows_of(arena), expected)
