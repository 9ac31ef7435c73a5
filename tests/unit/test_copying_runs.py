"""``kvstore.copy``: how it goes about it, how it fails, and how it goes on."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from copies import (
    CHUNK,
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
from kvstore.testing.faults import Fault, Rule


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "source"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


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
