"""What the kernel tells of a process's memory."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["mapped", "mapped_total"]


def mapped(base: int, field: str) -> int:
    """A figure in bytes of this process's mapping at `base`."""
    of_mapping = Path("/proc/self/smaps").read_text().partition(f"{base:x}-")[2]
    found = re.search(rf"^{field}:\s+(\d+) kB", of_mapping, re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def mapped_total(field: str) -> int:
    """A figure in bytes of this whole process."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024
