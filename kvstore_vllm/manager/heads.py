"""Which chunks of a request are worth having: pure arithmetic over keys, no store and no clock.

vLLM loads a *head* of a request: in groups with full attention every chunk from the first on that the device
lacks, in groups with a window (sliding window, local attention, recurrent state) the last chunks before the
head's end. One chunk that is missing ends the head. So a head is chosen as a whole, and the group that
reaches least far says how long it is.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

__all__ = ["GroupInfo", "Heads", "group_of"]

#: What a key of vLLM's ends with: the number of its group, big-endian.
_SUFFIX = 4

_Predicate = Callable[[bytes], bool]


@dataclass(frozen=True)
class GroupInfo:
    """What the manager knows of one group of layers.

    Attributes
    ----------
    index : int
        Number of the group, as keys end with it.
    tokens_per_block : int
        A key that ends elsewhere than at the end of a block stands for a partial tail.
    window_chunks : int or None
        Chunks at the end of a head that the group needs; None for all of them.
    """

    index: int
    tokens_per_block: int
    window_chunks: int | None


def group_of(key: bytes) -> int:
    """Number of the group that a key of vLLM's belongs to."""
    return int.from_bytes(key[-_SUFFIX:], "big")


@dataclass
class _Run:
    """Keys of one group in order, from `base` tokens on, and where the chunk of each ends."""

    window: int | None
    base: int = 0
    keys: list[bytes] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    @property
    def last(self) -> int:
        """Where the last chunk ends."""
        return self.ends[-1] if self.ends else self.base

    def begin(self, place: int) -> None:
        """Leave out what is before `place`."""
        self.base = self.ends[place - 1] if place else self.base
        del self.keys[:place], self.ends[:place]

    def resident_before(self, place: int, resident: _Predicate) -> int:
        """Where the run of resident keys begins that reaches up to `place`."""
        while place and resident(self.keys[place - 1]):
            place -= 1
        return place

    def reach(self, available: _Predicate) -> int:
        """Tokens up to the first key that is not available."""
        end = self.base
        for key, chunk_end in zip(self.keys, self.ends, strict=True):
            if not available(key):
                break
            end = chunk_end
        return end

    def window_end(self, most: int, available: _Predicate) -> int:
        """Tokens, `most` or fewer, at which the last window ends that is available as a whole.

        A window that begins before the first key may be shorter.
        """
        most = min(most, self.last)
        last, found = bisect_left(self.ends, most), 0
        for place in range(last, -1, -1):
            found = found + 1 if place < len(self.keys) and available(self.keys[place]) else 0
            if found == self.window:
                break
        return min(most, self.ends[place + found - 1]) if found else self.base


class Heads:
    """The heads that a request can have.

    Parameters
    ----------
    positions : mapping
        Key -> number of tokens up to the end of its chunk; within a group in the order of the tokens.
    groups : iterable of GroupInfo
    trigger : bytes
        The first key, in the order in which vLLM asks, that is not in host memory. What is before it and not
        in host memory either is on the device.
    resident : callable
        Whether a key is in host memory.
    most : int, optional
        Tokens beyond the beginning of `trigger`'s chunk that may be loaded.

    Attributes
    ----------
    start : int
        Tokens before `trigger`'s chunk.
    """

    def __init__(
        self,
        positions: Mapping[bytes, int],
        groups: Iterable[GroupInfo],
        trigger: bytes,
        resident: _Predicate,
        most: int | None = None,
    ) -> None:
        runs = _by_group(positions, groups)
        self._full = [run for run in runs.values() if run.window is None]
        self._windowed = [run for run in runs.values() if run.window is not None]
        own = runs[group_of(trigger)]
        place = own.keys.index(trigger)
        self.start = own.ends[place - 1] if place else 0
        self._most = None if most is None else self.start + most
        if own.window is None:
            first = own.resident_before(place, resident)
            base = own.ends[first - 1] if first else 0
            for run in runs.values():
                run.begin(bisect_right(run.ends, base))
        else:  # the groups before it are in host memory as far as they were asked for
            for run in self._full:
                run.begin(run.resident_before(len(run.keys), resident))
        self._links = {key for run in self._full for key in run.keys} if self._windowed else None

    def __iter__(self) -> Iterator[bytes]:
        for run in (*self._full, *self._windowed):
            yield from run.keys

    def is_link(self, key: bytes) -> bool:
        """Whether a head ends before `key` when it is missing."""
        return self._links is None or key in self._links

    def longest(self, available: _Predicate, most: int | None = None) -> int:
        """Tokens of the longest head, of at most `most` tokens, of which everything is available."""
        end = max((run.last for run in (*self._full, *self._windowed)), default=0)
        end = min(limit for limit in (end, self._most, most) if limit is not None)
        for run in self._full:
            end = min(end, run.reach(available))
        before = -1
        while end != before:  # where one window ends, another has to be looked at again
            before = end
            for run in self._windowed:
                end = run.window_end(end, available)
        return end

    def wanted(self, end: int) -> list[bytes]:
        """The keys that a head of `end` tokens consists of, in the order in which to promote them."""
        keys: list[bytes] = []
        for run in self._full:
            keys += run.keys[: bisect_right(run.ends, end)]
        for run in self._windowed:
            last = bisect_left(run.ends, end) + 1 if end > run.base else 0
            # One more than the window: it may begin anywhere within its first chunk.
            keys += run.keys[max(0, last - (run.window or 0) - 1) : last]
        return keys

    def fitting(self, available: _Predicate, missing: _Predicate, slots: int) -> int:
        """Tokens of the longest head of which no more than `slots` keys are missing."""
        end = self.longest(available)
        while end:
            over = sum(map(missing, self.wanted(end))) - slots
            if over <= 0:
                return end
            end = self.longest(available, self._shorter(end, over, missing))
        return 0

    def _shorter(self, end: int, over: int, missing: _Predicate) -> int:
        """A head without the last `over` missing links of one of `end` tokens."""
        run = (self._full or self._windowed)[0]
        last = min(bisect_left(run.ends, end), len(run.keys) - 1)
        for place in range(last, -1, -1):
            over -= missing(run.keys[place])
            if over <= 0 or not self._full:
                return run.ends[place - 1] if place else 0
        return 0


def _by_group(positions: Mapping[bytes, int], groups: Iterable[GroupInfo]) -> dict[int, _Run]:
    """Keys of whole chunks by group."""
    infos = {group.index.to_bytes(_SUFFIX, "big"): group for group in groups}
    runs = {suffix: _Run(info.window_chunks) for suffix, info in infos.items()}
    for key, end in positions.items():
        suffix = key[-_SUFFIX:]
        if suffix in runs and not end % infos[suffix].tokens_per_block:
            runs[suffix].keys.append(key)
            runs[suffix].ends.append(end)
    return {infos[suffix].index: run for suffix, run in runs.items()}
