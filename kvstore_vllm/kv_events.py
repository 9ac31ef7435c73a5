"""Events of the store as events of vLLM, which publishes them for routers.

================  ========================================
store             vLLM
================  ========================================
``stored``        stored, in the medium of the target
``promoted``      stored, CPU
``removed``       removed, from the medium of the source
``corrupt``       removed, from the medium of the source
``tier-*``        nothing: no chunk has changed its place
================  ========================================

The host is the medium CPU, without locality or owner, as vLLM words it for its own host tier. Every other
tier is STORAGE; its owner is the name of the tier, its locality that of the event unless the configuration
gives one.

vLLM remembers what it has said of a chunk (tokens, parent) until every place has lost it whose removal is
*expected*. That of the host's chunks always comes. Tiers may be large, shared, and emptied by others: what
vLLM remembered for their sake would grow without end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent, OffloadKey

from kvstore.events import Event

__all__ = ["to_offloading"]


def to_offloading(
    events: Iterable[Event],
    *,
    host: str,
    epoch: bytes = b"",
    localities: Mapping[str, str | None] = MappingProxyType({}),
    silent: Collection[str] = (),
) -> Iterator[OffloadingEvent]:
    """Translate events, oldest first; neighbours that say the same of different chunks become one.

    Parameters
    ----------
    events : iterable of Event
    host : str
        Name of the host tier.
    epoch : bytes
        What every key ends with since the last reset of the cache. It is cut off; chunks of another epoch
        are out of reach, so that nothing is said of them.
    localities : mapping
        Tier -> "LOCAL" or "REMOTE", where the configuration knows better than the scheme of the tier's URL.
    silent : collection of str
        Tiers of which nothing is said.
    """
    pending: OffloadingEvent | None = None
    seen: set[OffloadKey] = set()
    for event in events:
        keys = _plain(event.keys, epoch)
        following = _translate(event, keys, host, localities) if keys else None
        if following is None or following.ownership in silent:
            continue
        if pending is not None and _alike(pending, following) and seen.isdisjoint(keys):
            pending.keys += keys
        else:
            if pending is not None:
                yield pending
            pending, seen = following, set()
        seen.update(keys)
    if pending is not None:
        yield pending


def _plain(keys: Iterable[bytes], epoch: bytes) -> list[OffloadKey]:
    """Keys of this epoch as vLLM knows them, each once."""
    end = -len(epoch) or None
    return [OffloadKey(key[:end]) for key in dict.fromkeys(keys) if key.endswith(epoch)]


def _translate(
    event: Event, keys: list[OffloadKey], host: str, localities: Mapping[str, str | None]
) -> OffloadingEvent | None:
    removed = event.kind in ("removed", "corrupt")
    place = event.source if removed else event.target
    if place is None:
        return None
    if place == host:
        return OffloadingEvent(keys, Medium.CPU, removed, removal_expected=not removed)
    locality = Locality(localities.get(place) or event.locality.upper())
    return OffloadingEvent(keys, Medium.STORAGE, removed, locality, ownership=place)


def _alike(one: OffloadingEvent, other: OffloadingEvent) -> bool:
    """Whether two events differ in their keys at most."""
    return (one.medium, one.removed, one.ownership, one.locality) == (
        other.medium,
        other.removed,
        other.ownership,
        other.locality,
    )
