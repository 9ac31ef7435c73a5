"""Promotion: from the tiers up, in key order, in waves, each chunk once however many ask for it.

A :class:`Fetch` is one request. Its keys leave ``todo`` from the front, so that what is there first is the
head of the request. A key is *resident* (nothing to do), *coming* (somebody fills it already: the fetch
waits for it), *located* in a tier (it needs a slot and a place in the promotion budget) or not located yet
(then the fetch waits, for order's sake).

Only a caller evicts: ``advance`` is told whether it acts for one. A fetch that finds no slot it may use
waits while workers hold slots, for these come back by themselves; otherwise the rest of its keys are skipped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from ..catalog import Catalog
from ..engine.base import Result, Status, Verb
from ..events import EventQueue
from ..presence import Known
from . import report
from .dispatch import Dispatcher
from .locate import Locator
from .tier import Answer, Item, TierState

__all__ = ["Fetch", "Fetcher"]


class _Step(Enum):
    """How dealing with one key of a fetch ended: go on, or wait, for an answer or for room."""

    NEXT = 0
    WAIT = 1
    BLOCKED = 2


# To look up a member of an enum costs a tenth of a microsecond before Python 3.12.
_NEXT, _WAIT, _BLOCKED = _Step
_OK, _ABSENT, _PROBING, _UNKNOWN = Status.OK, Known.ABSENT, Known.PROBING, Known.UNKNOWN


class Fetch:
    """One request for promotion.

    Parameters
    ----------
    keys : iterable of bytes
        Wanted, in order; repeated keys count once.
    hold : bool
        Lease every chunk as soon as it is resident; whoever asked reads it, and drops the leases.
    into : dict, optional
        Key -> slot of leases that somebody has. What becomes resident is leased and added, to be read later.

    Attributes
    ----------
    promoted, missing, skipped : list of bytes
        Keys brought up; keys that no tier has; keys left alone: resident before, or no room.
    held : dict
        Key -> slot of the leases taken.
    """

    def __init__(
        self, keys: Iterable[bytes], *, hold: bool = False, into: dict[bytes, int] | None = None
    ) -> None:
        self.todo: OrderedDict[bytes, None] = OrderedDict.fromkeys(keys)
        self._place = {key: place for place, key in enumerate(self.todo)}
        self.coming: set[bytes] = set()
        self.promoted: list[bytes] = []
        self.missing: list[bytes] = []
        self.skipped: list[bytes] = []
        self.held: dict[bytes, int] = {} if into is None else into
        self.tried_again: set[bytes] = set()  # keys whose worker died with them
        self.asked = False  # every key of `todo` of which nothing was known is being asked for
        self.keep: set[bytes] = set()  # dealt with and resident: this fetch never evicts them
        self.ahead: set[bytes] = set()  # resident, but not come to yet: evicted only for keys before them
        self.hold = hold or into is not None
        self.reads = hold
        self.cancelled = False
        self._sorted = True
        self.on_done: Callable[[], None] | None = None

    @property
    def done(self) -> bool:
        """Whether every key has come to one of the three ends."""
        return not self.todo and not self.coming

    def come_back(self, key: bytes) -> None:
        """`key` has left ``todo`` and is to be dealt with again."""
        self.todo[key] = None
        self._sorted = False

    def sort(self) -> None:
        """Bring ``todo`` into the order of the request."""
        if not self._sorted:
            self.todo = OrderedDict.fromkeys(sorted(self.todo, key=self._place.__getitem__))
            self._sorted = True


class Fetcher:
    """Runs all fetches within one promotion budget (slots being filled from tiers at a time)."""

    def __init__(
        self,
        tiers: list[TierState],
        catalog: Catalog,
        dispatcher: Dispatcher,
        locator: Locator,
        events: EventQueue,
        host: str,
        budget: int,
    ) -> None:
        self._tiers = tiers
        self._catalog = catalog
        self._dispatcher = dispatcher
        self._locator = locator
        self._events = events
        self._host = host
        self._budget = budget
        self._waiters: dict[bytes, list[Fetch]] = {}  # key being filled -> who wants it
        self._runnable: dict[Fetch, None] = {}
        self._blocked: dict[Fetch, None] = {}  # by budget or slots; first come, first served
        self._probing: dict[bytes, list[Fetch]] = {}
        self.fresh: set[bytes] = set()  # promoted and not read yet: their first read is no second reference
        self.promoting = 0
        self.hits = 0
        self.misses = 0
        locator.on_located = self._located
        dispatcher.register(Verb.READ, self)

    # What the planner asks.

    def start(self, fetch: Fetch, now: float) -> None:
        """Take on `fetch`; :meth:`advance` does the rest."""
        ready, policy = self._catalog.ready, self._catalog.policy
        for key in fetch.todo:
            if key in ready:
                fetch.ahead.add(key)
                self.hits += 1
            else:
                self.misses += 1
            policy.access(key)
        self._runnable[fetch] = None

    def advance(self, now: float, *, may_evict: bool) -> None:
        """Bring every fetch as far as it can go."""
        while self._runnable:
            fetch = next(iter(self._runnable))
            del self._runnable[fetch]
            if self._run(fetch, now, may_evict):
                self._blocked[fetch] = None
            else:
                self._blocked.pop(fetch, None)
        for fetch in list(self._blocked):
            if self._run(fetch, now, may_evict):
                break
            self._blocked.pop(fetch, None)

    def cancel(self, fetch: Fetch) -> None:
        """Start no more of it; what is coming still comes."""
        fetch.cancelled = True
        fetch.skipped.extend(fetch.todo)
        fetch.todo.clear()
        self._runnable.pop(fetch, None)
        self._blocked.pop(fetch, None)
        self._settle(fetch)

    def filled(self, keys: Iterable[bytes], now: float) -> None:
        """A caller has committed or aborted chunks that a fetch may be waiting for."""
        if self._waiters:
            self._notify(keys, promoted=False)

    # What workers answer.

    def done(self, tier: TierState, answers: Sequence[Answer], now: float) -> None:
        """Promotions have ended; a key that failed is asked of the next tier."""
        self.promoting -= len(answers)
        came = [(key, slot, result.value) for (key, slot, _), result in answers if result.status is _OK]
        if came:
            self._promoted(tier, came, now)
        if len(came) < len(answers):
            for (key, slot, _), result in answers:
                if result.status is not _OK:
                    self._failed(tier, key, slot, result, now)

    def late(self, tier: TierState, item: Item, result: Result, now: float) -> None:
        """The worker no longer writes into the slot: it may be used again."""
        self._catalog.pardon(item[1])

    def _failed(self, tier: TierState, key: bytes, slot: int, result: Result, now: float) -> None:
        if result.status is Status.TIMEOUT:
            self._catalog.condemn(key, slot)
        else:
            self._catalog.discard(key, slot)
        if not self._deserves_another(key, result):
            tier.presence.lost(key, now)
        if result.status is Status.CORRUPT:
            tier.counters.corrupt += 1
            self._events.emit(report.corrupt(key, tier, result.error))
        tier.counters.misses += 1
        for fetch in self._waiters.pop(key, ()):
            self._look_again(fetch, key)

    def _deserves_another(self, key: bytes, result: Result) -> bool:
        """Whether `key` is asked of the same tier again: its worker died, for the first time."""
        waiters = self._waiters.get(key, ())
        if result.status is not Status.DIED or any(key in fetch.tried_again for fetch in waiters):
            return False
        for fetch in waiters:
            fetch.tried_again.add(key)
        return True

    # How a fetch goes on.

    def _run(self, fetch: Fetch, now: float, may_evict: bool) -> bool:
        """Start what can be started of `fetch`; True when it waits for budget or slots."""
        loads: dict[int, list[Item]] = {}
        step = _NEXT
        fetch.sort()
        while fetch.todo and step is _NEXT:
            key = next(iter(fetch.todo))
            step = self._step(fetch, key, loads, now, may_evict)
            if step is _NEXT:
                fetch.todo.pop(key, None)
        for index, items in loads.items():
            self._dispatcher.enqueue(self._tiers[index], Verb.READ, items)
        self._settle(fetch)
        return step is _BLOCKED

    def _step(
        self, fetch: Fetch, key: bytes, loads: dict[int, list[Item]], now: float, may_evict: bool
    ) -> _Step:
        """Deal with the first key of a fetch."""
        slot = self._catalog.ready.get(key)
        if slot is not None:
            self._resident(fetch, key, slot)
            fetch.skipped.append(key)
            return _NEXT
        if key in self._catalog.filling:
            fetch.coming.add(key)
            self._waiters.setdefault(key, []).append(fetch)
            return _NEXT
        tier, known = self._locator.where(key, now)
        if known is _ABSENT:
            self._absent(fetch, key, now)
            return _NEXT
        if known is _PROBING and fetch.asked:
            self._probing.setdefault(key, []).append(fetch)
            return _WAIT
        if tier is None or known is _UNKNOWN:
            return self._probe(fetch, now)
        return self._load(fetch, key, tier, loads, may_evict)

    def _probe(self, fetch: Fetch, now: float) -> _Step:
        """Ask for everything that `fetch` does not know yet, in one go; wait for the first answer."""
        unknown = []
        for key in fetch.todo:
            if key in self._catalog.ready or key in self._catalog.filling:
                continue
            tier, known = self._locator.where(key, now)
            if known is _UNKNOWN and tier is not None:
                unknown.append((key, tier))
        taken = self._locator.ask(unknown)
        fetch.asked = taken == len(unknown)
        first = next(iter(fetch.todo))
        if unknown and not taken:
            fetch.missing.append(first)  # too many probes are under way: rather a miss than a wait
            return _NEXT
        self._probing.setdefault(first, []).append(fetch)
        return _WAIT

    def _located(self, key: bytes, now: float) -> None:
        for fetch in self._probing.pop(key, ()):
            self._runnable[fetch] = None

    def _load(
        self, fetch: Fetch, key: bytes, tier: TierState, loads: dict[int, list[Item]], may_evict: bool
    ) -> _Step:
        if self.promoting >= self._budget:
            return _BLOCKED
        if not self._catalog.free and not (may_evict and self._make_room(fetch)):
            return self._no_room(fetch, may_evict)
        slot = self._catalog.reserve(key)
        self.promoting += 1
        fetch.coming.add(key)
        self._waiters.setdefault(key, []).append(fetch)  # some may wait since before a delete
        loads.setdefault(tier.index, []).append((key, slot, 0))
        for passed in self._tiers[: tier.index]:
            passed.counters.misses += passed.config.read
        return _NEXT

    def _no_room(self, fetch: Fetch, may_evict: bool) -> _Step:
        """Wait for slots that come back by themselves, but never with slots in hand that others may wait
        for."""
        if not may_evict or (self._comes_back() and not fetch.held):
            return _BLOCKED
        fetch.skipped.extend(fetch.todo)
        fetch.todo.clear()
        return _WAIT

    def _make_room(self, fetch: Fetch) -> bool:
        """Evict for as much of `fetch` as the budget allows, less if there is not that much to evict."""
        wanted = min(len(fetch.todo), self._budget - self.promoting)
        incoming = list(fetch.todo)[:wanted]
        for keep in (fetch.keep | fetch.ahead, fetch.keep):
            spared = sum(1 for key in keep if key in self._catalog.ready)
            n = min(wanted, max(1, self._catalog.idle - spared))
            if self._catalog.make_room(n, incoming[:n], keep=keep):
                return True
        return False

    def _comes_back(self) -> bool:
        """Whether workers hold slots, which they give back by themselves."""
        return self.promoting > 0 or any(len(tier.writing) > len(tier.overdue) for tier in self._tiers)

    def _promoted(self, tier: TierState, came: Sequence[Item], now: float) -> None:
        tier.counters.reads += len(came)
        tier.counters.hits += len(came)
        tier.counters.read_bytes += sum(length for _, _, length in came)
        if tier.ledger is not None:
            for key, _, _ in came:
                tier.ledger.touch(key)
        # What was deleted meanwhile, perhaps from the tier as well, does not become READY.
        ready = [key for key, _ in self._catalog.publish_many(came)]
        tier.presence.found_many(ready, now)
        self.fresh.update(ready)
        if ready:
            self._events.emit(report.promoted(ready, self._host, tier))
        self._notify([key for key, _, _ in came], promoted=True)

    def _notify(self, keys: Iterable[bytes], *, promoted: bool) -> None:
        """`keys` are no longer being filled: tell those who wait for them."""
        told: dict[Fetch, None] = {}
        for key in keys:
            slot = self._catalog.ready.get(key)
            for fetch in self._waiters.pop(key, ()):
                if slot is None:  # aborted or deleted
                    self._look_again(fetch, key)
                    continue
                fetch.coming.discard(key)
                self._resident(fetch, key, slot)
                (fetch.promoted if promoted else fetch.skipped).append(key)
                told[fetch] = None
        for fetch in told:
            self._settle(fetch)

    def _look_again(self, fetch: Fetch, key: bytes) -> None:
        """`key` has not come. It is asked of the next tier, unless nobody wants it any more."""
        fetch.coming.discard(key)
        if fetch.cancelled:
            fetch.skipped.append(key)
            self._settle(fetch)
        else:
            fetch.come_back(key)
            self._runnable[fetch] = None

    def _resident(self, fetch: Fetch, key: bytes, slot: int) -> None:
        fetch.keep.add(key)
        if fetch.reads:
            self.fresh.discard(key)
        if fetch.hold and key not in fetch.held:
            self._catalog.hold(slot)
            fetch.held[key] = slot

    def _absent(self, fetch: Fetch, key: bytes, now: float) -> None:
        fetch.missing.append(key)
        for tier in self._tiers:
            if tier.readable(now):
                tier.counters.misses += 1

    def _settle(self, fetch: Fetch) -> None:
        if fetch.done and fetch.on_done is not None:
            callback, fetch.on_done = fetch.on_done, None
            callback()
