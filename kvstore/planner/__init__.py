"""Decisions without I/O; :mod:`kvstore.planner.core` says how the parts fit."""

from .core import Lookup, Planner
from .erase import Erasure
from .prefix import Prefix
from .request import Fetch
from .tier import Direction, Tally, TierState

__all__ = ["Direction", "Erasure", "Fetch", "Lookup", "Planner", "Prefix", "Tally", "TierState"]
