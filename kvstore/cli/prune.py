"""``kvstore prune``: make room in a tier."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ..collect.prune import Outcome, prune, prune_orphaned
from ..errors import ConfigError
from ..units import parse_duration, parse_size
from ._options import Json, Namespace, StorageOptions, Url, one_tier
from ._output import emit, progress, size
from ._spaces import nothing_in, select

__all__ = ["run"]

#: Age of orphaned namespaces, unless one is given (seconds).
_ORPHANED_AFTER = 30 * 86400.0

_To = Annotated[
    str | None,
    typer.Option("--to", metavar="SIZE", help="Until no more than this is left: 1TiB, 500MB, or bytes."),
]
_OlderThan = Annotated[
    str | None,
    typer.Option(
        "--older-than", metavar="AGE", help="What nobody has used for so long: 7d, 12h, or seconds."
    ),
]
_Orphaned = Annotated[
    bool,
    typer.Option("--orphaned", help="Whole namespaces that nobody has used, for 30 days or --older-than."),
]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted, and delete nothing.")]


def run(
    url: Url,
    to: _To = None,
    older_than: _OlderThan = None,
    namespace: Namespace = None,
    orphaned: _Orphaned = False,
    dry_run: _DryRun = False,
    storage_option: StorageOptions = None,
    json: Json = False,
) -> int:
    """Delete the chunks of a tier that were used least recently, or whole namespaces that nobody uses.

    Stores may be at work in the tier: to them a deleted chunk is a miss. Where no store notes what it
    reads, as in a bucket without limits, the time of creation counts. Exits with 1 when something could not
    be deleted.
    """
    tier = one_tier(url, storage_option)
    limit = _read("--to", parse_size, to)
    age = _read("--older-than", parse_duration, older_than)
    if limit is None and age is None and not orphaned:
        raise ConfigError("say what to delete: --to SIZE, --older-than AGE or --orphaned")
    if orphaned and limit is not None:
        raise ConfigError("--orphaned deletes whole namespaces, and takes no --to")
    for _ in select(tier, namespace):  # a wrong URL or namespace is said at once
        break
    with progress(f"prune {tier.url}") as advance:
        if orphaned:
            outcomes = prune_orphaned(
                tier,
                namespace=namespace,
                unused_for=_ORPHANED_AFTER if age is None else age,
                dry_run=dry_run,
                note=advance,
            )
        else:
            outcomes = prune(
                tier, namespace=namespace, to=limit, unused_for=age, dry_run=dry_run, note=advance
            )
    report = _report(tier.url, outcomes, dry_run)
    emit(report, as_json=json, show=lambda console: _show(console, report, outcomes))
    return int(any(outcome.errors for outcome in outcomes))


def _read(option: str, parse: Any, text: str | None) -> Any:
    try:
        return None if text is None else parse(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def _report(url: str, outcomes: list[Outcome], dry_run: bool) -> dict[str, Any]:
    rows = [_row(outcome) for outcome in outcomes]
    totals = {
        name: sum(row[name] for row in rows) for name in ("chunks", "bytes", "kept_chunks", "kept_bytes")
    }
    return {"url": url, "dry_run": dry_run, **totals, "namespaces": rows}


def _row(outcome: Outcome) -> dict[str, Any]:
    names = {"size": "bytes", "kept_size": "kept_bytes"}
    return {names.get(name, name): value for name, value in asdict(outcome).items()}


def _show(console: Console, report: dict[str, Any], outcomes: list[Outcome]) -> None:
    if not outcomes:
        console.print(escape(nothing_in(report["url"])), soft_wrap=True)
        return
    verb = "would delete" if report["dry_run"] else "deleted"
    for outcome in outcomes:
        if outcome.chunks or outcome.gone or outcome.errors:
            whole = ", all of it" if outcome.gone else ""
            console.print(
                f"{escape(outcome.directory)}: {verb} {outcome.chunks:,} chunks, {size(outcome.size)}{whole}"
            )
        for error in outcome.errors:
            console.print(f"  [red]{escape(error)}[/]")
    console.print(
        f"{escape(report['url'])}: {verb} {report['chunks']:,} chunks, {size(report['bytes'])}; "
        f"{report['kept_chunks']:,} chunks, {size(report['kept_bytes'])} are left"
    )
