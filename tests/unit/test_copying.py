"""``kvstore.copy``: what is copied, what is skipped, what is refused, and how a copy goes on."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kvstore
from kvstore.backends.memory import forget
from kvstore.config import TierConfig
from kvstore.scan import Summary, scan, spaces
from kvstore.testing.faults import Fault, Rule

CHUNK = 4096
#: More than two batches for each of two workers.
CHUNKS = 100
MODEL = {"model": "m"}
DIRECTORY = kvstore.Namespace(MODEL, CHUNK).directory


def payload(number: int) -> bytes:
    return bytes([number]) * (CHUNK - number)


def key_of(number: int) -> bytes:
    return bytes([number]) * 16


DATA = {key_of(number): payload(number) for number in range(CHUNKS)}
KEYS = list(DATA)
BYTES = sum(map(len, DATA.values()))


def fill(root: Path, model: dict[str, str] = MODEL, keys: Iterable[bytes] = KEYS) -> Path:
    """Store chunks in a tier, and return the directory of their namespace."""
    with kvstore.open("ram://?capacity=2MiB", str(root), namespace=model, chunk_size=CHUNK) as store:
        store.put_many({key: DATA[key] for key in keys})
    return root / kvstore.Namespace(model, CHUNK).directory


def chunk_file(folder: Path, key: bytes) -> Path:
    return folder / key.hex()[:2] / f"{key.hex()}.kv"


def flip(path: Path) -> None:
    """Change a bit of a chunk's payload."""
    data = bytearray(path.read_bytes())
    data[4096] ^= 1
    path.write_bytes(data)


def keys_in(folder: Path) -> set[bytes]:
    return {bytes.fromhex(path.stem) for path in folder.glob("*/*.kv")}


def served(root: Path, model: dict[str, str] = MODEL) -> dict[bytes, bytes]:
    """What a store that opens the tier serves."""
    with kvstore.open("ram://?capacity=2MiB", str(root), namespace=model, chunk_size=CHUNK) as store:
        return store.get_many(KEYS)


def nothing_wrong(root: Path) -> bool:
    summary = Summary()
    for space in spaces(TierConfig(url=str(root))):
        for finding in scan(space):
            summary.add(finding)
    return summary.ok


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "source"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


# What is copied.


def test_copies_all_namespaces(source: Path, target: Path) -> None:
    folder = fill(source)
    fill(source, {"model": "other"}, KEYS[:3])
    done = kvstore.copy(str(source), str(target))
    assert done == (CHUNKS + 3, BYTES + sum(len(DATA[key]) for key in KEYS[:3]), 0, 0, 0)
    assert served(target) == DATA
    assert served(target, {"model": "other"}) == {key: DATA[key] for key in KEYS[:3]}
    assert (target / DIRECTORY / "namespace.json").read_bytes() == (folder / "namespace.json").read_bytes()
    assert nothing_wrong(target)


def test_copies_one_namespace(source: Path, target: Path) -> None:
    fill(source, keys=KEYS[:5])
    fill(source, {"model": "other"})
    assert kvstore.copy(str(source), str(target), namespace=DIRECTORY).chunks == 5
    assert os.listdir(target) == [DIRECTORY]


def test_the_manifest_is_copied_as_it_is(source: Path, target: Path) -> None:
    manifest = fill(source, keys=KEYS[:1]) / "namespace.json"
    content = json.loads(manifest.read_bytes())
    manifest.write_text(json.dumps({**content, "created_by": "somebody else"}))
    kvstore.copy(str(source), str(target))
    assert (target / DIRECTORY / "namespace.json").read_bytes() == manifest.read_bytes()


def test_copies_between_other_tiers(source: Path, target: Path) -> None:
    fill(source)
    name = str(source)
    try:
        assert kvstore.copy(str(source), f"memory://{name}").chunks == CHUNKS
        assert kvstore.copy(f"memory://{name}", f"simplecache::file://{target}").bytes == BYTES
    finally:
        forget(name)
    assert served(target) == DATA


