"""Repair: what is wrong goes aside, what is sound stays, and stores may be at work meanwhile."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import kvstore
from kvstore.backends import create
from kvstore.backends.layout import object_name
from kvstore.config import TierConfig
from kvstore.errors import ConfigError
from kvstore.repair import Action, Cursor, Deed, Pace, repair
from kvstore.scan import Status, Summary, scan, spaces
from kvstore.testing.backend import make_key
from support.spaces import CHUNK, NAMESPACE, OTHER, file_of
from support.spaces import fill as fill_tier


@pytest.fixture(params=["file://{}", "dir::file://{}"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> TierConfig:
    (tmp_path / "root").mkdir()
    return TierConfig(url=request.param.format(tmp_path / "root"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "root" / NAMESPACE.directory


@pytest.fixture
def fill(tier: TierConfig) -> Callable[..., None]:
    return partial(fill_tier, tier)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)


def plant(path: Path, data: bytes, *, age: float = 0.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def deeds(actions: Iterator[Action]) -> dict[str, Deed]:
    return {action.finding.name: action.deed for action in actions}


def verify(tier: TierConfig) -> Summary:
    summary = Summary()
    for space in spaces(tier):
        for finding in scan(space):
            summary.add(finding)
    return summary


def plant_one_of_each(folder: Path) -> dict[str, Deed]:
    """One of everything that can be wrong; returns what should be done about it."""
    good = file_of(folder, 1).read_bytes()
    damage(file_of(folder, 2))
    os.truncate(file_of(folder, 3), 100)
    plant(file_of(folder, 4), good)
    plant(folder / "zz" / "README.md", b"hello")
    plant(folder / "ab" / "old.tmp", b"half", age=10_000)
    plant(folder / "ab" / "young.tmp", b"half", age=10)
    (folder / "namespace.json").write_bytes(NAMESPACE.manifest[:30])
    return {
        object_name(make_key(1)): Deed.NOTHING,
        object_name(make_key(2)): Deed.QUARANTINED,
        object_name(make_key(3)): Deed.QUARANTINED,
        object_name(make_key(4)): Deed.QUARANTINED,
        "zz/README.md": Deed.QUARANTINED,
        "ab/old.tmp": Deed.REMOVED,
        "ab/young.tmp": Deed.NOTHING,
        "namespace.json": Deed.REMOVED,
    }


def test_what_is_wrong_is_mended(tier: TierConfig, fill: Callable[..., None], folder: Path) -> None:
    fill(1, 2, 3)
    expected = plant_one_of_each(folder)
    damaged = file_of(folder, 2).read_bytes()
    assert deeds(repair(spaces(tier))) == expected

    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    aside = {name for name in left if name.startswith("quarantine/")}
    assert left - aside == {object_name(make_key(1)), "ab/young.tmp"}
    assert len(aside) == 4
    (moved,) = (name for name in aside if make_key(2).hex() in name)
    assert (folder / moved).read_bytes() == damaged

    fill()  # a store that opens the namespace writes the manifest
    summary = verify(tier)
    assert summary.ok
    assert summary.counts == {Status.GOOD: 1, Status.QUARANTINED: 4, Status.TEMP: 1}


def test_a_dry_run_changes_nothing(tier: TierConfig, fill: Callable[..., None], folder: Path) -> None:
    fill(1, 2, 3)
    expected = plant_one_of_each(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert deeds(repair(spaces(tier), dry_run=True)) == expected
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_in_the_memory_of_this_process() -> None:
    tier = TierConfig(url="memory://repaired")
    backend = create(tier, NAMESPACE)
    backend.open()
    backend.create_file("stray", b"x")
    backend.write(make_key(1), memoryview(b"abc"))
    assert deeds(repair(spaces(tier))) == {object_name(make_key(1)): Deed.NOTHING, "stray": Deed.QUARANTINED}
    assert verify(tier).counts == {Status.GOOD: 1, Status.QUARANTINED: 1}


# While stores are at work.


def test_an_object_that_was_replaced_meanwhile_stays(
    tier: TierConfig, fill: Callable[..., None], folder: Path
) -> None:
    fill(1, 2)
    good = {number: file_of(folder, number).read_bytes() for number in (1, 2)}
    damage(file_of(folder, 1))
    damage(file_of(folder, 2))

    found = spaces(tier)
    space = next(found)
    read = space.backend.read_into

    def read_into(key: bytes, out: memoryview) -> int | None:
        """The first look finds what is there now; before the second it is replaced, or deleted."""
        try:
            return read(key, out)
        finally:
            file_of(folder, 1).write_bytes(good[1])
            file_of(folder, 2).unlink(missing_ok=True)

    space.backend.read_into = read_into  # type: ignore[method-assign]
    actions = list(repair([space]))
    assert {action.deed for action in actions} == {Deed.NOTHING}
    assert file_of(folder, 1).read_bytes() == good[1]
    assert not (folder / "quarantine").exists()


def test_a_sound_manifest_stays(tier: TierConfig, fill: Callable[..., None], folder: Path) -> None:
    """Written by a store between the first look and the second."""
    fill(1)
    manifest = folder / "namespace.json"
    manifest.write_bytes(b"")
    actions = []
    for space in spaces(tier):
        manifest.write_bytes(NAMESPACE.manifest)
        actions += repair([space])
    assert [action.finding.status for action in actions] == [Status.MANIFEST, Status.GOOD]
    assert {action.deed for action in actions} <= {Deed.NOTHING, Deed.LEFT}
    assert manifest.read_bytes() == NAMESPACE.manifest


def test_a_live_store_is_not_disturbed(tmp_path: Path) -> None:
    """Repair over and over while a store writes; everything that it wrote is there afterwards."""
    url = f"file://{tmp_path}"
    data = {make_key(number): bytes([number]) * CHUNK for number in range(200)}
    with kvstore.open("ram://?capacity=4MiB&pin=off", url, chunk_size=CHUNK) as store:
        for key, value in data.items():
            store.put(key, value)
            if key[0] % 16 == 0:
                assert all(action.deed is Deed.NOTHING for action in repair(spaces(TierConfig(url=url))))
        assert store.flush(timeout=20)
        assert store.stats().tiers[1].errors == 0
    with kvstore.open("ram://?capacity=4MiB&pin=off", url, chunk_size=CHUNK) as store:
        assert store.get_many(list(data)) == data


# What is left alone.


@pytest.mark.parametrize("name", ["configs", OTHER.directory])
def test_a_directory_that_may_be_somebody_elses(
    tier: TierConfig, fill: Callable[..., None], folder: Path, name: str
) -> None:
    """No fingerprint for a name, or a manifest that is not that of the name."""
    fill(1)
    folder.rename(folder.parent / name)
    plant(folder.parent / name / "settings.yaml", b"mine")
    actions = list(repair(spaces(tier)))
    assert {action.deed for action in actions} == {Deed.LEFT}
    assert "disagree" in actions[0].detail
    names = {path.name for path in (folder.parent / name).rglob("*") if path.is_file()}
    assert names == {"namespace.json", "settings.yaml", f"{make_key(1).hex()}.kv"}


def test_somebody_elses_file_called_namespace_json(tmp_path: Path) -> None:
    path = plant(tmp_path / "app" / "namespace.json", b"not json")
    assert deeds(repair(spaces(TierConfig(url=f"file://{tmp_path}")))) == {"namespace.json": Deed.LEFT}
    assert path.read_bytes() == b"not json"


def test_a_missing_manifest_is_for_a_store_to_write(
    tier: TierConfig, fill: Callable[..., None], folder: Path
) -> None:
    fill(1)
    (folder / "namespace.json").unlink()
    assert deeds(repair(spaces(tier))) == {
        "namespace.json": Deed.LEFT,
        object_name(make_key(1)): Deed.NOTHING,
    }


def test_what_cannot_be_read_or_moved_is_left(tmp_path: Path) -> None:
    tier = TierConfig(url=f"file://{tmp_path}")
    backend = create(tier, NAMESPACE)
    backend.open()
    folder = tmp_path / NAMESPACE.directory
    path = file_of(folder, 1)
    path.parent.mkdir()
    path.symlink_to(path)  # opening it fails, for root too
    plant(file_of(folder, 2), b"rubbish")
    (folder / "quarantine").write_bytes(b"in the way")
    found = {action.finding.name: action for action in repair(spaces(tier))}
    assert found[object_name(make_key(1))].finding.status is Status.UNREADABLE
    assert {action.deed for action in found.values()} == {Deed.LEFT}
    assert "cannot be moved" in found[object_name(make_key(2))].detail


# Pace.


def test_reading_keeps_to_the_rate(tmp_path: Path) -> None:
    tier = TierConfig(url=f"file://{tmp_path}")
    backend = create(tier, NAMESPACE)
    backend.open()
    for number in range(20):
        backend.write(make_key(number), memoryview(bytes(CHUNK)))
    now = [0.0]
    sizes: list[int] = []

    def sleep(seconds: float) -> None:
        assert seconds > 0
        now[0] += seconds

    pace = Pace(1e6, clock=lambda: now[0], sleep=sleep)

    def paced(size: int) -> None:
        pace(size)
        sizes.append(size)

    assert len(list(repair(spaces(tier), pace=paced))) == 20
    assert now[0] == pytest.approx(sum(sizes[:-1]) / 1e6)  # the first may be read at once
    assert sum(sizes) == 20 * (4096 + CHUNK)


def test_time_spent_otherwise_counts() -> None:
    now = [0.0]
    slept: list[float] = []
    pace = Pace(100.0, clock=lambda: now[0], sleep=slept.append)
    pace(50)
    now[0] = 0.2  # of the half second that 50 bytes are worth
    pace(50)
    assert slept == [pytest.approx(0.3)]
    now[0] = 60.0  # a long pause is no credit
    pace(100)
    pace(100)
    assert slept[1:] == [pytest.approx(1.0)]
    with pytest.raises(ValueError, match="more than 0"):
        Pace(0)


# Cursor.


@pytest.fixture
def many(tier: TierConfig, fill: Callable[..., None]) -> list[str]:
    """Names of all objects, in two namespaces, in the order in which they are found."""
    fill(*range(30))
    fill(*range(30, 60), namespace=OTHER)
    return [f"{space.directory}/{finding.name}" for space in spaces(tier) for finding in scan(space)]


def names(actions: Iterator[Action]) -> list[str]:
    return [f"{action.directory}/{action.finding.name}" for action in actions]


@pytest.mark.parametrize("stop", [1, 29, 30, 31, 60])
def test_goes_on_where_it_was_stopped(tier: TierConfig, many: list[str], tmp_path: Path, stop: int) -> None:
    path = tmp_path / "cursor"
    actions = repair(spaces(tier), cursor=Cursor(path, tier.url))
    first = names(itertools.islice(actions, stop))
    actions.close()  # as a Ctrl-C in whoever iterates does
    assert path.exists()
    second = names(repair(spaces(tier), cursor=Cursor(path, tier.url)))
    assert first + second == many
    assert not path.exists()


def test_a_repaired_file_is_no_obstacle(tier: TierConfig, many: list[str], tmp_path: Path) -> None:
    """The last file dealt with is gone when the scan goes on."""
    damage(tmp_path / "root" / many[10])
    path = tmp_path / "cursor"
    actions = repair(spaces(tier), cursor=Cursor(path, tier.url))
    first = list(itertools.islice(actions, 11))
    assert first[-1].deed is Deed.QUARANTINED
    actions.close()
    second = names(repair(spaces(tier), cursor=Cursor(path, tier.url)))
    assert [name for name in second if "/quarantine/" not in name] == many[11:]


def test_a_bad_manifest_moves_no_cursor(tier: TierConfig, many: list[str], tmp_path: Path) -> None:
    for space in spaces(tier):
        (tmp_path / "root" / space.directory / "namespace.json").write_bytes(b"")
    path = tmp_path / "cursor"
    actions = repair(spaces(tier), cursor=Cursor(path, tier.url))
    assert next(actions).finding.status is Status.MANIFEST
    actions.close()
    second = names(repair(spaces(tier), cursor=Cursor(path, tier.url)))
    assert [name for name in second if not name.endswith(".json")] == many


def test_a_kill_loses_a_second_at_most(tier: TierConfig, many: list[str], tmp_path: Path) -> None:
    """The clock moves a tenth of a second with each look: the file is at most a few findings behind."""
    path = tmp_path / "cursor"
    clock = itertools.count(0, 0.1)
    actions = repair(spaces(tier), cursor=Cursor(path, tier.url, clock=lambda: next(clock)))
    first = names(itertools.islice(actions, 40))
    saved = Cursor(path, tier.url)  # what a process would find that starts after a kill at this moment
    assert 40 - 11 <= first.index(f"{saved.directory}/{saved.name}") < 40
    actions.close()


def test_interrupted_and_started_again(tmp_path: Path) -> None:
    tier = TierConfig(url=f"file://{tmp_path}/root")
    backend = create(tier, NAMESPACE)
    backend.open()
    for number in range(300):
        backend.write(make_key(number), memoryview(b"x"))
    for number in range(0, 300, 3):
        os.truncate(file_of(tmp_path / "root" / NAMESPACE.directory, number), 10)
    script = (
        "import sys; from kvstore.config import TierConfig; from kvstore.repair import *\n"
        "from kvstore.scan import spaces\n"
        "tier = TierConfig(url=sys.argv[1])\n"
        "for action in repair(spaces(tier), pace=Pace(1e6), cursor=Cursor(sys.argv[2], tier.url)):\n"
        "    print(action.finding.name, flush=True)\n"
    )
    command = [sys.executable, "-c", script, tier.url, str(tmp_path / "cursor")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(100):
            process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode != 0
    assert (tmp_path / "cursor").exists()
    rest = list(repair(spaces(tier), cursor=Cursor(tmp_path / "cursor", tier.url)))
    assert sum(action.finding.status is not Status.QUARANTINED for action in rest) < 250
    assert verify(tier).counts[Status.CORRUPT] == 0
    assert verify(tier).counts[Status.QUARANTINED] == 100


def test_a_cursor_of_another_tier(tmp_path: Path) -> None:
    path = tmp_path / "cursor"
    cursor = Cursor(path, "file:///a")
    cursor.mark("x", "y")
    cursor.save()
    with pytest.raises(ConfigError, match="go on in file:///a, not in file:///b"):
        Cursor(path, "file:///b")


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b'{"url": 1}'])
def test_a_file_that_is_no_cursor(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cursor"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="does not say where"):
        Cursor(path, "file:///a")
    assert path.read_bytes() == content
