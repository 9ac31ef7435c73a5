"""Answers of the manager about single keys, beyond what is in host memory: plans, and waiting for them.

vLLM asks key by key, in walks (:mod:`.requests`). The first key of a walk that is not in host memory makes a
plan for the whole request (:mod:`.promotion`); until the plan has ended the request waits.

A call of the store may evict, and what was answered HIT must still be there when vLLM acts on it. So a plan
that is made in the middle of a walk first holds what the request has in host memory, and no store is called
once the plan has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from vllm.v1.kv_offload.base import LookupResult, ReqContext

from kvstore import Lookup, Store

from .._compat import key_positions
from ..config import AdapterConfig
from ..telemetry import Telemetry
from .heads import GroupInfo, Heads, group_of
from .promotion import Phase, Plan, Promoter
from .requests import RequestState
from .wishes import WishReader

__all__ = ["Lookups"]

#: Seconds between two looks at what a prefiller has computed.
_LOOK_EVERY = 0.02


class Lookups:
    """Requests and their plans.

    Parameters
    ----------
    store : Store
    config : AdapterConfig
    groups : sequence of GroupInfo
    telemetry : Telemetry
    loading : callable
        Whether any loads are under way.

    Attributes
    ----------
    waiting : set of str
        Requests that wait for their plans.
    """

    def __init__(
        self,
        store: Store,
        config: AdapterConfig,
        groups: Sequence[GroupInfo],
        telemetry: Telemetry,
        loading: Callable[[], bool],
    ) -> None:
        self.waiting: set[str] = set()
        self._store = store
        self._resident = store.resident
        self._config = config
        self._groups = {group.index: group for group in groups}
        self._windowed = {group.index for group in groups if group.window_chunks is not None}
        self._telemetry = telemetry
        self._promoter = Promoter(store, config.promote_budget, telemetry, loading)
        self._wishes = WishReader(config)
        self._requests: dict[str, RequestState] = {}
        self._awaited: dict[str, bytes] = {}  # request -> a key that its prefiller may be computing
        self._step = 0
        self._went_on = -1

    # The life of a request.

    def request(self, context: ReqContext) -> RequestState:
        """State of a request, made when there is none."""
        state = self._requests.get(context.req_id)
        if state is None:
            state = self._requests[context.req_id] = RequestState(self._wishes.read(context))
        return state

    def scheduled(self, request: str) -> None:
        """A request needs no plan any more: it runs, or has to begin anew."""
        self._awaited.pop(request, None)
        state = self._requests.get(request)
        if state is not None and state.plan is not None:
            self._promoter.end(state.plan)
            state.plan = None
            self.waiting.discard(request)

    def preempted(self, request: str) -> None:
        """A request has to begin anew: it computes again what it cannot load."""
        self.scheduled(request)
        state = self._requests.get(request)
        if state is not None:
            state.computed = 0

    def finished(self, request: str) -> None:
        """A request has ended."""
        self.scheduled(request)
        self._requests.pop(request, None)

    def reset(self, epoch: bytes) -> None:
        """End all plans; from now on the store's keys end with `epoch`."""
        for request in self._requests:
            self.scheduled(request)
        self._promoter.epoch = epoch

    def computing(self, tokens: int) -> None:
        """The engine computes so many tokens of a prompt in this step."""
        self._promoter.estimator.computing(tokens)

    def step(self) -> None:
        """The engine's step ends."""
        now = self._store.clock()
        if self._went_on != self._step:  # nobody has asked
            self._promoter.go_on(now)
        self._step += 1
        self._promoter.step(now)
        for request in [name for name in self._awaited if self._requests[name].next_look <= now]:
            self._look(request, now)

    # Answers.

    def answer(self, key: bytes, context: ReqContext) -> LookupResult:
        """Whether `key` can be loaded, or when it is worth asking again."""
        state = self.request(context)
        plan = state.plan
        if plan is not None and plan.pending:
            self._go_on()
        if plan is None or not plan.pending:
            if context.req_id in self._awaited:
                return self._defer(key, context, state)
            if self._is_resident(key):
                self.waiting.discard(context.req_id)
                return LookupResult.HIT
            if plan is not None and not state.found and self._is_to_come(key, context, state):
                self._awaited[context.req_id] = key
                return self._defer(key, context, state)
            plan = self._plan_anew(key, context, state)
        if plan is None and state.seen_in == self._step:
            return LookupResult.RETRY
        if plan is None or not plan.pending:
            self.waiting.discard(context.req_id)
            return LookupResult.HIT if self._is_resident(key) else LookupResult.MISS
        return self._defer(key, context, state)

    def _defer(self, key: bytes, context: ReqContext, state: RequestState) -> LookupResult:
        """Let the request wait."""
        if not state.deferred:
            state.deferred = True
            self._telemetry.count("requests_deferred")
        self.waiting.add(context.req_id)
        return state.wait(key, self._step, self._windowed)

    def _go_on(self) -> None:
        """Take in what the tiers have done, and go on with all plans, once a step."""
        if self._went_on != self._step:
            self._went_on = self._step
            self._store.poll()
            self._promoter.go_on(self._store.clock())

    def _plan_anew(self, key: bytes, context: ReqContext, state: RequestState) -> Plan | None:
        """A plan for a request of which `key` is not in host memory; the one it has when that must do."""
        before, now = state.plan, self._store.clock()
        positions: Mapping[bytes, int] = key_positions(context)
        deadline = (now if state.asked is None else state.asked) + self._config.lookup_timeout
        if before is not None:
            if before.phase is Phase.OVER and before.again <= now:
                before = None
            elif state.found:
                state.found = False
            elif before.phase is Phase.ENDED and positions.get(key, 1 << 62) <= before.heads.start:
                deadline = before.deadline  # the device has lost what was before the head
            else:
                return before
        if now >= deadline or not self._may_load(key, state):
            return before
        heads = self._heads(key, positions, state)
        if heads is None:
            return before
        state.asked = None
        wishes = state.wishes
        plan = state.plan = self._promoter.plan(
            heads, now, deadline, wishes.loads, prefiller=wishes.prefiller
        )
        if before is not None:
            self._promoter.end(before)
        return plan

    def _heads(self, key: bytes, positions: Mapping[bytes, int], state: RequestState) -> Heads | None:
        """The heads of a request that begin to miss at `key`; None when that can be part of none."""
        groups: Mapping[int, GroupInfo] = self._groups
        if not positions:
            if state.seen_in in (None, self._step):
                state.seen_in = self._step
                state.seen[key] = None
                state.asked = self._store.clock()
                return None
            groups = {index: GroupInfo(index, 1, None) for index in self._groups}
            positions = {seen: place for place, seen in enumerate(state.seen, 1)}
        group = groups.get(group_of(key))
        if key not in positions or group is None or positions[key] % group.tokens_per_block:
            return None
        most = state.wishes.most_load
        return Heads(positions, groups.values(), key, self._is_resident, most)

    def _may_load(self, key: bytes, state: RequestState) -> bool:
        """Whether anything below host memory may be asked; if not, chunks can only come from the device."""
        if state.wishes.loads != ():
            return True
        return self._store.lookup([key + self._promoter.epoch], tiers=())[0] is not Lookup.MISS

    def _is_to_come(self, key: bytes, context: ReqContext, state: RequestState) -> bool:
        """Whether a chunk that the latest plan has not brought is worth waiting for, as a prefiller may be
        computing it. It is not when it was there, and did not come."""
        prefiller, now = state.wishes.prefiller, self._store.clock()
        if prefiller is None or key == state.came or not self._is_whole(key, context):
            return False
        if state.waits_until is None:
            state.waits_until = now + self._config.prefill_timeout
        return now < state.waits_until and self._store.is_up(prefiller)

    def _look(self, request: str, now: float) -> None:
        """Ask its prefiller for the key that a request waits for; it waits no more when that is there, or
        will not be."""
        state, key = self._requests[request], self._awaited[request]
        state.next_look = now + _LOOK_EVERY
        prefiller = state.wishes.prefiller
        assert prefiller is not None and state.waits_until is not None
        if now < state.waits_until and self._store.is_up(prefiller):
            stored = [key + self._promoter.epoch]
            [answer] = self._store.lookup(stored, tiers=(prefiller,), anew=(prefiller,))
            if answer is Lookup.RETRY:
                return
            state.found, state.came = True, key
        del self._awaited[request]

    def _is_whole(self, key: bytes, context: ReqContext) -> bool:
        """Whether `key` is of a whole chunk of the request, as far as is known."""
        group, end = self._groups.get(group_of(key)), key_positions(context).get(key)
        return group is not None and end is not None and end % group.tokens_per_block == 0

    def _is_resident(self, key: bytes) -> bool:
        return key + self._promoter.epoch in self._resident
