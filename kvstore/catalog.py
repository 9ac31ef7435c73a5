"""Which chunk is in which host slot, and who holds it.

A slot is in exactly one state, and its owner follows from it:

=========== ====================================================== ===========================
state       meaning                                                left by
=========== ====================================================== ===========================
FREE        on the free list                                       ``reserve``
FILLING     somebody writes it; invisible to readers               ``publish``, ``discard``, ``condemn``
READY       holds a chunk; evictable while nobody leases it        ``evict``, ``remove``
DOOMED      removed while leased; freed by the last ``drop``       ``drop``
QUARANTINED its last writer has not answered; nobody may touch it  ``pardon``
=========== ====================================================== ===========================

Every slot has a generation, which moves on whenever the slot changes hands; whoever acts late on a slot
proves with the generation that it is still his. No thread, no clock, no I/O: the store's lock protects it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import IntEnum
from itertools import compress
from operator import not_

from .policy.base import EvictionPolicy

__all__ = ["Catalog", "SlotState"]


class SlotState(IntEnum):
    """State of one host slot; the module's table says how they follow each other."""

    FREE = 0
    FILLING = 1
    READY = 2
    DOOMED = 3
    QUARANTINED = 4


# To look up a member of an enum costs a tenth of a microsecond before Python 3.12.
_FREE, _FILLING, _READY, _DOOMED, _QUARANTINED = SlotState


