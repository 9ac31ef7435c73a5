"""What the store counts, as metrics of vLLM: names for its ``/metrics``, values for its statistics.

vLLM makes the metrics in one process, from :func:`metric_definitions` and the configuration alone, and fills
them in another with what :class:`Telemetry` returns; a name that was not defined is an error there. So every
name comes from a table in this file or in :mod:`kvstore.metrics`, and what varies (tier, direction) is a
label. Device copies (bytes and time) are counted by vLLM itself.

Who owns what: everything here is called by the scheduler's thread.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import repeat

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvstore.config import StoreConfig
from kvstore.events import Event
from kvstore.metrics import BUCKETS, COUNTERS, HISTOGRAMS, Latency, Stats, TierStats

__all__ = [
    "BREAKER_STATES",
    "HOST_GAUGES",
    "MANAGER_COUNTERS",
    "SAMPLES",
    "TIER_GAUGES",
    "Pace",
    "Telemetry",
    "TierTelemetry",
    "metric_definitions",
    "source_of",
    "tier_definitions",
]

_PREFIX = "vllm:kvstore_"
_TIER = ("tier",)
_BREAKER = f"{_PREFIX}tier_breaker"

#: Gauges of the host: name -> meaning, value.
HOST_GAUGES: dict[str, tuple[str, Callable[[Stats], float]]] = {
    "host_slots": ("slots of the host arena", lambda stats: stats.slots),
    "host_slots_used": ("host slots that are not free", lambda stats: round(stats.fill * stats.slots)),
    "host_slots_leased": ("host slots that transfers hold", lambda stats: stats.leased),
    "host_slots_promoting": ("host slots being filled from tiers", lambda stats: stats.promoting),
    "host_slots_quarantined": ("host slots set aside for late writers", lambda stats: stats.quarantined),
    "events_dropped": ("events of the store that nobody fetched in time", lambda stats: stats.events_dropped),
}

#: Gauges of any tier: name -> meaning, value.
TIER_GAUGES: dict[str, tuple[str, Callable[[TierStats], float]]] = {
    "chunks": ("chunks that the tier is known to hold", lambda tier: tier.chunks),
    "bytes": ("bytes that the tier is known to hold", lambda tier: tier.bytes),
    "queued": ("reads and writes that wait or run", lambda tier: tier.queued),
}

#: Value of a breaker's gauge: state -> number.
BREAKER_STATES: dict[str, int] = {"closed": 0, "half-open": 1, "open": 2}

#: Counters of the manager itself: name -> meaning.
MANAGER_COUNTERS: dict[str, str] = {
    "requests_deferred": "requests that waited for chunks to be promoted",
    "deadlines_passed": "requests that went on at their deadline with what the host had",
    "loads_declined": "chunks left to be recomputed, since that was estimated to be faster",
    "stores_refused": "chunks not taken: seen too seldom, or of too low a priority",
    "stores_failed": "chunks given up because a worker could not copy them",
    "resets": "times that the cache was reset",
}

#: Samples of one histogram that are reported at a time; what goes beyond comes with the next report.
SAMPLES = 1000
#: Seconds between two looks at the store's statistics.
_EVERY = 0.25
#: Promoted chunks whose tier of origin is remembered.
_ORIGINS = 1 << 16
#: Every fourth bound of the store's buckets, from 10 microseconds: two to a decade.
_BOUNDS = tuple(float(f"{bound:.3g}") for bound in BUCKETS[8::4])


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Every metric that :class:`Telemetry` reports: name -> definition."""
    found: dict[str, OffloadingMetricMetadata] = {}
    for name, (meaning, _) in HOST_GAUGES.items():
        found[_PREFIX + name] = OffloadingGaugeMetadata(documentation=meaning)
    for name, meaning in MANAGER_COUNTERS.items():
        found[_PREFIX + name] = OffloadingCounterMetadata(documentation=meaning)
    return found | tier_definitions()


def tier_definitions() -> dict[str, OffloadingMetricMetadata]:
    """The metrics that are reported for each tier: name -> definition."""
    found: dict[str, OffloadingMetricMetadata] = {}
    for name, (meaning, _) in TIER_GAUGES.items():
        found[_tier(name)] = OffloadingGaugeMetadata(meaning, _TIER)
    for name, meaning in COUNTERS.items():
        found[_tier(name)] = OffloadingCounterMetadata(meaning, _TIER)
    for name, meaning in HISTOGRAMS.items():
        found[_seconds(name)] = OffloadingHistogramMetadata(meaning, _TIER, buckets=_BOUNDS)
    states = ", ".join(f"{number} {state}" for state, number in BREAKER_STATES.items())
    meaning = f"state of the tier's circuit breaker for reads and for writes: {states}"
    found[_BREAKER] = OffloadingGaugeMetadata(meaning, (*_TIER, "direction"))
    return found


def source_of(scheme: str) -> CacheHitSource:
    """What vLLM calls a hit in a secondary tier whose URL has this scheme."""
    return CacheHitSource.P2P if scheme == "peer" else CacheHitSource.DISK


