"""Metrics of open stores for Prometheus, read from :meth:`Store.stats` at each scrape.

Names and meanings of counters and histograms are those of :mod:`kvstore.metrics`. Nothing is counted twice
and nothing runs between scrapes. A store that has been closed, or that nobody refers to any more, is left
out of the next scrape.

=======================================  =========  ==================================================
name                                     type       labels besides ``namespace``
=======================================  =========  ==================================================
``kvstore_host_<gauge>``                 gauge
``kvstore_tier_<gauge>``                 gauge      ``tier``, ``scheme``
``kvstore_breaker_state`` (1: it is so)  gauge      ``tier``, ``scheme``, ``direction``, ``state``
``kvstore_<counter>_total``              counter    ``tier``, ``scheme``
``kvstore_<histogram>_seconds``          histogram  ``tier``, ``scheme``
``kvstore_backend_<name>_total``         counter    ``tier``, ``scheme``: what a backend itself counts
``kvstore_events_dropped_total``         counter
=======================================  =========  ==================================================
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Self
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ..errors import ClosedError
from ..health import BreakerState
from ..metrics import BUCKETS, COUNTERS, HISTOGRAMS, Latency, Stats, TierStats
from ..store import Store

__all__ = ["MetricsServer", "register", "serve"]

#: Gauges of the host: name -> meaning, value.
_HOST_GAUGES: dict[str, tuple[str, Callable[[Stats], float]]] = {
    "fill_ratio": ("share of the host slots in use", lambda stats: stats.fill),
    "slots": ("slots of the host arena", lambda stats: stats.slots),
    "leased": ("host slots that somebody holds", lambda stats: stats.leased),
    "promoting": ("host slots being filled from tiers", lambda stats: stats.promoting),
    "quarantined": ("host slots set aside for late writers", lambda stats: stats.quarantined),
}

#: Gauges of any tier: name -> meaning, value; no value is reported where it is None.
_TIER_GAUGES: dict[str, tuple[str, Callable[[TierStats], float | None]]] = {
    "chunks": ("chunks that the tier is known to hold", lambda tier: tier.chunks),
    "bytes": ("bytes that the tier is known to hold", lambda tier: tier.bytes),
    "capacity_bytes": ("bytes that the tier may hold", lambda tier: tier.capacity),
    "queued": ("reads and writes that wait or run", lambda tier: tier.queued),
}

_TIER = ("namespace", "tier", "scheme")
_BREAKER = (*_TIER, "direction", "state")
_NAMESPACE = ("namespace",)
_BOUNDS = (*map(floatToGoString, BUCKETS), "+Inf")


def register(store: Store, registry: CollectorRegistry = REGISTRY) -> Callable[[], None]:
    """Export `store` through `registry`, beside the other stores that are exported there.

    Parameters
    ----------
    store : Store
        It is not kept alive by this, and need not be open any more when it is scraped.
    registry : CollectorRegistry
        The process's own by default.

    Returns
    -------
    callable
        Ends the export; a second call does nothing.

    Raises
    ------
    ClosedError
        The store is closed.
    ValueError
        An open store with the same namespace and a tier of the same name is exported already, or somebody
        else uses one of the names.
    """
    with _lock:
        collector = _collectors.get(registry)
        if collector is None:
            collector = _StoreCollector()
            registry.register(collector)
            _collectors[registry] = collector
    return collector.add(store)


def serve(store: Store, port: int, addr: str = "127.0.0.1") -> MetricsServer:
    """Serve the metrics of `store`, and nothing else, over HTTP from a thread of their own.

    Parameters
    ----------
    store : Store
    port : int
        0 takes a free one.
    addr : str
        Address to listen on; only this machine by default.

    Raises
    ------
    OSError
        The address is in use, or not one of this machine.
    """
    return MetricsServer(store, port, addr)


class MetricsServer:
    """HTTP server of one store's metrics; made by :func:`serve`, a context manager.

    Attributes
    ----------
    url : str
        What to scrape.
    """

    def __init__(self, store: Store, port: int, addr: str) -> None:
        registry = CollectorRegistry()
        register(store, registry)
        self._server, self._thread = start_http_server(port, addr, registry)
        host = f"[{addr}]" if ":" in addr else addr
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop serving; repeated calls do nothing."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _StoreCollector(Collector):
    """Collects all stores of one registry: the text format wants the samples of a name in one place."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stores: dict[object, weakref.ref[Store]] = {}

    def add(self, store: Store) -> Callable[[], None]:
        """Collect `store` too; the callable returned ends that."""
        with self._lock:
            mine = _series(store.stats())
            for stats in self._take():
                if taken := mine & _series(stats):
                    namespace, tier = min(taken)
                    raise ValueError(
                        f"tier {tier!r} of namespace {namespace} is exported already; name= tells tiers apart"
                    )
            token = object()
            self._stores[token] = weakref.ref(store)
        return lambda: self._remove(token)

    def describe(self) -> Iterable[Metric]:
        """Names that will be collected, so that the registry can refuse others' use of them."""
        return _families().values()

    def collect(self) -> Iterator[Metric]:
        """Families with the samples of every open store."""
        families = _families()
        with self._lock:
            for stats in self._take():
                _fill(families, stats)
        return iter(families.values())

    def _take(self) -> list[Stats]:
        """Facts of each store; those that are closed or gone are forgotten."""
        found = []
        for token, reference in list(self._stores.items()):
            store = reference()
            try:
                if store is not None:
                    found.append(store.stats())
                    continue
            except ClosedError:
                pass
            del self._stores[token]
        return found

    def _remove(self, token: object) -> None:
        with self._lock:
            self._stores.pop(token, None)


