"""What ``warm`` and ``copy`` share: their options, the copy itself, and its report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer
from rich.console import Console
from rich.markup import escape

from ..config import TierConfig
from ..copying import Copied, copy
from ..errors import ConfigError
from ..keys import ChunkKey
from ._options import configure
from ._output import emit, progress, size
from ._spaces import nothing_in
from ._storage import naming

__all__ = ["Hottest", "KeyFile", "Rate", "Resume", "Verify", "Workers", "read_keys", "transfer", "two_tiers"]

KeyFile = Annotated[
    Path | None,
    typer.Option("--keys", metavar="FILE", help="Only these chunks: a key in hex at the start of each line."),
]
Hottest = Annotated[
    str | None,
    typer.Option(
        "--hottest", metavar="SIZE", help="Only the chunks written last, so many bytes of them: 1TiB, 500MB."
    ),
]
Rate = Annotated[
    str | None,
    typer.Option("--rate", metavar="RATE", help="Copy no faster than this: 200MB/s, or bytes per second."),
]
Workers = Annotated[int, typer.Option("--workers", min=1, metavar="N", help="Chunks at a time.")]
Resume = Annotated[
    Path | None,
    typer.Option("--resume", metavar="FILE", help="Begin where FILE says, if it exists; keep it up to date."),
]
Verify = Annotated[
    str,
    typer.Option("--verify", metavar="END", help="source, or target: also read back what has been written."),
]


def two_tiers(
    source: str, target: str, storage_options: Sequence[str] | None
) -> tuple[TierConfig, TierConfig]:
    """The tiers at two URLs, which have names as if they were those of one store.

    Raises
    ------
    ConfigError
        They are not valid.
    """
    config = configure(
        ["ram://?capacity=1TiB", source, target],
        storage_options,
        None,
        namespace={},
        chunk_size=None,
        usual_chunk_size="1B",
        engine=None,
    )
    first, second = config.tiers
    return first, second


def transfer(
    source: TierConfig,
    target: TierConfig,
    *,
    namespace: str | None,
    keys: Path | None,
    hottest: str | None,
    rate: str | None,
    workers: int,
    resume: Path | None,
    verify: str,
    as_json: bool,
) -> int:
    """Copy, with a progress bar; print what was copied, and return the exit code."""
    started = time.monotonic()
    with naming(f"{source.url} -> {target.url}"), progress(f"copy to {target.url}") as advance:
        done = copy(
            source,
            target,
            namespace=namespace,
            keys=None if keys is None else read_keys(keys),
            limit_bytes=hottest,
            rate=rate,
            workers=workers,
            resume=resume,
            verify=cast(Literal["source", "target"], verify),
            progress=lambda now: advance(now.chunks + now.skipped, _note(now)),
        )
    seconds = time.monotonic() - started
    if keys is None and hottest is None and not any(done):
        Console(stderr=True).print(escape(nothing_in(source.url)), soft_wrap=True, highlight=False)
    report: dict[str, Any] = {
        "from": source.url, "to": target.url, **done._asdict(), "seconds": seconds
    }  # fmt: skip

    def show(console: Console) -> None:
        ends = f"{escape(source.url)} -> {escape(target.url)}"
        console.print(f"{ends}: {_note(done)}, {seconds:.1f} s", soft_wrap=True)
        if done.corrupt:
            console.print(f"[red]{done.corrupt:,} corrupt chunks were not copied[/]; see: kvstore verify")

    emit(report, as_json=as_json, show=show)
    return int(done.corrupt > 0)


def _note(done: Copied) -> str:
    counts = (("there already", done.skipped), ("corrupt", done.corrupt), ("missing", done.missing))
    rest = [f"{count:,} {what}" for what, count in counts if count]
    return ", ".join([f"{done.chunks:,} chunks ({size(done.bytes)}) copied", *rest])


def read_keys(path: Path) -> list[bytes]:
    """All keys of a file, so that a mistake in it is found before anything is copied."""
    try:
        with path.open(encoding="utf-8") as lines:
            numbered = [(number, line.split()) for number, line in enumerate(lines, 1)]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--keys: {path} cannot be read: {error}") from None
    return [_read_key(words[0], f"{path}, line {number}") for number, words in numbered if words]


def _read_key(text: str, place: str) -> bytes:
    try:
        return ChunkKey.fromhex(text)
    except ValueError as error:  # a wrong length is one, too
        raise ConfigError(f"--keys: {place}: {error}") from None
