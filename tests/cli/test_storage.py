"""``kvstore ls``, ``stat`` and ``verify``."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

import kvstore
from support.command import Command

CHUNK = 4096
KEYS = [bytes([n]) * 16 for n in range(8)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tier with two namespaces: 8 chunks of one model, 1 of another."""
    path = tmp_path / "kv [1]"
    for model, keys in (("[m]", KEYS), ("other", KEYS[:1])):
        with kvstore.open(
            "ram://?capacity=1MiB", {"url": str(path)}, namespace={"model": model}, chunk_size=CHUNK
        ) as store:
            store.put_many(dict.fromkeys(keys, b"x" * 100))
    return path


@pytest.fixture
def directory() -> str:
    return kvstore.Namespace({"model": "[m]"}, CHUNK).directory


def test_ls_namespaces(kv: Command, root: Path, directory: str) -> None:
    found = {facts["directory"]: facts for facts in kv("ls", root, "--json").json["namespaces"]}
    assert found.keys() == set(os.listdir(root))
    assert found[directory]["chunks"] == 8
    assert found[directory]["bytes"] == sum(file.stat().st_size for file in root.glob(f"{directory}/*/*.kv"))
    assert found[directory]["newest"] == pytest.approx(time.time(), abs=60)
    out = kv("ls", root).out
    assert directory in out
    assert "[m]" in out


def test_ls_chunks(kv: Command, root: Path, directory: str) -> None:
    report = kv("ls", root, "--namespace", directory, "--json").json
    assert [chunk["key"] for chunk in report["chunks"]] == [key.hex() for key in KEYS]
    assert {chunk["bytes"] for chunk in report["chunks"]} == {8192}
    lines = kv("ls", root, "--namespace", directory).out.splitlines()
    assert [line.split()[0] for line in lines] == [key.hex() for key in KEYS]


def test_stat(kv: Command, root: Path, directory: str) -> None:
    report = kv("stat", root, "--json").json
    assert (report["chunks"], report["bytes"]) == (9, 9 * 8192)
    fields = {facts["directory"]: facts["fields"] for facts in report["namespaces"]}
    assert fields[directory] == kvstore.Namespace({"model": "[m]"}, CHUNK).identity
    out = kv("stat", root, "--namespace", directory).out
    assert "[m]" in out
    assert "other" not in out


def test_verify_sound(kv: Command, root: Path) -> None:
    report = kv("verify", root, "--json").json
    assert (report["ok"], report["good"], report["problems"]) == (True, 9, [])
    assert "nothing wrong" in kv("verify", root).out


def test_verify_says_what_is_wrong(kv: Command, root: Path, directory: str) -> None:
    folder = root / directory
    before = {file for file in root.rglob("*") if file.is_file()}
    corrupt, foreign, *_ = sorted(folder.glob("*/*.kv"))
    data = bytearray(corrupt.read_bytes())
    data[4096] ^= 1
    corrupt.write_bytes(data)
    foreign.write_bytes((folder / "07" / f"{'07' * 16}.kv").read_bytes())
    (folder / "notes.txt").write_text("mine")
    stale, fresh = folder / "02" / "old.1-2-3.tmp", folder / "02" / "new.1-2-3.tmp"
    stale.touch()
    os.utime(stale, (1, 1))
    fresh.touch()
    other = next(file for file in before if file.name == "namespace.json" and file.parent != folder)
    other.write_text("{")

    report = kv("verify", root, "--json", code=1).json
    counts = {name: report[name] for name in ("good", "corrupt", "foreign", "stale_temp", "temp", "manifest")}
    assert counts == {"good": 7, "corrupt": 1, "foreign": 2, "stale_temp": 1, "temp": 1, "manifest": 1}
    assert not report["ok"]
    names = {(problem["status"], problem["name"]) for problem in report["problems"]}
    assert ("corrupt", f"00/{'00' * 16}.kv") in names
    assert ("foreign", f"01/{'01' * 16}.kv") in names
    assert ("stale_temp", "02/old.1-2-3.tmp") in names
    assert ("manifest", "namespace.json") in names
    # It changes nothing.
    assert {file for file in root.rglob("*") if file.is_file()} == {
        *before,
        folder / "notes.txt",
        stale,
        fresh,
    }
    out = kv("verify", root, code=1).out
    assert f"corrupt: {directory}/00/{'00' * 16}.kv: payload checksum does not hold" in out
    assert "what to do" in out


def test_one_namespace_is_verified_alone(kv: Command, root: Path, directory: str) -> None:
    next(root.glob(f"{directory}/00/*.kv")).write_bytes(b"torn")
    (sound,) = (name for name in os.listdir(root) if name != directory)
    assert kv("verify", root, "--namespace", sound, "--json").json["good"] == 1
    assert kv("verify", root, "--namespace", directory, "--json", code=1).json["corrupt"] == 1


@pytest.mark.parametrize("command", [["ls"], ["stat"], ["verify"], ["prune", "--to", "1MiB"]])
def test_where_no_namespace_is(kv: Command, root: Path, directory: str, command: list[str]) -> None:
    """That may be as it should be, so it is no problem; but whoever mistyped a path wants to know."""
    elsewhere = root.parent / "elsewhere"
    (elsewhere / "photos").mkdir(parents=True)
    remark = "nothing has been stored there, or it is not the root of a tier"
    assert kv(*command, elsewhere).out == f"no namespace in {elsewhere.as_uri()}: {remark}\n"
    assert kv(*command, elsewhere, "--json").json["namespaces"] == []
    ran = kv(*command, root / directory, code=2)
    assert f"is a namespace; name its tier: {root.as_uri()} --namespace {directory}" in ran.err
