"""The store: the facade over planner, engine and arena.

State machine of a chunk (host slot states in :mod:`kvstore.catalog`):

- ``reserve`` gives FILLING slots for keys that are neither READY nor FILLING, evicting READY ones that
  nobody leases. ``commit`` makes them READY, and the planner queues one write per write-through tier;
  ``abort`` frees them.
- A cascade write leases its slot until the worker has answered. It can fail: that is a counter and a future
  miss.
- ``lookup`` answers from catalog and presence, and sends probes for what is unknown. ``prefetch`` promotes:
  probe where unknown, reserve, read, verify, READY; in key order, in waves within the promotion budget; one
  transfer per key however many ask.
- ``delete`` removes from the host at once, and from the tiers in an order that no late write can undo.
- A worker past its deadline: the job fails, the slot is QUARANTINED (a promotion) or stays leased (a
  cascade) until the worker answers or is reaped. Each slot has a generation, for those who act on slots from
  outside.

Who waits: ``put``, ``put_many`` and ``add`` (for a slot, and for room in the queues of writes), ``get``,
``get_many``, ``delete``, ``flush``, ``close`` and ``Job.result``, each up to its ``timeout``.
``reserve(wait=0)``, ``lookup``, ``prefetch``, ``read`` and ``poll`` never wait for storage: an engine's
thread calls only these.

Who owns what: one lock guards planner, catalog and presence; every public method takes it, and no method
holds it while storage works. Completions are applied by whoever calls; the idle pump (:mod:`kvstore.pump`)
takes over when nobody does. A thread that waits becomes the leader, which waits on the engine's descriptor;
the others wait for it to report.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from types import TracebackType
from typing import Self

import numpy as np

from .arena import Arena
from .catalog import Catalog
from .config import StoreConfig
from .engine.base import Engine
from .errors import BackendError, ClosedError, NoSpaceError
from .events import Event, EventQueue
from .jobs import Job, Prefetched
from .keys import ChunkKey, check_keys, content_key
from .leases import ReadLease, WriteLease
from .metrics import Stats
from .namespace import Namespace
from .planner import Fetch, Lookup, Planner
from .pump import IdlePump
from .snapshot import take_stats

__all__ = ["Store"]

#: Longest that a waiting thread goes without looking at deadlines and at what others have released (seconds).
_TICK = 0.01
#: Bytes that ``put_many`` fills before it commits them: their cascade goes on while it fills the next.
_PART_BYTES = 16 << 20
#: Default of ``timeout=`` for calls that wait (seconds).
_PATIENCE = 60.0

_Buffer = bytes | bytearray | memoryview


class Store:
    """A tiered chunk store; made by :func:`kvstore.open`.

    Thread-safe. In a forked child every call raises :class:`ClosedError`. A key is bytes, 16 to 64 of them;
    anything else is a ``ConfigError`` or ``TypeError``.
    """

    def __init__(
        self,
        config: StoreConfig,
        namespace: Namespace,
        arena: Arena,
        catalog: Catalog,
        planner: Planner,
        engine: Engine,
        events: EventQueue,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.namespace = namespace
        self.chunk_size = config.chunk_size
        self.arena = arena
        self.clock = clock
        self.last_call = clock()
        self._catalog = catalog
        self._planner = planner
        self._engine = engine
        self._events = events
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._turn = _Turn(self)
        self._glance = _Turn(self, may_evict=False)
        self._leader = False
        self._jobs: set[Job[Prefetched]] = set()
        self._closed = ""
        self._wave = max(1, arena.slots // 2)
        self._part = max(1, min(self._wave, _PART_BYTES // self.chunk_size))
        self._pump = IdlePump(self)
        _stores.add(self)

    # Blocking calls.

    def put(self, key: bytes, data: _Buffer, *, timeout: float | None = _PATIENCE) -> bool:
        """Store one chunk; returns once host memory holds it.

        Parameters
        ----------
        key : bytes
        data : bytes-like
            At most ``chunk_size`` bytes.
        timeout : float, optional
            Seconds to wait for a slot and for room in the queues of writes.

        Returns
        -------
        bool
            False when the chunk was in host memory already; then nothing was written.

        Raises
        ------
        NoSpaceError
            There was no room within `timeout`.
        ValueError
            `data` is longer than a chunk.
        """
        return self.put_many({key: data}, timeout=timeout) == 1

    def put_many(self, items: Mapping[bytes, _Buffer], *, timeout: float | None = _PATIENCE) -> int:
        """Store many chunks, as :meth:`put` does; returns how many were new to host memory."""
        keys = check_keys(items)
        data = {key: self._checked(items[key]) for key in keys}
        deadline = self._deadline(timeout)
        stored = 0
        while keys:
            with self._reserve(keys[: self._part], lossless=True) as lease:
                for key, view in lease.items():
                    payload = data[key]
                    _copy(payload, view)
                    lease.set_length(key, len(payload))
            stored += len(lease)
            with self._lock:  # what somebody else is filling may yet be aborted
                coming = [key for key in lease.present if key not in self._catalog.ready]
            stuck = lease.refused + coming
            keys = stuck + keys[self._part :]
            if stuck and not len(lease) and not self._wait_for_room(stuck[0], deadline):
                raise NoSpaceError(f"no room for {len(keys)} chunks within {timeout} s; {self._why_full()}")
        return stored

    def add(self, data: _Buffer, *, timeout: float | None = _PATIENCE) -> ChunkKey:
        """Store `data` under the key of its content, and return that key."""
        key = content_key(data)
        self.put(key, data, timeout=timeout)
        return key

    def get(self, key: bytes, *, timeout: float | None = _PATIENCE) -> bytes | None:
        """The chunk as a copy, promoted to host memory if need be; None is a miss."""
        return self.get_many([key], timeout=timeout).get(key)

    def get_many(self, keys: Sequence[bytes], *, timeout: float | None = _PATIENCE) -> dict[bytes, bytes]:
        """Chunks by key, in the order of `keys`, only those found within `timeout` seconds."""
        todo = list(dict.fromkeys(check_keys(keys)))
        deadline = self._deadline(timeout)
        found: dict[bytes, bytes] = {}
        while todo:
            wave, todo = todo[: self._wave], todo[self._wave :]
            fetch = Fetch(wave, hold=True)
            try:
                in_time = self._fetch_and_wait(fetch, deadline)
                here = {key: bytes(self._payload(slot)) for key, slot in fetch.held.items()}
            finally:
                self._cancel(fetch)
            found.update(here)
            if not in_time:
                break
            left = [key for key in fetch.skipped if key not in here]
            if left and (here or self._wait_for_slot(left[0], deadline)):
                todo = left + todo
        return {key: found[key] for key in dict.fromkeys(keys) if key in found}

    def delete(self, keys: Sequence[bytes], *, timeout: float | None = _PATIENCE) -> None:
        """Delete chunks from host memory and from every tier that may be written; absent ones are no error.

        Tiers with ``write=off`` are left alone; this store no longer looks there for the keys.

        Raises
        ------
        BackendError
            A tier could not delete, or not within `timeout` seconds. The chunk stays hidden from this store.
        """
        keys = check_keys(keys)
        with self._turn as now:
            erasure = self._planner.delete(keys, now)
        if not self.wait_until(lambda: erasure.done, timeout):
            raise BackendError(
                f"delete: {erasure.left} answers are outstanding after {timeout} s", retryable=True
            )
        if erasure.errors:
            tier, key, why = erasure.errors[0]
            more = f" (and {len(erasure.errors) - 1} more)" if len(erasure.errors) > 1 else ""
            raise BackendError(f"delete: tier {tier!r}, key {key.hex()}: {why}{more}", tier=tier, key=key)

    def flush(self, *, timeout: float | None = None) -> bool:
        """Wait until every cascade queued so far has ended; False when `timeout` seconds were not enough."""
        with self._turn:
            sequence = self._planner.write_sequence
        return self.wait_until(lambda: self._planner.settled(sequence), timeout)

    # Calls that never wait for storage.

    def lookup(self, keys: Sequence[bytes]) -> list[Lookup]:
        """Where each of `keys` is, as far as is known; no data moves, and what is unknown is asked in the
        background."""
        keys = check_keys(keys)
        started = time.perf_counter()
        with self._glance as now:
            self._dispatch(may_evict=True)  # before the answers: what they call HIT stays until the next call
            answers = self._planner.lookup(keys, now)
            self._planner.host_counters.histograms["lookup"].observe(time.perf_counter() - started)
        return answers

    def prefetch(self, keys: Sequence[bytes]) -> Job[Prefetched]:
        """Promote what is in some tier but not in host memory, in the order of `keys`."""
        keys = list(dict.fromkeys(check_keys(keys)))
        fetch = Fetch(keys)
        job: Job[Prefetched] = Job(self, lambda: self._cancel(fetch))

        def settle() -> None:
            self._jobs.discard(job)
            with suppress(InvalidStateError):  # cancelled, by a thread that needs no lock for that
                job.future.set_result(Prefetched.of(keys, fetch.promoted, fetch.missing))

        fetch.on_done = settle
        with self._turn as now:
            self._jobs.add(job)
            self._planner.fetch(fetch, now)
        return job

    def read(self, keys: Sequence[bytes]) -> ReadLease:
        """Lease what is in host memory, for reading in place; promotes nothing."""
        keys = check_keys(keys)
        started = time.perf_counter()
        with self._turn:
            slots, missing = self._planner.read(keys)
            self._planner.host_counters.histograms["load"].observe(time.perf_counter() - started)
        return ReadLease(self, slots, missing)

    def reserve(self, keys: Sequence[bytes], *, wait: float = 0.0) -> WriteLease:
        """Slots to fill in place, for those of `keys` that are not there.

        Parameters
        ----------
        keys : sequence of bytes
        wait : float
            Seconds to wait until all fit. 0 never waits: what fits gets slots, from the front, and what a
            full queue of writes cannot take is dropped from the cascade.
        """
        keys = check_keys(keys)
        deadline = self._deadline(wait)
        while True:
            fits = wait > 0 and self.wait_until(lambda: self._planner.fits(keys), deadline - self.clock())
            lease = self._reserve(keys, lossless=False)
            if not lease.refused or not fits:
                return lease
            lease.abort()  # another thread took them

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count `keys` as used, in order: the last becomes the most recent."""
        keys = check_keys(keys)
        with self._turn:
            self._planner.touch(keys)

    def set_priority(self, keys: Sequence[bytes], priority: int) -> None:
        """Give chunks a retention priority, 0 (goes first) to 100; only ``policy=priority`` heeds it."""
        if not 0 <= priority <= 100:
            raise ValueError(f"priority {priority} is not between 0 and 100")
        keys = check_keys(keys)
        with self._turn:
            for key in keys:
                self._catalog.policy.set_priority(key, priority)

    def poll(self) -> None:
        """Apply what workers have completed, and start what is due."""
        with self._turn:
            pass

    def fileno(self) -> int:
        """A descriptor that is readable while :meth:`poll` has something to do."""
        return self._engine.fileno()

    def stats(self) -> Stats:
        """Counters, fill and latencies of every tier."""
        with self._glance as now:
            return take_stats(self, self._planner, self._events.dropped, now)

    def events(self) -> Iterator[Event]:
        """Events since the last call."""
        with self._turn:
            return self._events.take()

    # Life cycle.

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
            while self._leader:  # it waits on a descriptor that is about to go
                self._changed.wait(_TICK)
            for job in list(self._jobs):
                with suppress(InvalidStateError):
                    job.future.set_exception(ClosedError(self._closed))
            self._engine.close(max(0.1, deadline - self.clock()))
            self.arena.close()
            self._changed.notify_all()
        return written

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # For jobs, leases and the pump.

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
            with self._turn as now:
                if ready():
                    return True
                if now >= deadline:
                    return False
                pause = min(_TICK, deadline - now)
                if self._leader:
                    self._changed.wait(pause)
                    continue
                self._leader = True
            try:
                self._engine.wait(pause)
            finally:
                with self._lock:
                    self._leader = False
                    self._changed.notify_all()

    def _collect(self) -> float:
        """Apply what workers report; the lock is held. Returns the time."""
        now = self.clock()
        completions = self._engine.poll()
        if completions:
            self._planner.apply(completions, now)
            self._changed.notify_all()
        return now

    def _dispatch(self, *, may_evict: bool) -> None:
        """Start what is due; the lock is held."""
        while True:
            self._planner.advance(self.clock(), may_evict=may_evict)
            outbox = self._planner.take_outbox()
            for batch in outbox:
                self._engine.submit(batch)
            for batch in self._planner.take_abandoned():
                self._engine.abandon(batch)
            if not outbox:
                return
            if not self._engine.immediate:
                self._pump.wake()
                return
            self._collect()

    def _reserve(self, keys: Sequence[bytes], *, lossless: bool) -> WriteLease:
        with self._turn as now:
            slots = self._planner.reserve(keys, now, lossless=lossless)
            refused = [key for key in self._planner.absent(keys) if key not in slots]
        return WriteLease(self, slots, keys, refused)

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

    def _fetch_and_wait(self, fetch: Fetch, deadline: float) -> bool:
        with self._turn as now:
            self._planner.fetch(fetch, now)
        return self.wait_until(lambda: fetch.done, deadline - self.clock())

    def _wait_for_slot(self, key: bytes, deadline: float) -> bool:
        """Wait until `key` can be promoted, or is there; False when it cannot by `deadline`."""
        return self.wait_until(lambda: self._planner.fits([key]), deadline - self.clock())

    def _wait_for_room(self, key: bytes, deadline: float) -> bool:
        """Wait until `key` can be stored without losing anything, or is there; False when it cannot by
        `deadline`."""

        def ready() -> bool:
            now = self.clock()
            self._planner.wants_cleaning(now)
            return self._planner.has_room(key, now)

        return self.wait_until(ready, deadline - self.clock())

    def _is_paid(self) -> bool:
        return self._planner.pay_all(self.clock()) and self._planner.settled(self._planner.write_sequence)

    def _deadline(self, timeout: float | None) -> float:
        return float("inf") if timeout is None else self.clock() + timeout

    def _checked(self, data: _Buffer) -> memoryview:
        view = memoryview(data).cast("B")
        if len(view) > self.chunk_size:
            raise ValueError(f"data of {len(view)} bytes is longer than a chunk ({self.chunk_size} bytes)")
        return view

    def _why_full(self) -> str:
        catalog = self._catalog
        return (
            f"of {catalog.slots} slots {len(catalog.ready) - catalog.idle} are leased, "
            f"{len(catalog.filling)} are being filled, {catalog.quarantined} are quarantined; "
            "end leases sooner, or raise the host's capacity"
        )


