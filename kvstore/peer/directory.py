"""Which peers hold which chunks, as their events tell: for whoever decides which peer a request names.

A directory is a hint and may be wrong both ways, for events are lost and come late: a peer that does not have
a chunk any more says so when it is asked. It is fed with events of stores (:meth:`kvstore.Store.events`), or
with the messages in which vLLM publishes its KV events; the keys are those of the events.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Sequence

import msgspec
from xxhash import xxh3_64_intdigest

from ..events import Event

__all__ = ["Directory"]

#: Where peers read from, as vLLM calls it.
_HOST_MEMORY = "CPU"


class _KvEvent(msgspec.Struct):
    type: str
    block_hashes: list[bytes | int] = []
    medium: str | None = None
    group_idx: int | None = None


class _Batch(msgspec.Struct, array_like=True):
    time: float
    events: list[_KvEvent]


class Directory:
    """Peers by key; of a bounded number of keys, the most recent.

    Parameters
    ----------
    limit : int
        Largest number of keys.

    Examples
    --------
    >>> directory = Directory()
    >>> directory.stored("peer://10.0.0.1:5710", [b"first", b"second"])
    >>> directory.stored("peer://10.0.0.2:5710", [b"first"])
    >>> directory.choose([b"first", b"second", b"third"])
    'peer://10.0.0.1:5710'
    """

    def __init__(self, limit: int = 1 << 20) -> None:
        self._limit = limit
        self._holders: OrderedDict[Hashable, set[str]] = OrderedDict()
        self._decoder = msgspec.msgpack.Decoder(_Batch)

    def __len__(self) -> int:
        return len(self._holders)

    def choose(self, keys: Sequence[Hashable], *, among: Collection[str] | None = None) -> str | None:
        """The peer that holds the longest head of `keys`; None when nobody holds the first.

        Of several, requests that differ in their last keys get different ones.

        Parameters
        ----------
        keys : sequence
            In the order in which a request needs them.
        among : collection of str, optional
            Peers that come into question; by default all.
        """
        best: set[str] = set()
        left: set[str] | None = None if among is None else set(among)
        for key in keys:
            holders = self._holders.get(key, set())
            left = set(holders) if left is None else left & holders
            if not left:
                break
            best = left
        return max(best, key=lambda peer: xxh3_64_intdigest(f"{peer} {keys[-1]!r}".encode()), default=None)

    # What peers tell.

    def stored(self, peer: str, keys: Iterable[Hashable]) -> None:
        """`peer` holds `keys` in its host memory."""
        for key in keys:
            self._holders.setdefault(key, set()).add(peer)
            self._holders.move_to_end(key)
        while len(self._holders) > self._limit:
            self._holders.popitem(last=False)

    def removed(self, peer: str, keys: Iterable[Hashable]) -> None:
        """`peer` holds `keys` no longer."""
        for key in keys:
            holders = self._holders.get(key, set())
            holders.discard(peer)
            if not holders:
                self._holders.pop(key, None)

    def cleared(self, peer: str) -> None:
        """`peer` holds nothing any more; also for one that has gone."""
        self.removed(peer, list(self._holders))

    def take_events(self, peer: str, events: Iterable[Event], *, host: str = "host") -> None:
        """Take in events of the store that `peer` serves; `host` is the name of its host tier."""
        for event in events:
            if event.target == host:
                self.stored(peer, event.keys)
            elif event.kind == "removed" and event.source == host:
                self.removed(peer, event.keys)

    def take_message(self, peer: str, payload: bytes) -> None:
        """Take in the last frame of a message in which vLLM publishes KV events of the engine at `peer`.

        Only what the engine says of its host memory counts; that it has cleared its cache, it says of the
        device. Of a model with several groups of layers the first stands for all.

        Raises
        ------
        ValueError
            It is no such message.
        """
        try:
            batch = self._decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise ValueError(f"not a batch of vLLM's KV events: {error}") from None
        for event in batch.events:
            if event.medium != _HOST_MEMORY or event.group_idx:
                continue
            if event.type == "BlockStored":
                self.stored(peer, event.block_hashes)
            elif event.type == "BlockRemoved":
                self.removed(peer, event.block_hashes)
