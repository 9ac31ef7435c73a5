"""A tiered, content-addressed store for KV-cache chunks: host memory over any fsspec filesystem.

>>> import kvstore
>>> with kvstore.open("ram://?capacity=4MiB", chunk_size="64KiB") as store:
...     key = store.add(b"some bytes")
...     store.get(key)
b'some bytes'
"""

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
from .planner import Lookup
from .store import Store

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