class _Turn:
    """``with`` block of every public method: lock, liveness, completions before; new batches after.

    With ``may_evict=False`` it is for observers, who may come from any thread: they must not take away what
    a caller has just seen as HIT.
    """

    def __init__(self, store: Store, *, may_evict: bool = True) -> None:
        self._store = store
        self._may_evict = may_evict

    def __enter__(self) -> float:
        store = self._store
        if store._closed:  # without the lock: in a forked child nobody may be left to release it
            raise ClosedError(store._closed)
        store._lock.acquire()
        if store._closed:
            store._lock.release()
            raise ClosedError(store._closed)
        try:
            store.last_call = store._collect()
        except BaseException:  # such as Ctrl-C: the block is not entered, so nobody else would release it
            store._lock.release()
            raise
        return store.last_call

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        store = self._store
        try:
            if not store._closed:
                store._dispatch(may_evict=self._may_evict)
        finally:
            store._lock.release()


def _copy(source: memoryview, target: memoryview) -> None:
    """Copy to the start of `target`, and let other threads run meanwhile, as slice assignment would not."""
    np.copyto(np.asarray(target)[: len(source)], np.asarray(source))


_stores: weakref.WeakSet[Store] = weakref.WeakSet()


def _disown_stores() -> None:
    """In a forked child: workers and locks are the parent's."""
    for store in _stores:
        store._closed = "this process is a fork of the one that opened the store; open one here"
        store._lock = threading.RLock()
        store._changed = threading.Condition(store._lock)


os.register_at_fork(after_in_child=_disown_stores)
