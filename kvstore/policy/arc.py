"""Adaptive replacement cache, as Fig. 4 of Megiddo & Modha (FAST'03).

Residents are in two lists: T1, referenced once of late, and T2, referenced at least twice. Each has a list of
*ghosts*, keys that were evicted from it (B1, B2). A miss of a ghost shows which of the two lists was too
short, and moves the target size `p` of T1. The figure handles a miss in one step; here it comes in parts:

=============================  =========================================================================
``access(key)`` of a ghost     notes it in ``_missed``; nothing reads `p` before the next choice of victims
``victims(n, ..., incoming)``  per incoming key: Cases II and III (move `p`), REPLACE, and Case IV (discard)
``add(key)``                   what is left: the same without REPLACE, and the key enters T1 or T2
=============================  =========================================================================

So a batch chooses what single steps would have chosen, whether its keys were accessed all beforehand, one by
one, or not at all. Case IV discards before REPLACE in the figure and after the key has come in here, which
leaves the same lists.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain, islice, repeat

from .base import EvictionPolicy

__all__ = ["ARCPolicy"]

_NEW, _PROMISED, _FROM_B1, _FROM_B2 = range(4)
_COLDEST = False  # which end of an OrderedDict; by position, which popitem takes faster than by name


class _Ghosts:
    """Evicted keys, oldest first: a set for membership and a queue for order.

    It takes half of the memory of an OrderedDict, whose tables grow while it is turned over. A key that
    leaves out of turn stays in the queue, and is counted in ``stale`` so that it is skipped there, also when
    the same key has come back behind it.
    """

    __slots__ = ("keys", "order", "stale")

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.order: deque[bytes] = deque()
        self.stale: dict[bytes, int] = {}

    def append(self, key: bytes) -> None:
        self.keys.add(key)
        self.order.append(key)

    def remove(self, key: bytes) -> None:
        self.keys.remove(key)
        self.stale[key] = self.stale.get(key, 0) + 1
        if len(self.order) > 64 + len(self.keys) * 5 // 4:
            self._compact()

    def clear(self) -> None:
        self.keys.clear()
        self.order.clear()
        self.stale.clear()

    def skip(self, key: bytes) -> None:
        """The oldest left-over of `key` has been taken out of the queue."""
        count = self.stale.pop(key)
        if count > 1:
            self.stale[key] = count - 1

    def _compact(self) -> None:
        """Take all left-overs out of the queue."""
        for _ in range(len(self.order)):
            key = self.order.popleft()
            if key in self.stale:
                self.skip(key)
            else:
                self.order.append(key)


class _Cold:
    """The keys of one list that may go, coldest first, searched only as far as asked.

    The list itself loses its evicted keys in `commit`: it must not change while it is searched.
    """

    def __init__(
        self, keys: OrderedDict[bytes, None], ghosts: _Ghosts, evictable: Callable[[bytes], bool] | None
    ) -> None:
        self._keys, self._ghosts = keys, ghosts
        self._rest = iter(keys) if evictable is None else filter(evictable, keys)
        self._found: deque[bytes] = deque()
        self._evicted: list[bytes] = []

    def __len__(self) -> int:
        return len(self._keys) - len(self._evicted)

    def look_ahead(self, n: int) -> int:
        """Search for up to `n` keys; return how many there are."""
        self._found.extend(islice(self._rest, n))
        return len(self._found)

    def evict(self) -> bytes | None:
        """Make the next key a ghost; None when there is no more."""
        key = self._found.popleft() if self._found else next(self._rest, None)
        if key is not None:
            self._ghosts.append(key)
            self._evicted.append(key)
        return key

    def commit(self) -> None:
        """Take the evicted keys out of the list."""
        for key in self._evicted:
            del self._keys[key]


class ARCPolicy(EvictionPolicy):
    """Balance recency against frequency by what was missed.

    A ghost teaches once: further references to it count nothing until it has been resident again.

    Parameters
    ----------
    capacity : int
        Number of chunks that can be resident, at least 1. As many ghosts are remembered.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._t1: OrderedDict[bytes, None] = OrderedDict()  # coldest first
        self._t2: OrderedDict[bytes, None] = OrderedDict()
        self._b1 = _Ghosts()
        self._b2 = _Ghosts()
        self._b1_keys = self._b1.keys
        self._b2_keys = self._b2.keys
        self._most = 2 * capacity  # keys in the four lists
        self._p = 0.0
        self._missed: dict[bytes, None] = {}  # ghosts that `p` has still to learn from, oldest miss first
        self._taught: set[bytes] = set()  # ghosts that it has learned from
        self._promised: OrderedDict[bytes, None] = (
            OrderedDict()
        )  # left the ghosts, room is made, not resident yet
        self._unknown: bytes | None = (
            None  # accessed since the last add, and in no list: need not be looked up
        )

    def access(self, key: bytes) -> bool:
        """Record a reference to `key`: residents become frequent, ghosts teach."""
        t2 = self._t2
        if key in t2:
            t2.move_to_end(key)
            return True
        t1 = self._t1
        if key in t1:
            del t1[key]
            t2[key] = None
            return True
        if key in self._b1_keys or key in self._b2_keys:
            self._missed[key] = None
        elif key not in self._promised:
            self._unknown = key
        return False

    def add(self, key: bytes) -> None:
        """Make `key` resident: frequent when it was a ghost, recent when it is new."""
        unknown, self._unknown = self._unknown, None
        if key is not unknown:
            if key in self:
                self.access(key)
                return
            if self._recall(key) != _NEW:
                del self._promised[key]
                self._t2[key] = None
                return
        t1 = self._t1
        t1[key] = None
        recent = len(t1) + len(self._b1_keys)
        if recent > self.capacity:  # as _make_room, in place: every new key comes by here
            self._discard(self._b1)
        elif recent + len(self._t2) + len(self._b2_keys) > self._most:
            self._discard(self._b2)

    def renew_many(self, keys: Iterable[bytes]) -> None:
        """Make `keys` the most recent of the list that each is in."""
        t1, t2 = self._t1, self._t2
        for key in keys:
            if key in t1:
                t1.move_to_end(key)
            elif key in t2:
                t2.move_to_end(key)

    def remove(self, key: bytes) -> None:
        """Forget a resident key; it leaves no ghost."""
        self._t1.pop(key, None)
        self._t2.pop(key, None)

    def victims(
        self,
        n: int,
        evictable: Callable[[bytes], bool] | None = None,
        incoming: Sequence[bytes] = (),
    ) -> list[bytes]:
        """Evict `n` keys, or none, in the order in which single steps for `incoming` would evict them.

        Steps that would evict a key of `incoming` itself, or one that is not evictable, take the next in
        order, of the other list when there is none. Where `incoming` is longer than `n`, its first keys enter
        free room.
        """
        if n != 1 or evictable is not None or len(incoming) != 1:
            return self._choose(n, evictable, incoming)
        t1, t2 = self._t1, self._t2
        size = len(t1)
        if not size and not t2:
            return []
        (key,) = incoming
        missed = self._missed
        if missed and (len(missed) > 1 or key not in missed):
            self._settle(self._settled(incoming), incoming)
        where = _NEW if key is self._unknown else self._recall(key)
        if size and (not t2 or size > self._p or (where == _FROM_B2 and size == self._p)):
            victim, _ = t1.popitem(_COLDEST)
            ghosts = self._b1
        else:
            victim, _ = t2.popitem(_COLDEST)
            ghosts = self._b2
        ghosts.keys.add(victim)
        ghosts.order.append(victim)
        return [victim]

    def coldest(self, n: int) -> list[bytes]:
        """Up to `n` keys that would go first if new keys came in, with the target as it is now."""
        surplus = max(0, len(self._t1) - int(self._settled()))  # a size is above p when above its floor
        t1 = iter(self._t1)
        return list(islice(chain(islice(t1, surplus), self._t2, t1), n))

    def clear(self) -> None:
        """Forget residents, ghosts and the target."""
        self._t1.clear()
        self._t2.clear()
        self._b1.clear()
        self._b2.clear()
        self._p = 0.0
        self._missed.clear()
        self._taught.clear()
        self._promised.clear()
        self._unknown = None

    def __len__(self) -> int:
        return len(self._t1) + len(self._t2)

    def __contains__(self, key: object) -> bool:
        return key in self._t1 or key in self._t2

    def _learned(self, p: float, key: bytes) -> float:
        """What a miss of `key` makes of the target `p` (Cases II and III)."""
        b1, b2 = self._b1_keys, self._b2_keys
        if key in self._taught:
            return p
        if key in b1:
            return min(p + max(1.0, len(b2) / len(b1)), float(self.capacity))
        if key in b2:
            return max(p - max(1.0, len(b1) / len(b2)), 0.0)
        return p

    def _settled(self, incoming: Collection[bytes] = ()) -> float:
        """The target once it has learned from all that was missed but `incoming`, whose turn will come."""
        p = self._p
        if self._missed:
            coming = set(incoming)
            for key in self._missed:
                if key not in coming:
                    p = self._learned(p, key)
        return p

    def _settle(self, p: float, incoming: Collection[bytes]) -> None:
        """Make `p` the target, as :meth:`_settled` gave it for `incoming`, whose turn is next."""
        self._p = p
        if self._missed:
            self._taught.update(self._missed.keys() - set(incoming))
            self._missed.clear()

    def _recall(self, key: bytes) -> int:
        """Where `key` is remembered. A ghost teaches, and leaves the ghosts for a promised place in T2."""
        if key in self._b1_keys:
            ghosts, where = self._b1, _FROM_B1
        elif key in self._b2_keys:
            ghosts, where = self._b2, _FROM_B2
        else:
            return _PROMISED if key in self._promised else _NEW
        self._p = self._learned(self._p, key)
        ghosts.remove(key)
        self._unmark(key)
        self._promised[key] = None
        if len(self._promised) > self.capacity:  # the oldest was never added: its caller gave up
            self._promised.popitem(last=False)
        return where

    def _choose(
        self, n: int, evictable: Callable[[bytes], bool] | None, incoming: Sequence[bytes]
    ) -> list[bytes]:
        """The general case of :meth:`victims`: makes sure that `n` keys can go, then changes the lists."""
        p = self._settled(incoming)
        cold1 = _Cold(self._t1, self._b1, evictable)
        cold2 = _Cold(self._t2, self._b2, evictable)
        first, second = (cold1, cold2) if len(self._t1) > p else (cold2, cold1)
        missing = n - first.look_ahead(n)
        if n == 0 or second.look_ahead(missing) < missing:
            return []
        self._settle(p, incoming)
        return self._replace_many(n, cold1, cold2, incoming)

    def _replace_many(self, n: int, cold1: _Cold, cold2: _Cold, incoming: Sequence[bytes]) -> list[bytes]:
        """One step for each key of `incoming`, evicting in the last `n`; enough keys may go."""
        newcomers = returning = 0  # keys of the batch that belong to T1 and T2 already
        spare = len(incoming) - n
        chosen: list[bytes] = []
        for i, key in enumerate(chain(incoming, repeat(None, -spare))):
            where = _PROMISED if key is None else self._recall(key)
            if i >= spare:
                size = len(cold1) + newcomers
                from_t1 = size > self._p or (where == _FROM_B2 and size == self._p)
                first, second = (cold1, cold2) if from_t1 else (cold2, cold1)
                victim = first.evict()
                if victim is None:
                    victim = second.evict()
                assert victim is not None
                chosen.append(victim)
            if where == _NEW:
                newcomers += 1
                self._make_room(len(cold1) + newcomers, len(cold2) + returning)
            else:
                returning += 1
        cold1.commit()
        cold2.commit()
        return chosen

    def _make_room(self, t1: int, t2: int) -> None:
        """Case IV, after a new key has come in, for lists of these sizes."""
        recent = t1 + len(self._b1_keys)
        if recent > self.capacity:
            self._discard(self._b1)
        elif recent + t2 + len(self._b2_keys) > self._most:
            self._discard(self._b2)

    def _discard(self, ghosts: _Ghosts) -> None:
        """Forget the oldest of `ghosts`."""
        if not ghosts.keys:  # only when more keys are resident than the capacity
            return
        key = ghosts.order.popleft()
        while key in ghosts.stale:
            ghosts.skip(key)
            key = ghosts.order.popleft()
        ghosts.keys.remove(key)
        if self._missed or self._taught:
            self._unmark(key)

    def _unmark(self, key: bytes) -> None:
        """Drop the notes about a ghost that is one no longer."""
        self._missed.pop(key, None)
        self._taught.discard(key)
