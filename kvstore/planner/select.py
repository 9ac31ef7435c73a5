"""Which tiers a request is about, and which peers: names -> tiers.

A tier ``peer://`` without an address is a number of *places* for peers that requests name. A place has one
peer until another needs it: then that is forgotten, and the place connects elsewhere with its next batch. It
stays as long as anything is under way that names the peer, also in other tiers, as it may come to the place
later. A peer that finds every place in use is left out, and its chunks count as missing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..address import Address, is_allowed
from ..errors import ConfigError
from ..health import Breaker
from ..presence import Presence
from ..remedies import nearest
from .tier import TierState

__all__ = ["Selector"]

_PEER = "peer://"
#: Seconds for which a place is kept for its peer after a request has named it.
_KEPT = 1.0


class Selector:
    """Finds tiers by name, and gives places to peers.

    Parameters
    ----------
    tiers : sequence of TierState
        In order.
    """

    def __init__(self, tiers: Sequence[TierState]) -> None:
        self._by_name = {tier.name: tier for tier in tiers if not tier.config.dials}
        self._places = [tier for tier in tiers if tier.config.dials]
        self._taken: dict[str, TierState] = {}  # as peers are named -> their places

    def select(self, names: Collection[str], now: float) -> list[TierState]:
        """The tiers with these names, in order; a peer is named ``peer://host:port``.

        Raises
        ------
        ConfigError
            There is no such tier, or no tier that lets requests name this peer.
        """
        if isinstance(names, str):
            raise ConfigError(f"tiers are given as a list of names: [{names!r}]")
        found = set()
        for name in names:
            tier = self.find(name) or self._place_for(name, now)
            if tier is not None:
                tier.named = now
                found.add(tier)
        return sorted(found, key=lambda tier: tier.index)

    def find(self, name: str) -> TierState | None:
        """The tier with this name; None for a peer that has no place, and for what is none."""
        return self._by_name.get(name) or self._taken.get(name)

    def is_up(self, name: str, now: float) -> bool:
        """Whether the tier with this name may be asked for chunks, or a peer that has no place could get one.

        Raises
        ------
        ConfigError
            As for :meth:`select`.
        """
        tier = self.find(name)
        if tier is None:
            return any(place.readable(now) for place in self._places_of(name) if _is_idle(place, now))
        return tier.readable(now)

    def stored_in(self, names: Collection[str]) -> list[TierState]:
        """The tiers with these names, for chunks on their way down.

        Raises
        ------
        ConfigError
            There is no such tier; peers fill their memory themselves.
        """
        for name in names:
            if name not in self._by_name:
                raise self._unknown(name)
        return [self._by_name[name] for name in names]

    def _place_for(self, name: str, now: float) -> TierState | None:
        """A place for a peer that has none; None while there is none to be had."""
        places = self._places_of(name)
        idle = [place for place in places if _is_idle(place, now)]
        if not idle:
            custom = places[0].counters.custom
            custom["peer_crowded"] = custom.get("peer_crowded", 0.0) + 1
            return None
        place = min(idle, key=lambda place: place.named)
        self._taken = {name: other for name, other in self._taken.items() if other is not place}
        place.address = str(self._address(name)).removeprefix("tcp://")
        place.presence = Presence()
        place.reads.breaker = Breaker()
        place.last_error = ""
        self._taken[name] = place
        return place

    def _places_of(self, name: str) -> list[TierState]:
        """The places that a peer may have."""
        host = self._address(name).host
        places = [place for place in self._places if is_allowed(host, place.config.allow)]
        if not places:
            raise ConfigError(
                f"peer {name!r}: no tier lets requests name this host; "
                f"add a tier such as peer://?allow={host}"
            )
        return places

    def _address(self, name: str) -> Address:
        if not name.startswith(_PEER):
            raise self._unknown(name)
        try:
            return Address.parse(name.removeprefix(_PEER))
        except ValueError as error:
            raise ConfigError(f"peer {name!r}: {error}") from None

    def _unknown(self, name: str) -> ConfigError:
        known = self._by_name
        return ConfigError(
            f"no tier {name!r}; {nearest(name, known) if known else 'there are no secondary tiers'}"
        )


def _is_idle(place: TierState, now: float) -> bool:
    """Whether a place may go to another peer."""
    return not (place.expected or len(place.reads) or place.reads.in_flight or now - place.named < _KEPT)
