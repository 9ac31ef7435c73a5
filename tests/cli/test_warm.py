"""``kvstore warm`` and ``copy``."""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import kvstore
from support.command import Command
from support.object_store import Bucket

CHUNK = 4096
KEYS = [bytes([n]) * 16 for n in range(12)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tier with two namespaces: 12 chunks of one model, 1 of another."""
    path = tmp_path / "from [here]"
    for model, keys in (("m", KEYS), ("other", KEYS[:1])):
        with kvstore.open(
            "ram://?capacity=1MiB", {"url": str(path)}, namespace={"model": model}, chunk_size=CHUNK
        ) as store:
            store.put_many(dict.fromkeys(keys, b"x" * 100))
    return path


@pytest.fixture
def directory() -> str:
    return kvstore.Namespace({"model": "m"}, CHUNK).directory


def test_warm(kv: Command, root: Path, directory: str) -> None:
    report = kv("warm", "--from", root, "--to", "disk", "--json").json
    counts = {name: report[name] for name in ("chunks", "bytes", "skipped", "corrupt", "missing")}
    assert counts == {"chunks": 13, "bytes": 1300, "skipped": 0, "corrupt": 0, "missing": 0}
    assert report["from"] == root.as_uri()
    assert kv("verify", "disk", "--json").json["good"] == 13
    out = kv("warm", "--from", root, "--to", "disk", "--namespace", directory).out
    assert "0 chunks" in out
    assert "12 there already" in out


def test_warm_from_where_nothing_is_says_so(kv: Command, root: Path, tmp_path: Path) -> None:
    nothing = kv("warm", "--from", tmp_path, "--to", "disk")
    assert "0 chunks" in nothing.out
    assert "nothing has been stored there" in nothing.err
    assert "nothing" not in kv("warm", "--from", root, "--to", "disk", "--hottest", "1").err


def test_warm_says_what_is_corrupt(kv: Command, root: Path, directory: str) -> None:
    next(root.glob(f"{directory}/03/*.kv")).write_bytes(b"torn")
    report = kv("warm", "--from", root, "--to", "disk", "--json", code=1).json
    assert (report["chunks"], report["corrupt"]) == (12, 1)
    assert "1 corrupt" in kv("warm", "--from", root, "--to", "disk", code=1).out


def test_warm_with_the_keys_that_ls_prints(kv: Command, root: Path, directory: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    lines = kv("ls", root, "--namespace", directory).out.splitlines()[:5]
    keys.write_text("\n".join([*lines, "", "ff" * 16]))
    options = ("--from", root, "--to", "disk", "--keys", keys, "--json")
    assert kv("warm", *options, code=2).err.count("2 namespaces") == 1
    report = kv("warm", *options, "--namespace", directory).json
    assert (report["chunks"], report["missing"]) == (5, 1)


def test_warm_with_the_hottest_at_a_rate(kv: Command, root: Path) -> None:
    options = ("--hottest", "32KiB", "--rate", "1MB/s", "--workers", "2")
    assert kv("warm", "--from", root, "--to", "disk", *options, "--json").json["chunks"] == 4


def test_warm_goes_on(kv: Command, root: Path) -> None:
    options = ("--from", root, "--to", "disk", "--resume", "state", "--json")
    assert kv("warm", *options).json["chunks"] == 13
    assert kv("warm", *options).json["skipped"] == 13


@pytest.mark.parametrize(("options", "corrupt"), [([], 1), (["--verify", "source"], 0)])
def test_copy_reads_back_unless_told_not_to(
    kv: Command, root: Path, directory: str, tmp_path: Path, options: list[str], corrupt: int
) -> None:
    if "fault" not in entry_points(group="fsspec.specs").names:
        pytest.skip("commands learn of fault:: from the package's entry points: install it again")
    rule = json.dumps([{"fault": "flipped-bit", "verb": "put", "key": KEYS[3].hex()}])
    target = f"fault::file://{tmp_path}/cwd/disk?name=bad"
    options = [*options, "--namespace", directory, "--storage-option", f"bad.rules={rule}", "--json"]
    report = kv("copy", root, target, *options, code=corrupt).json
    assert (report["chunks"], report["corrupt"]) == (12 - corrupt, corrupt)
    assert kv("verify", "disk", "--json", code=1 - corrupt).json["good"] == 11


def test_a_disk_is_warmed_from_a_bucket(kv: Command, root: Path, bucket: Bucket) -> None:
    """Which is filled by a copy before."""
    credentials = [f"s3.{name}={json.dumps(value)}" for name, value in bucket.options.items()]
    options = [word for pair in credentials for word in ("--storage-option", pair)]
    assert kv("copy", root, bucket.url, *options, "--json").json["chunks"] == 13
    report = kv("warm", "--from", bucket.url, "--to", "disk", *options, "--json").json
    assert (report["chunks"], report["bytes"]) == (13, 1300)
    assert kv("verify", "disk", "--json").json["good"] == 13
    assert bucket.secret not in kv("warm", "--from", bucket.url, "--to", "disk", *options).out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--keys", "absent"], "absent"),
        (["--keys", "wrong"], "wrong, line 2"),
        (["--hottest", "lots"], "lots"),
        (["--rate", "fast"], "fast"),
        (["--verify", "nothing"], "nothing"),
        (["--workers", "0"], "workers"),
        (["--namespace", "ff"], "'ff'"),
        (["--resume", "wrong"], "wrong"),
        (["--storage-option", "nosuch.key=topsecret"], "nosuch"),
    ],
)
def test_wrong_usage_copies_nothing(
    kv: Command, root: Path, directory: str, tmp_path: Path, options: list[str], message: str
) -> None:
    (tmp_path / "cwd" / "wrong").write_text(f"{'00' * 16}\nno key\n")
    namespace = [] if "--namespace" in options else ["--namespace", directory]
    ran = kv("warm", "--from", root, "--to", "disk", *namespace, *options, "--json", code=2)
    assert message in ran.err
    assert "topsecret" not in ran.err
    assert not (tmp_path / "cwd" / "disk").exists()


def test_wrong_ends(kv: Command, root: Path) -> None:
    assert "same" in kv("warm", "--from", root, "--to", root, code=2).err
    assert "nothing at" in kv("warm", "--from", "absent", "--to", root, code=2).err
    assert "--to" in kv("warm", "--from", root, code=2).err
    assert "TARGET" in kv("copy", root, code=2).err
