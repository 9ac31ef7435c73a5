"""The report of a run of a workload, as JSON and as a table with a column for each tier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..metrics import Stats, TierStats
from ..workload import Outcome
from ._output import percent, size

__all__ = ["run_report", "show_run"]

_LEGEND = (
    "  Host memory: a look-up and a load are of one batch, and GB/s is all that\n"
    "  was served, over the whole time. Others: of one chunk, and GB/s of a worker\n"
    "  while it reads.\n"
)


def run_report(outcome: Outcome, stats: Stats) -> dict[str, Any]:
    """What ``--json`` prints of a run."""
    return {
        "requests": outcome.requests,
        "chunks": outcome.chunks,
        "unique_chunks": outcome.unique_chunks,
        "verified_chunks": outcome.verified_chunks,
        "mismatches": outcome.mismatches,
        "hit_ratio": outcome.hit_ratio,
        "tiers": [_tier_report(tier) for tier in stats],
    }


def show_run(console: Console, outcome: Outcome, stats: Stats, chunk_size: int) -> None:
    """Print a run for people."""
    console.print(_tier_table(outcome, stats, chunk_size))
    for tier in stats:
        if tier.last_error:
            console.print(f"  [yellow]{escape(tier.name)}, last error:[/] {escape(tier.last_error)}")
    console.print(_LEGEND, style="dim")
    console.print(
        f"  {outcome.requests:,} requests in {outcome.seconds:.1f} s, "
        f"{outcome.chunks:,} chunks, {outcome.unique_chunks:,} of them different"
    )
    served = size(outcome.hits * chunk_size)
    console.print(f"  [bold]{percent(outcome.hit_ratio)}[/] of the chunks were served: {served}")
    if outcome.mismatches:
        console.print(f"  [bold red]{outcome.mismatches:,} chunks had wrong bytes[/]")
    else:
        console.print(f"  [green]{outcome.verified_chunks:,} chunks verified, no wrong byte[/]")


def _tier_table(outcome: Outcome, stats: Stats, chunk_size: int) -> Table:
    """Counters and latencies, a column for each tier."""
    table = Table(box=SIMPLE_HEAD, pad_edge=True)
    table.add_column("")
    for tier in stats:
        table.add_column(escape(tier.name), justify="right", style="bold" if tier is stats.host else "")
    rows: list[tuple[str, Callable[[TierStats], str]]] = [
        ("hits", lambda tier: f"{tier.hits:,}"),
        ("misses", lambda tier: f"{tier.misses:,}"),
        ("evictions", lambda tier: f"{tier.evictions:,}"),
        ("holds, chunks", lambda tier: f"{tier.chunks:,}"),
        ("holds, bytes", lambda tier: size(tier.bytes)),
        ("read", lambda tier: size(_read_bytes(tier, outcome, stats, chunk_size))),
        ("written", lambda tier: size(tier.written_bytes)),
        ("look-up p50 / p99, ms", lambda tier: _spread(tier, "lookup")),
        ("load p50 / p99, ms", lambda tier: _spread(tier, "load")),
        ("GB/s read", lambda tier: _rate(tier, outcome, stats, chunk_size)),
        ("errors", lambda tier: f"{tier.errors:,}"),
        ("writes dropped", lambda tier: f"{tier.dropped:,}"),
    ]
    for label, cell in rows:
        table.add_row(label, *map(cell, stats))
    return table


def _tier_report(tier: TierStats) -> dict[str, Any]:
    return {
        "name": tier.name,
        "scheme": tier.scheme,
        "chunks": tier.chunks,
        "bytes": tier.bytes,
        "hits": tier.hits,
        "misses": tier.misses,
        "evictions": tier.evictions,
        "read_bytes": tier.read_bytes,
        "written_bytes": tier.written_bytes,
        "lookup_ms": _milliseconds(tier, "lookup"),
        "load_ms": _milliseconds(tier, "load"),
        "errors": tier.errors,
        "dropped": tier.dropped,
        "last_error": tier.last_error,
    }


def _milliseconds(tier: TierStats, name: str) -> dict[str, float]:
    latency = tier.latency[name]
    return {"p50": round(latency.p50 * 1000, 6), "p99": round(latency.p99 * 1000, 6)}


def _spread(tier: TierStats, name: str) -> str:
    found = _milliseconds(tier, name)
    return f"{found['p50']:.3f} / {found['p99']:.3f}" if tier.latency[name].count else "-"


def _read_bytes(tier: TierStats, outcome: Outcome, stats: Stats, chunk_size: int) -> int:
    """Bytes that came from the tier; everything that is served comes from host memory."""
    return outcome.hits * chunk_size if tier is stats.host else tier.read_bytes


def _rate(tier: TierStats, outcome: Outcome, stats: Stats, chunk_size: int) -> str:
    seconds = outcome.seconds if tier is stats.host else tier.latency["load"].total
    return f"{_read_bytes(tier, outcome, stats, chunk_size) / seconds / 1e9:.2f}" if seconds else "-"
