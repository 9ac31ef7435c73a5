"""``kvstore replay``."""

from __future__ import annotations

import json
import re
import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import kvstore
from kvstore.workload import chunk_key
from support.command import Command

TIER_FIELDS = {
    "name",
    "scheme",
    "chunks",
    "bytes",
    "hits",
    "misses",
    "evictions",
    "read_bytes",
    "written_bytes",
    "lookup_ms",
    "load_ms",
    "errors",
    "dropped",
    "last_error",
}


def tiers_of(path: Path, host: str = "8MiB") -> list[object]:
    return ["--tier", f"ram://?capacity={host}", "--tier", path]


def test_counts(kv: Command, trace: Path, tmp_path: Path) -> None:
    report = kv("replay", trace, *tiers_of(tmp_path / "kv"), "--chunk-size", "4KiB", "--json").json
    assert (report["requests"], report["chunks"], report["unique_chunks"]) == (4, 14, 8)
    assert (report["verified_chunks"], report["mismatches"]) == (6, 0)
    assert report["hit_ratio"] == pytest.approx(6 / 14)
    for tier in report["tiers"]:
        assert tier.keys() == TIER_FIELDS
        assert tier["lookup_ms"].keys() == tier["load_ms"].keys() == {"p50", "p99"}
    host, disk = report["tiers"]
    assert (host["name"], disk["name"]) == ("host", "file")
    assert (host["hits"], host["misses"], host["chunks"], host["errors"]) == (6, 8, 8, 0)
    assert (disk["chunks"], disk["written_bytes"], disk["errors"]) == (8, 8 * 4096, 0)


def test_second_run_finds_what_the_first_left(kv: Command, trace: Path, tmp_path: Path) -> None:
    arguments = ["replay", trace, *tiers_of(tmp_path / "kv"), "--chunk-size", "5000", "--json"]
    kv(*arguments)
    report = kv(*arguments, "--engine", "processes").json
    assert (report["hit_ratio"], report["verified_chunks"]) == (1.0, 14)
    assert report["tiers"][1]["hits"] == 8


def test_wrong_bytes_are_counted(kv: Command, trace: Path, tmp_path: Path) -> None:
    """A chunk that is sound for the store, and yet not what its key says."""
    with kvstore.open(
        "ram://?capacity=1MiB", str(tmp_path / "kv"), namespace={"workload": "replay"}, chunk_size=4096
    ) as store:
        store.put(chunk_key(1), b"not this".ljust(4096))
    arguments = ["replay", trace, *tiers_of(tmp_path / "kv"), "--chunk-size", "4KiB"]
    report = kv(*arguments, "--json", code=1).json
    assert (report["mismatches"], report["verified_chunks"]) == (4, 3)
    assert "wrong bytes" in kv(*arguments, code=1).out


def test_without_tiers_says_so(kv: Command, trace: Path) -> None:
    assert "temporary directory (no --tier was given)" in kv("replay", trace, "--chunk-size", "4KiB").out


@pytest.mark.parametrize("way", ["option", "variable"])
def test_configuration_file(kv: Command, trace: Path, tmp_path: Path, way: str) -> None:
    file = tmp_path / "kv.toml"
    url = f"file://{tmp_path}/kv?name=disk"
    file.write_text(f'chunk_size = "8KiB"\ntiers = ["ram://?capacity=8MiB", "{url}"]\n')
    if way == "option":
        report = kv("replay", trace, "--json", "--config", file).json
    else:
        report = kv("replay", trace, "--json", KVSTORE_CONFIG=str(file)).json
    assert report["tiers"][1]["name"] == "disk"
    assert report["tiers"][1]["written_bytes"] == 8 * 8192


def test_storage_options(kv: Command, trace: Path, tmp_path: Path) -> None:
    options = ["--tier", "ram://?capacity=8MiB", "--tier", f"simplecache::file://{tmp_path}/kv?name=far"]
    cache = tmp_path / "cache"
    option = f'far.simplecache={{"cache_storage": "{cache}"}}'
    kv("replay", trace, *options, "--chunk-size", "4KiB", "--storage-option", "far.simplecache={}")
    wrong = kv("replay", trace, *options, "--storage-option", option.replace("far", "fat", 1), code=2)
    assert "did you mean 'far'" in wrong.err


