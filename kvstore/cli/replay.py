"""``kvstore replay``: a trace, with real bytes, through real tiers."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from ..opening import open_store
from ..traces import read_requests
from ..units import format_size
from ..workload import replay
from ._options import (
    ChunkSize,
    ConfigFile,
    Engine,
    Json,
    Limit,
    StorageOptions,
    Tiers,
    Trace,
    TraceFormat,
    are_tiers_named,
    configure,
    temporary_tiers,
)
from ._output import emit, is_watched, percent, progress
from ._report import run_report, show_run

__all__ = ["run"]

_CHUNK = "256KiB"
_HOST, _DISK = 256 << 20, 4 << 30  # of the temporary stack


def run(
    trace: Trace,
    tier: Tiers = None,
    storage_option: StorageOptions = None,
    config: ConfigFile = None,
    chunk_size: ChunkSize = None,
    engine: Engine = None,
    limit: Limit = None,
    speed: Annotated[
        Literal["max", "real"], typer.Option(help="As fast as it goes, or by the timestamps of the trace.")
    ] = "max",
    format: TraceFormat = "auto",
    json: Json = False,
) -> int:
    """Serve the requests of a trace from a store, and check every byte that it serves.

    Chunks have 256 KiB unless --chunk-size or the configuration says otherwise. Payloads follow from the
    keys. The chunks stay in the tiers, in a namespace of their own. Without tiers, a temporary store is used.
    """
    with ExitStack() as stack:
        tiers = tier
        if not are_tiers_named(tier, config):
            tiers = stack.enter_context(temporary_tiers(_HOST, _DISK))
        settings = configure(
            tiers,
            storage_option,
            config,
            namespace={"workload": "replay"},
            chunk_size=chunk_size,
            usual_chunk_size=_CHUNK,
            engine=engine,
        )
        # Counted only for the bar: the trace is read as it is served.
        total = (
            sum(1 for _ in read_requests(trace, format, limit)) if is_watched() and trace.is_file() else limit
        )
        advance = stack.enter_context(progress("replay", total))
        store = stack.enter_context(open_store(config=settings))
        outcome = replay(
            store,
            read_requests(trace, format, limit),
            real_time=speed == "real",
            on_request=lambda so_far: advance(so_far.requests, f"hits {percent(so_far.hit_ratio)}"),
        )
        store.flush()
        stats = store.stats()

    def show(console: Console) -> None:
        where = " and ".join(part.url for part in settings.tiers) or "nothing else"
        if tiers is not tier:
            where = "a temporary directory (no --tier was given)"
        host, chunk = format_size(settings.host.capacity), format_size(settings.chunk_size)
        console.print(
            f"[bold]kvstore replay {escape(trace.name)}[/]: {host} of host memory over {escape(where)}, "
            f"chunks of {chunk}"
        )
        show_run(console, outcome, stats, settings.chunk_size)

    emit(run_report(outcome, stats), as_json=json, show=show)
    return int(outcome.mismatches > 0)
