"""Engines whose scheduler and workers are processes: several ranks, and every way to end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from process_tree import Tree, engine_process
from tiny_engines import BLOCK, LENGTH, Outputs, offloading, open_engine, prompts

from support.object_store import Bucket
from support.processes import mappers, wait_for

CHUNKS = LENGTH // BLOCK
STORED = CHUNKS * BLOCK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]


def disk(folder: Path) -> str:
    """A tier on a disk that may take its time: two ranks leave it little of two cores."""
    return f"file://{folder}/kv?timeout=60s"


class Shared(NamedTuple):
    """A tier of several engines, and the chunks that are in it."""

    tier: Any
    objects: Callable[[], list[str]]


def answers(tree: Tree) -> Outputs:
    return [tuple(answer) for answer in tree.ask("answers")]


def await_objects(folder: Path, count: int) -> None:
    wait_for(lambda: len(list(folder.rglob("*.kv"))) >= count)


def fill_in_process(model: Path, extra: dict[str, Any], expected: Outputs) -> None:
    with open_engine(model, extra) as engine:
        assert engine.answers(prompts()) == expected
        engine.settle()


class TestRanks:
    def test_two_ranks_read_what_one_has_stored(self, llama: Path, expected: Outputs, tmp_path: Path) -> None:
        """The canonical layout does not depend on the number of ranks."""
        extra = offloading(disk(tmp_path), canonical_layout=True)
        fill_in_process(llama, extra, expected)
        with engine_process(llama, tmp_path / "log", extra, ranks=2) as tree:
            assert tree.ask("cached")[0] == STORED  # whether others are loaded is up to the measured speeds
            assert answers(tree) == expected

    def test_without_that_layout_they_never_mix(self, llama: Path, expected: Outputs, tmp_path: Path) -> None:
        extra = offloading(disk(tmp_path))
        fill_in_process(llama, extra, expected)
        with engine_process(llama, tmp_path / "log", extra, ranks=2) as tree:
            assert tree.ask("cached") == [0] * len(expected)
            assert answers(tree) == expected
            await_objects(tmp_path / "kv", 2 * CHUNKS * len(expected))
        with engine_process(llama, tmp_path / "log", extra, ranks=2) as tree:
            assert tree.ask("cached")[0] == STORED
            assert answers(tree) == expected


@pytest.fixture(params=["directory", "bucket"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Shared:
    """What engines share."""
    if request.param == "directory":
        return Shared(disk(tmp_path), lambda: list(map(str, (tmp_path / "kv").rglob("*.kv"))))
    bucket: Bucket = request.getfixturevalue("bucket")
    tier = {"url": bucket.url, "timeout": "60s", "storage_options": bucket.options}
    return Shared(tier, lambda: [name for name in bucket.names() if name.endswith(".kv")])


def test_two_engines_read_what_the_other_has_stored(
    llama: Path, expected: Outputs, tmp_path: Path, shared: Shared
) -> None:
    extra = offloading(shared.tier)
    known, new = prompts()[:3], prompts()[3:]
    with open_engine(llama, extra) as one, engine_process(llama, tmp_path / "log", extra) as two:
        assert one.answers(known) == expected[:3]
        one.settle()
        assert len(shared.objects()) == CHUNKS * len(known)
        found = two.ask("cached")
        assert (found[0], found[3:]) == (STORED, [0] * len(new))
        assert answers(two) == expected
        wait_for(lambda: len(shared.objects()) == CHUNKS * len(expected), 60)
        assert one.cached(new)[0] == STORED
        assert one.answers(prompts()) == expected


class TestEnds:
    @pytest.mark.parametrize(
        ("whom", "how"),
        [
            ("VLLM::EngineCore", signal.SIGTERM),
            ("VLLM::EngineCore", signal.SIGKILL),
            ("VLLM::Worker", signal.SIGKILL),
        ],
    )
    def test_nothing_is_left_of_an_engine_that_is_killed(
        self, llama: Path, expected: Outputs, tmp_path: Path, whom: str, how: int
    ) -> None:
        """Not of ours, that is; the program that began it all is left to see to itself."""
        extra = offloading(disk(tmp_path))
        with engine_process(llama, tmp_path / "log", extra) as tree:
            assert answers(tree) == expected
            assert _pids(tree, "kvstore.engine")
            [inode] = {_arena_of(pid) for pid in _pids(tree, whom)}
            [pid] = _pids(tree, whom)
            os.kill(pid, how)
            wait_for(lambda: not _pids(tree, "kvstore.engine") and not _pids(tree, "VLLM::"), 60)
            wait_for(lambda: not mappers(inode))
            assert not [path for path in tree.leftovers() if "kvstore" in path.name]
        with open_engine(llama, extra) as engine:  # whatever the disk holds is right
            assert engine.answers(prompts()) == expected


def _pids(tree: Tree, what: str) -> list[int]:
    return [pid for pid, command in tree.living().items() if what in command]


def _arena_of(pid: int) -> int:
    """Inode of the arena that a process maps."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return next(int(line.split()[4]) for line in lines if "/memfd:kvstore-arena" in line)
