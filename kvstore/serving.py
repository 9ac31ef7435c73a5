"""The engine room of a store: one lock, and how those who call, those who wait and the idle pump share it.

Who owns what: the lock guards planner, catalog and presence; every public method of the store takes it in a
*turn* (completions before, new batches after), and nobody holds it while storage works. Completions are
applied by whoever calls; the idle pump (:mod:`kvstore.pump`) takes over when nobody does. A thread that
waits becomes the leader, which waits on the engine's descriptor; the others wait for it to report.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from .arena import Arena
from .catalog import Catalog
from .engine.base import Batch, Completion, Engine
from .errors import ClosedError
from .planner import Fetch, Planner
from .pump import IdlePump

__all__ = ["Serving"]

#: Longest that a waiting thread goes without looking at deadlines and at what others have released (seconds).
_TICK = 0.01
#: Seconds that a store gets that was interrupted, or that nobody has closed before the interpreter ends.
_LAST_MOMENTS = 5.0


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
    """

    def __init__(
        self,
        arena: Arena,
        catalog: Catalog,
        planner: Planner,
        engine: Engine,
        chunk_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.arena = arena
        self.chunk_size = chunk_size
        self.clock = clock
        self.last_call = clock()
        self._catalog = catalog
        self._planner = planner
        self._engine = engine
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._turn = _Turn(self)
        self._glance = _Turn(self, may_evict=False)
        self._zeros = memoryview(bytes(chunk_size))
        self._leader = False
        self._arrived: deque[Completion] = deque()
        self._applying = False
        self._outgoing: deque[Batch] = deque()
        self._futures: set[Future[Any]] = set()  # of jobs under way
        self._closed = ""
        self._pump = IdlePump(self)
        _served.add(self)

    def poll(self) -> None:
        """Apply what workers have completed, and start what is due."""
        with self._turn:
            pass

    def fileno(self) -> int:
        """A descriptor that is readable while :meth:`poll` has something to do."""
        return self._engine.fileno()

    def close(self, timeout: float = 30.0) -> bool:
        """Write what tiers are still owed, end the workers and free host memory.

        Returns
        -------
        bool
            False when `timeout` seconds were not enough to write everything. Further calls do nothing.
        """
        deadline = self._deadline(timeout)
        with self._lock:
            if self._closed:
                return True
        try:
            written = self.wait_until(self._is_paid, timeout)
        except ClosedError:  # another thread was faster: wait for it
            written = True
        self._pump.stop()
        with self._lock:
            if self._closed:
                return True
            self._closed = "the store is closed"
            while self._leader:  # it waits, no longer than a tick, on a descriptor that is about to go
                self._changed.wait(_TICK)
            for future in list(self._futures):
                with suppress(InvalidStateError):
                    future.set_exception(ClosedError(self._closed))
            self._changed.notify_all()
        self._engine.close(max(0.1, deadline - self.clock()))  # outside the lock: leases can still end
        self.arena.close()
        return written

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
        """Whether workers have anything to do."""
        return self._planner.busy

    def pump(self, timeout: float) -> None:
        """One round of the idle pump: wait for a completion, and apply it without evicting anything."""
        with self._lock:
            wait = min(timeout, self._planner.next_deadline - self.clock())
        self._engine.wait(max(0.0, wait))
        with self._lock:
            if not self._closed:
                self._collect()
                self._dispatch(may_evict=False)

    def wait_until(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Serve the store until ``ready()``; False when it is not after `timeout` seconds.

        Raises
        ------
        ClosedError
            The store was closed meanwhile.
        """
        deadline = self._deadline(timeout)
        while True:
            leading = False
            try:
                with self._turn as now:
                    if ready():
                        return True
                    if now >= deadline:
                        return False
                    pause = min(_TICK, deadline - now)
                    if self._leader:
                        self._changed.wait(pause)
                    else:
                        leading = self._leader = True
                if leading:
                    self._engine.wait(pause)
            finally:
                if leading:
                    with self._lock:
                        self._leader = False
                        self._changed.notify_all()

    def _collect(self) -> float:
        """Apply what workers report; the lock is held. Returns the time."""
        now = self.clock()
        self._arrived.extend(self._engine.poll())
        if self._arrived and not self._applying:  # a callback of a future may call the store
            self._applying = True
            try:
                while self._arrived:  # one leaves when it has been applied: Ctrl-C loses none
                    self._planner.apply(self._arrived[0], now)
                    self._arrived.popleft()
            finally:
                self._applying = False
            self._changed.notify_all()
        return now

    def _dispatch(self, *, may_evict: bool) -> None:
        """Start what is due; the lock is held."""
        while True:
            self._planner.advance(self.clock(), may_evict=may_evict)
            self._outgoing.extend(self._planner.take_outbox())
            submits = bool(self._outgoing)
            while self._outgoing:  # what Ctrl-C leaves here goes out with the next turn
                self._engine.submit(self._outgoing.popleft())
            for batch in self._planner.take_abandoned():
                self._engine.abandon(batch)
            if not submits:
                return
            if not self._engine.immediate:
                self._pump.wake()
                return
            self._collect()

    # For the store and its leases.

    def _commit(self, chunks: Sequence[tuple[bytes, int, int]]) -> None:
        with self._turn as now:
            self._planner.commit(chunks, now)
            self._changed.notify_all()

    def _abort(self, chunks: Sequence[tuple[bytes, int]]) -> None:
        with self._turn as now:
            self._planner.abort(chunks, now)
            self._changed.notify_all()

    def _drop(self, slots: Sequence[int]) -> None:
        with self._lock:
            self._planner.drop(slots)
            self._changed.notify_all()

    def _cancel(self, fetch: Fetch) -> None:
        """Start no more of `fetch`, and drop its leases; those that come late are not taken."""
        with self._lock:
            self._planner.cancel(fetch)
            fetch.hold = False
            self._drop(list(fetch.held.values()))
            fetch.held.clear()

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


class _Turn:
    """``with`` block of every public method: lock, liveness, completions before; new batches after.

    With ``may_evict=False`` it is for observers, who may come from any thread: they must not take away what
    a caller has just seen as HIT.
    """

    def __init__(self, serving: Serving, *, may_evict: bool = True) -> None:
        self._serving = serving
        self._may_evict = may_evict

    def __enter__(self) -> float:
        serving = self._serving
        if serving._closed:  # without the lock: in a forked child nobody may be left to release it
            raise ClosedError(serving._closed)
        serving._lock.acquire()
        if serving._closed:
            serving._lock.release()
            raise ClosedError(serving._closed)
        try:
            serving.last_call = serving._collect()
        except BaseException:  # such as Ctrl-C: the block is not entered, so nobody else would release it
            serving._lock.release()
            raise
        return serving.last_call

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        serving = self._serving
        try:
            if not serving._closed:
                serving._dispatch(may_evict=self._may_evict)
        finally:
            serving._lock.release()


_served: weakref.WeakSet[Serving] = weakref.WeakSet()


def _disown() -> None:
    """In a forked child: workers and locks are the parent's."""
    for serving in _served:
        serving._closed = "this process is a fork of the one that opened the store; open one here"
        serving._lock = threading.RLock()
        serving._changed = threading.Condition(serving._lock)


def _close_left_open() -> None:
    """At the end of the interpreter: what was stored gets some time to reach its tiers."""
    for serving in list(_served):
        if not serving._closed:
            warnings.warn(
                "a kvstore.Store was not closed; use it in a with block", ResourceWarning, stacklevel=1
            )
            serving.close(_LAST_MOMENTS)


atexit.register(_close_left_open)
os.register_at_fork(after_in_child=_disown)
