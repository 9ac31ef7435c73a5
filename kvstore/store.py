"""The store: the facade over planner, engine and arena.

State machine of a chunk (host slot states in :mod:`kvstore.catalog`):

- ``reserve`` gives FILLING slots for keys that are neither READY nor FILLING, evicting READY ones that
  nobody leases. ``commit`` makes them READY, and writes for each write-through tier due; ``abort`` frees.
- A cascade write leases its slot until the worker has answered. When it fails, that is a future miss.
- ``lookup`` answers from catalog and presence, and sends probes for what is unknown. ``prefetch`` promotes:
  probe where unknown, reserve, read, verify, READY; in key order, in waves within the promotion budget; one
  transfer per key however many ask.
- ``delete`` removes from the host at once, and from the tiers in an order that no late write can undo.
- A worker past its deadline: the job fails, the slot is QUARANTINED (a promotion) or stays leased (a
  cascade) until the worker answers or is reaped. Slots have generations, for who acts on them from outside.

Who waits: ``put``, ``put_many`` and ``add`` (for a slot, and for room in the queues of writes), ``get``,
``get_many``, ``delete``, ``flush``, ``close`` and ``Job.result``, each up to its ``timeout``.
``reserve(wait=0)``, ``lookup``, ``prefetch``, ``read`` and ``poll`` never wait for storage: an engine's
thread calls only these.

How callers, waiters and the idle pump share the lock: :mod:`kvstore.serving`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, KeysView, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from .arena import Arena
from .buffers import Buffer, copy, view_of
from .catalog import Catalog
from .config import StoreConfig
from .engine.base import Engine
from .errors import BackendError, NoSpaceError
from .events import Event, EventQueue
from .holding import Holding
from .jobs import Job, Prefetched
from .keys import ChunkKey, check_keys, content_key
from .leases import ReadLease, WriteLease
from .metrics import Stats
from .namespace import Namespace
from .planner import Fetch, Lookup, Planner, Prefix
from .serving import Serving
from .snapshot import summary, take_stats

if TYPE_CHECKING:
    from .gate import Gate

__all__ = ["Store"]

#: Bytes that ``put_many`` fills before it commits them: their cascade goes on while it fills the next.
_PART_BYTES = 16 << 20
#: Default of ``timeout=`` for calls that wait (seconds).
_PATIENCE = 60.0


class Store(Serving):
    """A tiered chunk store; made by :func:`kvstore.open`.

    Thread-safe. In a forked child every call raises :class:`ClosedError`. A key is bytes, 16 to 64 of them;
    anything else is a ``ConfigError`` or ``TypeError``.

    Where a call takes ``tiers``, these are names of the secondary tiers that it is about, in any order: by
    default all of them, and none if empty. Where a tier ``peer://`` allows it, ``peer://host:port`` names a
    peer; no other call asks that. A name that is neither is a ``ConfigError``.
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
        gate: Gate | None = None,
    ) -> None:
        super().__init__(arena, catalog, planner, engine, config.chunk_size, clock, gate)
        self.config = config
        self.namespace = namespace
        self._events = events
        self._wave = max(1, arena.slots // 2)
        self._part = max(1, min(self._wave, _PART_BYTES // self.chunk_size))

    def __repr__(self) -> str:
        return summary(self.config, self.namespace, closed=bool(self._closed))

    # Blocking calls.

    def put(self, key: bytes, data: Buffer, *, timeout: float | None = _PATIENCE) -> bool:
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

    def put_many(self, items: Mapping[bytes, Buffer], *, timeout: float | None = _PATIENCE) -> int:
        """Store many chunks, as :meth:`put` does; returns how many were new to host memory."""
        keys = check_keys(items)
        data = {key: view_of(items[key], self.chunk_size) for key in keys}
        deadline = self._deadline(timeout)
        stored = 0
        while keys:
            with self._reserve(keys[: self._part], lossless=True) as lease:
                for key, slot in lease.slots.items():
                    payload = data[key]
                    copy(payload, self._slot(slot))
                    lease.set_length(key, len(payload))
            stored += len(lease)
            with self._lock:  # what somebody else is filling may yet be aborted
                coming = [key for key in lease.present if key not in self._catalog.ready]
            stuck = lease.refused + coming
            keys = stuck + keys[self._part :]
            if stuck and not len(lease) and not self._wait_for_room(stuck[0], deadline):
                raise NoSpaceError(f"no room for {len(keys)} chunks within {timeout} s; {self._why_full()}")
        return stored

    def add(self, data: Buffer, *, timeout: float | None = _PATIENCE) -> ChunkKey:
        """Store `data` under the key of its content, and return that key."""
        key = content_key(data)
        self.put(key, data, timeout=timeout)
        return key

    def get(
        self, key: bytes, *, timeout: float | None = _PATIENCE, tiers: Collection[str] | None = None
    ) -> bytes | None:
        """The chunk as a copy, promoted to host memory if need be; None is a miss."""
        return self.get_many([key], timeout=timeout, tiers=tiers).get(key)

    def get_many(
        self,
        keys: Sequence[bytes],
        *,
        timeout: float | None = _PATIENCE,
        tiers: Collection[str] | None = None,
    ) -> dict[bytes, bytes]:
        """Chunks by key, in the order of `keys`, only those found within `timeout` seconds."""
        todo = list(dict.fromkeys(check_keys(keys)))
        deadline = self._deadline(timeout)
        found: dict[bytes, bytes] = {}
        while todo:
            wave, todo = todo[: self._wave], todo[self._wave :]
            fetch = Fetch(wave, hold=True)
            with self._turn(partial(self._start, fetch, tiers)):
                in_time = self._wait_for(fetch, deadline)
                here = {key: bytes(self._payload(slot)) for key, slot in fetch.held.items()}
            found.update(here)
            if not in_time:
                break
            left = [key for key in fetch.skipped if key not in here]
            if left and (here or self._wait_until_fit(left[:1], deadline)):
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
        erasure = self._turn(lambda now: self._planner.delete(keys, now))
        if not self.wait_until(lambda: erasure.done, timeout):
            raise BackendError(
                f"delete: {erasure.left} answers are outstanding after {timeout} s", retryable=True
            )
        if erasure.errors:
            tier, key, why = erasure.errors[0]
            more = f" (and {len(erasure.errors) - 1} more)" if len(erasure.errors) > 1 else ""
            raise BackendError(f"delete: tier {tier!r}, key {key.hex()}: {why}{more}", tier=tier, key=key)

    def flush(self, *, timeout: float | None = None) -> bool:
        """Wait until every cascade queued so far has ended, written or counted in ``errors`` or ``dropped``
        of its tier; False when `timeout` seconds were not enough."""
        sequence = self._turn(lambda _: self._planner.write_sequence)
        return self.wait_until(lambda: self._planner.settled(sequence), timeout)

    # Calls that never wait for storage.

    def lookup(
        self, keys: Sequence[bytes], *, tiers: Collection[str] | None = None, anew: Collection[str] = ()
    ) -> list[Lookup]:
        """Where each of `keys` is, as far as is known; no data moves, and what is unknown is asked in the
        background; of tiers with names in `anew` also what they did not have when they were asked."""
        keys = check_keys(keys)
        started = time.perf_counter()

        def look(now: float) -> list[Lookup]:
            self._dispatch(may_evict=True)  # before the answers: what they call HIT stays until the next call
            answers = self._planner.lookup(keys, now, self._planner.select(tiers, now), anew=anew)
            self._planner.host_counters.histograms["lookup"].observe(time.perf_counter() - started)
            return answers

        return self._turn(look, may_evict=False)

    @property
    def resident(self) -> KeysView[bytes]:
        """The keys in host memory: a live view, which is asked without a lock, ``key in store.resident``.

        What it says holds until the next call; nothing leaves host memory between calls.
        """
        return self._catalog.ready.keys()

    @property
    def room(self) -> int:
        """Slots that are free, or hold a chunk that may be evicted."""
        return self._catalog.free + self._catalog.idle

    @property
    def promoting(self) -> int:
        """Slots being filled from tiers."""
        return self._planner.promoting

    def is_up(self, tier: str) -> bool:
        """Whether a tier, or a peer, would be asked for chunks now: not one that is down, nor a peer that has
        no place and finds none."""
        return self._turn(lambda now: self._planner.is_up(tier, now), may_evict=False)

    def prefetch(
        self,
        keys: Sequence[bytes],
        *,
        into: ReadLease | None = None,
        tiers: Collection[str] | None = None,
    ) -> Job[Prefetched]:
        """Promote what is in some tier but not in host memory, in the order of `keys`.

        Parameters
        ----------
        keys : sequence of bytes
        into : ReadLease, optional
            Takes each of `keys` as soon as it is in host memory, so that it stays there until the lease ends.
            Whoever holds slots does not wait for others: what finds no room is skipped.
        """
        fetch = Fetch(check_keys(keys), into=None if into is None else into._slots)
        job: Job[Prefetched] = Job(
            self, over=lambda: fetch.done or fetch.cancelled, stop=lambda: self._stop(fetch)
        )

        def settle() -> None:
            self._jobs.discard(job)
            job.settle(lambda: Prefetched.of(fetch.keys, fetch.promoted, fetch.missing))

        def start(now: float) -> None:
            fetch.tiers = self._planner.select(tiers, now)
            self._jobs.add(job)
            if into is not None:
                into._feeds.append(fetch)
            self._planner.fetch(fetch, now)

        fetch.on_done = lambda: self._over.append(settle)
        self._turn(start)
        return job

    def read(self, keys: Sequence[bytes]) -> ReadLease:
        """Lease what is in host memory, for reading in place; promotes nothing."""
        keys = check_keys(keys)
        started = time.perf_counter()

        def lease(_now: float) -> ReadLease:
            slots, missing = self._planner.read(keys)
            self._planner.host_counters.histograms["load"].observe(time.perf_counter() - started)
            return ReadLease(self, slots, missing)

        return self._turn(lease)

    def hold(self, keys: Sequence[bytes]) -> ReadLease:
        """Lease what is in host memory as :meth:`read` does, without counting it as used."""
        keys = check_keys(keys)
        return self._turn(lambda _: ReadLease(self, *self._planner.hold(keys)))

    def reserve(self, keys: Sequence[bytes], *, wait: float = 0.0, after: Prefix | None = None) -> WriteLease:
        """Slots to fill in place, for those of `keys` that are not there.

        Parameters
        ----------
        wait : float
            Seconds to wait until all fit. 0 never waits: what fits gets slots, from the front, and what is
            evicted for it is lost to tiers that have not got it yet.
        after : Prefix, optional
            What was stored before, and without which `keys` are worth nothing, as the beginning of a prompt.
            What of it is on its way to tiers and in none yet stays, and meanwhile all of `keys` fit, or none.
        """
        if after is not None and not isinstance(after, Prefix):
            raise TypeError(f"after must be a Prefix, not a {type(after).__name__}: use Prefix(keys)")
        keys, deadline = check_keys(keys), self._deadline(wait)
        while True:
            fits = wait > 0 and self._wait_until_fit(keys, deadline, after)
            lease = self._reserve(keys, lossless=False, after=after)
            if not lease.refused or not fits or self.clock() >= deadline:
                return lease
            lease.abort()  # another thread took them

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count `keys` as used, in order: the last becomes the most recent."""
        self._turn(lambda _: self._planner.touch(check_keys(keys)))

    def renew(self, keys: Sequence[bytes]) -> None:
        """Make `keys` the most recent, the last of them most of all, without counting them as used."""
        self._turn(lambda _: self._planner.renew(check_keys(keys)))

    def clear(self) -> None:
        """Drop from host memory what nobody leases; what tiers have not got of it yet is lost to them."""
        self._turn(lambda _: self._planner.clear())

    def set_priority(self, keys: Sequence[bytes], priority: int) -> None:
        """Give chunks a retention priority, 0 (goes first) to 100; only ``policy=priority`` heeds it."""
        if not 0 <= priority <= 100:
            raise ValueError(f"priority {priority} is not between 0 and 100")
        keys = check_keys(keys)

        def mark(_now: float) -> None:
            for key in keys:
                self._catalog.policy.set_priority(key, priority)

        self._turn(mark)

    @property
    def served_at(self) -> str | None:
        """Where peers may read this store, with the port that it got; None when it is not served."""
        return None if self._peers is None else str(self._peers.address)

    def stats(self) -> Stats:
        """Counters, fill and latencies of every tier."""
        return self._turn(
            lambda now: take_stats(
                self.config, self.namespace, self.arena.pinned, self._planner, self._events.dropped, now
            ),
            may_evict=False,
        )

    def events(self) -> Iterator[Event]:
        """Events since the last call."""
        return self._turn(lambda _: self._events.take())

    def _reserve(self, keys: Sequence[bytes], *, lossless: bool, after: Prefix | None = None) -> WriteLease:
        def lease(now: float) -> WriteLease:
            slots = self._planner.reserve(keys, now, lossless=lossless, after=after)
            return WriteLease(self, slots, keys, refused=self._planner.absent(keys))

        return self._turn(lease)

    def _start(self, fetch: Fetch, tiers: Collection[str] | None, now: float) -> Holding:
        """Start a promotion that ends with the ``with`` block, and its leases with it; within a turn."""
        fetch.tiers = self._planner.select(tiers, now)
        self._planner.fetch(fetch, now)
        return Holding(self._holds, self._settle, self._release, (fetch.held, (fetch,)))

    def _wait_for(self, fetch: Fetch, deadline: float) -> bool:
        return self.wait_until(lambda: fetch.done, deadline - self.clock())

    def _wait_until_fit(self, keys: Sequence[bytes], deadline: float, after: Prefix | None = None) -> bool:
        """Wait until there are slots for all of `keys`; False when there are not by `deadline`."""
        clock, fits = self.clock, self._planner.fits
        return self.wait_until(lambda: fits(keys, clock(), after=after), deadline - clock())

    def _wait_for_room(self, key: bytes, deadline: float) -> bool:
        """Wait until `key` can be stored without losing anything, or is there; False after `deadline`."""

        def ready() -> bool:
            now = self.clock()
            self._planner.wants_cleaning(now)
            return self._planner.has_room(key, now)

        return self.wait_until(ready, deadline - self.clock())

    def _why_full(self) -> str:
        catalog = self._catalog
        return (
            f"of {catalog.slots} slots {len(catalog.ready) - catalog.idle} are leased, "
            f"{len(catalog.filling)} are being filled, {catalog.quarantined} are quarantined; "
            "end leases sooner, or raise the host's capacity"
        )
