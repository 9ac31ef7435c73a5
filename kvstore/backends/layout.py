"""Names of the objects of a namespace, and what a name found on storage stands for.

``docs/reference/format.md`` specifies them. Names are relative to the directory of the namespace and use
``/``:

- ``namespace.json``: the manifest
- ``<ab>/<key hex>.kv``: a chunk; ``<ab>`` are the first two digits of the key
- ``<name>.<writer>.tmp``: a file that is being written, beside the name it will get
- ``quarantine/<key hex>.<nanoseconds>.bad``: a bad object that was moved aside
"""

from __future__ import annotations

import itertools
import os
import re
import time
from enum import Enum
from typing import NamedTuple

__all__ = [
    "MANIFEST",
    "Entry",
    "Kind",
    "classify",
    "is_namespace",
    "object_name",
    "quarantine_name",
    "temp_name",
]

MANIFEST = "namespace.json"

_OBJECT = re.compile(r"(?P<fan>[0-9a-f]{2})/(?P<key>(?P=fan)(?:[0-9a-f]{2}){15,63})\.kv")
_QUARANTINED = re.compile(r"quarantine/(?P<key>(?:[0-9a-f]{2}){16,64})\.[0-9]+\.bad")
_NAMESPACE = re.compile(r"[0-9a-f]{32}")

_process_token = os.urandom(8).hex()
_serial = itertools.count()


class Kind(Enum):
    """What a name stands for."""

    OBJECT = "object"
    TEMP = "temp"
    MANIFEST = "manifest"
    QUARANTINED = "quarantined"
    FOREIGN = "foreign"


class Entry(NamedTuple):
    """One file of a namespace: `size` in bytes on storage, `mtime` in seconds since the epoch (0: unknown).

    ``key`` is that of the name, and None unless the kind is OBJECT or QUARANTINED.
    """

    name: str
    kind: Kind
    key: bytes | None
    size: int
    mtime: float


def object_name(key: bytes) -> str:
    """Name of the object of `key`."""
    digits = key.hex()
    return f"{digits[:2]}/{digits}.kv"


def temp_name(name: str) -> str:
    """A name beside `name` that no other writer, thread, process or host uses."""
    return f"{name}.{os.getpid():x}-{_process_token}-{next(_serial):x}.tmp"


def quarantine_name(key: bytes) -> str:
    """Where a bad object of `key` goes."""
    return f"quarantine/{key.hex()}.{time.time_ns()}.bad"


def is_namespace(directory: str) -> bool:
    """Whether a directory under a tier's root is named as a namespace is: a fingerprint in hex."""
    return _NAMESPACE.fullmatch(directory) is not None


def classify(name: str) -> tuple[Kind, bytes | None]:
    """What `name` stands for, and its key if it has one."""
    if match := _OBJECT.fullmatch(name):
        return Kind.OBJECT, bytes.fromhex(match["key"])
    if name == MANIFEST:
        return Kind.MANIFEST, None
    if match := _QUARANTINED.fullmatch(name):
        return Kind.QUARANTINED, bytes.fromhex(match["key"])
    return (Kind.TEMP if name.endswith(".tmp") else Kind.FOREIGN), None
