"""Every backend that we ship, against the suite that we ship."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from kvstore.backends.base import Backend, BackendContext
from kvstore.backends.compiled import CompiledBackend
from kvstore.backends.generic import GenericBackend
from kvstore.backends.memory import MemoryBackend, _stores, forget
from kvstore.backends.posix import PosixBackend
from kvstore.testing.backend import BackendTests
from support.compiled import needs_compiled

SPACE = "00ff" * 8


def object_file(key: bytes) -> str:
    return f"{key.hex()[:2]}/{key.hex()}.kv"


class InFolder(BackendTests):
    """Raw access to a folder with plain Python files."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.root = tmp_path
        self.folder = tmp_path / SPACE

    def raw_get(self, key: bytes) -> bytes | None:
        path = self.folder / object_file(key)
        return path.read_bytes() if path.exists() else None

    def raw_set(self, key: bytes, data: bytes) -> None:
        path = self.folder / object_file(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_list(self) -> list[str]:
        files = [str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()]
        return [name for name in files if name != "namespace.json"]


class TestPosix(InFolder):
    def make_backend(self, context: BackendContext) -> Backend:
        return PosixBackend(context, str(self.folder))


@needs_compiled
class TestCompiled(InFolder):
    def make_backend(self, context: BackendContext) -> Backend:
        return CompiledBackend(context, str(self.folder))


class TestPosixDirect(InFolder):
    def make_backend(self, context: BackendContext) -> Backend:
        return PosixBackend(context, str(self.folder), direct="on")


class TestPosixDurable(InFolder):
    def make_backend(self, context: BackendContext) -> Backend:
        return PosixBackend(context, str(self.folder), durability="full")


class TestGenericLocal(InFolder):
    def make_backend(self, context: BackendContext) -> Backend:
        return GenericBackend(context, f"file://{self.root}", SPACE)


class TestGenericSimpleCache(InFolder):
    """A chain that caches whole files; each backend has a cache of its own."""

    def make_backend(self, context: BackendContext) -> Backend:
        return GenericBackend(context, f"simplecache::file://{self.root}", SPACE)


class TestMemory(BackendTests):
    @pytest.fixture(autouse=True)
    def _store(self, tmp_path: Path) -> Iterator[None]:
        self.store = str(tmp_path)
        yield
        forget(self.store)

    def make_backend(self, context: BackendContext) -> Backend:
        return MemoryBackend(context, self.store, SPACE)

    @property
    def files(self) -> dict:
        return _stores[self.store][SPACE]

    def raw_get(self, key: bytes) -> bytes | None:
        file = self.files.get(object_file(key))
        return None if file is None else file[0]

    def raw_set(self, key: bytes, data: bytes) -> None:
        self.files[object_file(key)] = type(self.files["namespace.json"])(data, 0.0)

    def raw_list(self) -> list[str]:
        return [name for name in self.files if name != "namespace.json"]


class InFsspecMemory(BackendTests):
    """Raw access through a memory filesystem of our own; all of them share their files."""

    scheme = "memory://"
    options: dict = {}

    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> Iterator[None]:
        self.root = str(tmp_path)
        self.raw = fsspec.filesystem("memory")
        yield
        if self.raw.exists(self.root):
            self.raw.rm(self.root, recursive=True)

    def make_backend(self, context: BackendContext) -> Backend:
        return GenericBackend(context, f"{self.scheme}{self.root}", SPACE, self.options)

    def raw_get(self, key: bytes) -> bytes | None:
        path = f"{self.root}/{SPACE}/{object_file(key)}"
        return self.raw.cat_file(path) if self.raw.exists(path) else None

    def raw_set(self, key: bytes, data: bytes) -> None:
        self.raw.pipe_file(f"{self.root}/{SPACE}/{object_file(key)}", data)

    def raw_list(self) -> list[str]:
        return [path for path in self.raw.find(self.root) if not path.endswith("/namespace.json")]


class TestGenericMemory(InFsspecMemory):
    pass


class TestGenericDirectory(InFsspecMemory):
    scheme = "dir::memory://"


class TestGenericAsync(InFsspecMemory):
    """The path that object stores take: an asynchronous filesystem."""

    scheme = "async_wrapper::memory://"
