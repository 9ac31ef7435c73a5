"""``kvstore bench``: how fast the tiers are, and how much of that the store passes on."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..backends.compiled import why_not
from ..config import StoreConfig
from ..errors import ConfigError
from ..units import format_size
from ._measure import OPERATIONS, Timing, measure
from ._options import (
    ChunkSize,
    ConfigFile,
    Engine,
    Json,
    StorageOptions,
    Tiers,
    are_tiers_named,
    configure,
    temporary_tiers,
)
from ._output import Advance, emit, progress

__all__ = ["run"]

_CHUNK = "2MiB"
_HOST = 256 << 20
_CHUNKS = 32


def run(
    tier: Tiers = None,
    storage_option: StorageOptions = None,
    config: ConfigFile = None,
    chunk_size: ChunkSize = None,
    chunks: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", help="Chunks in a put; 32 by default."),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Repetitions; medians are shown.")] = 7,
    engine: Engine = None,
    json: Json = False,
) -> None:
    """Measure puts and gets of each tier against a plain loop of the same work, in the same run.

    Chunks have 2 MiB unless --chunk-size or the configuration says otherwise. What is written is removed at
    the end. Without tiers, a temporary directory is measured.
    """
    with ExitStack() as stack:
        tiers = tier
        if not are_tiers_named(tier, config):
            tiers = stack.enter_context(temporary_tiers(_HOST))
        settings = configure(
            tiers,
            storage_option,
            config,
            namespace={},
            chunk_size=chunk_size,
            usual_chunk_size=_CHUNK,
            engine=engine,
        )
        count = _chunks(settings, chunks)
        advance = stack.enter_context(progress("bench", (repeat + 1) * len(settings.tiers)))
        results: list[dict[str, Any]] = []
        for index, measured in enumerate(settings.tiers):
            report_round = partial(_advance, advance, f"tier {measured.name}", index * (repeat + 1))
            timings, loop = measure(settings, index, count, repeat, report_round)
            results += _results(measured.name, timings, loop, settings.chunk_size)
    report = {
        "chunk_size": settings.chunk_size,
        "chunks": count,
        "repeat": repeat,
        "engine": settings.engine,
        "not_compiled": why_not() if any(tier.scheme == "file" for tier in settings.tiers) else "",
        "results": results,
    }
    emit(report, as_json=json, show=lambda console: _show(console, report))


def _chunks(config: StoreConfig, wanted: int | None) -> int:
    """Chunks in an operation: half of the host's at most, so that none has to leave."""
    if not config.tiers:
        raise ConfigError("bench: there is no tier below host memory to measure")
    most = config.host.capacity // config.chunk_size // 2
    count = wanted or max(2, min(_CHUNKS, most))
    if count > most:
        needed = format_size(2 * count * config.chunk_size)
        raise ConfigError(f"bench: {count} chunks need a host tier of {needed}")
    return count


def _advance(advance: Advance, note: str, before: int, done: int) -> None:
    advance(before + done, note)


def _results(tier: str, timings: dict[str, Timing], loop: str, chunk_size: int) -> list[dict[str, Any]]:
    """Rows of the report: rates in bytes per second, None for what cannot be measured there."""
    rows = []
    for name in OPERATIONS:
        timing = timings.get(name)
        moved = timing.chunks * chunk_size if timing else 0
        rows.append(
            {
                "tier": tier,
                "operation": name,
                "store_bytes_per_second": moved / timing.store if timing else None,
                "plain_bytes_per_second": moved / timing.plain if timing else None,
                "ratio": timing.plain / timing.store if timing else None,
                "plain": loop,
            }
        )
    return rows


def _show(console: Console, report: dict[str, Any]) -> None:
    console.print(
        f"[bold]kvstore bench[/]: {report['chunks']} chunks of {format_size(report['chunk_size'])}, engine "
        f"{report['engine']}, medians of {report['repeat']} repetitions, store and loop in turns"
    )
    table = Table(box=SIMPLE_HEAD)
    table.add_column("tier")
    table.add_column("")
    for name in ("store, GB/s", "plain loop, GB/s", "ratio"):
        table.add_column(name, justify="right")
    for row in report["results"]:
        table.add_row(escape(row["tier"]), row["operation"], *_figures(row))
    console.print(table)
    for name, meaning in OPERATIONS.items():
        console.print(f"  {name:15} {meaning}", style="dim")
    for loop in dict.fromkeys(row["plain"] for row in report["results"]):
        console.print(f"  {'plain loop':15} {loop}", style="dim")
    if report["not_compiled"]:
        console.print(f"  not compiled    directories are slower: {report['not_compiled']}", style="dim")
    if any(row["ratio"] is None for row in report["results"]):
        console.print(
            "  n/a             only of local files can it be shown that the page cache has none", style="dim"
        )


def _figures(row: dict[str, Any]) -> list[str]:
    if row["ratio"] is None:
        return ["n/a", "n/a", "n/a"]
    rates = (row["store_bytes_per_second"], row["plain_bytes_per_second"])
    return [*(f"{rate / 1e9:.2f}" for rate in rates), f"{row['ratio']:.2f}"]
