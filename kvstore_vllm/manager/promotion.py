"""Promotion, planned for a whole request: what of it is in the tiers, and how much of that is brought up.

A plan goes through these phases:

========== ==================================================================================
locating   the tiers have been asked for all keys at once; the answers come
queued     the head is known; it waits until the host can take all of it
promoting  the store brings it up, in order; what arrives is held
ended      what is there is served; it is held until it is loaded, or for `_KEEP` seconds
over       nothing is held any more
========== ==================================================================================

The host is promised to one plan after the other: a head that does not fit waits for those before it to be
loaded, rather than being brought up by half and evicted by the next. Only a head that is larger than what the
host has for promotions is cut. A plan past its deadline ends with what has arrived.

Who owns what: everything here is called by the scheduler's thread, and nothing waits. Only the time at which
a promotion has ended is noted by whoever serves the store then: the scheduler may look much later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import IntEnum
from itertools import islice
from operator import itemgetter

from kvstore import Job, Lookup, Prefetched, ReadLease, Store

from ..telemetry import Telemetry
from .estimate import Estimator
from .heads import Heads

__all__ = ["Phase", "Plan", "Promoter"]

#: Seconds for which a promoted head waits to be loaded.
_KEEP = 30.0
#: Seconds after which a request that found nothing may look again: about as long as tiers' answers count.
_REST = 5.0
#: Seconds for which heads wait for slots that only stores under way can give back.
_SLOTS_COME_BACK = 0.5
#: Keys whose answers are fetched at a time, once the first of them has been answered.
_SLICE = 256


class Phase(IntEnum):
    """State of a plan; the module's table says what each means."""

    LOCATING = 0
    QUEUED = 1
    PROMOTING = 2
    ENDED = 3
    OVER = 4


class Plan:
    """The promotion of one request.

    Parameters
    ----------
    heads : Heads
    now, deadline : float
        It begins, and ends at the latest.
    can_have : callable
        Whether a key is in host memory, or can be brought there.
    tiers : tuple of str, optional
        Tiers and peers that may be asked; by default the usual ones.
    prefiller : str, optional
        A peer that is computing the chunks: it may have what it did not have, and what it has is loaded even
        if it could be computed sooner.

    Attributes
    ----------
    again : float
        When the request may be planned for again, once this plan is over.
    arrived : float or None
        When its promotion has ended.
    """

    def __init__(
        self,
        heads: Heads,
        now: float,
        deadline: float,
        can_have: Callable[[bytes], bool],
        tiers: tuple[str, ...] | None = None,
        *,
        prefiller: str | None = None,
    ) -> None:
        self.can_have = can_have
        self.tiers = tiers
        self.prefiller = prefiller
        self.heads = heads
        self.began = now
        self.deadline = deadline
        self.again = 0.0
        self.phase = Phase.LOCATING
        self.unknown: set[bytes] = set()
        self.present: set[bytes] = set()  # in a tier, or on the way
        self.asked: deque[bytes] = deque()  # the unknown keys of the head that is hoped for
        self.need: int | None = None  # slots that the head wants
        self.arrived: float | None = None
        self.keep_until = 0.0
        self.lease: ReadLease | None = None
        self.job: Job[Prefetched] | None = None
        self.total = 0  # chunks held once everything has come

    @property
    def pending(self) -> bool:
        """Whether the request has to wait for it."""
        return self.phase < Phase.ENDED

    @property
    def promised(self) -> int:
        """Chunks that have still to come."""
        lease = self.lease
        return self.total - len(lease) if self.phase is Phase.PROMOTING and lease is not None else 0


