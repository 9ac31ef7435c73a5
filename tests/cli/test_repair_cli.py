"""``kvstore verify --repair``, ``--rate`` and ``--resume``."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

import kvstore
from support.command import COMMAND, ENVIRONMENT, Command

CHUNK = 4096
KEYS = [bytes([n]) * 16 for n in range(60)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "kv"
    with kvstore.open("ram://?capacity=1MiB", str(path), namespace={"model": "m"}, chunk_size=CHUNK) as store:
        store.put_many(dict.fromkeys(KEYS, b"x" * 100))
    return path


def break_things(root: Path) -> None:
    corrupt, foreign, *_ = sorted(root.glob("*/*/*.kv"))
    foreign.write_bytes(corrupt.read_bytes())
    corrupt.write_bytes(b"torn")
    (manifest,) = root.glob("*/namespace.json")
    manifest.write_text("{")
    stale = manifest.with_name("old.tmp")
    stale.touch()
    os.utime(stale, (1, 1))


def test_repair_mends_and_says_so(kv: Command, root: Path) -> None:
    break_things(root)
    report = kv("verify", root, "--json", code=1).json
    assert report["repair"] is None
    assert {problem["repair"] for problem in report["problems"]} == {None}
    report = kv("verify", root, "--repair", "--json").json
    assert report["ok"]
    assert report["repair"] == {"nothing": 0, "quarantined": 2, "removed": 2, "left": 0}
    assert {problem["status"]: problem["repair"] for problem in report["problems"]} == {
        "corrupt": "quarantined",
        "foreign": "quarantined",
        "stale_temp": "removed",
        "manifest": "removed",
    }
    kvstore.open("ram://?capacity=1MiB", str(root), namespace={"model": "m"}, chunk_size=CHUNK).close()
    report = kv("verify", root, "--json").json
    assert (report["good"], report["quarantined"], report["problems"]) == (58, 2, [])


def test_what_is_left_is_a_problem(kv: Command, root: Path) -> None:
    (manifest,) = root.glob("*/namespace.json")
    manifest.unlink()
    assert kv("verify", root, "--repair", "--json", code=1).json["repair"]["left"] == 1
    out = kv("verify", root, "--repair", code=1).out
    assert "left as it is (a store that opens the namespace writes it)" in out


def test_for_people(kv: Command, root: Path) -> None:
    break_things(root)
    out = kv("verify", root, "--repair").out
    assert "payload" not in out
    assert out.count("; moved into quarantine/") == 2
    assert out.count("; removed") == 2


def test_rate(kv: Command, root: Path) -> None:
    began = time.monotonic()
    assert kv("verify", root, "--rate", "500KB/s", "--json").json["good"] == 60
    assert time.monotonic() - began > 59 * 8192 / 500e3


@pytest.mark.parametrize("rate", ["fast", "0", "50MB/min", "-1"])
def test_no_rate(kv: Command, root: Path, rate: str) -> None:
    assert "--rate" in kv("verify", root, f"--rate={rate}", code=2).err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_and_resumed(kv: Command, root: Path, tmp_path: Path, number: int) -> None:
    cursor = tmp_path / "cursor"
    command = [*COMMAND, "verify", str(root), "--rate", "100KB/s", "--resume", str(cursor)]
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as running:
        while not cursor.exists():  # it is written every second
            assert running.poll() is None, running.stderr.read()
        running.send_signal(number)
        running.communicate()
    assert running.returncode in (128 + number, 130)
    report = kv("verify", root, "--resume", cursor, "--json").json
    assert 0 < report["good"] <= 50
    assert not cursor.exists()
    assert kv("verify", root, "--resume", cursor, "--json").json["good"] == 60


def test_a_cursor_of_another_tier(kv: Command, root: Path, tmp_path: Path) -> None:
    cursor = tmp_path / "cursor"
    cursor.write_text('{"url": "file:///elsewhere", "directory": "", "name": ""}')
    assert "elsewhere" in kv("verify", root, "--resume", cursor, code=2).err
