"""The conformance suite of engines: what :class:`kvstore.engine.base.Engine` promises, as tests.

An author subclasses :class:`EngineTests` in a test module that pytest collects, and says how to make one::

    class TestMyEngine(EngineTests):
        def make_engine(self, config, namespace, arena, factory):
            return MyEngine(...)

The storage is real files, and fails as a :class:`~kvstore.testing.faults.FaultPlan` says. The suite needs
pytest.
"""

from __future__ import annotations

import select
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..arena import Arena
from ..config import StoreConfig, parse
from ..engine.base import Batch, Engine, Result, Status, Verb
from ..errors import NamespaceMismatchError
from ..namespace import Namespace
from ..opening import BackendFactory
from .backend import make_key
from .faults import Fault, FaultPlan, Rule

__all__ = ["EngineTests", "Stage"]

_CHUNK = 4096
_SLOTS = 16
#: Longest that a test waits for what must come (seconds).
_PATIENCE = 20.0
#: Longest that a call which never blocks may take, on a busy machine (seconds).
_AT_ONCE = 0.5
_IN_CALLERS_THREAD = "this engine works in its caller's thread"

_Rows = list[tuple[bytes, int, float]]


class Stage:
    """An engine over real tiers, with the books of what has been asked of it.

    Attributes
    ----------
    results : dict
        (batch id, index of the item) -> every result it has got.
    order : list of int
        Batch ids in the order in which their results came.
    rows : list
        What scans have found.
    """

    def __init__(self, engine: Engine, arena: Arena, plan: FaultPlan) -> None:
        self.engine, self.arena, self.plan = engine, arena, plan
        self.results: dict[tuple[int, int], list[Result]] = defaultdict(list)
        self.order: list[int] = []
        self.rows: _Rows = []
        self._asked: dict[int, int] = {}
        self._open = True

    def submit(self, verb: Verb, *numbers: int, tier: int = 0) -> Batch:
        """A batch for the chunks with these numbers; chunk n uses slot n."""
        keys = [make_key(number) for number in numbers]
        moves = verb in (Verb.READ, Verb.WRITE)
        slots = list(numbers) if moves else [-1] * len(keys)
        batch = Batch(len(self._asked) + 1, tier, verb, keys, slots, [_CHUNK if moves else 0] * len(keys))
        self._asked[batch.id] = len(keys)
        self.engine.submit(batch)
        return batch

    def scan(self) -> Batch:
        """A scan of the first tier."""
        batch = Batch(len(self._asked) + 1, 0, Verb.SCAN, [b""], [-1], [0])
        self._asked[batch.id] = 1
        self.engine.submit(batch)
        return batch

    def fill(self, *numbers: int) -> None:
        """Give each of these slots the content of its chunk."""
        for number in numbers:
            self.arena.view(number)[:] = _content(number)

    def collect(self) -> None:
        """Take what has ended."""
        for completion in self.engine.poll():
            for index, result in enumerate(completion.results, completion.first):
                self.results[completion.id, index].append(result)
            if completion.results:
                self.order.append(completion.id)
            self.rows.extend(completion.rows)

    def wait(self, *batches: Batch) -> None:
        """Collect until these batches are answered."""
        self.wait_until(lambda: all(self._is_answered(batch) for batch in batches))

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Collect until ``ready()``."""
        deadline = time.monotonic() + _PATIENCE
        while not ready():
            assert time.monotonic() < deadline, f"no answer; so far {dict(self.results)}"
            self.engine.wait(0.05)
            self.collect()

    def wait_for_faults(self, n: int = 1) -> None:
        """Wait until the plan has injected `n` faults: a worker is in the middle of it."""
        self.wait_until(lambda: len(self.plan.log()) >= n)

    def outcome(self, batch: Batch) -> list[Result]:
        """One result for each item of `batch`; AssertionError when an item has none, or several."""
        found = [self.results[batch.id, index] for index in range(self._asked[batch.id])]
        assert all(len(results) == 1 for results in found), f"not one result each: {found}"
        return [results[0] for results in found]

    def do(self, verb: Verb, *numbers: int, tier: int = 0) -> list[Result]:
        """Submit, wait, and return the outcome."""
        batch = self.submit(verb, *numbers, tier=tier)
        self.wait(batch)
        return self.outcome(batch)

    def readable(self) -> bool:
        """Whether the engine's descriptor says that there is something to report."""
        poller = select.poll()
        poller.register(self.engine.fileno(), select.POLLIN)
        return bool(poller.poll(0))

    def close(self, timeout: float) -> None:
        """Close engine and arena, unless that has been done."""
        if self._open:
            self._open = False
            self.engine.close(timeout)
            self.arena.close()

    def _is_answered(self, batch: Batch) -> bool:
        return all((batch.id, index) in self.results for index in range(self._asked[batch.id]))


