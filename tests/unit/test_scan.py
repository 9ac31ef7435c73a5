"""The scanner: one finding of each kind, on every kind of storage, without a change to any of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvstore.backends import create
from kvstore.backends.layout import Kind, aside_name, classify, object_name, temp_name
from kvstore.config import TierConfig
from kvstore.scan import Finding, Status, Summary, scan, spaces
from kvstore.testing.backend import make_key
from support.spaces import CHUNK, NAMESPACE, OTHER, file_of
from support.spaces import fill as fill_tier

SCHEMES = ["file://{}", "dir::file://{}", "simplecache::file://{}"]


@pytest.fixture(params=SCHEMES)
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> TierConfig:
    (tmp_path / "root").mkdir()
    return TierConfig(url=request.param.format(tmp_path / "root"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "root" / NAMESPACE.directory


@pytest.fixture
def fill(tier: TierConfig) -> Callable[..., None]:
    return partial(fill_tier, tier)


def scan_all(tier: TierConfig, **options: object) -> dict[str, Finding]:
    return {finding.name: finding for space in spaces(tier) for finding in scan(space, **options)}


def snapshot(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_sound_objects(tier: TierConfig, fill: Callable[..., None]) -> None:
    fill(1, 2, 3)
    found = scan_all(tier)
    assert sorted(found) == sorted(object_name(make_key(number)) for number in (1, 2, 3))
    assert list(found) == sorted(found)
    for finding in found.values():
        assert finding.status is Status.GOOD
        assert finding.key is not None and object_name(finding.key) == finding.name
        assert finding.size == 4096 + CHUNK
        assert abs(finding.mtime - time.time()) < 60


def test_damaged_objects(tier: TierConfig, fill: Callable[..., None], folder: Path) -> None:
    fill(1, 2, 3)
    data = bytearray(file_of(folder, 1).read_bytes())
    data[5000] ^= 1
    file_of(folder, 1).write_bytes(data)
    os.truncate(file_of(folder, 2), 100)
    found = scan_all(tier)
    one, two, three = (found[object_name(make_key(number))] for number in (1, 2, 3))
    assert (one.status, one.reason) == (Status.CORRUPT, "payload checksum does not hold")
    assert (two.status, two.reason) == (Status.CORRUPT, "torn: 100 bytes are less than a header")
    assert three.status is Status.GOOD


def test_foreign_files(tier: TierConfig, fill: Callable[..., None], folder: Path) -> None:
    fill(1)
    fill(2, namespace=OTHER)
    good = file_of(folder, 1).read_bytes()
    for number, data in [
        (3, good),
        (4, file_of(folder.parent / OTHER.directory, 2).read_bytes()),
    ]:
        file_of(folder, number).parent.mkdir(exist_ok=True)
        file_of(folder, number).write_bytes(data)
    (folder / "README").write_text("hello")
    (folder / "zz").mkdir()
    (folder / "zz" / f"{make_key(1).hex()}.kv").write_bytes(good)
    found = scan_all(tier)
    foreign = {name: finding.reason for name, finding in found.items() if finding.status is Status.FOREIGN}
    assert foreign == {
        object_name(make_key(3)): f"of another key, {make_key(1).hex()}",
        object_name(make_key(4)): f"of another namespace, {OTHER.directory}",
        "README": "no name that kvstore gives",
        f"zz/{make_key(1).hex()}.kv": "no name that kvstore gives",
    }
    assert found[object_name(make_key(1))].status is Status.GOOD


def test_temporary_files_by_age(tier: TierConfig, fill: Callable[..., None], folder: Path) -> None:
    fill(1)
    now = time.time()
    for name, age in [("young", 10), ("old", 10_000), ("future", -10_000)]:
        path = folder / f"{name}.tmp"
        path.write_bytes(b"half")
        os.utime(path, (now - age, now - age))
    found = scan_all(tier)
    assert found["young.tmp"].status is Status.TEMP
    assert found["future.tmp"].status is Status.TEMP
    assert found["old.tmp"].status is Status.STALE_TEMP
    assert "10000 s" in found["old.tmp"].reason or "10001 s" in found["old.tmp"].reason
    assert scan_all(tier, stale_after=5)["young.tmp"].status is Status.STALE_TEMP


def test_quarantined_objects_are_no_problem(
    tier: TierConfig, fill: Callable[..., None], folder: Path
) -> None:
    fill(1, 2)
    file_of(folder, 1).write_bytes(b"torn")
    backend = create(tier, NAMESPACE)
    backend.open()
    assert backend.quarantine(make_key(1))
    backend.close()
    statuses = {finding.key: finding.status for finding in scan_all(tier).values()}
    assert statuses == {make_key(1): Status.QUARANTINED, make_key(2): Status.GOOD}


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        (None, "missing"),
        (b"", "torn"),
        (NAMESPACE.manifest[:-20], "torn"),
        (OTHER.manifest, f"that of {OTHER.directory}"),
    ],
)
def test_bad_manifest_is_reported_and_objects_are_read(
    tier: TierConfig, fill: Callable[..., None], folder: Path, manifest: bytes | None, reason: str
) -> None:
    fill(1)
    if manifest is None:
        (folder / "namespace.json").unlink()
    else:
        (folder / "namespace.json").write_bytes(manifest)
    found = scan_all(tier)
    assert found["namespace.json"].status is Status.MANIFEST
    assert reason in found["namespace.json"].reason
    assert found[object_name(make_key(1))].status is Status.GOOD


def test_namespaces_side_by_side_and_what_is_not_ours(
    tier: TierConfig, fill: Callable[..., None], folder: Path
) -> None:
    fill(1)
    fill(1, 2, namespace=OTHER)
    (folder.parent / "lost+found").mkdir()
    (folder.parent / "notes.txt").write_text("mine")
    counts = {space.directory: len(list(scan(space))) for space in spaces(tier)}
    assert counts == {NAMESPACE.directory: 1, OTHER.directory: 2}
    assert [space.namespace for space in spaces(tier)] == sorted(
        (NAMESPACE, OTHER), key=lambda namespace: namespace.directory
    )


def test_listing_does_not_read(tier: TierConfig, fill: Callable[..., None], folder: Path) -> None:
    fill(1)
    file_of(folder, 1).write_bytes(b"rubbish")
    (finding,) = scan_all(tier, read=False).values()
    assert (finding.status, finding.size) == (Status.LISTED, 7)


def test_scanning_changes_nothing(tier: TierConfig, fill: Callable[..., None], folder: Path) -> None:
    fill(1, 2)
    file_of(folder, 1).write_bytes(b"rubbish")
    (folder / "namespace.json").unlink()
    (folder / "x.tmp").write_bytes(b"")
    before = snapshot(folder.parent)
    scan_all(tier)
    assert snapshot(folder.parent) == before


def test_a_tier_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(spaces(TierConfig(url=f"file://{tmp_path}/absent")))
    assert list(tmp_path.iterdir()) == []


def test_memory_store_of_this_process() -> None:
    tier = TierConfig(url="memory://scanned")
    backend = create(tier, NAMESPACE)
    backend.open()
    backend.write(make_key(1), memoryview(b"abc"))
    assert [finding.status for finding in scan_all(tier).values()] == [Status.GOOD]


def test_unreadable_objects(tmp_path: Path) -> None:
    tier = TierConfig(url=f"file://{tmp_path}")
    create(tier, NAMESPACE).open()
    path = file_of(tmp_path / NAMESPACE.directory, 1)
    path.parent.mkdir()
    path.symlink_to(path)  # opening it fails, for root too
    (finding,) = scan_all(tier).values()
    assert finding.status is Status.UNREADABLE
    assert "Too many levels" in finding.reason


def test_summary() -> None:
    summary = Summary()
    for status, size in [(Status.GOOD, 10), (Status.GOOD, 5), (Status.QUARANTINED, 3), (Status.TEMP, 1)]:
        summary.add(Finding("name", status, None, size, 0.0))
    assert summary.ok
    assert (summary.counts[Status.GOOD], summary.sizes[Status.GOOD]) == (2, 15)
    summary.add(Finding("name", Status.STALE_TEMP, None, 1, 0.0))
    assert not summary.ok


@pytest.mark.parametrize("length", [16, 64])
def test_names_and_what_they_stand_for(length: int) -> None:
    key = bytes(range(length))
    name = object_name(key)
    assert classify(name) == (Kind.OBJECT, key)
    assert classify(temp_name(name)) == (Kind.TEMP, None)
    assert classify(aside_name(name)) == (Kind.QUARANTINED, key)
    assert classify(aside_name("some/README.md")) == (Kind.QUARANTINED, None)
    assert classify("namespace.json") == (Kind.MANIFEST, None)
    for foreign in [name.upper(), f"x/{name}", f"01/{key.hex()}.kv", name[:-3], name[:-4] + ".kv", ""]:
        assert classify(foreign) == (Kind.FOREIGN, None)
    assert temp_name(name) != temp_name(name)
