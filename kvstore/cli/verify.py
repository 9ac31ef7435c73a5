"""``kvstore verify``: read every object of a tier, say what is wrong and what to do about it, and do it."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..errors import ConfigError
from ..repair import Action, Cursor, Deed, Pace, repair
from ..scan import Space, Status, Summary
from ..units import parse_size
from ._options import Json, Namespace, StorageOptions, Url, one_tier
from ._output import emit, progress, size
from ._spaces import nothing_in, select

__all__ = ["run"]

_Repair = Annotated[
    bool,
    typer.Option("--repair", help="Move bad objects into quarantine/; remove stale and torn leftovers."),
]
_Rate = Annotated[
    str | None,
    typer.Option("--rate", metavar="RATE", help="Read no faster than this: 50MB/s, or bytes per second."),
]
_Resume = Annotated[
    Path | None,
    typer.Option("--resume", metavar="FILE", help="Begin where FILE says, if it exists; keep it up to date."),
]

_SHOWN = 20

#: Status -> what it means, and what to do.
_MEANINGS: dict[Status, tuple[str, str]] = {
    Status.GOOD: ("read, header and checksum hold", ""),
    Status.CORRUPT: ("torn, damaged or of a newer format", "--repair moves it into quarantine/"),
    Status.FOREIGN: ("of another key or namespace, or not kvstore's", "--repair moves it into quarantine/"),
    Status.TEMP: ("being written by a live store", ""),
    Status.STALE_TEMP: ("left behind by a writer that died", "--repair removes it"),
    Status.QUARANTINED: ("moved aside earlier because it was bad", "delete it when you have seen it"),
    Status.MANIFEST: ("torn, missing or of another namespace", "--repair removes one that is torn"),
    Status.UNREADABLE: ("the storage failed", "look after the storage, then verify again"),
}


def run(
    url: Url,
    mend: _Repair = False,
    rate: _Rate = None,
    resume: _Resume = None,
    namespace: Namespace = None,
    storage_option: StorageOptions = None,
    json: Json = False,
) -> int:
    """Read every object of a tier and verify its header and checksum; without --repair, change nothing.

    Exits with 1 when something is corrupt, foreign, stale, unreadable, or a manifest is torn; after --repair,
    when some of that is left.
    """
    tier = one_tier(url, storage_option)
    pace = None if rate is None else Pace(_read_rate(rate))
    cursor = None if resume is None else Cursor(resume, tier.url)
    outcome = _Outcome(tier.url, mend)
    spaces = (outcome.enter(space) for space in select(tier, namespace))
    with (
        progress(f"verify {tier.url}") as advance,
        closing(repair(spaces, dry_run=not mend, pace=pace, cursor=cursor)) as actions,
    ):
        for action in actions:
            outcome.add(action)
            files, found = outcome.summary.counts.total(), len(outcome.problems)
            advance(files, f"{files:,} files, {size(outcome.summary.sizes.total())}, {found:,} problems")
    emit(outcome.report(), as_json=json, show=outcome.show)
    return int(not outcome.ok)


def _read_rate(text: str) -> int:
    try:
        rate = parse_size(text.removesuffix("/s"))
    except ValueError:
        rate = 0
    if not rate:
        raise ConfigError(f"--rate: {text!r} is no rate; write bytes per second, such as 50MB/s")
    return rate


class _Outcome:
    """What was found, and what was done about it."""

    def __init__(self, url: str, repaired: bool) -> None:
        self.summary = Summary()
        self.problems: list[Action] = []
        self._url = url
        self._repaired = repaired
        self._directories: list[str] = []

    def enter(self, space: Space) -> Space:
        """Go on to the next namespace."""
        self._directories.append(space.directory)
        return space

    def add(self, action: Action) -> None:
        """Count one finding."""
        self.summary.add(action.finding)
        if action.finding.status.is_problem:
            self.problems.append(action)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, or nothing is any longer."""
        return self.summary.ok or (self._repaired and not self._deeds[Deed.LEFT])

    @property
    def _deeds(self) -> Counter[Deed]:
        return Counter(action.deed for action in self.problems)

    def report(self) -> dict[str, Any]:
        """The JSON object."""
        counts = self.summary.counts
        return {
            "url": self._url,
            "ok": self.ok,
            "namespaces": self._directories,
            **{status.value.replace("-", "_"): counts[status] for status in _MEANINGS},
            "bytes": self.summary.sizes.total(),
            "repair": {deed.value: self._deeds[deed] for deed in Deed} if self._repaired else None,
            "problems": [
                {
                    "namespace": directory,
                    "name": finding.name,
                    "status": finding.status.value.replace("-", "_"),
                    "key": None if finding.key is None else finding.key.hex(),
                    "bytes": finding.size,
                    "reason": finding.reason,
                    "repair": deed.value if self._repaired else None,
                    "detail": detail if self._repaired else "",
                }
                for directory, finding, deed, detail in self.problems
            ],
        }

    def show(self, console: Console) -> None:
        """The same for people."""
        if not self._directories:
            console.print(escape(nothing_in(self._url)), soft_wrap=True)
            return
        console.print(f"[bold]{escape(self._url)}[/], namespaces: {len(self._directories):,}")
        if self.summary.counts:
            console.print(_table(self.summary))
        if not self.problems:
            console.print("[green]nothing wrong[/]")
        for action in self.problems[:_SHOWN]:
            console.print(self._line(action), markup=False, soft_wrap=True)
        if len(self.problems) > _SHOWN:
            console.print(f"and {len(self.problems) - _SHOWN:,} more (all of them with --json)")

    def _line(self, action: Action) -> str:
        finding = action.finding
        line = f"{finding.status.value}: {action.directory}/{finding.name}: {finding.reason}"
        if not self._repaired:
            return line
        why = f" ({action.detail})" if action.deed in (Deed.LEFT, Deed.NOTHING) else ""
        return f"{line}; {_WORDS[action.deed]}{why}"


_WORDS = {
    Deed.NOTHING: "nothing to do",
    Deed.QUARANTINED: "moved into quarantine/",
    Deed.REMOVED: "removed",
    Deed.LEFT: "left as it is",
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
