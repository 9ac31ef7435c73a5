"""Leases: counted holds on host slots, which end with the ``with`` block that took them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from .holding import Holding
from .planner import Fetch
from .serving import Serving

__all__ = ["ReadLease", "WriteLease"]


class _Lease(Holding):
    """Views of host slots by key, valid until the lease ends; made in a turn of the store."""

    def __init__(
        self, store: Serving, slots: dict[bytes, int], end: Callable[[Any], None], what: object
    ) -> None:
        super().__init__(store._holds, store._settle, end, what)
        self._store = store
        self._slots = slots
        self._views: dict[bytes, memoryview] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._slots)

    def __getitem__(self, key: bytes) -> memoryview:
        """The view of `key`; KeyError when the lease has none, ValueError when it has ended."""
        if self.ended:
            raise ValueError("the lease has ended; copy what you need before that")
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self._view(self._slots[key], key)
        return view

    def items(self) -> Iterator[tuple[bytes, memoryview]]:
        """Pairs of key and view, in the order asked for."""
        for key in self._slots:
            yield key, self[key]

    @property
    def slots(self) -> dict[bytes, int]:
        """Slot of each key in the arena, for whoever copies by address."""
        return dict(self._slots)

    def _view(self, slot: int, key: bytes) -> memoryview:
        raise NotImplementedError

    def give_back(self) -> None:
        """Give the slots back; the lease ends. A second call does nothing."""
        super().give_back()
        self._forget_views()

    def _forget_views(self) -> None:
        """Invalidate the views."""
        for view in self._views.values():
            try:
                view.release()
            except BufferError:  # an array over it is still alive: its owner has been told
                pass
        self._views.clear()


class ReadLease(_Lease):
    """Read-only views of chunks in host memory, exactly as long as their payloads. Nothing is copied.

    Attributes
    ----------
    missing : list of bytes
        Keys asked for that are not in host memory.
    """

    def __init__(self, store: Serving, slots: dict[bytes, int], missing: list[bytes]) -> None:
        self._feeds: list[Fetch] = []
        super().__init__(store, slots, store._release, (slots, self._feeds))
        self.missing = missing

    def release(self) -> None:
        """End the lease; a second call does nothing."""
        self.give_back()

    def _view(self, slot: int, key: bytes) -> memoryview:
        return self._store._payload(slot).toreadonly()


class WriteLease(_Lease):
    """Writable views of slots to be filled; leaving the block commits, an exception aborts.

    A view is as long as a chunk can be, and zeroed: what is not filled is zero, never what another chunk
    left there. What is shorter is said with :meth:`set_length`. Whoever copies by address, into
    :attr:`slots`, gets no zeros, and has to fill every byte or say the length.

    Attributes
    ----------
    present : list of bytes
        Keys asked for that are there, or being filled by somebody else: nothing to do.
    refused : list of bytes
        Keys that got no slot, from the first that did not fit.
    """

    def __init__(
        self, store: Serving, slots: dict[bytes, int], asked: Sequence[bytes], refused: list[bytes]
    ) -> None:
        super().__init__(store, slots, store._abort, slots)
        left_out = set(refused)
        self.refused = refused
        self.present = [key for key in dict.fromkeys(asked) if key not in slots and key not in left_out]
        self._lengths: dict[bytes, int] = {}

    def set_length(self, key: bytes, length: int) -> None:
        """Say that the chunk of `key` has `length` bytes, fewer than a whole chunk."""
        if not 0 <= length <= self._store.chunk_size:
            raise ValueError(f"length {length} is not between 0 and the chunk size, {self._store.chunk_size}")
        if key not in self._slots:
            raise KeyError(key)
        self._lengths[key] = length

    def commit(self, *, tiers: Collection[str] | None = None) -> None:
        """Make the chunks readable, and start their way to the tiers; the lease ends.

        Parameters
        ----------
        tiers : collection of str, optional
            Names of the tiers that they go to, of those that are written at all; by default all. With none
            they stay in host memory, for as long as eviction leaves them there.

        Raises
        ------
        ConfigError
            There is no such tier; the lease goes on.
        """
        if not self.ended:
            self._store._turn(partial(self._publish, tiers))
            self._forget_views()

    def abort(self) -> None:
        """Give the slots back; the lease ends."""
        self.give_back()

    def _publish(self, tiers: Collection[str] | None, now: float) -> None:
        whole = self._store.chunk_size
        chunks = [(key, slot, self._lengths.get(key, whole)) for key, slot in self._slots.items()]
        self._store._commit(chunks, now, tiers=tiers)
        self.resolve()

    def _view(self, slot: int, key: bytes) -> memoryview:
        view = self._store._slot(slot)
        view[:] = self._store._zeros
        return view

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.abort()  # what was not committed, for whatever reason
