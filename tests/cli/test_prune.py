"""``kvstore prune``, and ``kvstore stat`` where stores keep books."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

import kvstore
from kvstore.collect.directory import DirectoryBooks
from kvstore.collect.prune import prune
from kvstore.config import TierConfig
from support.chunks import chunk_key
from support.command import Command

CHUNK = 4096
SIZE = 2 * CHUNK
DAY = 86400


def fill(root: Path, model: str, numbers: range, options: str = "") -> Path:
    """Chunks whose age in days is their number."""
    with kvstore.open(
        "ram://?capacity=1MiB&pin=off",
        f"file://{root}{options}",
        namespace={"model": model},
        chunk_size=CHUNK,
    ) as store:
        store.put_many({chunk_key(number): bytes(CHUNK) for number in numbers})
        space = root / store.namespace.directory
    for number in numbers:
        key = chunk_key(number).hex()
        os.utime(space / key[:2] / f"{key}.kv", (time.time() - number * DAY - 60,) * 2)
    return space


def left(space: Path) -> list[int]:
    return sorted(bytes.fromhex(path.stem)[0] for path in space.rglob("*.kv"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def test_down_to_a_size_the_oldest_first_in_all_namespaces(kv: Command, root: Path) -> None:
    one, two = fill(root, "one", range(1, 6)), fill(root, "two", range(3, 9))
    report = kv("prune", root, "--to", f"{6 * SIZE}B", "--json").json
    assert (report["chunks"], report["bytes"], report["kept_chunks"]) == (5, 5 * SIZE, 6)
    assert (left(one), left(two)) == ([1, 2, 3, 4], [3, 4])
    assert kv("prune", root, "--to", "1GiB", "--json").json["chunks"] == 0


def test_what_nobody_has_used(kv: Command, root: Path) -> None:
    one, two = fill(root, "one", range(1, 6)), fill(root, "two", range(3, 9))
    out = kv("prune", root, "--older-than", "4d", "--namespace", two.name).out
    assert "deleted 5 chunks" in out
    assert (left(one), left(two)) == ([1, 2, 3, 4, 5], [3])


def test_a_dry_run_deletes_nothing(kv: Command, root: Path) -> None:
    one = fill(root, "one", range(1, 6), "?capacity=1GiB")
    before = (one / "accounting" / "state.json").read_bytes()
    for arguments, chunks in ((("--to", "0B"), 5), (("--older-than", "3d"), 3)):
        report = kv("prune", root, *arguments, "--dry-run", "--json").json
        assert (report["chunks"], report["dry_run"]) == (chunks, True)
    assert kv("prune", root, "--orphaned", "--older-than", "0s", "--dry-run", "--json").json["namespaces"][0][
        "gone"
    ]
    assert left(one) == [1, 2, 3, 4, 5]
    assert (one / "accounting" / "state.json").read_bytes() == before


def test_the_books_stay_right(kv: Command, root: Path) -> None:
    one = fill(root, "one", range(1, 6), "?capacity=1GiB")
    kv("prune", root, "--older-than", "4d")
    accounts = DirectoryBooks(str(one)).read()
    assert accounts is not None
    assert (accounts.chunks, accounts.size) == (3, 3 * SIZE)
    assert kv("verify", root, "--json").json["ok"]


def test_more_than_one_round_remembers(root: Path) -> None:
    one = fill(root, "one", range(1, 30))
    (outcome,) = prune(TierConfig(url=str(root)), to=5 * SIZE, most=7)
    assert (outcome.chunks, outcome.kept_chunks) == (24, 5)
    assert left(one) == [1, 2, 3, 4, 5]


def test_stale_temporary_files_go_too(kv: Command, root: Path) -> None:
    one = fill(root, "one", range(1, 3))
    stale, fresh = one / "01" / "x.1.tmp", one / "01" / "y.1.tmp"
    for path in (stale, fresh):
        path.write_bytes(b"half")
    os.utime(stale, (1, 1))
    assert kv("prune", root, "--to", "1GiB", "--json").json["namespaces"][0]["temporary"] == 1
    assert (stale.exists(), fresh.exists()) == (False, True)


def test_orphaned_namespaces_go_whole(kv: Command, root: Path) -> None:
    old, used, live, odd = (fill(root, model, range(40, 44)) for model in ("old", "used", "live", "odd"))
    for space in (old, used, live, odd):
        os.utime(space / "namespace.json", (1, 1))
    os.utime(next(used.rglob("*.kv")))
    (odd / "notes.txt").write_text("mine")
    os.utime(odd / "notes.txt", (1, 1))
    with kvstore.open(
        "ram://?capacity=1MiB&pin=off", f"file://{root}?capacity=1GiB", namespace={"model": "live"},
        chunk_size=CHUNK,
    ) as store:  # fmt: skip
        store.put(chunk_key(1), b"x")
        assert store.flush(timeout=20)
        report = kv("prune", root, "--orphaned", "--json").json
    assert {row["directory"]: row["gone"] for row in report["namespaces"]} == {
        old.name: True, used.name: False, live.name: False, odd.name: False,
    }  # fmt: skip
    assert not old.exists()
    assert (len(left(used)), len(left(live))) == (4, 5)
    assert [path.name for path in odd.rglob("*") if path.is_file()] == ["notes.txt"], "that is not kvstore's"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "say what to delete"),
        (("--to", "many"), "--to: not a size"),
        (("--older-than", "1y"), "--older-than: not a duration"),
        (("--orphaned", "--to", "1GiB"), "takes no --to"),
        (("--to", "1GiB", "--namespace", "nix"), "no namespace 'nix'"),
    ],
)
def test_usage(kv: Command, root: Path, arguments: tuple[str, ...], message: str) -> None:
    fill(root, "one", range(1, 2))
    ran = kv("prune", root, *arguments, code=2)
    assert message in ran.err
    assert ran.err.count("\n") == 1


def test_stat_answers_from_the_books(kv: Command, root: Path) -> None:
    one = fill(root, "one", range(1, 6), "?capacity=1GiB")
    facts = kv("stat", root, "--json").json["namespaces"][0]
    assert (facts["source"], facts["chunks"], facts["bytes"]) == ("books", 5, 5 * SIZE)
    next(one.rglob("*.kv")).unlink()
    assert kv("stat", root, "--json").json["chunks"] == 5
    facts = kv("stat", root, "--scan", "--json").json["namespaces"][0]
    assert (facts["source"], facts["chunks"]) == ("files", 4)
    assert "5" in kv("stat", root).out
