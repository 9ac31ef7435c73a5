"""Names of the objects of a namespace, and what a name found on storage stands for.

``docs/reference/format.md`` specifies them. Names are relative to the directory of the namespace and use
``/``:

- ``namespace.json``: the manifest
- ``accounting/<name>``: what instances that share a capacity tell each other
- ``<ab>/<key hex>.kv``: a chunk; ``<ab>`` are the first two digits of the key
- ``<name>.<writer>.tmp``: a file that is being written, beside the name it will get
- ``quarantine/<name>.<nanoseconds>.bad``: what was moved aside; the name is the key in hex of a bad object,
  or that of a file that is not kvstore's, with ``_`` for ``/``
"""

from __future__ import annotations

import itertools
import os
import re
import time
from enum import Enum
from typing import NamedTuple

__all__ = [
    "ACCOUNTING",
    "MANIFEST",
    "Entry",
    "Kind",
    "aside_name",
    "classify",
    "follows",
    "is_namespace",
    "object_name",
    "temp_name",
]

ACCOUNTING = "accounting"
MANIFEST = "namespace.json"

_OBJECT = re.compile(r"(?P<fan>[0-9a-f]{2})/(?P<key>(?P=fan)(?:[0-9a-f]{2}){15,63})\.kv")
_QUARANTINED = re.compile(r"quarantine/(?:(?P<key>(?:[0-9a-f]{2}){16,64})|[^/]+)\.[0-9]+\.bad")
_NAMESPACE = re.compile(r"[0-9a-f]{32}")

_process_token = os.urandom(8).hex()
_serial = itertools.count()


class Kind(Enum):
    """What a name stands for."""

    OBJECT = "object"
    TEMP = "temp"
    MANIFEST = "manifest"
    ACCOUNTING = "accounting"
    QUARANTINED = "quarantined"
    FOREIGN = "foreign"


class Entry(NamedTuple):
    """One file of a namespace: `size` in bytes on storage, `mtime` in seconds since the epoch (0: unknown).

    ``key`` is that of the name; only objects have one, those that were QUARANTINED too.
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


def aside_name(name: str) -> str:
    """Where the file `name`, a bad object or not kvstore's at all, goes when it is moved aside."""
    key = classify(name)[1]
    return f"quarantine/{name.replace('/', '_') if key is None else key.hex()}.{time.time_ns()}.bad"


def follows(name: str, after: str) -> bool:
    """Whether a file called `name` comes after `after`; a directory, whether files below it may do.

    Names are ordered part by part: ``a/z`` comes before ``a.txt``. Every name comes after the empty one.
    """
    parts, mark = name.split("/"), after.split("/")
    return name != after and parts >= mark[: len(parts)]


def is_namespace(directory: str) -> bool:
    """Whether a directory under a tier's root is named as a namespace is: a fingerprint in hex."""
    return _NAMESPACE.fullmatch(directory) is not None


def classify(name: str) -> tuple[Kind, bytes | None]:
    """What `name` stands for, and its key if it has one."""
    if match := _OBJECT.fullmatch(name):
        return Kind.OBJECT, bytes.fromhex(match["key"])
    if name == MANIFEST:
        return Kind.MANIFEST, None
    if name.startswith(f"{ACCOUNTING}/"):
        return Kind.ACCOUNTING, None
    if match := _QUARANTINED.fullmatch(name):
        return Kind.QUARANTINED, bytes.fromhex(match["key"]) if match["key"] else None
    return (Kind.TEMP if name.endswith(".tmp") else Kind.FOREIGN), None
