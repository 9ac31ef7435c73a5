"""``kvstore serve``: a store of its own that peers read."""

from __future__ import annotations

import json as json_format
import signal
import sys
import threading
from typing import Annotated, Any

import typer

from ..config import parse
from ..errors import ConfigError
from ..opening import open_store
from ..store import Store
from ._copying import KeyFile, read_keys
from ._options import ChunkSize, ConfigFile, Engine, Json, StorageOptions, Tiers, read_storage_options
from ._output import emit

__all__ = ["run"]


def run(
    tier: Tiers = None,
    at: Annotated[
        str, typer.Option("--at", metavar="HOST:PORT", help="Where to listen; :PORT is this machine only.")
    ] = ":5710",
    namespace: Annotated[
        str, typer.Option("--fields", metavar="JSON", help="Identity fields of what is served, as an object.")
    ] = "{}",
    keys: KeyFile = None,
    storage_option: StorageOptions = None,
    config: ConfigFile = None,
    chunk_size: ChunkSize = None,
    engine: Engine = None,
    json: Json = False,
) -> int:
    """Serve host memory to peers until Ctrl-C or SIGTERM.

    What --keys names is brought into host memory from the tiers first, so that a machine with memory to spare
    can hold what others ask for most. With --json the object is printed when it is ready.
    """
    parsed = parse(
        *(tier or ()),
        namespace=_read_fields(namespace),
        chunk_size=chunk_size,
        engine=engine,
        serve=at,
        storage_options=read_storage_options(storage_option),
        config=config,
    )
    wanted = [] if keys is None else read_keys(keys)
    with open_store(config=parsed) as store:
        loaded = store.prefetch(wanted).result()
        report = {
            "address": store.served_at,
            "namespace": store.namespace.directory,
            "chunks": len(loaded.promoted),
        }
        emit(report, as_json=json, show=lambda console: console.print(_sentence(store)))
        sys.stdout.flush()
        _until_asked_to_end()
    return 0


def _sentence(store: Store) -> str:
    held = f"{store.stats().host.chunks:,} chunks of namespace {store.namespace.directory}"
    return f"serving {held} at {store.served_at}; end with Ctrl-C"


def _read_fields(text: str) -> dict[str, Any]:
    try:
        fields = json_format.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ConfigError('--fields: write an object in JSON, such as {"model": "Qwen/Qwen3-8B"}')
    return fields


def _until_asked_to_end() -> None:
    """Return at Ctrl-C or SIGTERM."""
    asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.set())
    asked.wait()
