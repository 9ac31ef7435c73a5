"""Puts a store together: configuration -> namespace, arena, catalog, planner, engine."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

import msgspec

from .address import Address
from .arena import Arena
from .backends import Backend, create
from .catalog import Catalog
from .collect.limits import SHARED, is_shared
from .collect.report import INSTANCE_BYTES
from .config import HostConfig, StoreConfig, TierConfig, parse
from .config.store import check_places, check_settings
from .engine.base import BATCH_LIMIT, Engine, Slots, Verb
from .errors import BackendError, ConfigError, KVStoreError, NamespaceMismatchError
from .events import Event, EventQueue
from .frame import object_size
from .ledger import Ledger
from .namespace import Namespace
from .peer.choice import check_transports
from .planner import Direction, Planner, Tally, TierState
from .planner.report import breaker_event
from .policy import make_policy
from .remedies import install
from .store import Store

if TYPE_CHECKING:
    from .gate import Gate

__all__ = [
    "BackendFactory",
    "EngineFactory",
    "assemble",
    "make_engine",
    "make_gate",
    "make_tier",
    "open_store",
    "settled",
    "start_tiers",
]

#: Makes the backend of a tier; called once for each worker.
BackendFactory = Callable[[TierConfig, Namespace], Backend]
#: Makes the engine of a store, as :func:`make_engine` does.
EngineFactory = Callable[[StoreConfig, Namespace, Arena, BackendFactory], Engine]

_log = logging.getLogger("kvstore")

#: Payload bytes in one batch. Reads: every batch costs the caller, and what of it has come is told meanwhile.
_READ_BYTES = 64 << 20
#: Reads that a worker may have under way together.
_BULK_READ_BYTES = 64 << 20
#: Writes: enough to keep a worker busy, little enough for reads to wait behind.
_WRITE_BYTES = 16 << 20
_MOST_ITEMS = 128
#: Batches of one direction that a worker may have: one to work on, one to go on with.
_WINDOW = 2


def open_store(
    *tiers: str | os.PathLike[str] | Mapping[str, Any] | HostConfig | TierConfig,
    namespace: Mapping[str, Any] | None = None,
    chunk_size: int | str | None = None,
    engine: str | None = None,
    serve: str | None = None,
    storage_options: Mapping[str, Mapping[str, Any]] | None = None,
    config: str | Path | StoreConfig | None = None,
    **unknown: Never,
) -> Store:
    """Open a tiered store.

    Parameters
    ----------
    *tiers : str, path, mapping or configuration
        The host tier (``ram://?capacity=...``) first, then the secondary tiers in the order in which they
        are asked.
    namespace : mapping, optional
        Everything that makes bytes interchangeable: model, dtype, layout, ... Stores with different fields
        never see each other's chunks, whatever they share.
    chunk_size : int or str, optional
        Largest chunk in bytes, or with a unit; 2 MiB by default.
    engine : {"threads", "processes", "inline"}, optional
        What moves the bytes.
    serve : str, optional
        Address at which peers may read host memory, such as ``tcp://127.0.0.1:5710``.
    storage_options : mapping, optional
        Tier name -> options of its filesystem.
    config : path or StoreConfig, optional
        A TOML file (also named by ``KVSTORE_CONFIG``), or what :func:`kvstore.config.parse` has made of
        everything: then there is nothing else to say.
    **unknown
        Refused, with the nearest name that is valid.

    Returns
    -------
    Store
        A context manager.

    Raises
    ------
    ConfigError
        The configuration is wrong; nothing has been created.
    NoSpaceError
        The machine or its cgroup cannot hold the host tier.
    NamespaceMismatchError
        A tier holds a manifest that contradicts `namespace`; nothing has been touched.
    BackendError
        A tier with ``required=true`` cannot be reached.
    """
    check_settings(unknown, open_store.__kwdefaults__ or ())
    settings: dict[str, Any] = {
        "namespace": namespace,
        "chunk_size": chunk_size,
        "engine": engine,
        "serve": serve,
        "storage_options": storage_options,
    }
    if not isinstance(config, StoreConfig):
        return assemble(parse(*tiers, **settings, config=config))
    given = ["tiers"] * bool(tiers) + [name for name, value in settings.items() if value is not None]
    if given:
        raise ConfigError(
            f"store: {', '.join(given)} beside a StoreConfig, which is complete: put it in there, with"
            " msgspec.structs.replace"
        )
    return assemble(config)


def assemble(
    config: StoreConfig,
    factory: BackendFactory = create,
    *,
    arena: Arena | None = None,
    engine_of: EngineFactory | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Store:
    """A store for `config`, with backends made by `factory`.

    `arena` is one that exists already, for chunks of the configured size: the store takes it over, with its
    capacity. `engine_of` makes an engine other than the configured one; `clock` is what deadlines go by.
    """
    check_places(config)
    config = settled(config)
    check_transports(config)
    identity = Namespace(config.namespace, config.chunk_size)
    if arena is None:
        arena = Arena.create(config.host.capacity, config.chunk_size, pin=config.host.pin)
    else:
        config = _over(arena, config)
    engine, gate = None, None
    try:
        engine = (engine_of or make_engine)(config, identity, arena, factory)
        states = [make_tier(config, i, arena.slots) for i in range(len(config.tiers))]
        events = EventQueue()
        for event in start_tiers(engine, states, clock):
            events.emit(event)
        catalog = Catalog(arena.slots, make_policy(config.host.policy, arena.slots))
        planner = Planner(
            states,
            catalog,
            events,
            host=config.host.name,
            budget=max(1, arena.slots // 2),
        )
        gate = make_gate(config, identity, arena, planner, engine)
        store = Store(config, identity, arena, catalog, planner, engine, events, clock, gate)
        store.poll()  # ledgers begin to learn what is there
        return store
    except BaseException:
        if gate is not None:
            gate.close(0.1)
        if engine is not None:
            engine.close(1.0)
        arena.close()
        raise


def _over(arena: Arena, config: StoreConfig) -> StoreConfig:
    """`config` with the capacity of an arena that somebody else has made."""
    if arena.chunk_size != config.chunk_size:
        raise ConfigError(
            f"chunk_size of {config.chunk_size} bytes does not fit an arena of {arena.chunk_size} bytes each"
        )
    host = msgspec.structs.replace(config.host, capacity=arena.slots * arena.slot_size)
    return msgspec.structs.replace(config, host=host)


def make_tier(config: StoreConfig, index: int, slots: int) -> TierState:
    """State of a secondary tier of `config`, by its place among them, below a host of so many slots."""
    tier = config.tiers[index]
    written = sum(other.write != "off" for other in config.tiers)

    def direction(batch_bytes: int) -> Direction:
        items = max(_concurrency(tier), min(_MOST_ITEMS, batch_bytes // config.chunk_size), 1)
        return Direction(_WINDOW * tier.workers, min(items, BATCH_LIMIT))

    return TierState(
        index=index,
        config=tier,
        write_limit=max(1, slots // (2 * max(1, written))),
        reads=direction(_BULK_READ_BYTES if tier.scheme == "peer" else _READ_BYTES),
        writes=direction(_WRITE_BYTES),
        ledger=Ledger(tier.capacity) if tier.capacity is not None and tier.scheme not in SHARED else None,
        tally=_make_tally(config, index),
    )


def _make_tally(config: StoreConfig, index: int) -> Tally | None:
    """For a tier whose limits are shared; the lanes of the collectors follow those of the tiers."""
    if not is_shared(config.tiers[index]):
        return None
    lane = len(config.tiers) + sum(map(is_shared, config.tiers[:index]))
    return Tally(os.urandom(INSTANCE_BYTES), lane, object_size(config.chunk_size))


def _lanes(config: StoreConfig) -> list[TierConfig]:
    """What the engine serves: the tiers, and for each whose limits are shared another one with a single
    worker, which collects, so that no transfer ever waits for that."""
    collecting = [msgspec.structs.replace(tier, workers=1) for tier in config.tiers if is_shared(tier)]
    return [*config.tiers, *collecting]


def make_gate(
    config: StoreConfig, namespace: Namespace, arena: Arena, planner: Planner, engine: Engine
) -> Gate | None:
    """The gate at which peers come in, open; None when the host tier is not served.

    Raises
    ------
    ConfigError
        What peers have to prove is malformed, or the extra ``p2p`` is not installed.
    BackendError
        It cannot listen.
    """
    host = config.host
    if host.serve is None:
        return None
    if find_spec("zmq") is None:
        raise ConfigError(f"tier {host.name!r}: serve needs pyzmq: {install('p2p')}")
    from .gate import Gate
    from .peer.credentials import ServerCredentials

    gate = Gate(
        Address.parse(host.serve),
        arena,
        planner.catalog,
        namespace,
        ServerCredentials.of(host.storage_options, f"tier {host.name!r}"),
        transport=host.transport,
        engine_fd=engine.fileno(),
        counters=planner.host_counters.custom,
        nice=config.nice,
        affinity=config.affinity,
    )
    try:
        gate.open()
    except BaseException:
        gate.close(0.1)
        raise
    return gate


def make_engine(
    config: StoreConfig,
    namespace: Namespace,
    arena: Slots,
    factory: BackendFactory,
    *,
    attach: Callable[[int], Slots] = Arena.from_fd,
) -> Engine:
    """The engine that `config` names, over the slots of `arena`, with backends made by `factory`.

    A worker process calls `attach`, with the descriptor of `arena`, for what `arena` is here.
    """
    if config.engine == "processes":
        from .engine.processes import ProcessesEngine, ProcessTier

        return ProcessesEngine(
            [ProcessTier(tier, tier.workers, _concurrency(tier)) for tier in _lanes(config)],
            arena,
            namespace,
            factory,
            attach=attach,
            nice=config.nice,
            affinity=config.affinity,
        )
    from .collect.collector import collector_of
    from .engine.worker import Worker

    def make_worker(tier: TierConfig) -> Worker:
        backend = factory(tier, namespace)
        return Worker(
            backend,
            arena.view,
            retries=tier.retries,
            timeout=tier.timeout,
            concurrency=_concurrency(tier),
            collector=collector_of(tier, namespace, backend),
            has_quick_probes=tier.is_near,
        )

    if config.engine == "inline":
        from .engine.inline import InlineEngine

        return InlineEngine([make_worker(tier) for tier in _lanes(config)])
    from .engine.threads import ThreadsEngine, ThreadTier

    return ThreadsEngine(
        [
            ThreadTier(tier.name, partial(make_worker, tier), tier.workers, tier.opening_timeout)
            for tier in _lanes(config)
        ]
    )


def _concurrency(tier: TierConfig) -> int:
    """Operations at a time in one worker: more than one only where an operation mostly waits."""
    return 1 if tier.is_near else tier.concurrency


def settled(config: StoreConfig) -> StoreConfig:
    """`config` as planner and engine can have it: a tier for each place that peers can take, and one worker
    for what lives in the memory of one process."""
    tiers: list[TierConfig] = []
    taken = {config.host.name, *(tier.name for tier in config.tiers)}
    for tier in config.tiers:
        if tier.dials:
            tiers += _places(tier, taken)
        elif config.engine == "processes" and "memory" in tier.url.partition("/")[0]:
            tiers.append(msgspec.structs.replace(tier, workers=1))
        else:
            tiers.append(tier)
    return msgspec.structs.replace(config, tiers=tuple(tiers))


def _places(tier: TierConfig, taken: set[str]) -> list[TierConfig]:
    """A tier for each peer that can be connected at a time, with one worker; they share nothing that could
    make one wait for another. Their names are the first that are not `taken`, and are added there."""
    numbered = (f"{tier.name}-{number}" for number in count(1))
    names = list(islice((name for name in numbered if name not in taken), tier.peers))
    if tier.peers == 1:
        names = [tier.name]
    taken.update(names)
    return [msgspec.structs.replace(tier, name=name, peers=1, workers=1) for name in names]


def start_tiers(engine: Engine, tiers: list[TierState], clock: Callable[[], float]) -> list[Event]:
    """Open every tier; one that is not required may be down: the events tell of these.

    Raises
    ------
    KVStoreError
        A required tier cannot be opened, or one contradicts its configuration or the namespace.
    """
    events: list[Event] = []
    for tier, error in zip(tiers, engine.start(), strict=False):  # collectors open theirs when they are asked
        if error is None:
            continue
        if tier.config.required or isinstance(error, ConfigError | NamespaceMismatchError):
            raise _explained(tier, error)
        _log.error("tier %r is down, going on without it: %s", tier.name, error)
        tier.last_error = str(error)
        for verb, used in ((Verb.READ, tier.config.read), (Verb.WRITE, tier.config.write != "off")):
            tier.direction(verb).breaker.trip(clock())
            if used:
                events.append(breaker_event(tier, verb, up=False, why=tier.last_error))
    return events


def _explained(tier: TierState, error: Exception) -> KVStoreError:
    if isinstance(error, KVStoreError):
        return error
    return BackendError(
        f"tier {tier.name!r} ({tier.config.url}) cannot be opened: {type(error).__name__}: {error}; "
        f"mend it, or go on without it with required=false",
        tier=tier.name,
    )
