"""Collectors whose clocks are minutes off: ages are judged by the clock of the storage."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kvstore.backends import BackendContext
from kvstore.backends.posix import PosixBackend
from kvstore.collect.collector import Collector
from kvstore.collect.directory import DirectoryBooks
from kvstore.collect.limits import Limits
from kvstore.collect.report import Report
from support.chunks import chunk_key

CHUNK = 4096
TTL = 300.0


@pytest.mark.parametrize("off_by", [-900.0, 900.0], ids=["behind", "ahead"])
def test_what_expires_does_not_depend_on_a_collectors_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off_by: float
) -> None:
    path = str(tmp_path / "space")
    backend = PosixBackend(BackendContext(bytes(16), b"manifest", CHUNK), path)
    backend.open()
    for number in range(4):
        backend.write(chunk_key(number), memoryview(bytes(CHUNK)))
    now = time.time()
    for number, age in enumerate((0.0, TTL / 2, 2 * TTL, 4 * TTL)):
        key = chunk_key(number).hex()
        os.utime(f"{path}/{key[:2]}/{key}.kv", (now - age, now - age))
    monkeypatch.setattr(time, "time", lambda: now + off_by)
    collector = Collector(backend, DirectoryBooks(path), Limits(None, None, TTL, 2 * CHUNK))
    removed = set()
    more = True
    while more:
        answer = collector.turn(Report(b"1" * 8))
        removed |= {key for key, _, _ in answer.removed}
        more = answer.more
    collector.close()
    assert removed == {chunk_key(2), chunk_key(3)}
