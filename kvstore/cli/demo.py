"""``kvstore demo``: the store at its main job, with nothing to set up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..metrics import Stats
from ..opening import open_store
from ..traces import Request
from ..units import format_size
from ..workload import Outcome, conversations, replay
from ._options import Engine, Json, temporary_tiers
from ._output import emit, percent, progress
from ._report import run_report, show_run

__all__ = ["run"]

_CHUNK = 64 << 10
_HOST = 64 << 20
#: Share of the requests, from the end, that are made again after the restart.
_AGAIN = 0.2


def run(
    json: Json = False,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the workload.")] = 0,
    dir: Annotated[
        Path | None, typer.Option("--dir", metavar="PATH", help="Where to make the temporary directory.")
    ] = None,
    engine: Engine = "threads",
) -> int:
    """Watch conversations of many users go through host memory and disk, every byte verified.

    Makes a temporary store, which it removes at the end. The workload is the same for the same seed.
    """
    requests = list(conversations(seed=seed))
    again = requests[-int(len(requests) * _AGAIN) :]
    with temporary_tiers(_HOST, parent=dir) as tiers:
        outcome, stats = _serve("conversations", requests, tiers, engine)
        restart, fresh = _serve("after a restart", again, tiers, engine)
    report = {
        **run_report(outcome, stats),
        "restart": {"hits": restart.hits, "hit_ratio": restart.hit_ratio},
    }
    report["verified_chunks"] += restart.verified_chunks
    report["mismatches"] += restart.mismatches

    def show(console: Console) -> None:
        console.print(
            f"[bold]kvstore demo[/]: {format_size(_HOST)} of host memory over a temporary directory, "
            f"chunks of {format_size(_CHUNK)}, seed {seed}"
        )
        show_run(console, outcome, stats, _CHUNK)
        _show_restart(console, restart, fresh)
        _show_next(console)

    emit(report, as_json=json, show=show)
    return int(report["mismatches"] > 0)


def _serve(
    what: str, requests: Sequence[Request], tiers: Sequence[str], engine: str | None
) -> tuple[Outcome, Stats]:
    """Open the store, serve `requests`, and close it again."""
    namespace = {"workload": "demo"}
    with (
        progress(what, len(requests)) as advance,
        open_store(*tiers, chunk_size=_CHUNK, namespace=namespace, engine=engine) as store,
    ):
        outcome = replay(
            store,
            requests,
            on_request=lambda so_far: advance(so_far.requests, f"hits {percent(so_far.hit_ratio)}"),
        )
        store.flush()
        return outcome, store.stats()


def _show_restart(console: Console, outcome: Outcome, stats: Stats) -> None:
    disk = stats.tiers[1]
    console.print(
        f"\n[bold]After a restart[/], host memory empty, the last {outcome.requests:,} requests again:\n"
        f"  {outcome.hits:,} of {outcome.chunks:,} chunks served ({percent(outcome.hit_ratio)}), "
        f"{disk.hits:,} of them read from {disk.name}"
    )


def _show_next(console: Console) -> None:
    console.print(
        "\n[bold]Try next[/]\n"
        "  your own requests, through your own tiers:\n"
        "    kvstore replay TRACE --tier 'ram://?capacity=1GiB' --tier /mnt/kv\n"
        "  how much memory would pay:\n"
        "    kvstore simulate TRACE --policy lru,arc --capacity 1000,5000\n"
        "  how fast your disk is:\n"
        "    kvstore bench --tier 'ram://?capacity=1GiB' --tier /mnt/kv"
    )
