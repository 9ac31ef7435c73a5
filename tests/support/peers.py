"""Pairs of stores, of which one serves and the other reads."""

from __future__ import annotations

import os
from typing import Any

import pytest

import kvstore
from kvstore.gate import Gate
from kvstore.peer.nixl_agent import is_installed
from support.processes import wait_for

__all__ = ["CHUNK", "evict", "gate_of", "needs_nixl", "no_leases", "peer_of", "reader", "server"]

CHUNK = 64 << 10

needs_nixl = pytest.mark.skipif(
    not is_installed(), reason="no NIXL (pip install '.[nixl]', or nixl-cu12 with --no-deps)"
)


def server(
    slots: int = 32, serve: str = "tcp://127.0.0.1:0", transport: str = "zmq", **options: Any
) -> kvstore.Store:
    """A store that serves."""
    return kvstore.open(
        f"ram://?capacity={slots * CHUNK}&pin=off&transport={transport}",
        **{"serve": serve, "chunk_size": CHUNK, **options},
    )


def reader(
    url: str,
    query: str = "",
    slots: int = 32,
    options: dict[str, Any] | None = None,
    transport: str = "zmq",
    **more: Any,
) -> kvstore.Store:
    """A store whose only tier is the peer at `url`."""
    tier = {
        "url": f"{url}?name=peer&workers=1&transport={transport}{query}",
        "storage_options": options or {},
    }
    return kvstore.open(f"ram://?capacity={slots * CHUNK}&pin=off", tier, **{"chunk_size": CHUNK, **more})


def peer_of(store: kvstore.Store) -> str:
    """URL of a store that serves."""
    assert store.served_at is not None
    return store.served_at.replace("tcp://", "peer://")


def gate_of(store: kvstore.Store) -> Gate:
    """Where peers come in."""
    gate = store._peers
    assert gate is not None
    return gate


def evict(store: kvstore.Store) -> None:
    """Empty host memory; what is deleted would not be asked of a peer any more."""
    with store.reserve([os.urandom(16) for _ in range(store.stats().slots)]) as lease:
        assert len(lease) == store.stats().slots
        lease.abort()


def no_leases(store: kvstore.Store, timeout: float = 15.0) -> None:
    """Wait until peers hold nothing of a store, and prove that no slot is lost."""
    wait_for(lambda: store.stats() and gate_of(store).leases == 0, timeout)
    assert store.stats().leased == 0
    store._catalog.audit()
    evict(store)
