"""Options that several commands share, and the configuration that they make."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ..config import CONFIG_VARIABLE, HostConfig, StoreConfig, TierConfig, parse
from ..config.tiers import read_tier
from ..errors import ConfigError
from ..units import format_size

__all__ = [
    "ChunkSize",
    "ConfigFile",
    "Engine",
    "Json",
    "Limit",
    "Namespace",
    "StorageOptions",
    "Tiers",
    "Trace",
    "TraceFormat",
    "Url",
    "are_tiers_named",
    "configure",
    "one_tier",
    "read_storage_options",
    "temporary_tiers",
]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, on stdout.")]
Tiers = Annotated[
    list[str] | None,
    typer.Option("--tier", metavar="URL", help="A tier; repeat, host memory (ram://) first."),
]
StorageOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="NAME.KEY=VALUE",
        help="An option of the filesystem of the tier NAME; VALUE is JSON, or else plain text.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE.toml", help=f"Configuration; also named by {CONFIG_VARIABLE}."),
]
ChunkSize = Annotated[str | None, typer.Option("--chunk-size", metavar="SIZE", help="Bytes in a chunk.")]
Engine = Annotated[
    str | None, typer.Option("--engine", metavar="NAME", help="What moves bytes: threads or processes.")
]
Url = Annotated[str, typer.Argument(metavar="URL", help="A tier, such as file:///mnt/kv or s3://bucket/kv.")]
Namespace = Annotated[
    str | None, typer.Option("--namespace", metavar="DIR", help="Only this namespace, by its directory.")
]
Trace = Annotated[Path, typer.Argument(metavar="TRACE", help="File of requests, plain or compressed.")]
TraceFormat = Annotated[
    str, typer.Option("--format", metavar="FORMAT", help="auto, jsonl, u32le (32-bit numbers) or text.")
]
Limit = Annotated[
    int | None, typer.Option("--limit", min=1, metavar="N", help="Only the first N requests of the trace.")
]

#: Share of the free space that a temporary tier may take.
_SHARE = 0.5


def configure(
    tiers: Sequence[str] | None,
    storage_options: Sequence[str] | None,
    config: Path | None,
    *,
    namespace: Mapping[str, Any],
    chunk_size: str | None,
    usual_chunk_size: str,
    engine: str | None,
) -> StoreConfig:
    """The configuration that options ask for, under a namespace of the command's own.

    Raises
    ------
    ConfigError
        It is not valid.
    """
    from_file = config is not None or not tiers
    parsed = parse(
        *(tiers or ()),
        chunk_size=chunk_size or (None if from_file else usual_chunk_size),
        engine=engine,
        storage_options=read_storage_options(storage_options),
        config=config,
    )
    return msgspec.structs.replace(parsed, namespace=dict(namespace))


def are_tiers_named(tiers: Sequence[str] | None, config: Path | None) -> bool:
    """Whether the options or the environment name tiers."""
    return bool(tiers or config or os.environ.get(CONFIG_VARIABLE))


def one_tier(url: str, storage_options: Sequence[str] | None) -> TierConfig:
    """The secondary tier at `url`.

    Raises
    ------
    ConfigError
        It is not valid, or it is a host tier.
    """
    if url.lower().startswith("ram:"):
        raise ConfigError("ram:// is the memory of a process: there is nothing to look at from outside")
    tier = read_tier(url)
    assert isinstance(tier, TierConfig)
    host = HostConfig(capacity=1 << 40)
    (tier,) = StoreConfig(host=host, tiers=(tier,)).tiers  # which gives it its name
    options = read_storage_options(storage_options)
    for name in options:
        if name != tier.name:
            raise ConfigError(f"--storage-option: there is no tier {name!r} here, only {tier.name!r}")
    more = options.get(tier.name, {})
    return msgspec.structs.replace(tier, storage_options={**tier.storage_options, **more})


@contextmanager
def temporary_tiers(host: int, most: int | None = None, parent: Path | None = None) -> Iterator[list[str]]:
    """Tiers that last as long as the block: host memory over a directory, which goes however the block ends.

    Parameters
    ----------
    host : int
        Bytes.
    most : int, optional
        Bytes that the directory may take; never more than half of what is free.
    parent : Path, optional
        Where the directory is made; where temporary files are, by default.

    Yields
    ------
    list of str
        URLs.
    """
    if parent is not None and not parent.is_dir():
        raise ConfigError(f"--dir: there is no directory {str(parent)!r}")
    with tempfile.TemporaryDirectory(prefix="kvstore-", dir=parent) as directory:
        room = int(shutil.disk_usage(directory).free * _SHARE)
        capacity = format_size(min(most, room) if most is not None else room)
        url = Path(os.path.abspath(directory)).as_uri()
        yield [f"ram://?capacity={format_size(host)}&policy=arc", f"{url}?capacity={capacity}"]


def read_storage_options(texts: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """Tier -> option -> value, from texts such as ``s3.endpoint_url=http://host``.

    Raises
    ------
    ConfigError
        A text is none such.
    """
    options: dict[str, dict[str, Any]] = {}
    for text in texts or ():
        where, equals, value = text.partition("=")
        name, dot, key = where.partition(".")
        if not (name and dot and key and equals):
            # The text is not repeated: it can hold a secret.
            raise ConfigError("--storage-option: write NAME.KEY=VALUE, such as s3.endpoint_url=http://host")
        try:
            options.setdefault(name, {})[key] = json.loads(value)
        except ValueError:
            options.setdefault(name, {})[key] = value
    return options
