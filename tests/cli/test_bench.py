"""``kvstore bench``: what it reports, and that it leaves nothing behind. How fast it is, it says itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.backends.compiled import why_not
from support.command import Command

OPERATIONS = ["put", "get host", "get tier, hot", "get tier, cold"]


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_local_and_other_tiers(kv: Command, tmp_path: Path, engine: str) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    report = kv(
        "bench",
        *("--tier", "ram://?capacity=8MiB"),
        *("--tier", f"{tmp_path}/a?name=disk"),
        *("--tier", f"simplecache::file://{tmp_path}/b?name=far"),
        *("--chunk-size", "100KiB", "--chunks", 9, "--repeat", 2, "--engine", engine, "--json"),
    ).json
    assert (report["chunk_size"], report["chunks"], report["repeat"]) == (102400, 9, 2)
    assert report["engine"] == engine
    rows = {(row["tier"], row["operation"]): row for row in report["results"]}
    assert list(rows) == [(tier, operation) for tier in ("disk", "far") for operation in OPERATIONS]
    assert rows["far", "get tier, cold"]["ratio"] is None
    for (tier, operation), row in rows.items():
        if operation != "get tier, cold":
            rates = row["store_bytes_per_second"], row["plain_bytes_per_second"]
            assert row["ratio"] == pytest.approx(rates[0] / rates[1]), (tier, operation)
    assert "fsspec" in rows["far", "put"]["plain"]
    assert "system calls" in rows["disk", "put"]["plain"]
    assert not [file for name in ("a", "b") for file in (tmp_path / name).rglob("*")]


@pytest.mark.parametrize("value", ["on", "off"])
def test_says_what_is_not_compiled(kv: Command, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("KVSTORE_COMPILED", value)
    reason = why_not()
    options = ("bench", "--chunk-size", "64KiB", "--chunks", 4, "--repeat", 1)
    assert kv(*options, "--json", KVSTORE_COMPILED=value).json["not_compiled"] == reason
    assert ("not compiled" in kv(*options, KVSTORE_COMPILED=value).out) is bool(reason)


def test_for_people(kv: Command) -> None:
    out = kv("bench", "--chunk-size", "64KiB", "--chunks", 4, "--repeat", 1, COLUMNS="80").out
    assert all(operation in out for operation in OPERATIONS)
    assert "plain loop, GB/s" in out


def test_memory_of_worker_processes_cannot_be_measured(kv: Command) -> None:
    tiers = ("--tier", "ram://?capacity=8MiB", "--tier", "memory://x")
    ran = kv("bench", *tiers, "--chunk-size", "64KiB", "--repeat", 1, "--engine", "processes", code=1)
    assert "0 of" in ran.err
