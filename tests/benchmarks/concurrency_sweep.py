"""Measures how a vLLM engine on a CPU serves more and more users, with and without a store below it.

Prints a table, and writes what docs/explanation/concurrency.md shows::

    python tests/benchmarks/concurrency_sweep.py --docs

Needs vLLM (tox -e vllm), takes about ten minutes, and wants a machine with nothing else to do.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from _sweep.configurations import CONFIGURATIONS, S3, open_engines
from _sweep.geometry import PROMPT_TOKENS, PROMPTS_IN_HOST, PROMPTS_ON_DEVICE, write_model
from _sweep.measuring import describe_machine, run_sweep, work_of
from _sweep.report import draw, make_table, rewrite_page
from _sweep.results import Sweep
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from support.object_store import seaweed_bucket

_DOCS = Path(__file__).parents[2] / "docs"


def main(
    users: Annotated[str, typer.Option(help="Numbers of users, with commas.")] = "1,2,4,8,16",
    folder: Annotated[
        Path | None, typer.Option(help="Where the tiers on disk are; the default is a temporary directory.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all figures there.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw them there (.svg, .png).")] = None,
    docs: Annotated[
        bool, typer.Option("--docs", help="Renew the documentation: figures and picture.")
    ] = False,
) -> None:
    """Measure, and tell."""
    if docs:
        json, plot = _DOCS / "data" / "concurrency.json", _DOCS / "images" / "concurrency.svg"
    counts = [int(number) for number in users.split(",")]
    machine = describe_machine()
    with tempfile.TemporaryDirectory(dir=folder) as place, seaweed_bucket() as bucket:
        names = [name for name in CONFIGURATIONS if bucket is not None or name != S3]
        model = write_model(Path(place) / "model")
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with (
            open_engines(names, model, Path(place), bucket) as contenders,
            Progress(*columns, console=Console(file=sys.stderr)) as bar,
        ):
            task = bar.add_task("first requests", total=work_of(len(names), counts))
            points = run_sweep(
                contenders, counts, lambda count, note: bar.update(task, advance=count, description=note)
            )
    sweep = Sweep(machine, PROMPT_TOKENS, PROMPTS_ON_DEVICE, PROMPTS_IN_HOST, points)
    width = None if sys.stdout.isatty() else 160
    Console(highlight=False, width=width).print(make_table(sweep))
    if json is not None:
        sweep.write(json)
    if plot is not None:
        draw(sweep, plot)
    if docs:
        rewrite_page(_DOCS / "explanation" / "concurrency.md", sweep)


if __name__ == "__main__":
    typer.run(main)
