"""What the place of a tier can do to a store: full, read-only, unmounted, deleted, crowded, of another time.

Each is the real thing where this machine lets us mount: a small tmpfs in a mount namespace of a process of
its own, which runs one of the functions ``in_...`` below; an assertion that fails there fails the test.
Whatever happens, the calls that an engine makes do not raise, stores stop, and loads go on.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import health
from kvstore.backends.layout import object_name
from kvstore.scan import Status, scan, spaces
from kvstore.testing.backend import make_key
from support.world import CHUNK, KEYS, World, load, save

ENGINE = "threads"
FEW, MANY, LATER = KEYS[:2], KEYS[2:14], KEYS[14:]
LONGER_THAN_A_BREAKER_IS_OPEN = 120.0


@pytest.fixture
def world(tmp_path: Path, lasting_breakers: None) -> Iterator[World]:
    world = World(tmp_path, ENGINE)
    yield world
    world.close()


def run_mounted(place: str) -> None:
    """Run a function of this file in a mount namespace of its own."""
    with tempfile.TemporaryDirectory(prefix="kvstore-place-") as folder:
        command = ["unshare", "--mount", sys.executable, __file__, place, folder]
        environment = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(__file__))}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
        assert done.returncode == 0, done.stderr


needs_mounts = pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0,
    reason="this user may not mount file systems, which the test needs",
)


def mount(folder: Path, *options: str) -> None:
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", *options, str(folder)], check=True)


def save_in_turns(world: World, keys: list[bytes]) -> None:
    """Few enough at a time that no queue of writes is full."""
    for start in range(0, len(keys), 4):
        turn = keys[start : start + 4]
        assert save(world.store, turn) == set(turn)
        assert world.store.flush(timeout=20)


def stores_stop_and_loads_go_on(world: World, number: int) -> None:
    """What every place must see to while it is out of order for writing; `number` is that of its error."""
    world.store.events()
    save_in_turns(world, MANY)
    first = world.store.stats().tier("first")
    assert (first.breaker.write, first.breaker.read) == ("open", "closed")
    assert first.errors >= 8  # and then the tier is spared
    assert first.dropped == len(MANY) - first.errors - first.writes
    [down] = [event for event in world.store.events() if event.kind == "tier-down"]
    assert os.strerror(number) in down.detail
    assert load(world.store, FEW) == set(FEW)
    assert world.store.stats().tier("first").hits == len(FEW)
    assert load(world.store, MANY) == set(MANY)


def and_comes_back(world: World) -> None:
    """The place is in order again."""
    world.clock.skip(LONGER_THAN_A_BREAKER_IS_OPEN)
    written = world.store.stats().tier("first").writes
    save_in_turns(world, LATER)
    first = world.store.stats().tier("first")
    assert (first.breaker.write, first.writes) == ("closed", written + len(LATER))
    found = world.found("first")
    assert set(found) == {Status.GOOD}, "something is left behind"


# Full, by bytes and by files.


@needs_mounts
@pytest.mark.parametrize("place", ["in_a_full_file_system", "in_one_without_inodes", "in_one_made_read_only"])
def test_no_more_can_be_written(place: str) -> None:
    run_mounted(place)


def in_a_full_file_system(folder: Path) -> None:
    mount(folder / "first", "-t", "tmpfs", "-o", "size=1M", "tmpfs")
    world = World(folder, ENGINE)
    world.plant(FEW, "first")
    ballast = folder / "first" / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError as error:
                assert error.errno == errno.ENOSPC
                break
    world.open()
    stores_stop_and_loads_go_on(world, errno.ENOSPC)
    ballast.unlink()
    and_comes_back(world)
    world.close()


def in_one_without_inodes(folder: Path) -> None:
    """As a quota of files does; a quota of bytes is a full file system (EDQUOT for ENOSPC)."""
    mount(folder / "first", "-t", "tmpfs", "-o", "nr_inodes=30", "tmpfs")
    world = World(folder, ENGINE)
    world.plant(FEW, "first")
    ballast = []
    while True:
        try:
            (folder / "first" / f"ballast-{len(ballast)}").touch()
        except OSError as error:
            assert error.errno == errno.ENOSPC
            break
        ballast.append(folder / "first" / f"ballast-{len(ballast)}")
    world.open()
    stores_stop_and_loads_go_on(world, errno.ENOSPC)
    for path in ballast:
        path.unlink()
    and_comes_back(world)
    world.close()


def in_one_made_read_only(folder: Path) -> None:
    mount(folder / "first", "-t", "tmpfs", "-o", "size=4M", "tmpfs")
    world = World(folder, ENGINE)
    world.plant(FEW, "first")
    world.open()
    mount(folder / "first", "-o", "remount,ro")
    stores_stop_and_loads_go_on(world, errno.EROFS)
    mount(folder / "first", "-o", "remount,rw")
    and_comes_back(world)
    world.close()


@needs_mounts
def test_a_read_only_place_serves_reads() -> None:
    run_mounted("in_one_that_is_read_only")


def in_one_that_is_read_only(folder: Path) -> None:
    """From the start: the manifest is there, so the tier opens."""
    mount(folder / "first", "-t", "tmpfs", "-o", "size=4M", "tmpfs")
    world = World(folder, ENGINE)
    world.plant(FEW, "first")
    damaged = next((folder / "first").glob(f"*/{object_name(FEW[0])}"))
    damaged.write_bytes(damaged.read_bytes()[:100])
    mount(folder / "first", "-o", "remount,ro")
    world.open(write="off")
    assert load(world.store, FEW) == {FEW[1]}
    first = world.store.stats().tier("first")
    assert (first.corrupt, first.hits, first.breaker.read) == (1, 1, "closed")
    assert damaged.exists()  # it cannot be moved aside, and stays refused
    world.close()


# Gone.


@needs_mounts
def test_unmounted_while_in_use() -> None:
    run_mounted("in_one_that_is_unmounted")


def in_one_that_is_unmounted(folder: Path) -> None:
    """What is below the mount point is an empty directory, which serves until the file system is back."""
    disk = folder / "disk"
    disk.mkdir()
    (folder / "first").mkdir()
    subprocess.run(["mount", "--bind", str(disk), str(folder / "first")], check=True)
    world = World(folder, ENGINE)
    world.plant([*FEW, *LATER], "first")
    world.plant(FEW[:1], "second")
    world.open()
    subprocess.run(["umount", "--lazy", str(folder / "first")], check=True)
    assert load(world.store, FEW) == set(FEW[:1])
    save_in_turns(world, MANY[:4])
    first = world.store.stats().tier("first")
    assert (first.errors, first.writes) == (0, 4)
    subprocess.run(["mount", "--bind", str(disk), str(folder / "first")], check=True)
    world.clock.skip(LONGER_THAN_A_BREAKER_IS_OPEN)
    assert load(world.store, LATER) == set(LATER)
    assert world.store.stats().tier("first").hits == len(LATER)
    world.close()


@pytest.mark.parametrize("deleted", ["first", "first/namespace"])
def test_a_directory_deleted_under_us_grows_again(world: World, deleted: str) -> None:
    world.plant([*FEW, *LATER])
    store = world.open()
    assert load(store, LATER) == set(LATER)
    shutil.rmtree(world.folder / deleted.replace("namespace", world.namespace.directory))
    assert load(store, FEW) == set(FEW)
    assert store.stats().tier("second").hits == len(FEW)
    save_in_turns(world, MANY)
    first = store.stats().tier("first")
    assert (first.errors, first.writes) == (0, len(MANY))
    assert world.found("first") == {Status.MANIFEST: 1, Status.GOOD: len(MANY)}
    world.close()
    store = world.open()  # which writes the manifest again
    assert load(store, MANY) == set(MANY)
    assert world.found("first") == {Status.GOOD: len(MANY)}


def test_what_lay_above_a_tier_is_not_made_again(world: World, tmp_path: Path) -> None:
    """It may be the place of a disk that was unmounted, and all would go to another."""
    mounts = tmp_path / "mounts"
    store = world.open(url=f"file://{mounts}/disk/kv")
    save_in_turns(world, MANY[:4])
    assert store.stats().tier("first").writes == 4
    shutil.rmtree(mounts / "disk")
    rest = MANY[4:]
    save_in_turns(world, rest)
    first = store.stats().tier("first")
    assert (first.breaker.write, list(mounts.iterdir())) == ("open", [])
    assert "mkdir -p" in first.last_error and "\n" not in first.last_error
    assert load(store, rest) == set(rest)
    (mounts / "disk").mkdir()
    world.clock.skip(LONGER_THAN_A_BREAKER_IS_OPEN)
    save_in_turns(world, LATER)
    assert (mounts / "disk" / "kv").is_dir()


def test_a_file_where_the_directory_was(world: World) -> None:
    world.plant(FEW)
    store = world.open()
    shutil.rmtree(world.folder / "first")
    (world.folder / "first").write_text("in the way")
    assert load(store, FEW) == set(FEW)
    save_in_turns(world, MANY)
    first = store.stats().tier("first")
    assert (first.writes, first.breaker.write) == (0, "open")
    assert load(store, MANY) == set(MANY)
    (world.folder / "first").unlink()
    world.clock.skip(LONGER_THAN_A_BREAKER_IS_OPEN)
    save_in_turns(world, LATER)
    assert store.stats().tier("first").writes == len(LATER)


# Another time.


def test_a_clock_that_was_set_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything on storage is from the future; what times the store itself is monotonic."""
    world.plant(FEW)
    for path in (world.folder / "first").rglob("*"):
        os.utime(path, (time.time() + 1e8, time.time() + 1e8))
    real = time.time
    store = world.open(capacity=f"{4 * (CHUNK + 4096)}B")
    save_in_turns(world, MANY[:2])
    monkeypatch.setattr(time, "time", lambda: real() - 1e7)
    monkeypatch.setattr(time, "time_ns", lambda: int((real() - 1e7) * 1e9))
    assert load(store, FEW) == set(FEW)
    save_in_turns(world, MANY[2:6])
    first = store.stats().tier("first")
    assert (first.hits, first.errors, first.writes, first.evictions) == (2, 0, 6, 4)
    assert first.chunks == 4
    temp = world.folder / "first" / world.namespace.directory / "x.tmp"
    temp.write_bytes(b"half")  # younger than now is young
    (tier,) = (tier for tier in world.config().tiers if tier.name == "first")
    statuses = [finding.status for space in spaces(tier) for finding in scan(space)]
    assert statuses == [Status.GOOD] * 4 + [Status.TEMP]


# A crowd.


def test_twenty_thousand_files_present(world: World) -> None:
    """Neither opening nor any call takes longer for what is there already; a listing takes little memory."""
    world.plant(FEW, "first")
    folder = world.folder / "first" / world.namespace.directory
    source = folder / object_name(FEW[0])
    for number in range(100, 20_100):
        path = folder / object_name(make_key(number))
        path.parent.mkdir(exist_ok=True)
        os.link(source, path)  # a foreign object, if anybody reads it
    began = time.perf_counter()
    store = world.open(capacity="1GiB")
    assert load(store, FEW) == set(FEW)
    assert time.perf_counter() - began < 5
    save_in_turns(world, MANY)  # as soon as the listing for the capacity is done
    first = store.stats().tier("first")
    assert first.chunks == 20_000 + len(FEW) + len(MANY)
    assert (first.errors, first.writes) == (0, len(MANY))
    assert load(store, [make_key(100)]) == set()
    assert store.stats().tier("first").corrupt == 1


if __name__ == "__main__":
    health._FIRST = 60.0  # as `lasting_breakers` has it
    globals()[sys.argv[1]](Path(sys.argv[2]))
