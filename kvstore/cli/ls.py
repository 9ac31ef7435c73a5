"""``kvstore ls``: the namespaces of a tier, or the chunks of a namespace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..config import TierConfig
from ..scan import Status, scan
from ._options import Json, Namespace, StorageOptions, Url, one_tier
from ._output import age, emit, progress, size
from ._spaces import describe, nothing_in, select

__all__ = ["run"]


def run(
    url: Url, namespace: Namespace = None, storage_option: StorageOptions = None, json: Json = False
) -> None:
    """List the namespaces of a tier, or with --namespace the chunks of one, with sizes and ages.

    Sizes are those on storage, 4 KiB of header included.
    """
    tier = one_tier(url, storage_option)
    if namespace is not None:
        _list_chunks(tier, namespace, json)
        return
    with progress(f"list {tier.url}") as advance:
        found = [describe(space, advance) for space in select(tier)]
    emit(
        {"url": tier.url, "namespaces": found}, as_json=json, show=lambda console: _show(console, tier, found)
    )


def _show(console: Console, tier: TierConfig, found: list[dict[str, Any]]) -> None:
    if not found:
        console.print(escape(nothing_in(tier.url)), soft_wrap=True)
        return
    table = Table(box=SIMPLE_HEAD)
    table.add_column("namespace", no_wrap=True)
    for name in ("chunks", "bytes", "newest"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("of", overflow="ellipsis", no_wrap=True)
    for facts in found:
        table.add_row(
            escape(facts["directory"]),
            f"{facts['chunks']:,}",
            size(facts["bytes"]),
            age(facts["newest"] or 0.0) if facts["chunks"] else "-",
            f"[red]{escape(facts['problem'])}[/]" if facts["problem"] else _brief(facts["fields"]),
        )
    console.print(table)


def _brief(fields: dict[str, Any]) -> str:
    own = ("chunk_size", "format_version", "hash")
    return escape(", ".join(str(value) for name, value in fields.items() if name not in own)) or "-"


def _list_chunks(tier: TierConfig, namespace: str, as_json: bool) -> None:
    rows = _chunks(tier, namespace)
    if as_json:
        chunks = [{"key": key.hex(), "bytes": count, "mtime": mtime} for key, count, mtime in rows]
        emit({"url": tier.url, "namespace": namespace, "chunks": chunks}, as_json=True, show=lambda _: None)
        return
    for key, count, mtime in rows:  # printed as they are found: there may be millions
        print(f"{key.hex()}  {size(count):>9}  {age(mtime):>7}")


def _chunks(tier: TierConfig, namespace: str) -> Iterator[tuple[bytes, int, float]]:
    for space in select(tier, namespace):
        for finding in scan(space, read=False):
            if finding.status is Status.LISTED and finding.key is not None:
                yield finding.key, finding.size, finding.mtime
