"""Eviction policies by name."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Final

from ..errors import ConfigError
from .arc import ARCPolicy
from .base import EvictionPolicy
from .lru import LRUPolicy
from .priority import DEFAULT_PRIORITY, PriorityPolicy

__all__ = [
    "DEFAULT_PRIORITY",
    "POLICIES",
    "ARCPolicy",
    "EvictionPolicy",
    "LRUPolicy",
    "PriorityPolicy",
    "make_policy",
]

_CLASSES: Final[dict[str, type[EvictionPolicy]]] = {
    "arc": ARCPolicy,
    "lru": LRUPolicy,
    "priority": PriorityPolicy,
}

POLICIES: Final = tuple(_CLASSES)
"""Names that :func:`make_policy` takes, sorted."""


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """Make an eviction policy.

    Parameters
    ----------
    name : str
        One of :data:`POLICIES`.
    capacity : int
        Number of chunks that can be resident, at least 1.

    Raises
    ------
    ConfigError
        There is no such policy, or the capacity is below one chunk.
    """
    if name not in _CLASSES:
        nearest = get_close_matches(name.lower(), POLICIES, n=1, cutoff=0.0)[0]
        raise ConfigError(f"unknown policy {name!r}; did you mean {nearest!r}? Valid: {', '.join(POLICIES)}")
    if capacity < 1:
        raise ConfigError(f"the capacity of policy {name!r} must be at least 1 chunk, not {capacity}")
    return _CLASSES[name](capacity)
