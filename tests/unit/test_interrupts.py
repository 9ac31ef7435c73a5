"""Ctrl-C in the middle of a call: nothing stays locked, leased or being filled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvstore
from support.chunks import CHUNK, chunk_key

A = chunk_key(1)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with kvstore.open(f"ram://?capacity={4 * 4096}", str(tmp_path), chunk_size=CHUNK) as opened:
        yield opened


def once(raising: BaseException, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """A function that raises at its first call, and is `otherwise` from then on."""
    errors = [raising]

    def call(*arguments: Any, **named: Any) -> Any:
        if errors:
            raise errors.pop()
        return otherwise(*arguments, **named)

    return call


def test_a_waiting_thread_that_is_interrupted_no_longer_leads(
    store: kvstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store._engine, "wait", once(KeyboardInterrupt(), store._engine.wait))
    with pytest.raises(KeyboardInterrupt):
        store.wait_until(lambda: False, 5)
    assert store.flush(timeout=5)
    assert store.close(5)


def test_a_turn_that_is_interrupted_at_its_end_leaves_no_leader(
    store: kvstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_dispatch", once(KeyboardInterrupt(), store._dispatch))
    with pytest.raises(KeyboardInterrupt):
        store.wait_until(lambda: False, 5)
    assert store.close(5)


@pytest.mark.parametrize("where", ["_collect", "_dispatch"])
def test_an_interrupted_commit_keeps_no_slot(
    store: kvstore.Store, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    lease = store.reserve([A])
    lease[A][:] = bytes(CHUNK)
    monkeypatch.setattr(store, where, once(KeyboardInterrupt(), getattr(store, where)))
    with pytest.raises(KeyboardInterrupt), lease:
        pass
    assert not store._catalog.filling
    store._catalog.audit()
    assert store.put(A, bytes(CHUNK), timeout=5) or store.get(A) == bytes(CHUNK)


def test_completions_that_were_taken_in_are_not_lost(
    store: kvstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = store._planner.apply
    monkeypatch.setattr(store._planner, "apply", once(KeyboardInterrupt(), apply))
    store._pump.stop()  # so that this thread is the one that is interrupted
    with pytest.raises(KeyboardInterrupt):
        store.put(A, bytes(CHUNK))
        store.flush(timeout=5)
    assert store.flush(timeout=5)
    assert store.stats().leased == 0 and store.stats().tiers[1].writes == 1
