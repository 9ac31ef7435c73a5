"""What a sweep has found, for people: a table, the same in a page, and a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from .configurations import NOTHING, VLLM
from .results import Point, Sweep

__all__ = ["draw", "make_table", "rewrite_page"]

_HEADINGS = (
    "users",
    "configuration",
    "req/s",
    "of computing",
    f"of {VLLM}",
    "TTFT, ms: mean",
    "p50",
    "p95",
    "p99",
    "tokens from",
)
_WORDS = ("configuration", "tokens from")
_SMALL = {"rotation": 90, "fontsize": "small", "color": "0.4"}
#: In a page, everything from the one line to the other is made here.
_BEGIN, _END = "<!-- sweep: begin -->", "<!-- sweep: end -->"


def make_table(sweep: Sweep) -> Table:
    """All points, for a terminal."""
    table = Table(box=SIMPLE_HEAD)
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading in _WORDS else "right")
    for point in sweep.points:
        table.add_row(*_row(point))
    return table


def rewrite_page(page: Path, sweep: Sweep) -> None:
    """Put the machine and all points into a page, between its two marks.

    Raises
    ------
    ValueError
        The marks are not there.
    """
    before, begin, rest = page.read_text(encoding="utf-8").partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not end:
        raise ValueError(f"{page} has no lines {_BEGIN} and {_END}")
    rules = ["---" if heading in _WORDS else "---:" for heading in _HEADINGS]
    lines = [_HEADINGS, rules, *map(_row, sweep.points)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    machine = "; ".join(f"{name}: {words}" for name, words in sweep.machine.items())
    page.write_text(
        f"{before}{begin}\n\nMeasured on: {machine}.\n\n{table}\n\n{end}{after}", encoding="utf-8"
    )


def draw(sweep: Sweep, path: Path) -> None:
    """Draw throughput and time to first token over the number of users; the suffix tells the format."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in dict.fromkeys(point.configuration for point in sweep.points):
        points = [point for point in sweep.points if point.configuration == name]
        users = [point.users for point in points]
        style: dict[str, Any] = {"marker": "o", "linestyle": "--" if name in (NOTHING, VLLM) else "-"}
        left.plot(users, [point.throughput for point in points], label=name, **style)
        right.plot(users, [point.wait.mean / 1e3 for point in points], **style)
    left.set_ylabel("requests per second")
    right.set_ylabel("mean time to first token (s)")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(users, map(str, users))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("users at once, each with a prompt of its own")
        axes.grid(alpha=0.3)
        for place, text in ((sweep.on_device, "device full"), (sweep.in_host, "host full")):
            axes.axvline(place, color="0.7")
            axes.text(place, 0.98, text, transform=axes.get_xaxis_transform(), va="top", **_SMALL)
    left.legend()
    with matplotlib.rc_context({"svg.hashsalt": "sweep"}):  # equal figures make equal files
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _row(point: Point) -> list[str]:
    wait = point.wait
    return [
        str(point.users),
        point.configuration,
        f"{point.throughput:.3g}",
        f"{point.gain:.3g}",
        f"{point.against[VLLM]:.2f}" if VLLM in point.against else "",
        *(f"{value:,.0f}" for value in (wait.mean, wait.p50, wait.p95, wait.p99)),
        ", ".join(_shares(point)),
    ]


def _shares(point: Point) -> Iterator[str]:
    for source, share in sorted(point.sources.items(), key=lambda pair: -pair[1]):
        if share >= 0.005:
            yield f"{source} {100 * share:.0f} %"
