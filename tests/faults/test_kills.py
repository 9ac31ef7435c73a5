"""SIGKILL of a worker process, or of the store's own process, before each step of the write protocol."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.scan import Status
from kvstore.testing.faults import Fault, Rule
from support.processes import has_ended
from support.world import KEYS, World, is_idle, is_staffed, load, save, wait_for

STEPS = range(1, 9)
FIRST, LATER = KEYS[0], KEYS[1:3]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, "processes")
    yield world
    world.close()


def left_before(step: int) -> dict[Status, int]:
    """What a writer leaves that gets no further than to `step`: it makes a file in 2, links it in 6, unlinks
    the temporary name in 7."""
    return {Status.STALE_TEMP: 1} if 2 < step <= 7 else {}


@pytest.mark.parametrize("step", STEPS)
def test_the_store_lives_when_a_worker_is_killed(world: World, step: int) -> None:
    store = world.open(Rule(Fault.KILL_WORKER, "put", times=1, step=step))
    assert save(store, [FIRST]) == {FIRST}
    assert store.flush(timeout=20)
    stats = store.stats()
    assert (stats.tier("first").errors, stats.tier("second").writes) == (1, 1)
    wait_for(lambda: is_idle(store) and is_staffed(store))
    assert save(store, LATER) == set(LATER)
    assert store.flush(timeout=20)
    assert store.stats().tier("first").writes == 2
    published = int(step > 6)
    assert world.found("first") == {Status.GOOD: 2 + published, **left_before(step)}
    world.close()
    store = world.open()
    assert load(store, [FIRST, *LATER]) == {FIRST, *LATER}
    assert store.stats().tier("first").hits == 2 + published


def test_every_write_is_accounted_for_when_a_worker_is_killed(world: World) -> None:
    store = world.open(Rule(Fault.KILL_WORKER, "put", skip=2, times=1))
    assert save(store, KEYS) == set(KEYS)
    assert store.flush(timeout=20)
    wait_for(lambda: is_idle(store))
    tier = store.stats().tier("first")
    assert tier.dropped > 0
    assert tier.writes + tier.dropped == len(KEYS)


@pytest.mark.parametrize("step", STEPS)
def test_what_is_left_when_the_store_is_killed(tmp_path: Path, step: int) -> None:
    owner = subprocess.run(
        [sys.executable, __file__, str(tmp_path), str(step)],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert owner.returncode == -signal.SIGKILL, owner.stderr
    assert has_ended(int(owner.stdout), timeout=5), "the worker outlives its parent"
    world = World(tmp_path, "threads")
    good = {Status.GOOD: 1} if step > 6 else {}
    assert world.found("first") == {**good, **left_before(step)}
    store = world.open()
    if good:
        assert load(store, [FIRST]) == {FIRST}
        assert store.stats().tier("first").hits == 1
    assert save(store, LATER) == set(LATER)
    assert store.flush(timeout=20)
    assert world.found("first")[Status.GOOD] == 2 + len(good)
    world.close()


def be_killed(folder: str, step: str) -> None:
    """A store whose worker kills it; says who that worker is."""
    world = World(Path(folder), "processes")
    store = world.open(Rule(Fault.KILL_PARENT, "put", step=int(step)))
    [pid] = [w.child.process.pid for w in store._engine._workers.values() if w.child.tier == 0]
    print(pid, flush=True)
    save(store, [FIRST])
    store.flush(timeout=20)


if __name__ == "__main__":
    be_killed(*sys.argv[1:])
