"""The manager against vLLM's scheduler side, with everything happening in any order.

Hypothesis chooses what comes next: requests, steps, answers of tiers and workers, failures, time, aborts,
preemption, resets. Whatever it chooses: a request is never deferred for longer than the deadline, what was
called a hit can be loaded, what is loaded is right, every slot has one owner, and when all requests have
ended nobody holds anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from small_world import TOKENS, Prompt, World, open_scripted_world

from support.scripted import Clock, ScriptedEngine

_T = TypeVar("_T")
_TIMEOUT = 5.0
#: Windows of the groups in tokens; None for full attention.
_WINDOWS = [(None,), (None, 2 * TOKENS), (None, None), (2 * TOKENS,), (None, TOKENS, 3 * TOKENS)]
_PARAMS: list[dict[str, Any]] = [
    {},
    {"priority": 10},
    {"max_load_tokens": 3 * TOKENS},
    {"kv_load_tiers": []},
    {"kv_load_tiers": [{"locality": "LOCAL"}]},
    {"kv_load_tiers": [{"locality": "REMOTE"}], "tiers": ["t1"]},
]
_names = itertools.count()
_index = st.integers(0, 1 << 16)
#: Prompts share prefixes: two conversations, each with a branch.
_paths = st.builds(
    lambda root, turn, length: tuple([root] * turn + [root + 1] * max(0, length - turn))[:length],
    st.sampled_from([10, 20]),
    st.integers(1, 6),
    st.integers(1, 10),
)


def _one_of(choices: Sequence[_T], index: int) -> _T:
    return choices[index % len(choices)]


class ManagerMachine(RuleBasedStateMachine):
    """One world, of few slots."""

    world: World
    engine: ScriptedEngine
    clock: Clock

    def __init__(self) -> None:
        super().__init__()
        self.deferred: dict[str, float] = {}  # request -> since when

    @initialize(
        slots=st.sampled_from([2, 6, 12, 24]),
        windows=st.sampled_from(_WINDOWS),
        tiers=st.sampled_from([0, 1, 2]),
        policy=st.sampled_from(["lru", "arc", "priority"]),
        known=st.booleans(),
    )
    def begin(self, slots: int, windows: Any, tiers: int, policy: str, known: bool) -> None:
        run = next(_names)
        localities = ("LOCAL", "REMOTE")[:tiers]
        found = [
            {"url": f"memory://{run}-{tier}", "name": f"t{tier}", "locality": locality}
            for tier, locality in enumerate(localities)
        ]
        self.world, self.engine, self.clock = open_scripted_world(
            *found, slots=slots, windows=windows, policy=policy, lookup_timeout=_TIMEOUT
        )
        self.patch = pytest.MonkeyPatch()
        if not known:
            self.patch.setattr("kvstore_vllm.manager.lookups.key_positions", lambda _context: {})

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.end()
        finally:
            self.patch.undo()
            self.world.store.close(0.1)

    def those(self, *states: str) -> list[Prompt]:
        """Requests in one of `states`."""
        return [request for request in self.world.requests.values() if request.state in states]

    # The engine.

    @rule(path=_paths, params=st.sampled_from(_PARAMS))
    @precondition(lambda self: len(self.world.requests) < 6)
    def arrive(self, path: tuple[int, ...], params: dict[str, Any]) -> None:
        self.world.arrive(f"r{next(_names)}", path, **params)

    @rule(path=_paths, newest_first=st.booleans())
    @precondition(lambda self: len(self.world.requests) < 6)
    def live(self, path: tuple[int, ...], newest_first: bool) -> None:
        """A request lives while all others wait, and everybody works; then the host forgets it."""
        world, others = self.world, dict(self.world.requests)
        request = self.world.arrive(f"r{next(_names)}", path)
        world.requests = {request.request_id: request}
        for _ in range(12):
            world.step()
            world.settle(newest_first=newest_first)
            self.engine.run_all()
        if request.state == "running":
            world.finish(request)
            world.step()
            world.settle(newest_first=newest_first)
        self.engine.run_all()
        world.store.poll()
        world.store.clear()
        world.requests = others | world.requests
        self.deferred.clear()

    @rule(room=st.integers(0, 3))
    def step(self, room: int) -> None:
        deferred = self.world.step(room)
        waits = [name for name in deferred if self.is_deferred_by_the_manager(name)]
        self.deferred = {name: self.deferred.get(name, self.clock()) for name in waits}
        for name, since in self.deferred.items():
            assert self.clock() - since < _TIMEOUT, f"{name} has waited for {self.clock() - since} s"

    def is_deferred_by_the_manager(self, name: str) -> bool:
        """vLLM itself waits for transfers of the request, and for loads of the same chunks."""
        scheduler = self.world.scheduler
        return not scheduler._req_status[name].transfer_jobs and not scheduler._chunks_being_loaded

    @rule(index=_index, aborted=st.booleans())
    @precondition(lambda self: self.those("running", "waiting"))
    def finish(self, index: int, aborted: bool) -> None:
        request = _one_of(self.those("running", "waiting"), index)
        self.world.finish(request, aborted=aborted or request.state == "waiting")

    @rule()
    @precondition(lambda self: self.those("running"))
    def finish_all(self) -> None:
        for request in self.those("running"):
            self.world.finish(request)

    @rule(index=_index)
    @precondition(lambda self: self.those("running"))
    def preempt(self, index: int) -> None:
        self.world.preempt(_one_of(self.those("running"), index))

    @rule(index=_index, chunks=st.integers(0, 10))
    @precondition(lambda self: self.those("waiting"))
    def cache_on_the_device(self, index: int, chunks: int) -> None:
        """The device's prefix cache changes under a request that waits."""
        request = _one_of(self.those("waiting"), index)
        self.world.cached.difference_update(request.block_hashes)
        self.world.cached.update(request.block_hashes[:chunks])

    @rule()
    @precondition(lambda self: not self.world.scheduler._current_batch_jobs_to_flush)  # which vLLM asserts
    def reset(self) -> None:
        self.world.reset()
        self.deferred.clear()

    # The workers.

    @rule(index=_index)
    @precondition(lambda self: self.world.rank.todo)
    def copy(self, index: int) -> None:
        self.world.rank.run(_one_of(self.world.rank.todo, index))

    @rule()
    def copy_all(self) -> None:
        self.world.settle()

    @rule(index=_index)
    @precondition(lambda self: any(copy.is_store for copy in self.world.rank.todo))
    def fail_a_copy(self, index: int) -> None:
        stores = [copy for copy in self.world.rank.todo if copy.is_store]
        self.world.rank.fails.add(_one_of(stores, index).ticket)

    # The tiers.

    @rule(index=_index, items=st.integers(1, 4))
    @precondition(lambda self: self.engine.held)
    def serve(self, index: int, items: int) -> None:
        self.engine.run(_one_of(self.engine.held, index), items)

    @rule(index=_index, after=st.booleans())
    @precondition(lambda self: self.engine.held)
    def fail(self, index: int, after: bool) -> None:
        self.engine.fail(_one_of(self.engine.held, index), 1, after=after)

    @rule()
    def forget(self) -> None:
        """Host memory loses what nobody holds."""
        self.world.store.clear()

    @rule()
    def serve_all(self) -> None:
        self.engine.run_all()

    @rule(seconds=st.sampled_from([0.01, 0.6, 4.0, 35.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def nobody_answers(self) -> None:
        """The deadline of whoever waits passes."""
        self.step(0)
        self.clock.advance(_TIMEOUT)
        self.step(0)

    # What is always true.

    @invariant()
    def slots_have_one_owner(self) -> None:
        if hasattr(self, "world"):
            self.world.store._planner.catalog.audit()

    def end(self) -> None:
        """All requests end, tiers and workers answer everything: nobody holds anything."""
        for request in list(self.world.requests.values()):
            self.world.finish(request, aborted=True)
        for _ in range(20):
            self.world.step()
            self.world.settle()
            self.engine.run_all()
            self.world.store.poll()
            self.clock.advance(0.1)
        manager, catalog = self.world.manager, self.world.store._planner.catalog
        assert not self.engine.held and not self.world.rank.todo
        assert len(manager._transfers) == 0
        assert not manager._lookups._requests and not manager._lookups.waiting
        catalog.audit()
        assert catalog.quarantined == 0
        assert self.world.store.room == catalog.slots


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
