"""Filling in the pages of the host arena: before it is used, in the background, beside the interpreter."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstore import arena as arena_module
from kvstore import memory
from kvstore.arena import Arena
from support.memory import mapped, mapped_total

MIB = 1 << 20
PAGE = 4096


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(8 * MIB, 1 * MIB, pin="off") as created:
        yield created


class TestPopulation:
    def test_every_page_is_there_when_create_returns(self, arena: Arena) -> None:
        assert arena.populated == arena.slots
        assert mapped(arena.base, "Rss") >= 8 * MIB

    def test_the_bytes_of_a_slot_survive_it(self, arena: Arena) -> None:
        arena.view(0)[:4] = b"data"
        memory.populate(arena.base, MIB, write=True)
        memory.touch(arena.base, MIB)
        assert bytes(arena.view(0)[:5]) == b"data\0"

    @pytest.mark.parametrize(
        "fill",
        [
            lambda address, length: memory.populate(address, length, write=True),
            lambda address, length: memory.populate(address, length, write=False),
            memory.touch,
        ],
        ids=["write", "read", "touch"],
    )
    def test_each_way_fills_in_pages(self, fill: Callable[[int, int], None]) -> None:
        region = mmap.mmap(-1, 4 * MIB)
        exported = ctypes.c_char.from_buffer(region)
        base = ctypes.addressof(exported)
        before = mapped_total("RssShmem")
        fill(base, 4 * MIB)
        assert mapped_total("RssShmem") - before >= 4 * MIB

    def test_memory_that_cannot_be_had(self) -> None:
        with pytest.raises(OSError):
            memory.populate(0, PAGE, write=True)

    def test_the_interpreter_runs_meanwhile(self) -> None:
        region = mmap.mmap(-1, 128 * MIB)
        exported = ctypes.c_char.from_buffer(region)
        entered, left = threading.Event(), threading.Event()

        def fill() -> None:
            entered.set()
            memory.populate(ctypes.addressof(exported), 128 * MIB, write=True)
            left.set()

        interval, turns = sys.getswitchinterval(), 0
        sys.setswitchinterval(60)  # the filling thread gives up the GIL of its own accord, or not at all
        try:
            thread = threading.Thread(target=fill)
            thread.start()
            entered.wait()
            while not left.wait(0.001):
                turns += 1
        finally:
            sys.setswitchinterval(interval)
            thread.join()
        assert turns >= 3

    def test_beyond_one_gib_in_the_background(self) -> None:
        with Arena.create(1280 * MIB, MIB, pin="off") as made:
            seen = {made.populated}
            assert min(seen) >= 1024
            while (slot := made.populated) < made.slots:
                made.view(slot)[:4] = b"busy"  # ahead of the filling, which must not undo it
                assert bytes(made.view(slot)[:4]) == b"busy"
                seen.add(slot)
            assert len(seen) > 3
            assert mapped(made.base, "Rss") >= 1280 * MIB

    def test_close_while_it_goes_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(arena_module, "_EAGER", 16 * MIB)
        made = Arena.create(512 * MIB, MIB, pin="off")
        view = made.view(0)
        thread = made._filler._thread
        assert thread is not None
        assert thread.daemon
        made.close()
        assert not thread.is_alive()
        assert mapped(np.frombuffer(view, np.uint8).ctypes.data, "Rss") < 512 * MIB

    def test_an_attached_process_fills_in_its_page_tables(self, arena: Arena) -> None:
        with Arena.attach(arena.handle) as other:
            assert other.populated == arena.slots
            assert other._filler._thread is not None
            other._filler._thread.join()
            assert mapped(other.base, "Rss") >= 8 * MIB
