"""Run by ``test_memory.py`` in a process of its own: prints the bytes of resident memory per key of a case.

Keys are made while it is measured, for a key that nobody else holds belongs to the cost.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from resource import getpagesize

from kvstore.catalog import Catalog
from kvstore.policy import make_policy
from kvstore.presence import Presence

KEYS = 1_000_000


def resident_bytes() -> int:
    """Resident memory of this process."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * getpagesize()


def store(catalog: Catalog, keys: int) -> None:
    """Store chunks under new keys of 16 bytes, evicting one by one when the host is full."""
    for _ in range(keys):
        key = os.urandom(16)
        assert catalog.make_room(1, [key])
        catalog.publish(key, catalog.reserve(key), 4096)


def of_resident_chunks(policy: str) -> float:
    """Catalog and policy of a full host."""
    before = resident_bytes()
    catalog = Catalog(KEYS, make_policy(policy, KEYS))
    store(catalog, KEYS)
    used = resident_bytes() - before
    assert len(catalog.ready) == len(catalog.policy) == KEYS
    return used / KEYS


def of_ghosts() -> float:
    """What ARC remembers of evicted chunks, after everything resident has been used twice."""
    catalog = Catalog(KEYS, make_policy("arc", KEYS))
    store(catalog, KEYS)
    for key in catalog.ready:
        catalog.policy.access(key)
    before = resident_bytes()
    store(catalog, KEYS)
    used = resident_bytes() - before
    assert catalog.evictions == KEYS
    return used / KEYS


def of_presence() -> float:
    """What is remembered of a tier's keys; three times as many come as it may remember."""
    presence = Presence(KEYS)
    before = resident_bytes()
    for _ in range(3 * KEYS):
        presence.found(os.urandom(16), 0.0)
    used = resident_bytes() - before
    assert KEYS // 2 <= len(presence) <= KEYS
    return used / len(presence)


CASES: dict[str, Callable[[], float]] = {
    "chunk, lru": lambda: of_resident_chunks("lru"),
    "chunk, arc": lambda: of_resident_chunks("arc"),
    "ghost, arc": of_ghosts,
    "presence": of_presence,
}

if __name__ == "__main__":
    print(CASES[sys.argv[1]]())
