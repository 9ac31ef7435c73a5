"""A serving process that ends before its owner has heard why."""

from __future__ import annotations

import pytest

from kvstore import BackendError
from kvstore.gate import Gate
from support.peers import gate_of, server
from support.processes import wait_for

pytest.importorskip("zmq", reason="no pyzmq (pip install '.[p2p]')")


def test_why_it_cannot_serve_is_told_however_late_that_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by an owner who finds the process gone when looking for the first time."""
    serve = Gate.serve
    with server() as owner:
        others = gate_of(owner)

        def serve_late(gate: Gate) -> bool:
            wait_for(lambda: gate is others or gate._bell.rung, 60)
            return serve(gate)

        monkeypatch.setattr(Gate, "serve", serve_late)
        with pytest.raises(BackendError, match="cannot serve.*[Aa]ddress"):
            server(serve=owner.served_at)
