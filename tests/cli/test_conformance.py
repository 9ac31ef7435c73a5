"""``kvstore conformance`` on real storages: files, memory, chains, an S3 server, an SFTP server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from support.command import Command
from support.object_store import Bucket

QUICK = ("--quick", "--chunk-size", "64KiB")
PASSWORD = "Zz9-sftp-password-Zz9"


def holds(report: dict[str, Any]) -> dict[str, bool | None]:
    return {finding["name"]: finding["holds"] for finding in report["properties"]}


def options(name: str, values: dict[str, Any]) -> list[str]:
    pairs = [f"{name}.{key}={json.dumps(value)}" for key, value in values.items()]
    return [word for pair in pairs for word in ("--storage-option", pair)]


def test_files(kv: Command, tmp_path: Path) -> None:
    """The full examination, with a race of processes."""
    report = kv("conformance", "disk", "--chunk-size", "64KiB", "--json").json
    assert report["ok"]
    found = holds(report)
    assert {name for name, holds in found.items() if holds is not True} == {"time-outs"}
    assert found["first-process-wins"]
    assert report["capabilities"]["first_writer_wins"]
    for operation in ("probe", "write", "read"):
        assert 0 < report["latency_ms"][operation]["p50"] <= report["latency_ms"][operation]["p99"]
    assert report["write_bytes_per_second"] > 0
    assert report["read_bytes_per_second"] > 0
    assert list((tmp_path / "cwd" / "disk").iterdir()) == []


def test_says_what_a_store_will_do(kv: Command) -> None:
    out = " ".join(kv("conformance", "async_wrapper::memory:///kv", *QUICK).out.split())
    assert "first-writer-wins" in out
    assert "harmless" in out
    assert "p99" in out
    assert "everything holds that a store relies on" in out


@pytest.mark.parametrize(
    ("url", "no", "unknown"),
    [
        ("memory://kv", set(), {"first-process-wins", "time-outs"}),
        (
            "async_wrapper::memory:///kv",
            {"conditional-write"},
            {"first-writer-wins", "first-process-wins", "time-outs"},
        ),
        (
            "simplecache::memory:///kv",
            {"conditional-write", "deletion-visible", "first-writer-wins"},
            {"first-process-wins", "time-outs"},
        ),
    ],
)
def test_memory_and_chains(kv: Command, url: str, no: set[str], unknown: set[str]) -> None:
    report = kv("conformance", url, *QUICK, "--json").json
    assert report["ok"]
    found = holds(report)
    # A race need not show what nothing prevents.
    assert {name for name, holds in found.items() if holds is False} - {"first-writer-wins"} == no - {
        "first-writer-wins"
    }
    assert {name for name, holds in found.items() if holds is None} - {"first-writer-wins"} == unknown - {
        "first-writer-wins"
    }
    assert (found["first-writer-wins"] is True) is (url == "memory://kv")


def test_a_storage_that_damages_what_it_takes(kv: Command, tmp_path: Path) -> None:
    if "fault" not in entry_points(group="fsspec.specs").names:
        pytest.skip("commands learn of fault:: from the package's entry points: install it again")
    url = f"fault::file://{tmp_path}/bad?name=bad"
    rules = options("bad", {"rules": [{"fault": "flipped-bit", "verb": "get"}]})
    report = kv("conformance", url, *QUICK, *rules, "--json", code=1).json
    assert not report["ok"]
    assert holds(report)["round-trip"] is False
    assert "CorruptChunkError" in report["trouble"]
    assert "no store can use this storage" in kv("conformance", url, *QUICK, *rules, code=1).out


def test_wrong_usage(kv: Command) -> None:
    assert "--chunk-size" in kv("conformance", "disk", "--chunk-size", "big", code=2).err
    assert "--chunk-size" in kv("conformance", "disk", "--chunk-size", "0", code=2).err
    assert "ram://" in kv("conformance", "ram://", code=2).err
    assert "nosuch" in kv("conformance", "nosuch://x", code=2).err
    assert kv("conformance", "/proc/nowhere", code=1).err.startswith("kvstore: ")


# Real servers.


def test_s3(kv: Command, bucket: Bucket) -> None:
    report = kv("conformance", bucket.url, *QUICK, *options("s3", bucket.options), "--json").json
    assert report["ok"]
    found = holds(report)
    assert {name for name, holds in found.items() if holds is not True} == {"first-process-wins"}
    assert bucket.names() == []


class SftpServer:
    """An SFTP server on the loopback interface, which shows `folder`; its loop runs in a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sftp", daemon=True)
        self._thread.start()
        self._acceptor = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        self.port = self._acceptor.get_port()

    async def _listen(self) -> Any:
        import asyncssh

        class Login(asyncssh.SSHServer):
            def password_auth_supported(self) -> bool:
                return True

            def validate_password(self, username: str, password: str) -> bool:
                return (username, password) == ("kv", PASSWORD)

        root = str(self._folder).encode()
        return await asyncssh.listen(
            "127.0.0.1",
            0,
            server_factory=Login,
            server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
            sftp_factory=lambda channel: asyncssh.SFTPServer(channel, chroot=root),
        )

    @property
    def options(self) -> dict[str, Any]:
        """``storage_options`` of a tier there."""
        return {"port": self.port, "username": "kv", "password": PASSWORD}

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _close(self) -> None:
        self._acceptor.close()
        await self._acceptor.wait_closed()


@pytest.fixture
def sftp(tmp_path: Path) -> Iterator[SftpServer]:
    pytest.importorskip("asyncssh", reason="no SFTP server (pip install asyncssh)")
    pytest.importorskip("paramiko", reason="no SFTP client for fsspec (pip install paramiko)")
    (tmp_path / "sftp").mkdir()
    server = SftpServer(tmp_path / "sftp")
    yield server
    server.close()


def test_sftp(kv: Command, sftp: SftpServer, tmp_path: Path) -> None:
    """As the client of fsspec does it: one file at a time, without conditions."""
    small = ("--quick", "--chunk-size", "8KiB")  # its client writes slowly
    arguments = ("sftp://127.0.0.1/kv", *small, *options("sftp", sftp.options))
    report = kv("conformance", *arguments, "--json").json
    assert report["ok"]
    found = holds(report)
    assert found["conditional-write"] is False
    assert not [name for name in ("round-trip", "visible", "listed", "quarantine") if not found[name]]
    assert not [path for path in (tmp_path / "sftp").rglob("*") if path.name != "kv"]


def test_sftp_with_a_wrong_password(kv: Command, sftp: SftpServer) -> None:
    wrong = {**sftp.options, "password": f"{PASSWORD}-not"}
    ran = kv("conformance", "sftp://127.0.0.1/kv", *QUICK, *options("sftp", wrong), code=1)
    assert ran.out == ""
    assert "Authentication" in ran.err
    assert PASSWORD not in ran.err