def test_real_speed_keeps_to_the_timestamps(kv: Command, tmp_path: Path) -> None:
    trace = tmp_path / "slow.jsonl"
    trace.write_text("".join(f'{{"timestamp": {t}, "hash_ids": [1]}}\n' for t in (5000, 8000)))
    arguments = ["replay", trace, "--tier", "ram://?capacity=1MiB", "--chunk-size", "4KiB", "--json"]
    started = time.monotonic()
    assert kv(*arguments, "--speed", "real").json["hit_ratio"] == 0.5
    assert time.monotonic() - started >= 3


def test_limit(kv: Command, trace: Path) -> None:
    assert kv("replay", trace, "--limit", 1, "--chunk-size", "4KiB", "--json").json["requests"] == 1


def test_mooncake(kv: Command, shared_data: Path) -> None:
    """With room for everything, a chunk misses once and no more."""
    path = shared_data / "mooncake_conversation_first2000.jsonl"
    report = kv("replay", path, "--tier", "ram://?capacity=152MiB", "--chunk-size", "4KiB", "--json").json
    assert (report["requests"], report["chunks"], report["unique_chunks"]) == (2000, 54559, 38788)
    assert (report["verified_chunks"], report["mismatches"]) == (54559 - 38788, 0)
    assert round(100 * report["hit_ratio"], 3) == 28.906


def test_coding_agents(kv: Command, shared_data: Path, tmp_path: Path) -> None:
    path = shared_data / "weka16_merged.jsonl.gz"
    report = kv(
        "replay", path, "--limit", 60, *tiers_of(tmp_path / "kv"), "--chunk-size", "4KiB", "--json"
    ).json
    assert report["mismatches"] == 0
    assert report["verified_chunks"] == report["chunks"] - report["unique_chunks"]
    host, disk = report["tiers"]
    assert host["evictions"] > 0 < disk["hits"]


def test_parts_and_text_identifiers(kv: Command, shared_data: Path) -> None:
    """A trace whose requests are mappings of parts, and may repeat a chunk."""
    report = kv("replay", shared_data / "ragpulse_0_trace.jsonl.gz", "--limit", 200, "--json").json
    assert report["verified_chunks"] == report["chunks"] - report["unique_chunks"]


def test_writes_that_a_tier_that_is_down_never_got_are_shown(
    kv: Command, trace: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    tier = tmp_path / "file" / "kv?name=down&required=false&retries=0"
    run = ["replay", trace, "--tier", "ram://?capacity=8MiB", "--tier", tier, "--chunk-size", "4KiB"]
    host, down = json.loads(kv(*run, "--json").out)["tiers"]
    assert (host["dropped"], down["chunks"]) == (0, 0)
    assert down["dropped"] > 0 and "Not a directory" in down["last_error"]
    shown = kv(*run).out
    assert re.search(r"writes dropped +0 +[1-9]", shown)
    assert re.search(r"down, last error: .*Not a directory", shown)


def test_the_last_error_of_a_tier_is_shown(kv: Command, trace: Path, tmp_path: Path) -> None:
    if "fault" not in entry_points(group="fsspec.specs").names:
        pytest.skip("commands learn of fault:: from the package's entry points: install it again")
    rules = json.dumps([{"fault": "ENOSPC", "verb": "put", "key": chunk_key(1).hex()}])
    tiers = ["--tier", "ram://?capacity=8MiB", "--tier", f"fault::file://{tmp_path}/kv?name=full"]
    run = ["replay", trace, *tiers, "--chunk-size", "4KiB", "--storage-option", f"full.rules={rules}"]
    host, full = kv(*run, "--json").json["tiers"]
    assert full["errors"] and "No space left" in full["last_error"]
    assert host["last_error"] == ""
    assert re.search(r"full, last error: .*No space left", kv(*run).out)
