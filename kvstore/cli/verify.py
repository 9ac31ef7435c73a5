"""``kvstore verify``: read every object of a tier, and say what is wrong and what to do about it."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..scan import Finding, Status, Summary, scan
from ._options import Json, Namespace, StorageOptions, Url, one_tier
from ._output import emit, progress, size
from ._spaces import select

__all__ = ["run"]

_SHOWN = 20

#: Status -> what it means, and what to do.
_MEANINGS: dict[Status, tuple[str, str]] = {
    Status.GOOD: ("read, header and checksum hold", ""),
    Status.CORRUPT: ("torn, damaged or of a newer format", "delete it; a store refuses it anyhow"),
    Status.FOREIGN: ("of another key or namespace, or not kvstore's", "move it out of the directory"),
    Status.TEMP: ("being written by a live store", ""),
    Status.STALE_TEMP: ("left behind by a writer that died", "delete it"),
    Status.QUARANTINED: ("moved aside earlier because it was bad", "delete it when you have seen it"),
    Status.MANIFEST: ("torn, missing or of another namespace", "delete the namespace's directory"),
    Status.UNREADABLE: ("the storage failed", "look after the storage, then verify again"),
}


def run(
    url: Url, namespace: Namespace = None, storage_option: StorageOptions = None, json: Json = False
) -> int:
    """Read every object of a tier and verify its header and checksum; changes nothing.

    Exits with 1 when something is corrupt, foreign, stale, unreadable, or a manifest is torn.
    """
    tier = one_tier(url, storage_option)
    summary = Summary()
    problems: list[tuple[str, Finding]] = []
    directories = []
    with progress(f"verify {tier.url}") as advance:
        for space in select(tier, namespace):
            directories.append(space.directory)
            for finding in scan(space):
                summary.add(finding)
                if finding.status.is_problem:
                    problems.append((space.directory, finding))
                files = summary.counts.total()
                advance(files, f"{files:,} files, {size(summary.sizes.total())}, {len(problems):,} problems")

    def show(console: Console) -> None:
        console.print(f"[bold]{escape(tier.url)}[/], namespaces: {len(directories):,}")
        if summary.counts:
            console.print(_table(summary))
        _show_problems(console, problems)

    emit(_report(tier.url, directories, summary, problems), as_json=json, show=show)
    return int(not summary.ok)


def _report(
    url: str, directories: list[str], summary: Summary, problems: list[tuple[str, Finding]]
) -> dict[str, Any]:
    return {
        "url": url,
        "ok": summary.ok,
        "namespaces": directories,
        **{status.value.replace("-", "_"): summary.counts[status] for status in _MEANINGS},
        "bytes": summary.sizes.total(),
        "problems": [
            {
                "namespace": directory,
                "name": finding.name,
                "status": finding.status.value.replace("-", "_"),
                "key": None if finding.key is None else finding.key.hex(),
                "bytes": finding.size,
                "reason": finding.reason,
            }
            for directory, finding in problems
        ],
    }


def _table(summary: Summary) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    table.add_column("files", justify="right", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("what it means")
    table.add_column("what to do")
    for status, (meaning, remedy) in _MEANINGS.items():
        if count := summary.counts[status]:
            color = "red" if status.is_problem else "green" if status is Status.GOOD else "yellow"
            label = f"[{color}]{status.value}[/]"
            table.add_row(label, f"{count:,}", size(summary.sizes[status]), meaning, remedy)
    return table


def _show_problems(console: Console, problems: list[tuple[str, Finding]]) -> None:
    if not problems:
        console.print("[green]nothing wrong[/]")
        return
    for directory, finding in problems[:_SHOWN]:
        line = f"{finding.status.value}: {directory}/{finding.name}: {finding.reason}"
        console.print(line, markup=False, soft_wrap=True)
    if len(problems) > _SHOWN:
        console.print(f"and {len(problems) - _SHOWN:,} more (all of them with --json)")
