"""Promotion: from the tiers up, in key order, in waves, each chunk once however many ask for it.

A :class:`~.request.Fetch` is one request. Its keys leave ``todo`` from the front, so that what is there first
is the head of the request. A key is *resident* (nothing to do), *coming* (somebody fills it already: the
fetch waits for it), *located* in a tier (it needs a slot and a place in the promotion budget) or not located
yet (then the fetch waits, for order's sake).

Only a caller evicts: ``advance`` is told whether it acts for one. A fetch that finds no slot it may use
waits while workers hold slots, for these come back by themselves; otherwise the rest of its keys are skipped.

In one turn a fetch gets slots for a batch for each worker of a tier, then it rests until the next, so that no
turn takes long. Others get theirs meanwhile: a short request does not wait for all of a long one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, repeat

from ..catalog import Catalog
from ..engine.base import Result, Status, Verb
from ..events import EventQueue
from ..presence import Known
from . import report
from .answers import Answers
from .dispatch import Dispatcher
from .locate import Locator
from .request import Fetch
from .run import Run, Step
from .tier import Item, TierState

__all__ = ["Fetcher"]


# To look up a member of an enum costs a tenth of a microsecond before Python 3.12.
_NEXT, _WAIT, _BLOCKED, _REST = Step
_OK = Status.OK
_ABSENT, _PROBING, _UNKNOWN = Known.ABSENT, Known.PROBING, Known.UNKNOWN


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
        self._waiters: dict[bytes, tuple[Fetch, ...]] = {}  # key being filled -> who wants it
        self._runnable: dict[Fetch, None] = {}
        self._resting: dict[Fetch, None] = {}  # until the next turn
        self.resting = False  # whether any does
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
        fetch.ahead = self._catalog.ready.keys() & fetch.todo.keys()
        self.hits += len(fetch.ahead)
        self.misses += len(fetch.todo) - len(fetch.ahead)
        self._catalog.policy.access_many(fetch.todo)
        self._locator.expect(fetch.tiers, 1)
        self._runnable[fetch] = None

    def advance(self, now: float, *, may_evict: bool) -> None:
        """Bring every fetch as far as it can go in one turn."""
        self.resting = False
        if self._resting:
            self._runnable, self._resting = self._resting | self._runnable, {}
        while self._runnable:
            fetch = next(iter(self._runnable))
            del self._runnable[fetch]
            self._advance(fetch, now, may_evict)
        for fetch in list(self._blocked):
            if self._advance(fetch, now, may_evict) is _BLOCKED:
                break

    def _advance(self, fetch: Fetch, now: float, may_evict: bool) -> Step:
        """Bring `fetch` as far as it can go in one turn, and note what it waits for."""
        step = self._run(fetch, now, may_evict)
        self.resting |= step is _REST
        if step is _BLOCKED:
            self._blocked[fetch] = None
        elif step is not _REST:
            self._blocked.pop(fetch, None)
        elif fetch not in self._blocked:  # else it keeps its place there
            self._resting[fetch] = None
        return step

    def cancel(self, fetch: Fetch) -> None:
        """Start no more of it; what is coming still comes."""
        fetch.cancelled = True
        fetch.skipped.extend(fetch.todo)
        fetch.todo.clear()
        for waiting in (self._runnable, self._resting, self._blocked):
            waiting.pop(fetch, None)
        self._settle(fetch)

    def filled(self, keys: Sequence[bytes], now: float) -> None:
        """A caller has committed or aborted chunks that a fetch may be waiting for."""
        if self._waiters:
            self._tell(keys, [self._waiters.pop(key, ()) for key in keys], promoted=False)

    # What workers answer.

    def done(self, tier: TierState, answers: Answers, now: float) -> None:
        """Promotions have ended; a key that failed is asked of the next tier."""
        self.promoting -= len(answers)
        good = answers.good
        if good is not None:
            self._promoted(tier, good, now)
        if good is not answers:
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

    def _run(self, fetch: Fetch, now: float, may_evict: bool) -> Step:
        """Start what can be started of `fetch` in one turn; says why not more, if so."""
        run = Run(fetch, now, may_evict, self._locator.askable(now, fetch.tiers))
        step = _NEXT
        fetch.sort()
        while fetch.todo and step is _NEXT:
            key = next(iter(fetch.todo))
            step = self._step(run, key)
            if step is _NEXT:
                fetch.todo.pop(key, None)
        for index, items in run.loads.items():
            self._dispatcher.enqueue(self._tiers[index], Verb.READ, items)
            for passed in self._locator.among(fetch.tiers):
                if passed.index < index:
                    passed.counters.misses += len(items) * passed.config.read
        self._settle(fetch)
        return step

    def _step(self, run: Run, key: bytes) -> Step:
        """Deal with the first key of a fetch."""
        fetch, slot = run.fetch, self._catalog.ready.get(key)
        if slot is not None:
            self._resident(fetch, key, slot)
            fetch.skipped.append(key)
            return _NEXT
        if key in self._catalog.filling:
            self._expect(fetch, [key])
            return _NEXT
        tier, known = self._locator.where(key, run.tiers, run.fetch.tiers)
        if known is _ABSENT:
            self._absent(run, key)
            return _NEXT
        if known is _PROBING and fetch.asked:
            self._probing.setdefault(key, []).append(fetch)
            return _WAIT
        if tier is None or known is _UNKNOWN:
            return self._probe(run)
        return self._load(run, key, tier)

    def _probe(self, run: Run) -> Step:
        """Ask for everything that the fetch does not know yet, in one go; wait for the first answer."""
        fetch, unknown = run.fetch, []
        for key in fetch.todo:
            if key in self._catalog.ready or key in self._catalog.filling:
                continue
            tier, known = self._locator.where(key, run.tiers, run.fetch.tiers)
            if known is _UNKNOWN and tier is not None:
                unknown.append((key, tier))
        taken = self._locator.ask(unknown, fetch.tiers)
        fetch.asked = taken == len(unknown)
        first = next(iter(fetch.todo))
        if unknown and not taken:
            fetch.missing.append(first)  # too many probes are under way: rather a miss than a wait
            return _NEXT
        self._probing.setdefault(first, []).append(fetch)
        return _WAIT

    def _located(self, key: bytes, next_tier: TierState | None) -> None:
        """A tier has answered: go on with those who do not wait for `next_tier`, which is asked now."""
        for fetch in self._probing.pop(key, ()):
            if next_tier is not None and next_tier in self._locator.among(fetch.tiers):
                self._probing.setdefault(key, []).append(fetch)
            else:
                self._runnable[fetch] = None

    def _load(self, run: Run, key: bytes, tier: TierState) -> Step:
        """Find room for the key, and bring it up from `tier`; with it what comes next, if that is as easy."""
        head = [key]
        if not run.room:
            most = min(tier.wave - run.brought, self._budget - self.promoting)
            if most <= 0:
                return _BLOCKED if self.promoting >= self._budget else _REST
            if not self._catalog.free and not (run.may_evict and self._make_room(run.fetch, most)):
                return self._no_room(run.fetch, run.may_evict)
            run.room = min(self._catalog.free, most)
            if tier is run.tiers[0]:
                head = self._head(run, tier)
        self._bring(run, head, tier)
        return _NEXT

    def _head(self, run: Run, tier: TierState) -> list[bytes]:
        """The first keys for which there is room, if :meth:`_step` would find of each that `tier` has it (one
        by one costs twice the time); only the first if not."""
        head = list(islice(run.fetch.todo, run.room))
        dealt_with = (self._catalog.ready, self._catalog.filling, tier.tombs)
        if tier.presence.has_all(head) and not any(
            known and not known.keys().isdisjoint(head) for known in dealt_with
        ):
            return head
        return head[:1]

    def _bring(self, run: Run, keys: Sequence[bytes], tier: TierState) -> None:
        """Give each of `keys` a slot, and a place among what is brought up from `tier`."""
        run.room -= len(keys)
        run.brought += len(keys)
        self.promoting += len(keys)
        todo = run.fetch.todo
        if len(keys) == len(todo):
            todo.clear()
        else:
            for key in keys:
                del todo[key]
        self._expect(run.fetch, keys)
        slots = self._catalog.reserve_many(keys)
        run.loads.setdefault(tier.index, []).extend(zip(keys, slots, repeat(0)))

    def _expect(self, fetch: Fetch, keys: Sequence[bytes]) -> None:
        """`fetch` waits for `keys`, which are being filled."""
        fetch.coming.update(keys)
        waiters, alone = self._waiters, (fetch,)
        if waiters.keys().isdisjoint(keys):
            waiters.update(dict.fromkeys(keys, alone))
        else:
            for key in keys:  # some may wait since before a delete
                waiters[key] = waiters.get(key, ()) + alone

    def _no_room(self, fetch: Fetch, may_evict: bool) -> Step:
        """Wait for slots that come back by themselves, but never with slots in hand that others may wait
        for."""
        if not may_evict or (self._comes_back() and not fetch.held):
            return _BLOCKED
        fetch.skipped.extend(fetch.todo)
        fetch.todo.clear()
        return _WAIT

    def _make_room(self, fetch: Fetch, most: int) -> bool:
        """Evict for as much of `fetch` as that, less if there is not that much to evict."""
        wanted = min(len(fetch.todo), most)
        incoming = list(islice(fetch.todo, wanted))
        for keep in (fetch.keep | fetch.ahead if fetch.ahead else fetch.keep, fetch.keep):
            n = min(wanted, self._catalog.idle - len(keep))
            if n < wanted:  # perhaps some of these have gone
                spared = sum(1 for key in keep if key in self._catalog.ready)
                n = min(wanted, max(1, self._catalog.idle - spared))
            if self._catalog.make_room(n, incoming[:n], keep=keep):
                return True
        return False

    def _comes_back(self) -> bool:
        """Whether workers hold slots, which they give back by themselves."""
        return self.promoting > 0 or any(len(tier.writing) > len(tier.overdue) for tier in self._tiers)

    def _promoted(self, tier: TierState, came: Answers, now: float) -> None:
        tier.counters.reads += len(came)
        tier.counters.hits += len(came)
        tier.counters.read_bytes += sum(came.values)
        if tier.ledger is not None:
            for key in came.keys:
                tier.ledger.touch(key)
        # What was deleted meanwhile, perhaps from the tier as well, does not become READY.
        ready, _ = self._catalog.publish_many(came.keys, came.slots, came.values)
        tier.presence.found_many(ready, now)
        self.fresh.update(ready)
        if ready:
            self._events.emit(report.promoted(ready, self._host, tier))
        waiters = [self._waiters.pop(key, ()) for key in came.keys]
        if len(ready) == len(waiters) == waiters.count(waiters[0]) and len(waiters[0]) == 1:
            self._came(waiters[0][0], ready)
        else:
            self._tell(came.keys, waiters, promoted=True)

    def _came(self, fetch: Fetch, keys: Sequence[bytes]) -> None:
        """What :meth:`_tell` does, in one go, when `keys` are READY and nobody but `fetch` waits for them."""
        fetch.coming.difference_update(keys)
        fetch.keep.update(keys)
        fetch.promoted.extend(keys)
        if fetch.hold:
            for key in keys:
                self._hold(fetch, key, self._catalog.ready[key])
        self._settle(fetch)

    def _tell(self, keys: Iterable[bytes], waiters: Iterable[tuple[Fetch, ...]], *, promoted: bool) -> None:
        """`keys` are no longer being filled: tell those who wait for each of them."""
        told: dict[Fetch, None] = {}
        for key, waiting in zip(keys, waiters, strict=True):
            slot = self._catalog.ready.get(key)
            for fetch in waiting:
                if slot is None:  # aborted or deleted
                    self._look_again(fetch, key)
                    continue
                fetch.coming.discard(key)
                fetch.keep.add(key)
                if fetch.hold:
                    self._hold(fetch, key, slot)
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
        if fetch.hold:
            self._hold(fetch, key, slot)

    def _hold(self, fetch: Fetch, key: bytes, slot: int) -> None:
        if fetch.reads:
            self.fresh.discard(key)
        if key not in fetch.held:
            self._catalog.hold(slot)
            fetch.held[key] = slot

    def _absent(self, run: Run, key: bytes) -> None:
        run.fetch.missing.append(key)
        for tier in run.tiers:
            tier.counters.misses += 1

    def _settle(self, fetch: Fetch) -> None:
        if not fetch.done:
            return
        self._locator.expect(fetch.tiers, -1)
        fetch.tiers = ()
        if fetch.on_done is not None:
            callback, fetch.on_done = fetch.on_done, None
            callback()