def test_what_is_there_is_not_read(source: Path, target: Path) -> None:
    folder = fill(source)
    kvstore.copy(str(source), str(target))
    for key in KEYS:
        flip(chunk_file(folder, key))  # which reading would find out
    chunk_file(target / DIRECTORY, KEYS[7]).unlink()
    assert kvstore.copy(str(source), str(target)) == (0, 0, CHUNKS - 1, 1, 0)


def test_a_corrupt_chunk_is_not_copied(source: Path, target: Path) -> None:
    folder = fill(source)
    torn, flipped, foreign = (chunk_file(folder, key) for key in KEYS[10:13])
    torn.write_bytes(torn.read_bytes()[:5000])
    flip(flipped)
    foreign.write_bytes(chunk_file(folder, KEYS[20]).read_bytes())
    before = sorted((path, path.stat().st_size) for path in source.rglob("*"))
    done = kvstore.copy(str(source), str(target))
    assert done._replace(bytes=0) == (CHUNKS - 3, 0, 0, 3, 0)
    assert keys_in(target / DIRECTORY) == set(KEYS) - set(KEYS[10:13])
    assert sorted((path, path.stat().st_size) for path in source.rglob("*")) == before


def test_keys_are_copied_in_order(source: Path, target: Path) -> None:
    folder = fill(source)
    chunk_file(folder, KEYS[3]).unlink()
    wanted = [KEYS[9], KEYS[3], KEYS[1], KEYS[40]]
    done = kvstore.copy(str(source), str(target), keys=iter(wanted), workers=1)
    assert done == (3, sum(len(DATA[KEYS[n]]) for n in (9, 1, 40)), 0, 0, 1)
    files = sorted((target / DIRECTORY).glob("*/*.kv"), key=lambda path: path.stat().st_mtime_ns)
    assert [bytes.fromhex(path.stem) for path in files] == [KEYS[9], KEYS[1], KEYS[40]]


def test_keys_are_taken_as_they_are_needed(source: Path, target: Path) -> None:
    """A list of keys may be longer than memory."""
    fill(source)
    taken = 0

    def endless() -> Iterator[bytes]:
        nonlocal taken
        for key in itertools.cycle(KEYS):
            taken += 1
            yield key

    class Enough(Exception):
        pass

    def stop(_: kvstore.Copied) -> None:
        raise Enough

    with pytest.raises(Enough):
        kvstore.copy(str(source), str(target), keys=endless(), workers=2, progress=stop)
    assert taken <= 200


def test_the_hottest_chunks(source: Path, target: Path) -> None:
    """Of two namespaces together; a chunk takes 8192 bytes on storage."""
    folder, other = fill(source), fill(source, {"model": "other"})
    for age, key in enumerate(KEYS):
        os.utime(chunk_file(folder, key), (1e9 - 10 * age, 1e9 - 10 * age))
        os.utime(chunk_file(other, key), (1e9 - 10 * age - 5, 1e9 - 10 * age - 5))
    done = kvstore.copy(str(source), str(target), limit_bytes=5 * 8192 + 8191)
    assert done.chunks == 5
    assert keys_in(target / DIRECTORY) == set(KEYS[:3])
    assert keys_in(target / other.name) == set(KEYS[:2])


def test_no_bytes_of_the_hottest_are_no_chunks(source: Path, target: Path) -> None:
    fill(source)
    assert kvstore.copy(str(source), str(target), limit_bytes="8191B") == (0, 0, 0, 0, 0)


def test_an_empty_source(source: Path, target: Path) -> None:
    source.mkdir()
    assert kvstore.copy(str(source), str(target)) == (0, 0, 0, 0, 0)


# How it is copied.


def test_copies_at_once_share_the_work(source: Path, target: Path) -> None:
    fill(source)
    with ThreadPoolExecutor(3) as pool:
        copies = [pool.submit(kvstore.copy, str(source), str(target), workers=2) for _ in range(3)]
    done = [copy.result() for copy in copies]
    assert [outcome.chunks + outcome.skipped for outcome in done] == [CHUNKS] * 3
    assert sum(outcome.chunks for outcome in done) == CHUNKS
    assert served(target) == DATA


