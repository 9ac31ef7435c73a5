"""A copy that is killed in the middle, and made again."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvstore
from support.command import COMMAND, ENVIRONMENT, Command
from support.processes import wait_for

CHUNK = 64 * 1024
CHUNKS = 120
MODEL = {"model": "killed"}
DIRECTORY = kvstore.Namespace(MODEL, CHUNK).directory
DATA = {bytes([number]) * 16: bytes([number]) * (CHUNK - number) for number in range(CHUNKS)}
#: Eight seconds for all chunks, so that there is a middle that nobody misses, and checkpoints in it.
RATE = "1MB/s"


@pytest.fixture
def kv(tmp_path: Path) -> Command:
    return Command(tmp_path)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    with kvstore.open("ram://?capacity=16MiB", str(root), namespace=MODEL, chunk_size=CHUNK) as store:
        store.put_many(DATA)
    return root


def copied(target: Path) -> set[bytes]:
    return {bytes.fromhex(path.stem) for path in target.glob("*/*/*.kv")}


def kill_when(condition: Callable[[], object], source: Path, target: Path, *options: str) -> None:
    """Start a copy, and kill it when the condition holds."""
    command = [*COMMAND, "warm", "--from", str(source), "--to", str(target), "--rate", RATE, *options]
    with subprocess.Popen(command, env=ENVIRONMENT, stdin=subprocess.DEVNULL) as process:
        wait_for(lambda: condition() or process.poll() is not None)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert len(copied(target)) < CHUNKS


def done_by(state: Path) -> int:
    """Chunks that were copied when the file was written."""
    return int(json.loads(state.read_bytes())["done"][0])


def spoil(source: Path, keys: set[bytes]) -> None:
    """Make chunks of the source such that reading them again would be noticed."""
    for key in keys:
        path = source / DIRECTORY / key.hex()[:2] / f"{key.hex()}.kv"
        path.write_bytes(b"spoilt")


def finish(kv: Command, source: Path, target: Path, *options: str) -> dict[str, Any]:
    """Make a killed copy again; its report."""
    assert kv("verify", target, "--json").json["ok"]  # whatever the kill has left
    spoil(source, copied(target))
    report = kv("warm", "--from", source, "--to", target, *options, "--json").json
    assert report["corrupt"] == report["missing"] == 0
    assert report["chunks"] + report["skipped"] == CHUNKS
    checked = kv("verify", target, "--json").json
    assert (checked["ok"], checked["good"]) == (True, CHUNKS)
    with kvstore.open("ram://?capacity=16MiB", str(target), namespace=MODEL, chunk_size=CHUNK) as store:
        assert store.get_many(list(DATA)) == DATA
    return report


def test_a_copy_killed_again_and_again(kv: Command, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    for count in (1, 20, 70):
        kill_when(lambda count=count: len(copied(target)) >= count, source, target)
    there = len(copied(target))
    report = finish(kv, source, target)
    assert (report["chunks"], report["skipped"]) == (CHUNKS - there, there)


def test_a_killed_copy_goes_on_from_its_file(kv: Command, source: Path, tmp_path: Path) -> None:
    """And counts what it had copied when the file was written."""
    target, state = tmp_path / "target", tmp_path / "state"
    options = ("--resume", str(state))
    kill_when(lambda: state.exists() and done_by(state), source, target, *options)
    before, there = done_by(state), len(copied(target))
    assert 0 < before <= there
    assert finish(kv, source, target, *options)["chunks"] == before + CHUNKS - there
    assert not state.exists()


def test_a_copy_killed_at_its_start(kv: Command, source: Path, tmp_path: Path) -> None:
    """The manifest comes first: it is what the next copy, or a store, would write."""
    target = tmp_path / "target"
    kill_when((target / DIRECTORY / "namespace.json").exists, source, target)
    finish(kv, source, target)
