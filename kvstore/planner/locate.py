"""Where is a key? Walks the tiers in order, probing where nothing is known, and remembers the answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from ..engine.base import Result, Status, Verb
from ..presence import Known
from .answers import Answers
from .dispatch import Dispatcher
from .tier import Item, TierState

__all__ = ["Locator"]

#: Keys that may wait for a probe at a time; beyond, the answer is MISS.
_MOST_PROBES = 1 << 18

# To look up a member of an enum costs a tenth of a microsecond before Python 3.12.
_UNKNOWN, _PROBING, _PRESENT, _ABSENT = Known


class Locator:
    """Answers from presence and asks for what it does not know.

    Parameters
    ----------
    tiers : sequence of TierState
    dispatcher : Dispatcher

    Attributes
    ----------
    on_located : callable
        Called with ``(key, next_tier)`` when a tier has answered a probe: the walk goes on to `next_tier`, or
        ends with None.
    """

    def __init__(self, tiers: Sequence[TierState], dispatcher: Dispatcher) -> None:
        self._tiers = tiers
        self._usual = [tier for tier in tiers if not tier.config.dials]
        self._dispatcher = dispatcher
        # For each tier: the keys that it is being asked for, and which tiers their walks may go on to.
        self._walking: list[dict[bytes, Sequence[TierState]]] = [{} for _ in tiers]
        self._outdated: list[set[bytes]] = [set() for _ in tiers]  # deleted meanwhile: a yes says nothing
        self._tried_again: list[set[bytes]] = [set() for _ in tiers]  # being asked again: a worker died
        self.on_located: Callable[[bytes, TierState | None], None] = lambda _key, _next: None
        dispatcher.register(Verb.PROBE, self)

    def among(self, tiers: Sequence[TierState] | None) -> Sequence[TierState]:
        """The tiers that a request for `tiers` is about: by default all that have a place to ask."""
        return self._usual if tiers is None else tiers

    def askable(self, now: float, tiers: Sequence[TierState] | None = None) -> list[TierState]:
        """Those of `tiers`, by default of all, that may be asked for chunks at time `now`, in order."""
        return [tier for tier in self.among(tiers) if tier.readable(now)]

    def where(
        self, key: bytes, askable: Sequence[TierState], tiers: Sequence[TierState] | None = None
    ) -> tuple[TierState | None, Known]:
        """First of the `askable` among `tiers` that has `key`, as far as is known; nothing is asked.

        Returns
        -------
        tier, known
            A tier and PRESENT; a tier and UNKNOWN (the first that should be asked); ``(None, PROBING)``
            while one of `tiers` is being asked, also one that may not be asked for more until it has
            answered; ``(None, ABSENT)`` when no tier has it.
        """
        first_unknown = None
        for tier in askable:
            if key in tier.tombs:
                continue
            known = tier.presence.get(key)
            if known is _PRESENT:
                return tier, known
            if known is _UNKNOWN and first_unknown is None:
                first_unknown = tier
        if any(key in self._walking[tier.index] for tier in self.among(tiers)):
            return None, _PROBING
        return (None, _ABSENT) if first_unknown is None else (first_unknown, _UNKNOWN)

    def ask(self, keys: Sequence[tuple[bytes, TierState]], tiers: Sequence[TierState] | None = None) -> int:
        """Start walks over `tiers`, by default all; returns how many of `keys`, from the front, could be
        taken on."""
        room = _MOST_PROBES - sum(map(len, self._walking))
        taken = max(0, min(room, len(keys)))
        tiers = self.among(tiers)
        by_tier: dict[int, list[Item]] = {}
        for key, tier in keys[:taken]:
            self._walking[tier.index][key] = tiers
            by_tier.setdefault(tier.index, []).append((key, -1, 0))
        self.expect(tiers, taken)
        for index, items in by_tier.items():
            self._dispatcher.enqueue(self._tiers[index], Verb.PROBE, items)
        return taken

    def expect(self, tiers: Sequence[TierState] | None, more: int) -> None:
        """Count walks and promotions that have begun, or ended: until then no place of theirs goes to another
        peer."""
        if tiers is None or tiers is self._usual:
            return  # there are no places among these
        for tier in tiers:
            tier.expected += more

    def doubt(self, keys: Collection[bytes], tiers: Iterable[TierState]) -> None:
        """Forget that `keys` are not in `tiers`."""
        for tier in tiers:
            tier.presence.absent.discard_many(keys)

    def age(self, now: float) -> None:
        """Forget what is too old."""
        for tier in self._tiers:
            tier.presence.age(now)

    def done(self, tier: TierState, answers: Answers, now: float) -> None:
        """A tier has answered probes; whatever is not a yes sends the walk on."""
        for (key, _, _), result in answers:
            self._answered(tier, key, result, now)

    def late(self, tier: TierState, item: Item, result: Result, now: float) -> None:
        """What was true at the time of the question may not be any more."""

    def outdate(self, keys: Iterable[bytes]) -> None:
        """`keys` are being deleted: answers that are on their way are older than that."""
        for walking, outdated in zip(self._walking, self._outdated, strict=True):
            if walking:
                outdated.update(key for key in keys if key in walking)

    def _answered(self, tier: TierState, key: bytes, result: Result, now: float) -> None:
        tiers = self._walking[tier.index].pop(key)
        self.expect(tiers, -1)
        next_tier: TierState | None = None
        outdated, tried_again = self._outdated[tier.index], self._tried_again[tier.index]
        if result.status is Status.OK and key not in outdated:
            tried_again.discard(key)
            tier.presence.found(key, now)
        else:
            outdated.discard(key)
            if result.status is Status.DIED and key not in tried_again:
                tried_again.add(key)  # no fault of the tier's: ask it once more
            else:
                tried_again.discard(key)
                tier.presence.lost(key, now)
            unasked, known = self.where(key, self.askable(now, tiers), tiers)
            if known is _UNKNOWN and unasked is not None and self.ask([(key, unasked)], tiers):
                next_tier = unasked
        self.on_located(key, next_tier)
