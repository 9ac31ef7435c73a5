"""``kvstore stat``: counts, bytes and identity of each namespace of a tier."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..units import format_size
from ._options import Json, Namespace, StorageOptions, Url, one_tier
from ._output import age, emit, progress, size
from ._spaces import describe, nothing_in, recall, select

__all__ = ["run"]


_Scan = Annotated[
    bool, typer.Option("--scan", help="List every file, even where the stores keep books of what there is.")
]


def run(
    url: Url,
    namespace: Namespace = None,
    scan: _Scan = False,
    storage_option: StorageOptions = None,
    json: Json = False,
) -> None:
    """Show what is in a tier: chunks and bytes of each namespace, with its identity fields.

    Where stores share a limit, their books answer at once, however much there is; elsewhere, and with --scan,
    all files are listed. Nothing but the manifests is read; bytes are those on storage.
    """
    tier = one_tier(url, storage_option)
    with progress(f"stat {tier.url}") as advance:
        found = [
            (None if scan else recall(tier, space)) or describe(space, advance)
            for space in select(tier, namespace)
        ]
    chunks, total = (sum(facts[name] for facts in found) for name in ("chunks", "bytes"))

    def show(console: Console) -> None:
        for facts in found:
            _show(console, facts)
        if not found:
            console.print(escape(nothing_in(tier.url)), soft_wrap=True)
            return
        console.print(f"{escape(tier.url)}: namespaces {len(found):,}, chunks {chunks:,}, {size(total)}")

    emit({"url": tier.url, "chunks": chunks, "bytes": total, "namespaces": found}, as_json=json, show=show)


def _show(console: Console, facts: dict[str, Any]) -> None:
    console.print(f"[bold]{escape(facts['directory'])}[/]")
    table = Table.grid(padding=(0, 2))
    if facts["problem"]:
        table.add_row("  manifest", f"[red]{escape(facts['problem'])}[/]")
    for name, value in (facts["fields"] or {}).items():
        text = format_size(value) if name == "chunk_size" else str(value)
        table.add_row(f"  {escape(name)}", escape(text), style="dim")
    table.add_row("  chunks", f"{facts['chunks']:,}, {size(facts['bytes'])}")
    if facts["newest"]:
        table.add_row("  age", f"newest {age(facts['newest'])}, oldest {age(facts['oldest'])}")
    for name in ("temporary", "quarantined", "foreign"):
        if facts[name]:
            table.add_row(f"  {name}", f"{facts[name]:,} files")
    console.print(table)
    console.print()
