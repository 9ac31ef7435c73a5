"""The directory of peers: who holds the longest head, as events tell."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import kvstore
from kvstore.peer.directory import Directory

ONE, TWO = "peer://10.0.0.1:1", "peer://10.0.0.2:1"


def test_the_longest_head_wins() -> None:
    directory = Directory()
    directory.stored(ONE, "abxd")
    directory.stored(TWO, "abc")
    assert directory.choose("abcd") == TWO
    assert directory.choose("abxc") == ONE
    assert directory.choose("abcd", among=[ONE]) == ONE
    assert directory.choose("zab") is None
    assert directory.choose("") is None


def test_what_has_gone_is_forgotten() -> None:
    directory = Directory()
    directory.stored(ONE, "abc")
    directory.stored(TWO, "a")
    directory.removed(ONE, "az")
    assert (directory.choose("ab"), directory.choose("b")) == (TWO, ONE)
    directory.cleared(TWO)
    directory.removed(ONE, "bc")
    assert len(directory) == 0


def test_it_is_bounded_and_keeps_the_latest() -> None:
    directory = Directory(limit=2)
    directory.stored(ONE, "ab")
    directory.stored(TWO, "ac")
    assert len(directory) == 2
    assert [directory.choose(key, among=[ONE]) for key in "abc"] == [ONE, None, None]
    assert directory.choose("c") == TWO


def test_peers_that_hold_as_much_share_the_requests() -> None:
    directory = Directory()
    for peer in (ONE, TWO):
        directory.stored(peer, [b"shared", 7])
    chosen = [directory.choose([b"shared", 7, bytes([last])]) for last in range(64)]
    assert {chosen.count(peer) > 16 for peer in (ONE, TWO)} == {True}
    assert chosen == [directory.choose([b"shared", 7, bytes([last])]) for last in range(64)]


def test_a_store_tells_what_its_host_memory_holds() -> None:
    directory, slots = Directory(), 4
    with kvstore.open(f"ram://?capacity={slots * 4096}&pin=off", "memory://", chunk_size=64) as store:
        keys = [store.add(bytes([number])) for number in range(6)]
        store.flush()
        directory.take_events(ONE, store.events())
        held = [key for key in keys if directory.choose([key]) == ONE]
        assert held == [key for key in keys if key in store.resident]
        assert len(held) == slots
        store.get(keys[0])
        directory.take_events(ONE, store.events())
        assert directory.choose(keys[:1]) == ONE


def message(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([1.0, list(events), 0])


def told(kind: str, hashes: list[bytes | int], **more: Any) -> dict[str, Any]:
    return {"type": kind, "block_hashes": hashes, "medium": "CPU", "lora_name": None, **more}


def test_messages_of_vllm_count_as_far_as_they_are_about_host_memory() -> None:
    directory = Directory()
    directory.take_message(
        ONE,
        message(
            told("BlockStored", [b"a", 7], token_ids=[1, 2], parent_block_hash=None, block_size=1),
            told("BlockStored", [b"device"], medium="GPU"),
            told("BlockStored", [b"disk"], medium="STORAGE", ownership="fs"),
            told("BlockStored", [b"window"], group_idx=1),
            told("BlockRemoved", [7], group_idx=0),
            {"type": "SomethingNew", "of": ["another", "shape"]},
        ),
    )
    assert directory.choose([b"a"]) == ONE
    assert len(directory) == 1
    directory.take_message(ONE, message({"type": "AllBlocksCleared"}))  # the device's cache
    assert directory.choose([b"a"]) == ONE


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode({"a": 1}), message({"no": "type"})])
def test_what_is_no_message_of_vllm(payload: bytes) -> None:
    with pytest.raises(ValueError, match="not a batch of vLLM's KV events"):
        Directory().take_message(ONE, payload)