class Catalog:
    """Index of the host tier.

    A dict to slot numbers plus arrays by slot: entry objects would double the memory per chunk.

    Parameters
    ----------
    slots : int
        Number of slots of the arena.
    policy : EvictionPolicy
        Orders the READY keys; its capacity is `slots`.

    Attributes
    ----------
    on_evict : callable
        Called with the keys of the chunks that eviction drops, before their slots are freed.
    """

    def __init__(self, slots: int, policy: EvictionPolicy) -> None:
        self.slots = slots
        self.policy = policy
        self.ready: dict[bytes, int] = {}
        self.filling: dict[bytes, int] = {}
        self.evictions = 0
        self.published = 0  # chunks that have become READY so far
        self.eased = 0  # slots that have become FREE, or READY and not leased, so far
        self.bytes = 0  # payload of the READY chunks
        self.on_evict: Callable[[Sequence[bytes]], None] = lambda _keys: None
        # Slot 0 is on top: the arena is pre-faulted from its beginning.
        self._free = list(range(slots - 1, -1, -1))
        self._state = bytearray(slots)
        self._key: list[bytes | None] = [None] * slots
        self._length = array("I", bytes(4 * slots))
        self._leases = array("I", bytes(4 * slots))
        self._generation = array("I", bytes(4 * slots))
        self._idle = 0  # READY and not leased
        self._quarantined = 0

    # What is known of a slot.

    @property
    def free(self) -> int:
        """Number of FREE slots."""
        return len(self._free)

    @property
    def idle(self) -> int:
        """Number of READY slots without a lease."""
        return self._idle

    @property
    def quarantined(self) -> int:
        """Number of QUARANTINED slots."""
        return self._quarantined

    def state(self, slot: int) -> SlotState:
        """State of `slot`."""
        return SlotState(self._state[slot])

    def key(self, slot: int) -> bytes | None:
        """Key of the chunk in `slot`, None when it holds none."""
        return self._key[slot]

    def length(self, slot: int) -> int:
        """Bytes of payload in a READY `slot`."""
        return self._length[slot]

    def leases(self, slot: int) -> int:
        """Number of holds on `slot`."""
        return self._leases[slot]

    def generation(self, slot: int) -> int:
        """How often `slot` has changed hands (modulo 2**32)."""
        return self._generation[slot]

    # Filling.

    def reserve(self, key: bytes) -> int:
        """Take a FREE slot for `key`, which must be neither READY nor FILLING; the slot is now FILLING."""
        return self.reserve_many((key,))[0]

    def reserve_many(self, keys: Sequence[bytes]) -> list[int]:
        """Do that for each of `keys`, which differ; there must be as many FREE slots."""
        free, state, owners = self._free, self._state, self._key
        slots = free[len(free) - len(keys) :]
        del free[len(free) - len(keys) :]
        for key, slot in zip(keys, slots, strict=True):
            state[slot] = _FILLING
            owners[slot] = key
        self.filling.update(zip(keys, slots, strict=True))
        return slots

    def owns(self, key: bytes, slot: int) -> bool:
        """Whether `slot` is still the one in which `key` is being filled (a delete may have come between)."""
        return self.filling.get(key) == slot

    def publish(self, key: bytes, slot: int, length: int) -> bool:
        """Make a FILLING slot READY; when `key` was deleted meanwhile, free the slot and return False."""
        return bool(self.publish_many((key,), (slot,), (length,))[0])

    def publish_many(
        self, keys: Sequence[bytes], slots: Sequence[int], lengths: Sequence[int]
    ) -> tuple[Sequence[bytes], Sequence[int]]:
        """Do that for each of `keys`, in order; returns keys and slots of those now READY."""
        filling, state, all_lengths = self.filling, self._state, self._length
        if list(map(filling.get, keys)) != list(slots):
            owned = list(map(self.owns, keys, slots))
            self._release_many(list(compress(slots, map(not_, owned))))
            keys, slots = list(compress(keys, owned)), list(compress(slots, owned))
            lengths = list(compress(lengths, owned))
        for key in keys:
            del filling[key]
        for slot, length in zip(slots, lengths, strict=True):
            state[slot] = _READY
            all_lengths[slot] = length
        self.ready.update(zip(keys, slots, strict=True))
        self.bytes += sum(lengths)
        self.published += len(keys)
        self._idle += len(keys)
        self.eased += len(keys)
        self.policy.add_many(keys)
        return keys, slots

    def discard(self, key: bytes, slot: int) -> None:
        """Free a FILLING slot: its chunk did not come."""
        if self.owns(key, slot):
            del self.filling[key]
        self._release(slot)

    def condemn(self, key: bytes, slot: int) -> None:
        """Set a FILLING slot aside: its writer may still write."""
        if self.owns(key, slot):
            del self.filling[key]
        self._state[slot] = _QUARANTINED
        self._key[slot] = None
        self._quarantined += 1

    def pardon(self, slot: int) -> None:
        """Free a QUARANTINED slot: its writer has answered, or is gone."""
        self._quarantined -= 1
        self._release(slot)

    # Leases.

    def hold(self, slot: int) -> None:
        """Keep a READY slot from eviction until the matching :meth:`drop`."""
        if not self._leases[slot]:
            self._idle -= 1
        self._leases[slot] += 1

    def hold_many(self, slots: Iterable[int]) -> None:
        """Do that for each of `slots`."""
        leases = self._leases
        for slot in slots:
            if not leases[slot]:
                self._idle -= 1
            leases[slot] += 1

    def drop(self, slot: int) -> None:
        """End one :meth:`hold`."""
        self._leases[slot] -= 1
        if self._leases[slot]:
            return
        if self._state[slot] == _DOOMED:
            self._release(slot)
        else:
            self._idle += 1
            self.eased += 1

    def drop_many(self, slots: Iterable[int]) -> None:
        """Do that for each of `slots`."""
        for slot in slots:
            self.drop(slot)

    # Leaving.

    def remove(self, key: bytes) -> bool:
        """Make `key` invisible at once; its slot is freed when nobody uses it. False when the host lacks
        it."""
        self.filling.pop(key, None)  # whoever fills it finds out in publish()
        slot = self.ready.pop(key, None)
        if slot is None:
            return False
        self.policy.remove(key)
        self.bytes -= self._length[slot]
        if self._leases[slot]:
            self._state[slot] = _DOOMED
        else:
            self._idle -= 1
            self._release(slot)
        return True

    def clear(self) -> list[bytes]:
        """Drop every READY chunk that nobody leases; returns their keys."""
        leases = self._leases
        idle = [key for key, slot in self.ready.items() if not leases[slot]]
        for key in idle:
            self.remove(key)
        return idle

    def make_room(
        self,
        n: int,
        incoming: Sequence[bytes],
        *,
        keep: Collection[bytes] = (),
        may_go: Callable[[int], bool] | None = None,
    ) -> bool:
        """Evict until `n` slots are FREE.

        Parameters
        ----------
        n : int
            Slots wanted.
        incoming : sequence of bytes
            The keys that will take them.
        keep : collection of bytes
            Keys that must stay although nobody leases them (a set where it is large).
        may_go : callable, optional
            ``may_go(slot)`` vetoes the eviction of further unleased slots.

        Returns
        -------
        bool
            False when there are not enough victims; then nothing was evicted.
        """
        missing = n - len(self._free)
        if missing <= 0:
            return True
        if missing > self._idle:
            return False
        ready, leases = self.ready, self._leases

        def evictable(key: bytes) -> bool:
            slot = ready[key]
            return not leases[slot] and key not in keep and (may_go is None or may_go(slot))

        everything_may_go = self._idle == len(ready) and not keep and may_go is None
        victims = self.policy.victims(missing, None if everything_may_go else evictable, incoming)
        if not victims:
            return False
        self.on_evict(victims)
        slots = [ready.pop(key) for key in victims]
        self.bytes -= sum([self._length[slot] for slot in slots])
        self._release_many(slots)
        self._idle -= len(victims)
        self.evictions += len(victims)
        return True

    def _release(self, slot: int) -> None:
        self._release_many((slot,))

    def _release_many(self, slots: Sequence[int]) -> None:
        state, keys, generation = self._state, self._key, self._generation
        for slot in slots:
            state[slot] = _FREE
            keys[slot] = None
            generation[slot] = (generation[slot] + 1) & 0xFFFFFFFF
        self._free.extend(slots)
        self.eased += len(slots)

    # Proof.

    def audit(self) -> None:
        """Check that every slot has exactly one owner; AssertionError says which has not."""
        counts = [0] * len(SlotState)
        for slot in range(self.slots):
            state = self.state(slot)
            counts[state] += 1
            key = self._key[slot]
            if state is SlotState.READY:
                assert key is not None and self.ready.get(key) == slot, f"slot {slot}: READY but not indexed"
                assert key in self.policy, f"slot {slot}: READY but unknown to the policy"
            elif state is SlotState.DOOMED:
                assert self._leases[slot], f"slot {slot}: DOOMED without a lease"
            else:
                assert not self._leases[slot], f"slot {slot}: {state.name} with a lease"
        assert counts[SlotState.FREE] == len(self._free) == len(set(self._free)), "free list"
        assert counts[SlotState.READY] == len(self.ready) == len(self.policy), "index of READY"
        assert counts[SlotState.FILLING] >= len(self.filling), "index of FILLING"
        assert counts[SlotState.QUARANTINED] == self._quarantined, "count of QUARANTINED"
        assert self.bytes == sum(self._length[slot] for slot in self.ready.values()), "bytes"
        idle = sum(1 for slot in self.ready.values() if not self._leases[slot])
        assert idle == self._idle, "count of idle slots"