class Pace:
    """Says when statistics are due: at most four times a second, however often vLLM asks.

    Parameters
    ----------
    clock : callable
        Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due = clock()

    def is_due(self) -> bool:
        """Whether it is time; then it is not for a while."""
        now = self._clock()
        if now < self._due:
            return False
        self._due = now + _EVERY
        return True


class TierTelemetry:
    """Turns snapshots of tiers into what has happened since the snapshots before."""

    def __init__(self) -> None:
        self._counters: dict[str, Mapping[str, int]] = {}
        self._reported: dict[tuple[str, str], list[int]] = {}  # tier, histogram -> observations reported

    def report(self, tiers: Iterable[TierStats], out: OffloadingConnectorStats) -> None:
        """Add to `out` the gauges of `tiers`, and what their counters and histograms have gained."""
        for tier in tiers:
            label = (tier.name,)
            for name, (_, value) in TIER_GAUGES.items():
                out.set_gauge(_tier(name), value(tier), label)
            for direction in ("read", "write"):
                state = BREAKER_STATES[getattr(tier.breaker, direction)]
                out.set_gauge(_BREAKER, state, (*label, direction))
            before = self._counters.get(tier.name, {})
            for name, total in tier.counters.items():
                if total > before.get(name, 0):
                    out.increase_counter(_tier(name), total - before.get(name, 0), label)
            self._counters[tier.name] = dict(tier.counters)
            for name, latency in tier.latency.items():
                for sample in self._samples(tier.name, name, latency):
                    out.observe_histogram(_seconds(name), sample, label)

    def _samples(self, tier: str, name: str, latency: Latency) -> Iterator[float]:
        """Durations that stand for the observations since the last report, `SAMPLES` at most.

        The store keeps counts, vLLM wants durations: each is given as the middle of its bucket.
        """
        reported = self._reported.setdefault((tier, name), [0] * len(latency.buckets))
        room = SAMPLES
        for index, total in enumerate(latency.buckets):
            new = min(total - reported[index], room)
            if new > 0:
                reported[index] += new
                room -= new
                yield from repeat(_middle(index), new)


class Telemetry:
    """Statistics of one store for vLLM.

    Parameters
    ----------
    config : StoreConfig
        Of the store; says which tier is which.
    clock : callable
        Seconds, monotonic.
    """

    def __init__(self, config: StoreConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._sources = {tier.name: source_of(tier.scheme) for tier in config.tiers}
        self._host = config.host.name
        self._pace = Pace(clock)
        self._tiers = TierTelemetry()
        self._counts: Counter[str] = Counter()
        # Key -> its source, and the request that it counts for once one has asked.
        self._origins: OrderedDict[bytes, tuple[CacheHitSource, str | None]] = OrderedDict()

    def count(self, name: str, n: int = 1) -> None:
        """Add `n` to one of :data:`MANAGER_COUNTERS`."""
        self._counts[name] += n

    def stats(self, take: Callable[[], Stats]) -> OffloadingConnectorStats | None:
        """What has happened since the last report; None when it is too early for another.

        Parameters
        ----------
        take : callable
            ``Store.stats``; called at most four times a second.
        """
        if not self._pace.is_due():
            return None
        stats, out = take(), OffloadingConnectorStats()
        for name, (_, value) in HOST_GAUGES.items():
            out.set_gauge(_PREFIX + name, value(stats))
        for name, n in self._counts.items():
            out.increase_counter(_PREFIX + name, n)
        self._counts.clear()
        self._tiers.report(stats, out)
        return out

    def note(self, events: Iterable[Event]) -> None:
        """Learn from events of the store where chunks came from.

        Every event has to pass here, and before vLLM asks for the source of a chunk.
        """
        for event in events:
            if event.kind == "promoted":
                source = self._sources.get(event.source or "", CacheHitSource.EXTERNAL_UNSPECIFIED)
                for key in event.keys:
                    self._origins[key] = (source, None)
            elif event.kind == "removed" and event.source == self._host:
                for key in event.keys:
                    self._origins.pop(key, None)
        while len(self._origins) > _ORIGINS:
            self._origins.popitem(last=False)

    def hit_source(self, key: bytes, request: str) -> CacheHitSource:
        """Where the chunk `key` came from, for the request with this id.

        A promotion counts for the first request that asks; for all others the chunk was in the host.
        """
        source, owner = self._origins.get(key, (CacheHitSource.HOST, request))
        if owner is None:
            self._origins[key] = (source, request)
        return source if owner in (None, request) else CacheHitSource.HOST


def _tier(name: str) -> str:
    return f"{_PREFIX}tier_{name}"


def _seconds(name: str) -> str:
    return f"{_PREFIX}tier_{name}_seconds"


def _middle(index: int) -> float:
    """Geometric middle of a bucket; of the last one, which is open, a little more than its lower bound."""
    step = BUCKETS[1] / BUCKETS[0]
    return float(BUCKETS[min(index, len(BUCKETS) - 1)] * (step**-0.5 if index < len(BUCKETS) else step**0.5))
