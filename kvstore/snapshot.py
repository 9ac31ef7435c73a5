"""What a store tells of itself: the snapshot that :meth:`Store.stats` returns, and its ``repr``."""

from __future__ import annotations

from .config import StoreConfig
from .metrics import BreakerStats, Latency, Stats, TierStats
from .namespace import Namespace
from .planner import Planner, TierState
from .units import format_size

__all__ = ["summary", "take_stats", "tier_stats"]

#: Characters of an error that are worth showing.
_LINE = 200


def summary(config: StoreConfig, namespace: Namespace, *, closed: bool) -> str:
    """One line on a store, which holds no secret."""
    tiers = [f"{config.host.name} ({format_size(config.host.capacity)})"]
    tiers += [f"{tier.name} ({tier.url})" for tier in config.tiers]
    facts = f"chunks of {format_size(config.chunk_size)}, namespace {namespace.directory}"
    return f"<{'closed ' * closed}Store: {', '.join(tiers)}; {facts}>"


def take_stats(
    config: StoreConfig,
    namespace: Namespace,
    pinned: bool,
    planner: Planner,
    events_dropped: int,
    now: float,
) -> Stats:
    """Facts of a store at time `now`; the caller holds its lock."""
    catalog = planner.catalog
    host = TierStats(
        name=config.host.name,
        scheme=config.host.scheme,
        chunks=len(catalog.ready),
        bytes=catalog.bytes,
        capacity=config.host.capacity,
        counters=planner.host_snapshot(),
        latency={name: Latency.of(h) for name, h in planner.host_counters.histograms.items()},
        custom=dict(planner.host_counters.custom),
    )
    return Stats(
        tiers=(host, *(tier_stats(tier, now) for tier in planner.tiers)),
        slots=catalog.slots,
        fill=1.0 - catalog.free / catalog.slots,
        leased=len(catalog.ready) - catalog.idle,
        promoting=planner.promoting,
        quarantined=catalog.quarantined,
        pinned=pinned,
        namespace=namespace.directory,
        events_dropped=events_dropped,
    )


def tier_stats(tier: TierState, now: float) -> TierStats:
    """Facts of one secondary tier at time `now`."""
    waiting = len(tier.owed) if tier.config.write == "through" else 0
    return TierStats(
        name=tier.name,
        scheme=tier.config.scheme,
        chunks=tier.chunks,
        bytes=tier.bytes,
        capacity=tier.config.capacity,
        counters=tier.counters.snapshot(),
        latency={name: Latency.of(h) for name, h in tier.counters.histograms.items()},
        queued=len(tier.reads) + len(tier.writing) + waiting,
        breaker=BreakerStats(tier.reads.breaker.state(now).value, tier.writes.breaker.state(now).value),
        custom=dict(tier.counters.custom),
        last_error=" ".join(tier.last_error.split())[:_LINE],
    )
