"""``kvstore simulate``: what a policy would hit, without bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..errors import ConfigError
from ..policy import POLICIES, make_policy
from ..simulate import Curve, plot, simulate
from ..traces import read_references
from ._options import Json, Limit, Trace, TraceFormat
from ._output import emit, percent, progress

__all__ = ["run"]


def run(
    trace: Trace,
    policy: Annotated[
        str, typer.Option(metavar="NAME,...", help=f"Policies: {', '.join(POLICIES)}.")
    ] = "lru,arc",
    capacity: Annotated[
        str, typer.Option(metavar="N,...", help="Capacities of the cache, in chunks.")
    ] = "1000,5000",
    format: TraceFormat = "auto",
    limit: Limit = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the curves (.png, .svg, .pdf).")
    ] = None,
    json: Json = False,
) -> None:
    """Count what eviction policies would hit on a trace; no bytes move.

    Each chunk of each request is one reference; every miss is filled.
    """
    policies, capacities = _names(policy, "--policy"), _numbers(capacity)
    for name in policies:
        for chunks in capacities:
            make_policy(name, chunks)  # refuses before the trace is read
    curves: list[Curve] = []
    with progress("simulate", len(policies) * len(capacities)) as advance:
        references = list(read_references(trace, format, limit))
        for name in policies:
            for chunks in capacities:
                advance(len(curves), f"{name}, {chunks:,} chunks")
                curves.append(simulate(references, name, chunks))
    if plot_file is not None:
        plot(curves, plot_file)

    def show(console: Console) -> None:
        console.print(_table(trace.name, curves, policies, capacities))
        console.print(f"  {len(references):,} references to {len(set(references)):,} different chunks")
        if plot_file is not None:
            console.print(f"  drawn to {escape(str(plot_file))}")

    emit({"curves": [curve._asdict() for curve in curves]}, as_json=json, show=show)


def _table(title: str, curves: list[Curve], policies: list[str], capacities: list[int]) -> Table:
    table = Table(box=SIMPLE_HEAD, title=f"hit ratio of {escape(title)}", title_justify="left")
    table.add_column("chunks", justify="right")
    for name in policies:
        table.add_column(name, justify="right")
    for row, chunks in enumerate(capacities):
        ratios = [curves[column * len(capacities) + row].hit_ratio for column in range(len(policies))]
        best = max(ratios)
        table.add_row(f"{chunks:,}", *(f"[bold]{percent(r)}[/]" if r == best else percent(r) for r in ratios))
    return table


def _names(text: str, option: str) -> list[str]:
    """Items of a list with commas, each once."""
    names = list(dict.fromkeys(filter(None, (part.strip() for part in text.split(",")))))
    if not names:
        raise ConfigError(f"{option}: an empty list")
    return names


def _numbers(text: str) -> list[int]:
    names = _names(text, "--capacity")
    wrong = [name for name in names if not name.isascii() or not name.isdecimal()]
    if wrong:
        raise ConfigError(f"--capacity: not a number of chunks: {wrong[0]!r} (example: --capacity 1000,5000)")
    return list(map(int, names))
