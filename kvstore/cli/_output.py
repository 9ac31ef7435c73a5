"""What commands print: one JSON object, or text; progress on stderr, when that is a terminal."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.filesize import decimal

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

__all__ = ["Advance", "age", "emit", "is_watched", "percent", "progress", "size"]

Advance = Callable[[float, str], None]
"""``advance(done, note)``: so much of the work is done, and a note beside the bar."""

_WIDTH_OF_PIPES = 120
_AGES = ((86400, "d"), (3600, "h"), (60, "min"))


def emit(report: Mapping[str, Any], *, as_json: bool, show: Callable[[Console], None]) -> None:
    """Print `report` as JSON, or have `show` print it for people."""
    if as_json:
        json.dump(report, sys.stdout, indent=2 if sys.stdout.isatty() else None)
        sys.stdout.write("\n")
        return
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDTH_OF_PIPES
    show(Console(highlight=False, width=width))


def is_watched() -> bool:
    """Whether somebody sees the progress."""
    return sys.stderr.isatty()


@contextmanager
def progress(what: str, total: float | None = None) -> Iterator[Advance]:
    """A progress bar for the block; without `total` it only shows that something goes on."""
    if not is_watched():
        yield lambda done, note: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns: list[ProgressColumn] = [
        TextColumn("{task.description}"),
        BarColumn(24),
        TextColumn("{task.percentage:3.0f}%" if total else ""),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    ]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total, note="")
        yield lambda done, note: bar.update(task, completed=done, note=note)


def size(count: float) -> str:
    """Bytes for people, in powers of 1000."""
    return decimal(int(count))


def percent(fraction: float) -> str:
    """A fraction for people."""
    return f"{100 * fraction:.2f} %"


def age(mtime: float, now: float | None = None) -> str:
    """Time since `mtime` (seconds since the epoch; 0 is unknown) for people."""
    if not mtime:
        return "unknown"
    seconds = max(0.0, (time.time() if now is None else now) - mtime)
    for unit, name in _AGES:
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"
