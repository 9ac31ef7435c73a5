"""Copies between device and host that workers have been told to do, from the lease of their slots to its end.

vLLM completes a transfer by its keys, an unordered set; the leases know their order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from kvstore import ReadLease, Store, WriteLease

from ..acks import AckWords
from ..specs import SlotSpec
from .resets import Quarantine, Transfer

__all__ = ["Transfers"]

_Name = tuple[str, frozenset[bytes]]


class Transfers:
    """Transfers under way, and those that a reset has left without anybody to complete them.

    Parameters
    ----------
    store : Store
    acks : AckWords
    """

    def __init__(self, store: Store, acks: AckWords) -> None:
        self._store = store
        self._acks = acks
        self._stores: dict[_Name, list[Transfer]] = {}
        self._loads: dict[_Name, list[Transfer]] = {}
        self._tickets = {"store": 0, "load": 0}
        self._quarantine = Quarantine(acks)

    def __len__(self) -> int:
        return sum(map(len, (*self._stores.values(), *self._loads.values()))) + len(self._quarantine)

    @property
    def loading(self) -> bool:
        """Whether any loads are under way."""
        return bool(self._loads)

    def load(self, request: str, keys: Collection[bytes], stored: Sequence[bytes]) -> SlotSpec:
        """Begin to load `keys`, which the store knows as `stored`.

        Raises
        ------
        RuntimeError
            One of them is not in host memory, though a lookup has said so.
        """
        lease = self._store.read(stored)
        if lease.missing:
            lease.release()
            raise RuntimeError(f"{len(lease.missing)} chunks to load have left host memory")
        slots = lease.slots
        places = slots.values() if len(slots) == len(stored) else [slots[key] for key in stored]
        transfer = self._begin(self._loads, (request, frozenset(keys)), lease)
        return SlotSpec(np.fromiter(places, np.int64, len(stored)), transfer.ticket)

    def loaded(self, request: str, keys: Collection[bytes]) -> None:
        """A load has ended; one that is not known was dropped by a reset."""
        transfer = self._end(self._loads, (request, frozenset(keys)))
        if transfer is not None:
            transfer.give_up()

    def store(
        self,
        request: str,
        keys: Sequence[bytes],
        lease: WriteLease,
        slots: Sequence[int],
        *,
        tiers: Collection[str] | None,
    ) -> SlotSpec:
        """Begin to store `keys` into `slots`, which `lease` holds; they go on to `tiers`, or to all."""
        transfer = self._begin(self._stores, (request, frozenset(keys)), lease, tiers=tiers)
        return SlotSpec(np.fromiter(slots, np.int64, len(slots)), transfer.ticket)

    def stored(self, request: str, keys: Collection[bytes], *, success: bool) -> int:
        """A store has ended, well or not; returns how many chunks are lost because a worker has failed."""
        transfer = self._end(self._stores, (request, frozenset(keys)))
        if transfer is None:
            return 0
        lease = transfer.lease
        if success and isinstance(lease, WriteLease) and not self._acks.failed(transfer.ticket):
            lease.commit(tiers=transfer.tiers)
            return 0
        transfer.give_up()
        return len(lease)

    def drop(self) -> None:
        """vLLM drops all transfers: keep their leases until the workers are through with them."""
        for transfers in (self._stores, self._loads):
            for alike in transfers.values():
                self._quarantine.add(alike)
            transfers.clear()

    def sweep(self) -> None:
        """End the leases of dropped transfers that every rank has acknowledged."""
        self._quarantine.sweep()

    def close(self) -> None:
        """Let go of the arena's control page; nothing is begun or ended afterwards."""
        self._acks.close()

    def _begin(
        self,
        transfers: dict[_Name, list[Transfer]],
        name: _Name,
        lease: ReadLease | WriteLease,
        *,
        tiers: Collection[str] | None = None,
    ) -> Transfer:
        direction = "load" if isinstance(lease, ReadLease) else "store"
        self._tickets[direction] += 1
        transfer = Transfer(lease, self._tickets[direction], tiers)
        transfers.setdefault(name, []).append(transfer)
        return transfer

    def _end(self, transfers: dict[_Name, list[Transfer]], name: _Name) -> Transfer | None:
        alike = transfers.get(name)
        if alike is None:
            return None
        transfer = alike.pop(0)
        if not alike:
            del transfers[name]
        return transfer
