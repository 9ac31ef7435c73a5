"""Events as the planner words them: one function for each thing that happens to chunks."""

from __future__ import annotations

from collections.abc import Iterable

from ..engine.base import Verb
from ..events import Event, Locality
from .tier import READS, TierState

__all__ = ["breaker_event", "corrupt", "evicted", "promoted", "removed", "stored", "written"]


def stored(keys: Iterable[bytes], host: str) -> Event:
    """A caller's chunks are in host memory."""
    return Event("stored", tuple(keys), None, host, "local")


def evicted(keys: Iterable[bytes], host: str) -> Event:
    """Chunks left host memory."""
    return Event("removed", tuple(keys), host, None, "local")


def written(keys: Iterable[bytes], host: str, tier: TierState) -> Event:
    """A secondary tier has chunks that it had not."""
    return Event("stored", tuple(keys), host, tier.name, _locality(tier))


def promoted(keys: Iterable[bytes], host: str, tier: TierState) -> Event:
    """Chunks came up from a secondary tier."""
    return Event("promoted", tuple(keys), tier.name, host, _locality(tier))


def removed(keys: Iterable[bytes], tier: TierState) -> Event:
    """Chunks left a secondary tier."""
    return Event("removed", tuple(keys), tier.name, None, _locality(tier))


def corrupt(key: bytes, tier: TierState, why: str) -> Event:
    """A secondary tier held something else under `key`."""
    return Event("corrupt", (key,), tier.name, None, _locality(tier), why)


def breaker_event(tier: TierState, verb: Verb, *, up: bool, why: str = "") -> Event:
    """One direction of a tier went down, or came back."""
    direction = "upkeep" if verb is Verb.COLLECT else "reads" if verb in READS else "writes"
    detail = f"{direction}: {why}" if why else direction
    return Event("tier-up" if up else "tier-down", (), tier.name, None, _locality(tier), detail)


def _locality(tier: TierState) -> Locality:
    return "remote" if tier.remote else "local"