@pytest.mark.parametrize("rate", [200_000, "200KB/s", "200KB"])
def test_a_rate_is_kept(source: Path, target: Path, rate: int | str) -> None:
    fill(source, keys=KEYS[:25])
    started = time.monotonic()
    done = kvstore.copy(str(source), str(target), rate=rate)
    assert done.chunks == 25
    assert time.monotonic() - started >= (done.bytes - CHUNK) / 200_000  # the first need not wait


def test_an_interrupted_copy_does_not_wait_for_its_rate(source: Path, target: Path) -> None:
    fill(source)

    def stop(_: kvstore.Copied) -> None:
        raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        # With 16 chunks in the first batch, and 100 in all, which take 13 seconds.
        kvstore.copy(str(source), str(target), rate=30_000, workers=1, progress=stop)
    assert time.monotonic() - started < 6
    assert len(keys_in(target / DIRECTORY)) < 30


def test_an_error_that_may_pass_is_tried_again(source: Path, target: Path) -> None:
    fill(source)
    rules = [Rule(Fault.EIO, "get", times=2), Rule(Fault.EIO, "get", skip=50, times=1)]
    flaky = {"url": f"fault::file://{source}?retries=2", "storage_options": {"rules": rules}}
    assert kvstore.copy(flaky, str(target), workers=1).chunks == CHUNKS


@pytest.mark.parametrize("end", ["source", "target"])
def test_an_error_that_stays_ends_the_copy(source: Path, target: Path, end: str) -> None:
    """Without a trace of the chunk that it befell; made again, the copy is complete."""
    fill(source)
    verb = "get" if end == "source" else "put"
    rules = [Rule(Fault.ENOSPC, verb, key=KEYS[60].hex())]
    ends = {"source": str(source), "target": str(target)}
    ends[end] = {"url": f"fault::file://{ends[end]}", "storage_options": {"rules": rules}}
    with pytest.raises(OSError, match="injected"):
        kvstore.copy(**ends)
    done = kvstore.copy(str(source), str(target))
    assert 0 < done.chunks < CHUNKS
    assert done.chunks + done.skipped == CHUNKS
    assert served(target) == DATA


def test_the_target_is_verified_if_asked(source: Path, target: Path) -> None:
    """What a target has taken and does not give back is deleted there, and counts as corrupt."""
    fill(source)
    rules = [Rule(Fault.FLIPPED_BIT, "put", key=KEYS[5].hex())]
    bad = {"url": f"fault::file://{target}", "storage_options": {"rules": rules}}
    done = kvstore.copy(str(source), bad, verify="target")
    assert (done.chunks, done.corrupt) == (CHUNKS - 1, 1)
    assert served(target) == {key: data for key, data in DATA.items() if key != KEYS[5]}
    assert nothing_wrong(target)


def test_progress_is_told_in_order(source: Path, target: Path) -> None:
    fill(source)
    told: list[kvstore.Copied] = []
    done = kvstore.copy(str(source), str(target), progress=told.append)
    assert told == sorted(told)
    assert told[-1] == done
    assert len(told) > 3


# Going on.


class Stopped(Exception):
    pass


def stop_halfway(now: kvstore.Copied) -> None:
    if now.chunks + now.corrupt >= CHUNKS // 2:
        raise Stopped


def test_a_copy_goes_on_where_it_ended(source: Path, target: Path, tmp_path: Path) -> None:
    folder, file = fill(source), tmp_path / "copy.state"
    flip(chunk_file(folder, KEYS[2]))
    with pytest.raises(Stopped):
        kvstore.copy(str(source), str(target), resume=file, progress=stop_halfway)
    assert file.exists()
    gone = chunk_file(target / DIRECTORY, KEYS[0])
    gone.unlink()
    done = kvstore.copy(str(source), str(target), resume=file)
    assert done.chunks + done.skipped == CHUNKS - 1
    assert done.chunks >= CHUNKS // 2
    assert done.corrupt == 1  # found by the first copy, and not forgotten
    assert not gone.exists()  # nobody has looked at what was done
    assert not file.exists()
    assert kvstore.copy(str(source), str(target), resume=file).chunks == 1


