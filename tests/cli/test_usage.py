"""What every command does: exit codes, errors of one line, clean stdout, interruption, a quick start."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvstore
from kvstore import BackendError
from kvstore.cli import COMMANDS
from kvstore.cli._storage import naming
from support.command import COMMAND, ENVIRONMENT, Command


def test_help_names_every_command(kv: Command) -> None:
    for arguments in ([], ["--help"]):
        out = kv(*arguments).out
        assert all(re.search(rf"^. {name} ", out, re.MULTILINE) for name in COMMANDS)
        assert "<bool>" not in out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_json_and_help(kv: Command, command: str) -> None:
    out = kv(command, "--help").out
    assert "--json" in out
    assert not re.search(r"<(bool|str|path|int)>|list\[", out)  # types of Python say nothing to a user


def test_version(kv: Command) -> None:
    assert re.fullmatch(r"kvstore \d+\.\d+\S*\n", kv("--version").out)
    assert kv("--version").out == f"kvstore {kvstore.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulat"], "did you mean 'simulate'"),
        (["demo", "--bogus"], "--bogus"),
        (["replay"], "TRACE"),
        (["replay", "absent.jsonl"], "absent.jsonl"),
        (["replay", "absent.jsonl", "--tier", "ram://?capacty=1GiB"], "did you mean 'capacity'"),
        (["replay", "absent.jsonl", "--tier", "/tmp/x"], "no host tier"),
        (["replay", "absent.jsonl", "--config", "absent.toml"], "absent.toml"),
        (["replay", "absent.jsonl", "--speed", "warp"], "warp"),
        (["simulate", "absent.jsonl", "--policy", "arcc"], "arc"),
        (["simulate", "absent.jsonl", "--capacity", "1,many"], "many"),
        (["simulate", "absent.jsonl", "--capacity", ","], "--capacity"),
        (["ls", "absent"], "absent"),
        (["stat", "ram://"], "ram://"),
        (["verify", "nosuch://x"], "nosuch"),
        (["verify", "."], None),
        (["verify", ".", "--namespace", "ff"], "ff"),
        (["ls", ".", "--storage-option", "topsecret"], "NAME.KEY=VALUE"),
        (["ls", ".", "--storage-option", "s3.key=topsecret"], "'s3'"),
        (["bench", "--tier", "ram://?capacity=64MiB"], "no tier below"),
        (["bench", "--chunks", "1000000"], "host tier of"),
        (["demo", "--dir", "absent"], "absent"),
    ],
)
def test_wrong_usage_is_one_line(kv: Command, arguments: list[str], message: str | None) -> None:
    if message is None:  # an empty directory is no mistake
        assert kv(*arguments, "--json").json["ok"]
        return
    ran = kv(*arguments, "--json", code=2)
    assert ran.out == ""
    assert re.fullmatch(r"kvstore: [^\n]+\n", ran.err)
    assert message in ran.err
    assert "topsecret" not in ran.err


def test_trouble_with_storage_is_one_line(kv: Command, tmp_path: Path, trace: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    ran = kv("replay", trace, "--tier", "ram://?capacity=8MiB", "--tier", tmp_path / "file" / "kv", code=1)
    assert ran.out == ""
    assert re.fullmatch(r"kvstore: tier 'file'[^\n]+\n", ran.err)


@pytest.mark.parametrize("command", ["conformance", "copy", "warm"])
def test_a_place_that_cannot_be_used_is_named_with_the_remedy(
    kv: Command, tmp_path: Path, trace: Path, command: str
) -> None:
    kv("replay", trace, "--tier", "ram://?capacity=8MiB", "--tier", tmp_path / "kv", "--chunk-size", "4KiB")
    (tmp_path / "file").write_text("in the way")
    bad = tmp_path / "file" / "kv"
    words = {
        "conformance": [bad],
        "copy": [tmp_path / "kv", bad],
        "warm": ["--from", tmp_path / "kv", "--to", bad],
    }
    ran = kv(command, *words[command], "--json", code=1)
    assert ran.out == ""
    assert re.fullmatch(rf"kvstore: {tmp_path}/file[^\n]*: Not a directory; check the path\n", ran.err)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "s3://b: No space left on device; make room there, for example with kvstore prune"),
        (errno.EACCES, "s3://b: Permission denied; see who may read and write there"),
        (errno.EIO, "s3://b: Input/output error; look after the storage, then run the command again"),
    ],
)
def test_an_error_that_names_no_file_is_that_of_the_tier(number: int, message: str) -> None:
    with pytest.raises(BackendError) as caught, naming("s3://b"):
        raise OSError(number, os.strerror(number))
    assert str(caught.value) == message


def test_json_is_alone_on_stdout_while_progress_is_shown(trace: Path) -> None:
    """Progress goes to stderr, and only because that is a terminal here."""
    ours, theirs = pty.openpty()
    arguments = [*COMMAND, "replay", str(trace), "--chunk-size", "4KiB", "--json"]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=theirs, stdin=subprocess.DEVNULL, env=ENVIRONMENT
    ) as process:
        os.close(theirs)
        out, _ = process.communicate(timeout=60)
    shown = b"".join(iter(lambda: _read(ours), b""))
    os.close(ours)
    assert json.loads(out)["requests"] == 4
    assert b"replay" in shown


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except OSError:  # the other side is closed
        return b""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_reader_that_goes_away_is_no_traceback(
    kv: Command, trace: Path, tmp_path: Path, unbuffered: str
) -> None:
    tiers = ("--tier", "ram://?capacity=8MiB", "--tier", tmp_path / "kv")
    kv("replay", trace, *tiers, "--chunk-size", "4KiB")
    (namespace,) = os.listdir(tmp_path / "kv")
    for arguments in (["ls", "--namespace", namespace], ["stat"], ["stat", "--json"]):
        readable, writable = os.pipe()
        os.close(readable)
        done = subprocess.run(
            [*COMMAND, *arguments, str(tmp_path / "kv")],
            stdout=writable,
            stderr=subprocess.PIPE,
            env={**ENVIRONMENT, "PYTHONUNBUFFERED": unbuffered},
        )
        os.close(writable)
        assert (done.returncode, done.stderr) == (1, b"")


@contextmanager
def running_demo(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A demo that is in the middle of its work."""
    with subprocess.Popen(
        [*COMMAND, "demo", "--dir", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    ) as process:
        deadline = time.monotonic() + 30
        while not list(folder.glob("*/*/*/*.kv")):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
        yield process


@pytest.mark.parametrize(
    ("numbers", "code", "err"),
    [
        ([signal.SIGINT], 130, b"kvstore: interrupted\n"),
        ([signal.SIGINT] * 3, 130, b"kvstore: interrupted\n"),
        ([signal.SIGTERM], 143, b""),
        ([signal.SIGTERM, signal.SIGINT], 143, b""),
    ],
)
def test_interrupted_demo_cleans_up(
    tmp_path: Path, numbers: list[signal.Signals], code: int, err: bytes
) -> None:
    with running_demo(tmp_path) as process:
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.02)  # two that come at once are one
        assert process.communicate(timeout=30) == (b"", err)
        assert process.returncode == code
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["typer", "msgspec"])
def test_interrupted_while_it_is_imported(tmp_path: Path, module: str) -> None:
    """By a module that stands in for one that the command line imports."""
    (tmp_path / f"{module}.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise AssertionError('it went on')\n"
    )
    script = shutil.which("kvstore", path=os.path.dirname(sys.executable))
    assert script is not None
    for command in (COMMAND, [script]):
        done = subprocess.run(
            [*command, "demo"],
            capture_output=True,
            timeout=60,
            env={**ENVIRONMENT, "PYTHONPATH": str(tmp_path)},
        )
        assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"kvstore: interrupted\n")


def test_commands_import_only_what_they_need(trace: Path) -> None:
    heavy = {"fsspec", "matplotlib", "torch", "kvstore.scan", "kvstore.engine.processes", "kvstore.cli.bench"}
    for arguments in (["--version"], ["simulate", str(trace), "--json"]):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", *COMMAND[1:], *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=ENVIRONMENT,
            text=True,
            check=True,
        )
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert "kvstore.cli" in imported
        assert not heavy & imported
