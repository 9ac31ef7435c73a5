"""The catalog: states of slots, leases, eviction, generations."""

from __future__ import annotations

import pytest

from kvstore.catalog import Catalog, SlotState
from kvstore.policy import make_policy
from support.chunks import chunk_key

A, B, C, D = map(chunk_key, range(4))


def make(slots: int = 3, policy: str = "lru") -> Catalog:
    return Catalog(slots, make_policy(policy, slots))


def fill(catalog: Catalog, *keys: bytes, length: int = 10) -> list[int]:
    """Make `keys` READY."""
    slots = [catalog.reserve(key) for key in keys]
    for key, slot in zip(keys, slots, strict=True):
        assert catalog.publish(key, slot, length)
    catalog.audit()
    return slots


def test_slots_are_handed_out_from_the_beginning_of_the_arena() -> None:
    assert fill(make(), A, B, C) == [0, 1, 2]


def test_filling_is_invisible_until_published() -> None:
    catalog = make()
    slot = catalog.reserve(A)
    assert (A in catalog.ready, catalog.filling) == (False, {A: slot})
    assert catalog.state(slot) is SlotState.FILLING
    catalog.publish(A, slot, 7)
    assert (catalog.ready, catalog.filling) == ({A: slot}, {})
    assert (catalog.length(slot), catalog.bytes, catalog.key(slot)) == (7, 7, A)


def test_discard_frees_the_slot() -> None:
    catalog = make(1)
    catalog.discard(A, catalog.reserve(A))
    assert (catalog.free, catalog.filling) == (1, {})
    catalog.audit()


def test_every_change_of_hands_moves_the_generation_on() -> None:
    catalog = make(1)
    seen = []
    for end in ("evict", "remove", "discard", "pardon"):
        slot = catalog.reserve(A)
        if end == "discard":
            catalog.discard(A, slot)
        elif end == "pardon":
            catalog.condemn(A, slot)
            catalog.pardon(slot)
        else:
            catalog.publish(A, slot, 1)
            if end == "evict":
                assert catalog.make_room(1, [B])
            else:
                catalog.remove(A)
        seen.append(catalog.generation(slot))
    assert seen == [1, 2, 3, 4]


def test_quarantined_slots_are_out_of_use_until_pardoned() -> None:
    catalog = make(1)
    slot = catalog.reserve(A)
    catalog.condemn(A, slot)
    assert (catalog.state(slot), catalog.quarantined, catalog.free) == (SlotState.QUARANTINED, 1, 0)
    assert not catalog.make_room(1, [B])
    catalog.audit()
    catalog.pardon(slot)
    assert (catalog.quarantined, catalog.free) == (0, 1)
    catalog.audit()


def test_leased_chunks_are_not_evicted() -> None:
    catalog = make(2)
    slot, _ = fill(catalog, A, B)
    catalog.hold(slot)
    catalog.hold(slot)
    assert catalog.idle == 1
    assert not catalog.make_room(2, [C, D]), "all or nothing"
    assert set(catalog.ready) == {A, B}
    assert catalog.make_room(1, [C])
    assert set(catalog.ready) == {A}
    catalog.drop(slot)
    assert catalog.leases(slot) == 1 and not catalog.make_room(2, [C, D])
    catalog.drop(slot)
    assert catalog.make_room(2, [C, D])
    catalog.audit()


def test_a_chunk_removed_while_leased_keeps_its_slot_until_the_last_drop() -> None:
    catalog = make(1)
    (slot,) = fill(catalog, A)
    catalog.hold(slot)
    assert catalog.remove(A)
    assert (catalog.state(slot), catalog.free, catalog.bytes) == (SlotState.DOOMED, 0, 0)
    catalog.audit()
    catalog.drop(slot)
    assert catalog.free == 1
    catalog.audit()


def test_removing_what_is_not_there() -> None:
    assert make().remove(A) is False


def test_a_chunk_deleted_while_it_is_filled_is_never_published() -> None:
    catalog = make()
    old = catalog.reserve(A)
    catalog.remove(A)
    new = catalog.reserve(A)  # somebody stores it again meanwhile
    assert catalog.publish(A, old, 5) is False
    assert catalog.publish(A, new, 6) is True
    assert catalog.ready == {A: new}
    catalog.audit()


@pytest.mark.parametrize("end", ["discard", "condemn"])
def test_a_failed_fill_after_a_delete_leaves_the_newer_one_alone(end: str) -> None:
    catalog = make()
    old = catalog.reserve(A)
    catalog.remove(A)
    new = catalog.reserve(A)
    getattr(catalog, end)(A, old)
    assert catalog.filling == {A: new}
    catalog.audit()


def test_eviction_spares_what_it_is_told_to_spare() -> None:
    catalog = make(3)
    slots = fill(catalog, A, B, C)
    assert catalog.make_room(1, [D], keep={A})
    assert set(catalog.ready) == {A, C}
    assert not catalog.make_room(3, [D], keep={A})
    assert not catalog.make_room(2, [D], may_go=lambda slot: slot not in (slots[0], slots[2]))
    assert set(catalog.ready) == {A, C}


def test_eviction_is_reported_before_the_slot_is_free() -> None:
    catalog = make(1)
    fill(catalog, A)
    seen = []
    catalog.on_evict = lambda keys: seen.append((keys, [key in catalog.ready for key in keys], catalog.free))
    catalog.make_room(1, [B])
    assert seen == [([A], [True], 0)]
    assert catalog.evictions == 1


def test_audit_finds_a_slot_with_two_owners() -> None:
    catalog = make()
    (slot,) = fill(catalog, A)
    catalog._free.append(slot)
    with pytest.raises(AssertionError, match="free list"):
        catalog.audit()


def test_audit_finds_a_lost_lease() -> None:
    catalog = make()
    (slot,) = fill(catalog, A)
    catalog.hold(slot)
    catalog._leases[slot] = 0
    with pytest.raises(AssertionError, match="idle"):
        catalog.audit()
