"""What the store counts: counters and latency histograms per tier, and the snapshot that users see.

Definitions are data (:data:`COUNTERS`, :data:`HISTOGRAMS`); exporters read them, so that a metric is named
in one place only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

import msgspec

from .errors import ConfigError
from .remedies import nearest

__all__ = [
    "BUCKETS",
    "COUNTERS",
    "HISTOGRAMS",
    "BreakerStats",
    "Histogram",
    "Latency",
    "Stats",
    "TierCounters",
    "TierStats",
]

#: Upper bounds of the latency buckets in seconds: 1 microsecond to 100 s, eight to a decade.
BUCKETS: tuple[float, ...] = tuple(1e-6 * 10 ** (i / 8) for i in range(65))

#: Histograms of a tier: name -> meaning; seconds.
HISTOGRAMS: dict[str, str] = {
    "lookup": "time to answer whether chunks are there: a batch of look-ups in the host, one probe elsewhere",
    "load": "time to bring one chunk: a read lease on the host for one batch, one promotion elsewhere",
    "store": "time to write one chunk to a secondary tier",
}


class Histogram:
    """Counts of durations in fixed buckets; one list operation per observation."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds

    def observe_many(self, seconds: Sequence[float]) -> None:
        """Count durations."""
        counts = self.counts
        for duration in seconds:
            counts[bisect_left(BUCKETS, duration)] += 1
        self.total += sum(seconds)

    def quantile(self, q: float) -> float:
        """Smallest bucket bound in seconds that at least the fraction `q` of the durations do not pass; 0.0
        when empty."""
        need = q * sum(self.counts)
        if not need:
            return 0.0
        seen = 0
        for bound, count in zip(BUCKETS, self.counts, strict=False):
            seen += count
            if seen >= need:
                return bound
        return BUCKETS[-1]


def _counter(meaning: str) -> int:
    return field(default=0, metadata={"meaning": meaning})


@dataclass
class TierCounters:
    """Counters and histograms of one tier; a counter that does not apply to a tier stays 0.

    `custom` holds what the tier's backend registers of its own.
    """

    hits: int = _counter("chunks asked of the tier that it had")
    misses: int = _counter("chunks asked of the tier that it had not")
    reads: int = _counter("chunks read from the tier")
    writes: int = _counter("chunks written to the tier")
    read_bytes: int = _counter("bytes of payload read")
    written_bytes: int = _counter("bytes of payload written")
    evictions: int = _counter("chunks evicted to make room")
    errors: int = _counter("operations that failed in storage")
    timeouts: int = _counter("batches of operations past their deadline")
    corrupt: int = _counter("objects refused because header or checksum did not match")
    dropped: int = _counter(
        "writes dropped: tier down, no room in it, evicted before their turn, or had by a worker that died"
    )
    deletes: int = _counter("chunks deleted on request")
    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {name: Histogram() for name in HISTOGRAMS}
    )
    custom: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, n: int = 1) -> None:
        """Add `n` to the counter `name`."""
        setattr(self, name, getattr(self, name) + n)

    def snapshot(self) -> dict[str, int]:
        """All counters by name."""
        return {name: getattr(self, name) for name in COUNTERS}


#: Counters of a tier: name -> meaning.
COUNTERS: dict[str, str] = {
    f.name: f.metadata["meaning"] for f in fields(TierCounters) if "meaning" in f.metadata
}


class Latency(msgspec.Struct, frozen=True):
    """Summary of a histogram.

    `count` observations of `total` seconds; `p50` and `p99` are upper bucket bounds in seconds; `buckets`
    are the counts for :data:`BUCKETS`, and what lies beyond.
    """

    count: int
    p50: float
    p99: float
    total: float
    buckets: tuple[int, ...] = ()

    @classmethod
    def of(cls, histogram: Histogram) -> Latency:
        """Summarize `histogram`."""
        counts = tuple(histogram.counts)
        return cls(sum(counts), histogram.quantile(0.5), histogram.quantile(0.99), histogram.total, counts)


class BreakerStats(msgspec.Struct, frozen=True):
    """State of a tier's breakers: ``closed``, ``open`` or ``half-open`` for each direction."""

    read: str = "closed"
    write: str = "closed"


class TierStats(msgspec.Struct, frozen=True):
    """Snapshot of one tier.

    `chunks` and `bytes` count what the tier holds: exact for the host; for a secondary tier what this
    instance has written and not deleted, or what its ledger says when the tier has a ``capacity``. `queued`
    reads and writes wait or run. `last_error` says in a line what went wrong with the storage most recently.
    """

    name: str
    scheme: str
    chunks: int
    bytes: int
    capacity: int | None
    counters: Mapping[str, int]
    latency: Mapping[str, Latency]
    queued: int = 0
    breaker: BreakerStats = BreakerStats()
    custom: Mapping[str, float] = {}
    last_error: str = ""

    def __getattr__(self, name: str) -> int:
        """Counters read as attributes: ``stats.host.hits``."""
        if name in COUNTERS:
            return self.counters[name]
        raise AttributeError(name)


class Stats(msgspec.Struct, frozen=True):
    """Snapshot of the store: the host tier first, then the secondary tiers in order.

    `fill` is the share of host slots in use, `quarantined` the number set aside for late writers, `leased`
    the number that somebody holds, `promoting` the number being filled from tiers.
    """

    tiers: tuple[TierStats, ...]
    slots: int
    fill: float
    leased: int
    promoting: int
    quarantined: int
    pinned: bool
    namespace: str
    events_dropped: int

    @property
    def host(self) -> TierStats:
        """The host tier."""
        return self.tiers[0]

    def tier(self, name: str) -> TierStats:
        """The tier called `name`.

        Raises
        ------
        ConfigError
            There is none.
        """
        tiers = {tier.name: tier for tier in self.tiers}
        if name not in tiers:
            raise ConfigError(f"no tier {name!r}; {nearest(name, tiers)}")
        return tiers[name]

    def __iter__(self) -> Iterator[TierStats]:
        return iter(self.tiers)

    def to_dict(self) -> dict[str, object]:
        """Everything as plain data, for ``--json``."""
        plain = msgspec.to_builtins(self)
        assert isinstance(plain, dict)
        return plain
