"""Events of the store, as vLLM publishes them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
    OffloadingEventGroupSpec,
    OffloadingEventsTracker,
)
from vllm.v1.kv_offload.base import (
    Locality,
    Medium,
    OffloadingEvent,
    OffloadingKVEventsConfig,
    make_offload_key,
)

import kvstore
from kvstore.events import Event
from kvstore.peer.directory import Directory
from kvstore.testing.backend import make_key
from kvstore_vllm.kv_events import to_offloading

KEYS = [make_key(number) for number in range(4)]
EPOCH = b"\1" * 8


def translate(*events: Event, epoch: bytes = b"") -> list[OffloadingEvent]:
    return list(to_offloading(events, host="host", epoch=epoch))


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (Event("stored", (KEYS[0],), None, "host", "local"), (Medium.CPU, False, None, None)),
        (Event("removed", (KEYS[0],), "host", None, "local"), (Medium.CPU, True, None, None)),
        (Event("promoted", (KEYS[0],), "s3", "host", "remote"), (Medium.CPU, False, None, None)),
        (
            Event("stored", (KEYS[0],), "host", "s3", "remote"),
            (Medium.STORAGE, False, Locality.REMOTE, "s3"),
        ),
        (Event("removed", (KEYS[0],), "s3", None, "remote"), (Medium.STORAGE, True, Locality.REMOTE, "s3")),
        (
            Event("corrupt", (KEYS[0],), "disk", None, "local", "why"),
            (Medium.STORAGE, True, Locality.LOCAL, "disk"),
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, Event) else "",
)
def test_each_kind(event: Event, expected: tuple[object, ...]) -> None:
    (found,) = translate(event)
    assert (found.medium, found.removed, found.locality, found.ownership) == expected
    assert found.keys == [KEYS[0]]


def test_breakers_are_no_concern_of_routers() -> None:
    assert translate(Event("tier-down", (), "s3", None, "remote", "reads")) == []


def test_neighbours_become_one_and_the_order_stays() -> None:
    stored = [Event("stored", (key,), "host", "s3", "remote") for key in KEYS[:3]]
    gone = Event("removed", (KEYS[1],), "s3", None, "remote")
    assert [(event.removed, event.keys) for event in translate(*stored, gone, stored[1])] == [
        (False, KEYS[:3]),
        (True, KEYS[1:2]),
        (False, KEYS[1:2]),
    ]
    assert [event.ownership for event in translate(stored[0], stored[0]._replace(target="disk"))] == [
        "s3",
        "disk",
    ]


def test_no_event_names_a_chunk_twice() -> None:
    event = Event("stored", (KEYS[0], KEYS[0]), None, "host", "local")
    assert [found.keys for found in translate(event, event)] == [KEYS[:1], KEYS[:1]]


def test_epoch_is_cut_off_and_others_are_left_out() -> None:
    keys = (KEYS[0] + EPOCH, KEYS[1] + b"\2" * 8, KEYS[2])
    (found,) = translate(Event("stored", keys, None, "host", "local"), epoch=EPOCH)
    assert found.keys == [KEYS[0]]


def test_configured_locality_wins() -> None:
    event = Event("stored", (KEYS[0],), "host", "nfs", "local")
    for configured, expected in (("REMOTE", Locality.REMOTE), (None, Locality.LOCAL)):
        (found,) = to_offloading([event], host="host", localities={"nfs": configured})
        assert found.locality is expected


def test_nothing_is_said_of_silent_tiers() -> None:
    written = Event("stored", (KEYS[0],), "host", "nfs", "local")
    dropped = Event("removed", (KEYS[0],), "nfs", None, "local")
    promoted = Event("promoted", (KEYS[0],), "nfs", "host", "local")
    (found,) = to_offloading([written, promoted, dropped], host="host", silent={"nfs"})
    assert (found.medium, found.removed, found.ownership) == (Medium.CPU, False, None)


def test_a_chunk_that_comes_back_is_described_to_its_end() -> None:
    """It leaves the host and is promoted between two reports; its removal names both of its blocks."""
    hashes, tokens = [b"one" * 8, b"two" * 8], 4
    group = SimpleNamespace(
        group_idx=0,
        tokens_per_block=tokens,
        tokens_per_chunk=2 * tokens,
        hashes_per_chunk=2,
        sliding_window_size_in_chunks=None,
        kv_event_group_spec=OffloadingEventGroupSpec("full_attention", None),
    )
    request = SimpleNamespace(block_hashes=hashes, all_token_ids=list(range(2 * tokens)), lora_request=None)
    key = make_offload_key(hashes[1], 0)
    tracker = OffloadingEventsTracker(OffloadingKVEventsConfig(True, True))
    tracker.record_store(request, group, 0, key)
    removed = Event("removed", (key,), "host", None, "local")
    promoted = Event("promoted", (key,), "disk", "host", "local")
    for events in ([Event("stored", (key,), None, "host", "local")], [removed, promoted]):
        list(tracker.take_events(translate(*events)))
    (last,) = tracker.take_events(translate(removed))
    assert isinstance(last, BlockRemoved) and len(last.block_hashes) == len(hashes)


def test_life_of_a_chunk(tmp_path: Path) -> None:
    """As a real store tells it: stored, written, evicted, promoted, deleted."""
    tiers = ("ram://?capacity=32KiB&pin=off", f"file://{tmp_path}/kv?name=disk")
    with kvstore.open(*tiers, chunk_size="16KiB", engine="inline") as store:
        for key in KEYS[:3]:  # the host holds two
            store.put(key, b"x")
            store.flush()
        assert store.get(KEYS[0]) == b"x"
        store.delete(KEYS[:1])
        found = list(to_offloading(store.events(), host=store.config.host.name))
    life = [(event.medium.value, event.removed) for event in found if KEYS[0] in event.keys]
    assert life == [
        ("CPU", False),
        ("STORAGE", False),
        ("CPU", True),
        ("CPU", False),
        ("CPU", True),
        ("STORAGE", True),
    ]


def test_a_directory_reads_what_vllm_publishes() -> None:
    stored = BlockStored(
        block_hashes=[b"a", 7],
        parent_block_hash=None,
        token_ids=[1, 2],
        block_size=1,
        lora_id=None,
        medium="CPU",
        lora_name=None,
        group_idx=0,
    )
    directory, peer = Directory(), "peer://10.0.0.1:5710"
    for events in ([stored], [BlockRemoved(block_hashes=[7], medium="CPU", group_idx=0)]):
        directory.take_message(peer, msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=events)))
    assert (directory.choose([b"a"]), directory.choose([7])) == (peer, None)
    cleared = KVEventBatch(ts=2.0, events=[AllBlocksCleared()], data_parallel_rank=0)
    directory.take_message(peer, msgspec.msgpack.encode(cleared))  # the device's cache
    assert directory.choose([b"a"]) == peer