def test_a_copy_of_namespaces_goes_on_in_the_right_one(source: Path, target: Path, tmp_path: Path) -> None:
    models = [{"model": name} for name in "abc"]
    for model in models:
        fill(source, model)

    def stop(now: kvstore.Copied) -> None:
        if now.chunks > 1.5 * CHUNKS:
            raise Stopped

    with pytest.raises(Stopped):
        kvstore.copy(str(source), str(target), resume=tmp_path / "state", progress=stop)
    done = kvstore.copy(str(source), str(target), resume=tmp_path / "state")
    assert done.chunks + done.skipped == 3 * CHUNKS
    assert [served(target, model) for model in models] == [DATA] * 3


@pytest.mark.parametrize("change", ["source", "target", "namespace", "content"])
def test_the_state_of_another_copy_is_refused(
    source: Path, target: Path, tmp_path: Path, change: str
) -> None:
    fill(source)
    file = tmp_path / "copy.state"
    with pytest.raises(Stopped):
        kvstore.copy(str(source), str(target), resume=file, progress=stop_halfway)
    ends = {"source": str(source), "target": str(target), "namespace": None}
    if change == "content":
        file.write_text("{")
    elif change == "namespace":
        ends["namespace"] = DIRECTORY
    else:
        fill(tmp_path / "another")
        ends[change] = str(tmp_path / "another")
    before = file.read_bytes()
    with pytest.raises(kvstore.ConfigError, match=r"copy\.state"):
        kvstore.copy(**ends, resume=file)
    assert file.read_bytes() == before


# Refusals.


def test_a_target_of_other_bytes_is_refused(source: Path, target: Path) -> None:
    fill(source)
    other = fill(target, {"model": "other"}, [])
    other.rename(target / DIRECTORY)  # so that its manifest contradicts its name
    with pytest.raises(kvstore.NamespaceMismatchError):
        kvstore.copy(str(source), str(target))
    assert keys_in(target / DIRECTORY) == set()


@pytest.mark.parametrize("manifest", [None, b"{", "other"])
def test_a_source_without_a_sound_manifest_is_refused(
    source: Path, target: Path, manifest: bytes | str | None
) -> None:
    """Unless another namespace is named."""
    folder = fill(source)
    other = fill(source, {"model": "other"}, KEYS[:1])
    if manifest is None:
        (folder / "namespace.json").unlink()
    else:
        content = (other / "namespace.json").read_bytes() if manifest == "other" else manifest
        (folder / "namespace.json").write_bytes(content)
    with pytest.raises(kvstore.NamespaceMismatchError, match=DIRECTORY):
        kvstore.copy(str(source), str(target))
    assert not target.exists()
    assert kvstore.copy(str(source), str(target), namespace=other.name).chunks == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"namespace": "ff"}, "no namespace 'ff'"),
        ({"keys": KEYS}, "2 namespaces"),
        ({"keys": KEYS, "limit_bytes": 1}, "exclude each other"),
        ({"keys": KEYS, "resume": "file"}, "whole namespaces"),
        ({"limit_bytes": 1, "resume": "file"}, "whole namespaces"),
        ({"limit_bytes": "many"}, "limit_bytes"),
        ({"rate": "fast"}, "rate"),
        ({"rate": 0}, "more than 0"),
        ({"workers": 0}, "workers"),
        ({"verify": "both"}, "'both'"),
        ({"keys": [b"short"], "namespace": DIRECTORY}, "key"),
    ],
)
def test_wrong_arguments(source: Path, target: Path, arguments: dict[str, object], message: str) -> None:
    fill(source)
    fill(source, {"model": "other"})
    with pytest.raises(kvstore.ConfigError, match=message):
        kvstore.copy(str(source), str(target), **arguments)
    assert not list(target.glob("*/*/*.kv"))


def test_wrong_tiers(source: Path, target: Path) -> None:
    fill(source)
    for ends, message in [
        ((source, source), "same"),
        ((target, source), "nothing at"),
        (("ram://?capacity=1MiB", source), "ram://"),
        ((source, "ram://?capacity=1MiB"), "ram://"),
        ((source, "nosuch://x"), "nosuch"),
    ]:
        with pytest.raises(kvstore.ConfigError, match=message):
            kvstore.copy(*map(str, ends))
