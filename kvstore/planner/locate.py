"""Where is a key? Walks the tiers in order, probing where nothing is known, and remembers the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..engine.base import Result, Status, Verb
from ..presence import Known
from .dispatch import Dispatcher
from .tier import Answer, Item, TierState

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
        Called with ``(key, now)`` when the walk for a key that had to be probed has ended.
    """

    def __init__(self, tiers: Sequence[TierState], dispatcher: Dispatcher) -> None:
        self._tiers = tiers
        self._dispatcher = dispatcher
        self._outdated: set[bytes] = set()  # deleted since they were asked for: a yes says nothing
        self._tried_again: set[bytes] = (
            set()
        )  # a worker died with their probe, and they are being asked again
        self._walking: dict[bytes, int] = {}  # key -> index of the tier that is being asked
        self.on_located: Callable[[bytes, float], None] = lambda _key, _now: None
        dispatcher.register(Verb.PROBE, self)

    def where(self, key: bytes, now: float) -> tuple[TierState | None, Known]:
        """First tier that has `key`, as far as is known; nothing is asked.

        Returns
        -------
        tier, known
            A tier and PRESENT; a tier and UNKNOWN (the first that should be asked); ``(None, PROBING)``
            while a walk is under way; ``(None, ABSENT)`` when no tier has it.
        """
        if key in self._walking:
            return None, _PROBING
        first_unknown = None
        for tier in self._tiers:
            if not tier.readable(now) or key in tier.tombs:
                continue
            known = tier.presence.get(key)
            if known is _PRESENT:
                return tier, known
            if known is _UNKNOWN and first_unknown is None:
                first_unknown = tier
        return (None, _ABSENT) if first_unknown is None else (first_unknown, _UNKNOWN)

    def ask(self, keys: Sequence[tuple[bytes, TierState]]) -> int:
        """Start walks; returns how many of `keys`, from the front, could be taken on."""
        room = _MOST_PROBES - len(self._walking)
        by_tier: dict[int, list[Item]] = {}
        for key, tier in keys[: max(0, room)]:
            self._walking[key] = tier.index
            by_tier.setdefault(tier.index, []).append((key, -1, 0))
        for index, items in by_tier.items():
            self._dispatcher.enqueue(self._tiers[index], Verb.PROBE, items)
        return max(0, min(room, len(keys)))

    def age(self, now: float) -> None:
        """Forget what is too old."""
        for tier in self._tiers:
            tier.presence.age(now)

    def done(self, tier: TierState, answers: Sequence[Answer], now: float) -> None:
        """A tier has answered probes; whatever is not a yes sends the walk on."""
        for (key, _, _), result in answers:
            self._answered(tier, key, result, now)

    def late(self, tier: TierState, item: Item, result: Result, now: float) -> None:
        """What was true at the time of the question may not be any more."""

    def outdate(self, keys: Iterable[bytes]) -> None:
        """`keys` are being deleted: answers that are on their way are older than that."""
        self._outdated.update(key for key in keys if key in self._walking)

    def _answered(self, tier: TierState, key: bytes, result: Result, now: float) -> None:
        self._walking.pop(key, None)
        outdated = key in self._outdated
        self._outdated.discard(key)
        if result.status is Status.OK and not outdated:
            self._tried_again.discard(key)
            tier.presence.found(key, now)
        else:
            if result.status is Status.DIED and key not in self._tried_again:
                self._tried_again.add(key)  # no fault of the tier's: ask it once more
            else:
                self._tried_again.discard(key)
                tier.presence.lost(key, now)
            next_tier, known = self.where(key, now)
            if known is _UNKNOWN and next_tier is not None and self.ask([(key, next_tier)]):
                return
        self.on_located(key, now)