class Promoter:
    """Makes plans, and carries them out within what the host has for promotions.

    Parameters
    ----------
    store : Store
    share : float
        Share of the host's slots that may hold promised and promoted heads.
    telemetry : Telemetry
    loading : callable
        Whether heads are being loaded, and so give their slots back before long.

    Attributes
    ----------
    epoch : bytes
        What the store's keys end with.
    """

    def __init__(self, store: Store, share: float, telemetry: Telemetry, loading: Callable[[], bool]) -> None:
        self.epoch = b""
        self.estimator = Estimator()
        self._store = store
        self._resident = store.resident
        self._telemetry = telemetry
        self._loading = loading
        self._slots = slots = store.arena.slots
        self._reserve = slots - max(1, int(slots * share))
        self._locating: dict[Plan, None] = {}
        self._queue: deque[Plan] = deque()
        self._promoting: dict[Plan, None] = {}
        self._held: dict[Plan, None] = {}  # ended, not over
        self._alone_since: float | None = None  # since then only stores can give slots back

    def plan(
        self,
        heads: Heads,
        now: float,
        deadline: float,
        tiers: tuple[str, ...] | None = None,
        *,
        prefiller: str | None = None,
    ) -> Plan:
        """Begin a plan: ask for everything at once, and go on with what is known already.

        What is there is held meanwhile, as vLLM may have been told so, and asking may evict.
        """

        def can_have(key: bytes) -> bool:
            return key in plan.present or self._is_resident(key)

        plan = Plan(heads, now, deadline, can_have, tiers, prefiller=prefiller)
        keys = list(heads)
        here = set(filter(self._is_resident, keys))
        away = [key for key in keys if key not in here]
        plan.lease = self._store.hold(list(map(self._stored, here)))
        plan.present |= here  # what the host loses meanwhile is most likely in a tier
        anew = () if prefiller is None else (prefiller,)
        answers = self._store.lookup(list(map(self._stored, away)), tiers=tiers, anew=anew)
        for key, answer in zip(away, answers, strict=True):
            if answer is Lookup.RETRY:
                plan.unknown.add(key)
            elif answer is not Lookup.MISS:
                plan.present.add(key)
        self._locating[plan] = None
        self._go_on_locating(plan, now)
        self._start_queued(now)
        if plan.phase < Phase.PROMOTING:
            self._let_go(plan)  # the request waits, and vLLM asks for all of it again
        return plan

    def go_on(self, now: float) -> None:
        """Bring all plans as far as they can go."""
        if self._locating:
            for plan in self._answered():
                self._go_on_locating(plan, now)
        self._start_queued(now)
        arrived = [(plan.arrived, plan) for plan in self._promoting if plan.arrived is not None]
        for when, plan in sorted(arrived, key=itemgetter(0)):
            self._finish(plan, when, now)
        late = [p for p in (*self._locating, *self._queue, *self._promoting) if now >= p.deadline]
        for plan in late:
            self._telemetry.count("deadlines_passed")
            self._end(plan, now + _KEEP, again=float("inf"))

    def end(self, plan: Plan) -> None:
        """Give up what `plan` holds and wants; it is over."""
        if plan.phase is Phase.OVER:
            return
        if plan.pending:
            self._end(plan, 0.0, again=plan.again)
        self._held.pop(plan, None)
        plan.phase = Phase.OVER
        self._let_go(plan)

    def step(self, now: float) -> None:
        """Between two steps of the engine: let go of what nobody has loaded in time."""
        self.estimator.step(now)
        for plan in [plan for plan in self._held if plan.keep_until <= now]:
            self.end(plan)

    # Locating.

    def _answered(self) -> list[Plan]:
        """The plans whose next key has been answered; one question for all that may ask the same tiers."""
        alike: dict[tuple[str, ...] | None, list[Plan]] = {}
        for plan in self._locating:
            alike.setdefault(plan.tiers, []).append(plan)
        found = []
        for tiers, plans in alike.items():
            answers = self._store.lookup([self._stored(plan.asked[0]) for plan in plans], tiers=tiers)
            found += [p for p, answer in zip(plans, answers, strict=True) if answer is not Lookup.RETRY]
        return found

    def _go_on_locating(self, plan: Plan, now: float) -> None:
        """Take in answers; once the head is known, the plan is queued, or ends if there is nothing to do."""
        if not self._locate(plan):
            return
        del self._locating[plan]
        plan.need = self._need(plan)
        if plan.need:
            plan.phase = Phase.QUEUED
            self._queue.append(plan)
        else:
            self._end(plan, now, again=now + _REST)

    def _locate(self, plan: Plan) -> bool:
        """Whether all is known that matters for the longest head; takes in answers that have come."""
        while True:
            if not plan.asked:
                hoped = plan.heads.longest(lambda key: plan.can_have(key) or key in plan.unknown)
                plan.asked = deque(key for key in plan.heads.wanted(hoped) if key in plan.unknown)
                if not plan.asked:
                    return True
            if not self._take_answers(plan, plan.asked):
                return False
            plan.asked.clear()

    def _take_answers(self, plan: Plan, asked: deque[bytes]) -> bool:
        """Take in answers from the front; False when the next is still to come."""
        size = 1
        while asked:
            keys = list(islice(asked, size))
            answers = self._store.lookup(list(map(self._stored, keys)), tiers=plan.tiers)
            for key, answer in zip(keys, answers, strict=True):
                if answer is Lookup.RETRY:
                    return False
                asked.popleft()
                plan.unknown.discard(key)
                if answer is not Lookup.MISS:
                    plan.present.add(key)
                elif plan.heads.is_link(key):
                    return True  # the head ends here, whatever the other answers are
            size = _SLICE
        return True

    # Promoting.

    def _start_queued(self, now: float) -> None:
        """Start the plans that there is room for, in the order in which they have been located."""
        while self._queue and self._start(self._queue[0], now):
            pass

    def _start(self, plan: Plan, now: float) -> bool:
        """Start, or end, the first plan of the queue; False when it has to wait for room."""
        heads, room = plan.heads, self._room()
        if plan.need is None:
            plan.need = self._need(plan)
        if plan.need > room and self._may_wait(plan, room, now):
            return False
        self._hold(plan, heads.wanted(heads.longest(plan.can_have)))
        left = self._room()
        if plan.need > left and self._may_wait(plan, left, now):
            plan.need += room - left
            self._let_go(plan)
            return False
        self._queue.popleft()
        end = heads.fitting(plan.can_have, lambda key: not self._is_resident(key), max(0, left))
        missing = self._missing(plan, end)
        queued = sum(other.promised for other in self._promoting)
        tokens = end - heads.start
        if (
            missing
            and plan.prefiller is None
            and not self.estimator.worth_loading(len(missing), tokens, queued, now)
        ):
            self._telemetry.count("loads_declined", len(missing))
            missing = []
        if missing:
            self._promote(plan, heads.wanted(end), missing, now)
        else:
            self._end(plan, now, again=now + _REST)
        return True

    def _may_wait(self, plan: Plan, room: int, now: float) -> bool:
        """Whether more room than `room` is going to come."""
        if room >= self._slots - self._reserve - (0 if plan.lease is None else len(plan.lease)):
            return False
        if self._promoting or self._held or self._loading():
            self._alone_since = None
            return True
        if self._alone_since is None:
            self._alone_since = now
        return now < self._alone_since + _SLOTS_COME_BACK

    def _promote(self, plan: Plan, head: list[bytes], missing: list[bytes], now: float) -> None:
        lease = self._hold(plan, head)
        plan.total = len(lease) + len(missing)
        plan.phase, plan.began = Phase.PROMOTING, now
        self._promoting[plan] = None
        plan.job = self._store.prefetch(list(map(self._stored, missing)), into=lease, tiers=plan.tiers)
        plan.job.future.add_done_callback(lambda _: setattr(plan, "arrived", self._store.clock()))

    def _finish(self, plan: Plan, arrived: float, now: float) -> None:
        assert plan.job is not None
        outcome = plan.job.future
        error = None if outcome.cancelled() else outcome.exception()
        promoted = () if error or outcome.cancelled() else outcome.result().promoted
        self.estimator.promoted(len(promoted), plan.began, arrived)
        self._end(plan, now + _KEEP, again=now)

    def _end(self, plan: Plan, keep_until: float, *, again: float) -> None:
        self._locating.pop(plan, None)
        if plan in self._queue:
            self._queue.remove(plan)
        self._promoting.pop(plan, None)
        if plan.job is not None:
            plan.job.cancel()
        plan.phase = Phase.ENDED
        plan.keep_until, plan.again = keep_until, again
        self._held[plan] = None
        self._alone_since = None
        if self._queue:
            self._queue[0].need = None  # there may be more room now, or less to bring up

    # Leases and facts.

    def _hold(self, plan: Plan, keys: list[bytes]) -> ReadLease:
        """Hold what is resident of `keys`, and nothing else any more."""
        before = plan.lease
        plan.lease = self._store.hold([key for key in map(self._stored, keys) if key in self._resident])
        if before is not None:
            before.release()
        return plan.lease

    def _let_go(self, plan: Plan) -> None:
        if plan.lease is not None:
            plan.lease.release()
            plan.lease = None

    def _room(self) -> int:
        """Slots that the host has for further promotions."""
        promised = sum(plan.promised for plan in self._promoting)
        return self._store.room + self._store.promoting - promised - self._reserve

    def _need(self, plan: Plan) -> int:
        """Slots that the longest head wants."""
        return len(self._missing(plan, plan.heads.longest(plan.can_have)))

    def _missing(self, plan: Plan, end: int) -> list[bytes]:
        return [key for key in plan.heads.wanted(end) if not self._is_resident(key)]

    def _stored(self, key: bytes) -> bytes:
        return key + self.epoch

    def _is_resident(self, key: bytes) -> bool:
        return key + self.epoch in self._resident
