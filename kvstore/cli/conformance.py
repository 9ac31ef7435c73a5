"""``kvstore conformance``: what a storage guarantees, how fast it is, and what a store will do there."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..conformance import Finding, Latency, Report, Speed, examine
from ..errors import ConfigError
from ..units import format_size, parse_size
from ._options import ChunkSize, Json, StorageOptions, Url, one_tier
from ._output import emit, progress, size
from ._storage import naming

__all__ = ["run"]

_USUAL_CHUNK_SIZE = "1MiB"
_OPERATIONS = ("probe", "write", "read")


def run(
    url: Url,
    chunk_size: ChunkSize = _USUAL_CHUNK_SIZE,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repetitions, no race of processes.")] = False,
    storage_option: StorageOptions = None,
    json: Json = False,
) -> int:
    """Examine a storage: what it guarantees, how fast it is, and what a store will therefore do.

    Works in a namespace of its own, and removes it. Exits with 1 when something fails that stores rely on.
    """
    tier = one_tier(url, storage_option)
    with naming(tier.url), progress(f"examine {tier.url}") as advance:
        report = examine(
            tier,
            chunk_size=_read_size(chunk_size or _USUAL_CHUNK_SIZE),
            quick=quick,
            progress=lambda name: advance(0, name),
        )
    emit(_as_json(report), as_json=json, show=lambda console: _show(console, report))
    return int(not report.ok)


def _read_size(text: str) -> int:
    try:
        found = parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--chunk-size: {error}") from None
    if not found:
        raise ConfigError("--chunk-size: a chunk has at least 1 byte")
    return found


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "url": report.url,
        "ok": report.ok,
        "namespace": report.namespace,
        "chunk_size": report.chunk_size,
        "capabilities": dict(vars(report.capabilities)),
        "properties": [finding._asdict() for finding in report.findings],
        **(_figures(report.speed) if report.speed is not None else {}),
        "trouble": report.trouble,
    }


def _figures(speed: Speed) -> dict[str, Any]:
    return {
        "latency_ms": {name: _milliseconds(getattr(speed, name)) for name in _OPERATIONS},
        "operations": speed.operations,
        "clients": speed.clients,
        "write_bytes_per_second": speed.write_rate,
        "read_bytes_per_second": speed.read_rate,
    }


def _milliseconds(latency: Latency) -> dict[str, float]:
    return {name: 1000 * seconds for name, seconds in latency._asdict().items()}


def _show(console: Console, report: Report) -> None:
    console.print(f"[bold]{escape(report.url)}[/]")
    console.print(_properties(report))
    if report.speed is not None:
        console.print(_speeds(report.speed, report.chunk_size))
    else:
        console.print(f"[yellow]not timed: {escape(report.trouble)}[/]")
    if report.ok:
        console.print("[green]everything holds that a store relies on[/]")
    else:
        failed = [finding for finding in report.findings if finding.required and finding.holds is False]
        for finding in failed:
            console.print(f"[bold red]{finding.name}[/]: {escape(finding.consequence)}")


def _properties(report: Report) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("property", no_wrap=True)
    table.add_column("holds", no_wrap=True)
    table.add_column("what was seen")
    table.add_column("so a store")
    for finding in report.findings:
        table.add_row(finding.name, _verdict(finding), escape(finding.detail), escape(finding.consequence))
    return table


def _verdict(finding: Finding) -> str:
    if finding.holds is None:
        return "[yellow]unknown[/]"
    if finding.holds:
        return "[green]yes[/]"
    return "[bold red]NO[/]" if finding.required else "[yellow]no[/]"


def _speeds(speed: Speed, chunk_size: int) -> Table:
    table = Table(box=SIMPLE_HEAD, title=f"chunks of {format_size(chunk_size)}", title_justify="left")
    for name in ("", "p50", "p99", f"{speed.clients} clients"):
        table.add_column(name, justify="right", no_wrap=True)
    rates = {"write": f"{size(speed.write_rate)}/s", "read": f"{size(speed.read_rate)}/s"}
    for name in _OPERATIONS:
        latency = _milliseconds(getattr(speed, name))
        table.add_row(name, f"{latency['p50']:.3g} ms", f"{latency['p99']:.3g} ms", rates.get(name, ""))
    return table
