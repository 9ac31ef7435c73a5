"""A tiered, content-addressed store for KV-cache chunks: host memory over any fsspec filesystem.

What is offered here is imported when somebody asks for it, so that worker processes and the command line,
which need little of it, start quickly.

>>> import kvstore
>>> with kvstore.open("ram://?capacity=4MiB", chunk_size="64KiB") as store:
...     key = store.add(b"some bytes")
...     store.get(key)
b'some bytes'
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import HostConfig, StoreConfig, TierConfig
    from .copying import Copied, copy
    from .errors import (
        BackendError,
        ClosedError,
        ConfigError,
        CorruptChunkError,
        KVStoreError,
        NamespaceMismatchError,
        NoSpaceError,
        WorkerDiedError,
    )
    from .events import Event
    from .jobs import Job, Prefetched
    from .keys import ChunkKey, content_key, prefix_keys
    from .leases import ReadLease, WriteLease
    from .metrics import Stats, TierStats
    from .namespace import Namespace
    from .opening import open_store as open
    from .planner import Lookup, Prefix
    from .store import Store

    __version__: str

__all__ = [
    "BackendError",
    "ChunkKey",
    "ClosedError",
    "ConfigError",
    "Copied",
    "CorruptChunkError",
    "Event",
    "HostConfig",
    "Job",
    "KVStoreError",
    "Lookup",
    "Namespace",
    "NamespaceMismatchError",
    "NoSpaceError",
    "Prefetched",
    "Prefix",
    "ReadLease",
    "Stats",
    "Store",
    "StoreConfig",
    "TierConfig",
    "TierStats",
    "WorkerDiedError",
    "WriteLease",
    "content_key",
    "copy",
    "open",
    "prefix_keys",
]

_HOMES = {
    name: module
    for module, names in {
        "config": ["HostConfig", "StoreConfig", "TierConfig"],
        "copying": ["Copied", "copy"],
        "errors": [name for name in __all__ if name.endswith("Error")],
        "events": ["Event"],
        "jobs": ["Job", "Prefetched"],
        "keys": ["ChunkKey", "content_key", "prefix_keys"],
        "leases": ["ReadLease", "WriteLease"],
        "metrics": ["Stats", "TierStats"],
        "namespace": ["Namespace"],
        "opening": ["open"],
        "planner": ["Lookup", "Prefix"],
        "store": ["Store"],
    }.items()
    for name in names
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


if not TYPE_CHECKING:  # a type checker would take it that every name is here

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            thing = import_module("importlib.metadata").version("kvstore-tiers")
        elif name in _HOMES:
            module = import_module(f".{_HOMES[name]}", __name__)
            thing = getattr(module, "open_store" if name == "open" else name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = thing
        return thing
