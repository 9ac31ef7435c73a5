"""Objects without content in the directory of a namespace: for listing and deleting they are chunks."""

from __future__ import annotations

import os
import time
from pathlib import Path

from kvstore.namespace import Namespace

__all__ = ["litter"]

#: Seconds since the garbage was used.
LONG_AGO = 1e6


def litter(root: Path, namespace: Namespace, count: int) -> None:
    """Make `count` objects in `root` that nobody has used for long."""
    space = root / namespace.directory
    for fan in range(256):
        (space / f"{fan:02x}").mkdir(parents=True, exist_ok=True)
    when = time.time() - LONG_AGO
    for _ in range(count):
        name = os.urandom(16).hex()
        fd = os.open(f"{space}/{name[:2]}/{name}.kv", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(fd, 8192)
        os.utime(fd, (when, when))
        os.close(fd)
