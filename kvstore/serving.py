"""The engine room of a store: one lock, and how those who call, those who wait and the idle pump share it.

Who owns what: the lock guards planner, catalog and presence; every public method of the store takes it for a
*turn* (completions before, new batches after), and nobody holds it while storage works. Completions are
applied by whoever calls; the idle pump (:mod:`kvstore.pump`) takes over when nobody does. Threads that wait
share the engine's descriptor (:mod:`kvstore.waiting`).

Ctrl-C, or an exception from any other signal handler, can come between any two steps of the main thread:

1. In the middle of a turn: nobody can tell what the planner had done, so the store refuses every further
   call with :class:`ClosedError`, and :meth:`Serving.close` waits for nothing. What is in the tiers is safe.
2. Anywhere else the store goes on. What the interrupted call held comes back (:mod:`kvstore.holding`), and a
   leader that does not come back is replaced.
3. No lock stays taken: each is a lock of the interpreter's own in a ``with`` block, which signals cannot
   part. A lock with methods in Python (``Condition``, ``Event``) could be left taken by a signal in one of
   them, so no thread that a signal can reach uses one.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self, TypeVar

from .arena import Arena
from .catalog import Catalog
from .engine.base import Engine
from .errors import ClosedError
from .holding import Holds
from .planner import Fetch, Planner
from .pump import IdlePump
from .waiting import Waiter, Waiters

if TYPE_CHECKING:
    from .gate import Gate

__all__ = ["Serving", "Settled"]

_T = TypeVar("_T")

#: Seconds that a store gets that was interrupted, or that nobody has closed before the interpreter ends.
_LAST_MOMENTS = 5.0
#: Seconds for which those who only look for completions, and find none, need not look for what else is due.
_QUIET = 0.005
#: Why an interrupted store is closed.
_CUT_SHORT = "the store was interrupted in the middle of a change; open it again"


class Settled(Protocol):
    """What somebody may wait for."""

    def settle(self, outcome: Callable[[], Any], /) -> None:
        """It has ended, with what ``outcome()`` returns or raises; later calls do nothing."""


class Serving:
    """Serves planner and engine; :class:`kvstore.Store` is this with the methods that users call.

    Parameters
    ----------
    arena : Arena
    catalog : Catalog
    planner : Planner
    engine : Engine
    chunk_size : int
        Bytes.
    clock : callable
        What deadlines go by.
    gate : Gate, optional
        Where peers come in.
    """

    def __init__(
        self,
        arena: Arena,
        catalog: Catalog,
        planner: Planner,
        engine: Engine,
        chunk_size: int,
        clock: Callable[[], float] = time.monotonic,
        gate: Gate | None = None,
    ) -> None:
        self.arena = arena
        self.chunk_size = chunk_size
        self.clock = clock
        self.last_call = clock()
        self._quiet_until = 0.0  # there is nothing to start before, unless something comes
        self._catalog = catalog
        self._planner = planner
        self._engine = engine
        self._peers = gate
        self._lock = threading.RLock()
        self._zeros = memoryview(bytes(chunk_size))
        self._waiters = Waiters(engine if gate is None else gate)
        self._holds = Holds()
        self._over: deque[Callable[[], None]] = deque()  # calls that settle jobs
        self._jobs: set[Settled] = set()  # under way
        self._closed = ""
        self._ending = threading.RLock()
        self._ended = False
        self._pump = IdlePump(self)
        if gate is not None:
            self._pump.wake()  # peers come unasked
        _served.add(self)

    def poll(self) -> None:
        """Apply what workers have completed, and start what is due."""
        self.last_call = now = self.clock()
        with self._lock:
            if now < self._quiet_until and not self._has_news():
                return  # as most polls of a busy loop do
        self._turn(_nothing)

    def fileno(self) -> int:
        """A descriptor that is readable while :meth:`poll` has something to do."""
        return self._engine.fileno() if self._peers is None else self._peers.fileno()

    def close(self, timeout: float = 30.0) -> bool:
        """Write what tiers are still owed, end the workers and free host memory.

        Returns
        -------
        bool
            False when `timeout` seconds were not enough to write everything, or when Ctrl-C had cut short a
            change. Further calls do nothing.
        """
        if self._ended:
            return True
        deadline = self._deadline(timeout)
        try:
            return self.wait_until(self._is_paid, timeout)
        except ClosedError:  # interrupted; or another thread was faster: wait for it
            return self._closed != _CUT_SHORT
        finally:
            self._end(deadline)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        interrupted = kind is not None and not issubclass(kind, Exception)
        self.close(_LAST_MOMENTS if interrupted else 30.0)  # who presses Ctrl-C does not wait for tiers

    # For jobs and the pump.

    @property
    def busy(self) -> bool:
        """Whether workers have anything to do, or peers may."""
        return self._planner.busy or self._peers is not None

    @property
    def resting(self) -> bool:
        """Whether planning goes on in the next turn; who only waits need not put it off."""
        return self._planner.resting

    def pump(self, timeout: float) -> None:
        """One round of the idle pump: wait for a completion, and apply it without evicting anything.

        Raises
        ------
        ClosedError
            The store is closed.
        """
        with self._lock:
            wait = min(timeout, self._planner.next_deadline - self.clock())
        self._waiters.source.wait(max(0.0, wait))
        self._step(self._serve, _nothing, False)

    def wait_until(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Serve the store until ``ready()``; False when it is not after `timeout` seconds.

        Raises
        ------
        ClosedError
            The store was closed meanwhile.
        """
        waiter = Waiter(self._waiters, ready, self._deadline(timeout))
        while (outcome := self._turn(waiter.look)) is None:
            if not self.resting:
                waiter.sleep()
        return outcome

    # Turns.

    def _turn(self, act: Callable[[float], _T], *, may_evict: bool = True) -> _T:
        """``act(now)`` between completions before and new batches after; every public method is one.

        With ``may_evict=False`` it is for observers, who may come from any thread: they must not take away
        what a caller has just seen as HIT.
        """
        self.last_call = self.clock()
        answer: _T = self._step(self._serve, act, may_evict)
        return answer

    def _step(self, step: Callable[..., _T], *arguments: Any) -> _T:
        """Take a step under the lock that happens as a whole, or is the store's last."""
        with self._lock:
            if self._closed:
                self._refuse()
            try:
                answer = step(*arguments)
                while self._over:  # last, for whoever waits for a job may call the store
                    self._over.popleft()()
                return answer
            except Exception:
                raise
            except BaseException:  # such as Ctrl-C
                self._closed = _CUT_SHORT
                self._fail_jobs()
                raise

    def _serve(self, act: Callable[[float], _T], may_evict: bool) -> _T:
        now = self.clock()
        self._collect(now)
        answer = act(now)
        if act is _nothing and now < self._quiet_until:
            return answer
        self._dispatch(may_evict=may_evict)
        self._quiet_until = min(now + _QUIET, self._planner.next_deadline) if may_evict else 0.0
        return answer

    def _has_news(self) -> bool:
        """Whether a turn would find anything to apply, or to say no to; with the lock held."""
        return bool(
            self._closed or self._holds.returned or self._peers is not None or self._engine.has_news()
        )

    def _collect(self, now: float) -> None:
        """Apply what workers report, and take back what callers no longer hold."""
        if self._holds.returned:
            self._take_back()
        completions = self._engine.poll()
        for completion in completions:
            self._planner.apply(completion, now)
        freed = self._peers.serve() if self._peers is not None else False
        if completions or freed:
            self._changed()

    def _dispatch(self, *, may_evict: bool) -> None:
        """Start what is due."""
        while True:
            self._planner.advance(self.clock(), may_evict=may_evict)
            batches = self._planner.take_outbox()
            for batch in batches:
                self._engine.submit(batch)
            for batch in self._planner.take_abandoned():
                self._engine.abandon(batch)
            if self._peers is not None:
                self._peers.notify()
            if not batches:
                return
            if not self._engine.immediate:
                self._pump.wake()
                return
            self._collect(self.clock())

    def _take_back(self) -> None:
        self._holds.take_back()
        self._changed()

    def _changed(self) -> None:
        """Something has come or become free: there may be something to start, and somebody who waits."""
        self._quiet_until = 0.0
        self._waiters.tell()

    # For the store and its leases.

    def _commit(
        self, chunks: Sequence[tuple[bytes, int, int]], now: float, *, tiers: Collection[str] | None
    ) -> None:
        """Make filled slots readable; within a turn."""
        self._planner.commit(chunks, now, tiers=tiers)
        self._waiters.tell()

    def _settle(self) -> None:
        """Take back what callers no longer hold; if that is interrupted, the next turn does it."""
        try:
            self._step(self._take_back)
        except ClosedError:
            pass

    def _release(self, held: tuple[Mapping[bytes, int], Sequence[Fetch]]) -> None:
        """End read leases, and what adds to them; within a turn."""
        slots, fetches = held
        for fetch in fetches:
            self._stop(fetch)
        self._planner.drop(slots.values())

    def _abort(self, slots: Mapping[bytes, int]) -> None:
        """Give slots back unfilled; within a turn."""
        self._planner.abort(list(slots.items()), self.clock())

    def _stop(self, fetch: Fetch) -> None:
        """Start no more of `fetch`, and take no leases for what comes late; within a turn."""
        self._planner.cancel(fetch)
        fetch.hold = False
        self._quiet_until = 0.0

    def _slot(self, slot: int) -> memoryview:
        return self.arena.view(slot)[: self.chunk_size]

    def _payload(self, slot: int) -> memoryview:
        return self.arena.view(slot)[: self._catalog.length(slot)]

    def _is_paid(self) -> bool:
        planner = self._planner
        return (
            planner.pay_all(self.clock())
            and planner.settled(planner.write_sequence)
            and planner.leave(self.clock())
        )

    def _deadline(self, timeout: float | None) -> float:
        return float("inf") if timeout is None else self.clock() + timeout

    # The end.

    def _end(self, deadline: float) -> None:
        """End pump, jobs, workers and arena; one that was interrupted can be called again."""
        self._pump.stop()
        with self._lock:
            self._closed = self._closed or "the store is closed"
            self._fail_jobs()
        with self._ending:  # not the lock: leases can still end
            if not self._ended:
                if self._peers is not None:
                    self._peers.close(0.1)
                self._engine.close(max(0.1, deadline - self.clock()))
                self.arena.close()
                self._ended = True

    def _fail_jobs(self) -> None:
        while self._jobs:
            self._jobs.pop().settle(self._refuse)
        self._waiters.tell()

    def _refuse(self) -> NoReturn:
        raise ClosedError(self._closed)


def _nothing(_now: float) -> None:
    """What those do in their turn who only want to serve the store."""


_served: weakref.WeakSet[Serving] = weakref.WeakSet()


def _disown() -> None:
    """In a forked child: workers and locks are the parent's."""
    for serving in _served:
        serving._closed = "this process is a fork of the one that opened the store; open one here"
        serving._ended = True
        serving._lock = threading.RLock()


def _close_left_open() -> None:
    """At the end of the interpreter: what was stored gets some time to reach its tiers."""
    for serving in list(_served):
        if not serving._ended:
            warnings.warn(
                "a kvstore.Store was not closed; use it in a with block", ResourceWarning, stacklevel=1
            )
            serving.close(_LAST_MOMENTS)


atexit.register(_close_left_open)
os.register_at_fork(after_in_child=_disown)
