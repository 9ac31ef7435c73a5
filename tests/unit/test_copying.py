"""``kvstore.copy``: what is copied, what is skipped, and what is refused."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from copies import (
    BYTES,
    CHUNKS,
    DATA,
    DIRECTORY,
    KEYS,
    chunk_file,
    fill,
    flip,
    keys_in,
    nothing_wrong,
    served,
)

import kvstore
from kvstore.backends.memory import forget


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "source"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


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
        (
            (source, f"file://{target}?capacity=1GiB"),
            "file://.*: stores keep capacity, copies do not: leave it",
        ),
        ((source, f"file://{target}?ttl=7d"), "stores keep ttl"),
        ((target, source), "nothing at"),
        (("ram://?capacity=1MiB", source), "ram://"),
        ((source, "ram://?capacity=1MiB"), "ram://"),
        ((source, "nosuch://x"), "nosuch"),
    ]:
        with pytest.raises(kvstore.ConfigError, match=message):
            kvstore.copy(*map(str, ends))