class EngineTests:
    """What every engine must do. Where nothing is done behind the caller's back, nothing can hang there."""

    @abstractmethod
    def make_engine(
        self, config: StoreConfig, namespace: Namespace, arena: Arena, factory: BackendFactory
    ) -> Engine:
        """A new engine for the tiers of `config`, not yet started."""

    @pytest.fixture
    def stage(self, tmp_path: Path) -> Iterator[Callable[..., Stage]]:
        """Makes a :class:`Stage` of ``file://`` tiers that are called ``tier0``, ``tier1``, ..."""
        stages: list[Stage] = []

        def make(*rules: Rule, tiers: int = 1, options: str = "workers=1", start: bool = True) -> Stage:
            urls = [f"file://{tmp_path}/{i}?retries=0&name=tier{i}&{options}" for i in range(tiers)]
            config = parse(f"ram://?capacity={_SLOTS * _CHUNK}&pin=off", *urls, chunk_size=_CHUNK)
            namespace = Namespace(config.namespace, config.chunk_size)
            arena = Arena.create(config.host.capacity, _CHUNK, pin="off")
            plan = FaultPlan(rules, tmp_path / f"plan-{len(stages)}")
            stages.append(Stage(self.make_engine(config, namespace, arena, plan), arena, plan))
            if start:
                assert stages[-1].engine.start() == [None] * tiers
            return stages[-1]

        yield make
        for made in stages:
            made.plan.heal()
            made.close(_PATIENCE)

    @pytest.fixture
    def background(self, stage: Callable[..., Stage]) -> Callable[..., Stage]:
        """As `stage`, for engines that work while the caller does something else."""

        def make(*rules: Rule, tiers: int = 1, options: str = "workers=1") -> Stage:
            made = stage(*rules, tiers=tiers, options=options)
            if made.engine.immediate:
                pytest.skip(_IN_CALLERS_THREAD)
            return made

        return make

    # Results.

    def test_moves_chunks_between_slots_and_storage(self, stage: Callable[..., Stage]) -> None:
        made = stage()
        made.fill(1, 2)
        assert [(r.status, r.value) for r in made.do(Verb.WRITE, 1, 2)] == [(Status.OK, 1)] * 2
        assert [(r.status, r.value) for r in made.do(Verb.WRITE, 1)] == [(Status.OK, 0)]
        made.arena.view(2)[:] = bytes(_CHUNK)
        assert [(r.status, r.value) for r in made.do(Verb.READ, 2)] == [(Status.OK, _CHUNK)]
        assert made.arena.view(2) == _content(2)

    def test_tells_what_is_there(self, stage: Callable[..., Stage]) -> None:
        made = stage()
        made.do(Verb.WRITE, 2)
        assert [r.status for r in made.do(Verb.PROBE, 1, 2, 3)] == [Status.MISSING, Status.OK, Status.MISSING]
        assert [r.status for r in made.do(Verb.DELETE, 2, 3)] == [Status.OK, Status.OK]
        assert [r.status for r in made.do(Verb.PROBE, 2)] == [Status.MISSING]
        assert [r.status for r in made.do(Verb.READ, 2)] == [Status.MISSING]

    def test_scan_reports_every_object(self, stage: Callable[..., Stage]) -> None:
        made = stage()
        made.do(Verb.WRITE, 1, 2, 3)
        batch = made.scan()
        made.wait(batch)
        assert [r.status for r in made.outcome(batch)] == [Status.OK]
        assert sorted(key for key, _, _ in made.rows) == sorted(make_key(n) for n in (1, 2, 3))
        assert all(size > _CHUNK and mtime > 0 for _, size, mtime in made.rows)

    @pytest.mark.parametrize("workers", [1, 3])
    def test_every_item_gets_exactly_one_result(self, stage: Callable[..., Stage], workers: int) -> None:
        made = stage(
            Rule(Fault.EIO, "put", skip=5, times=9),
            Rule(Fault.VANISH, "get", skip=2, times=5),
            tiers=2,
            options=f"workers={workers}",
        )
        batches = []
        for n in range(60):
            verb = (Verb.WRITE, Verb.READ, Verb.PROBE, Verb.DELETE)[n % 4]
            batches.append(made.submit(verb, *range(1 + n % 3, 9), tier=n % 2))
        made.wait(*batches)
        made.collect()
        for batch in batches:
            made.outcome(batch)

    def test_an_error_of_one_item_is_its_result(self, stage: Callable[..., Stage]) -> None:
        made = stage(Rule(Fault.ENOSPC, "put", key=make_key(2).hex()))
        results = made.do(Verb.WRITE, 1, 2, 3)
        assert [r.status for r in results] == [Status.OK, Status.FAILED, Status.OK]
        assert "No space left" in results[1].error

    def test_an_error_of_a_whole_batch_is_everybodys_result(self, stage: Callable[..., Stage]) -> None:
        made = stage(Rule(Fault.EACCES, "exists"), Rule(Fault.EIO, "delete"), Rule(Fault.EIO, "scan"))
        assert [r.status for r in made.do(Verb.PROBE, 1, 2)] == [Status.FAILED] * 2
        assert [r.status for r in made.do(Verb.DELETE, 1, 2)] == [Status.FAILED] * 2
        batch = made.scan()
        made.wait(batch)
        assert [r.status for r in made.outcome(batch)] == [Status.FAILED]

    def test_bad_objects_are_refused_and_moved_aside(self, stage: Callable[..., Stage]) -> None:
        made = stage(Rule(Fault.FLIPPED_BIT, "put", times=1))
        made.do(Verb.WRITE, 1)
        (result,) = made.do(Verb.READ, 1)
        assert (result.status, result.value) == (Status.CORRUPT, 1)
        assert result.error
        assert [r.status for r in made.do(Verb.PROBE, 1)] == [Status.MISSING]

    # Opening.

    def test_start_says_which_tier_cannot_be_opened(self, stage: Callable[..., Stage]) -> None:
        made = stage(Rule(Fault.EACCES, "open", tier="tier1", times=1), tiers=2, start=False)
        good, bad = made.engine.start()
        assert good is None
        assert isinstance(bad, Exception) and "Permission denied" in str(bad)
        assert [r.status for r in made.do(Verb.PROBE, 1, tier=0)] == [Status.MISSING]

    def test_a_tier_that_was_down_at_start_is_opened_later(self, stage: Callable[..., Stage]) -> None:
        made = stage(Rule(Fault.EIO, "open", times=1), start=False)
        assert isinstance(made.engine.start()[0], Exception)
        assert [r.status for r in made.do(Verb.WRITE, 1)] == [Status.OK]

    def test_start_tells_a_wrong_namespace_from_a_fault(
        self, stage: Callable[..., Stage], tmp_path: Path
    ) -> None:
        directory = tmp_path / "0" / Namespace({}, _CHUNK).directory
        directory.mkdir(parents=True)
        (directory / "namespace.json").write_bytes(Namespace({"model": "another"}, _CHUNK).manifest)
        assert isinstance(stage(start=False).engine.start()[0], NamespaceMismatchError)

    # Waiting.

    def test_poll_with_nothing_to_report(self, stage: Callable[..., Stage]) -> None:
        made = stage()
        assert made.engine.poll() == []
        assert not made.readable()

    def test_descriptor_is_readable_while_something_waits(self, stage: Callable[..., Stage]) -> None:
        made = stage()
        batch = made.submit(Verb.PROBE, 1)
        made.engine.wait(_PATIENCE)
        assert made.readable()
        made.wait(batch)
        assert not made.readable()
        assert made.engine.poll() == []

    def test_wait_keeps_its_timeout(self, stage: Callable[..., Stage]) -> None:
        made = stage()
        started = time.monotonic()
        made.engine.wait(0.05)
        assert 0.04 < time.monotonic() - started < _PATIENCE

    def test_reads_go_before_writes(self, stage: Callable[..., Stage]) -> None:
        made = stage(Rule(Fault.HANG, "put", key=make_key(9).hex()))
        if made.engine.immediate:
            made.plan.heal()
            first = []
        else:  # the worker is kept busy while the others queue up
            first = [made.submit(Verb.WRITE, 9)]
            made.wait_for_faults()
        write, delete = made.submit(Verb.WRITE, 1), made.submit(Verb.DELETE, 2)
        read, probe = made.submit(Verb.READ, 3), made.submit(Verb.PROBE, 4)
        made.plan.heal()
        made.wait(write, delete, read, probe)
        assert made.order == [batch.id for batch in (*first, probe, read, delete, write)]

    # Hangs.

    def test_a_hung_worker_blocks_neither_poll_nor_submit(self, background: Callable[..., Stage]) -> None:
        made = background(Rule(Fault.HANG, "exists"))
        hung = made.submit(Verb.PROBE, 1)
        made.wait_for_faults()
        started = time.monotonic()
        assert made.engine.poll() == []
        late = made.submit(Verb.PROBE, 2)
        assert made.engine.poll() == []
        assert time.monotonic() - started < _AT_ONCE
        made.plan.heal()
        made.wait(hung, late)
        assert [r.status for r in made.outcome(hung)] == [Status.MISSING]

    def test_tiers_do_not_wait_for_each_other(self, background: Callable[..., Stage]) -> None:
        made = background(Rule(Fault.HANG, "exists", tier="tier0"), tiers=2)
        made.submit(Verb.PROBE, 1, tier=0)
        made.wait_for_faults()
        assert [r.status for r in made.do(Verb.PROBE, 1, tier=1)] == [Status.MISSING]

    def test_after_abandon_the_tier_goes_on(self, background: Callable[..., Stage]) -> None:
        made = background(Rule(Fault.HANG, "get", times=1))
        made.do(Verb.WRITE, 1)
        hung = made.submit(Verb.READ, 1)
        made.wait_for_faults()
        made.engine.abandon(hung)
        assert [r.status for r in made.do(Verb.PROBE, 1)] == [Status.OK]
        made.plan.heal()  # the one that hung answers now, unless it was killed and has been answered for
        made.wait(hung)
        assert made.outcome(hung)[0].status in (Status.OK, Status.DIED)

    def test_abandon_of_a_batch_that_nobody_has_begun(self, background: Callable[..., Stage]) -> None:
        made = background(Rule(Fault.HANG, "exists"))
        hung = made.submit(Verb.PROBE, 1)
        made.wait_for_faults()
        queued = made.submit(Verb.PROBE, 2)
        made.engine.abandon(hung)
        made.engine.abandon(queued)
        made.plan.heal()
        made.wait(hung, queued)
        made.outcome(hung)
        made.outcome(queued)

    def test_abandon_of_what_has_ended_changes_nothing(self, stage: Callable[..., Stage]) -> None:
        made = stage()
        batch = made.submit(Verb.PROBE, 1)
        made.wait(batch)
        made.engine.abandon(batch)
        assert [r.status for r in made.do(Verb.PROBE, 1)] == [Status.MISSING]
        made.outcome(batch)

    def test_close_leaves_a_hung_worker_behind_in_time(self, background: Callable[..., Stage]) -> None:
        made = background(Rule(Fault.HANG, "exists"))
        made.submit(Verb.PROBE, 1)
        made.wait_for_faults()
        made.submit(Verb.WRITE, 2)
        started = time.monotonic()
        made.close(0.3)
        assert time.monotonic() - started < 0.3 + 2 * _AT_ONCE

    def test_start_gives_up_on_a_tier_that_hangs(self, stage: Callable[..., Stage]) -> None:
        made = stage(Rule(Fault.HANG, "open"), options="workers=1&timeout=300ms", start=False)
        if made.engine.immediate:
            pytest.skip(_IN_CALLERS_THREAD)
        started = time.monotonic()
        (error,) = made.engine.start()
        assert isinstance(error, Exception)
        assert time.monotonic() - started < 0.3 + 4 * _AT_ONCE

    def test_a_worker_that_hangs_while_it_opens_is_replaced(self, stage: Callable[..., Stage]) -> None:
        made = stage(Rule(Fault.HANG, "open", times=1), options="workers=1&timeout=300ms", start=False)
        if made.engine.immediate:
            pytest.skip(_IN_CALLERS_THREAD)
        assert made.engine.start() != [None]
        waits = made.submit(Verb.PROBE, 1)
        made.engine.abandon(waits)
        assert [r.status for r in made.do(Verb.PROBE, 1)] == [Status.MISSING]
        made.wait(waits)
        assert [r.status for r in made.outcome(waits)] == [Status.CANCELLED]


def _content(number: int) -> bytes:
    return make_key(number) * (_CHUNK // 16)