_lock = threading.Lock()
_collectors: WeakKeyDictionary[CollectorRegistry, _StoreCollector] = WeakKeyDictionary()


def _series(stats: Stats) -> set[tuple[str, str]]:
    return {(stats.namespace, tier.name) for tier in stats}


def _families() -> dict[str, Metric]:
    """Every family that is known beforehand, by name, without samples."""
    families: list[Metric] = [
        *(GaugeMetricFamily(f"kvstore_host_{n}", m, labels=_NAMESPACE) for n, (m, _) in _HOST_GAUGES.items()),
        *(GaugeMetricFamily(f"kvstore_tier_{n}", m, labels=_TIER) for n, (m, _) in _TIER_GAUGES.items()),
        GaugeMetricFamily("kvstore_breaker_state", "1 for the state that it is in", labels=_BREAKER),
        *(CounterMetricFamily(f"kvstore_{n}", meaning, labels=_TIER) for n, meaning in COUNTERS.items()),
        *(
            HistogramMetricFamily(f"kvstore_{n}_seconds", meaning, labels=_TIER)
            for n, meaning in HISTOGRAMS.items()
        ),
        CounterMetricFamily("kvstore_events_dropped", "events dropped unread", labels=_NAMESPACE),
    ]
    return {family.name: family for family in families}


def _fill(families: dict[str, Metric], stats: Stats) -> None:
    """Add the samples of one store."""
    namespace = [stats.namespace]
    for name, (_, value_of) in _HOST_GAUGES.items():
        _add(families, f"kvstore_host_{name}", namespace, value_of(stats))
    _add(families, "kvstore_events_dropped", namespace, stats.events_dropped)
    for tier in stats:
        _fill_tier(families, [*namespace, tier.name, tier.scheme], tier)
    for tier in stats.tiers[1:]:
        for direction in ("read", "write"):
            found = getattr(tier.breaker, direction)
            for state in BreakerState:
                labels = [*namespace, tier.name, tier.scheme, direction, state]
                _add(families, "kvstore_breaker_state", labels, float(state == found))


def _fill_tier(families: dict[str, Metric], labels: list[str], tier: TierStats) -> None:
    for name, (_, value_of) in _TIER_GAUGES.items():
        if (value := value_of(tier)) is not None:
            _add(families, f"kvstore_tier_{name}", labels, value)
    for name, count in tier.counters.items():
        _add(families, f"kvstore_{name}", labels, count)
    for name, latency in tier.latency.items():
        family = families[f"kvstore_{name}_seconds"]
        assert isinstance(family, HistogramMetricFamily)
        family.add_metric(labels, _cumulative(latency), latency.total)
    for name, value in tier.custom.items():
        full = f"kvstore_backend_{re.sub('[^a-zA-Z0-9_]', '_', name)}".removesuffix("_total")
        families.setdefault(full, CounterMetricFamily(full, "counted by the backend itself", labels=_TIER))
        _add(families, full, labels, value)


def _add(families: dict[str, Metric], name: str, labels: Sequence[str], value: float) -> None:
    family = families[name]
    assert isinstance(family, GaugeMetricFamily | CounterMetricFamily)
    family.add_metric(labels, value)


def _cumulative(latency: Latency) -> list[tuple[str, float]]:
    """Upper bounds, with the number of durations that each of them covers."""
    total = 0.0
    pairs = []
    for bound, count in zip(_BOUNDS, latency.buckets, strict=True):
        total += count
        pairs.append((bound, total))
    return pairs
