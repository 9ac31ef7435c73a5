"""``kvstore demo``."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.command import Command

FIELDS = {
    "requests",
    "chunks",
    "unique_chunks",
    "verified_chunks",
    "mismatches",
    "hit_ratio",
    "tiers",
    "restart",
}


def test_demo(kv: Command, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    report = kv("demo", "--json", "--seed", 3, "--dir", folder).json
    assert report.keys() == FIELDS
    host, disk = report["tiers"]
    assert (host["scheme"], disk["scheme"]) == ("ram", "file")
    assert report["mismatches"] == 0
    # More than the host holds, and nothing lost: only the first reference to a chunk is a miss.
    assert report["unique_chunks"] > 4000 > 3 * host["chunks"]
    served = report["chunks"] - report["unique_chunks"]
    assert report["hit_ratio"] == pytest.approx(served / report["chunks"])
    assert host["hits"] + disk["hits"] == served
    assert host["evictions"] > 0 < disk["hits"]
    assert disk["chunks"] == report["unique_chunks"]
    # After the restart everything is there.
    assert report["restart"]["hits"] > 1000
    assert report["restart"]["hit_ratio"] == 1.0
    assert report["verified_chunks"] == served + report["restart"]["hits"]
    assert list(folder.iterdir()) == []


def test_demo_for_people(kv: Command) -> None:
    ran = kv("demo", "--engine", "processes", COLUMNS="80")
    assert ran.err == ""  # no progress: nobody watches
    assert max(map(len, ran.out.splitlines())) <= 80
    for text in ("evictions", "look-up p50 / p99, ms", "no wrong byte", "After a restart", "Try next"):
        assert text in ran.out
