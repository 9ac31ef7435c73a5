"""Actors of the soak test: callers that use a store in every way and know what each key may hold, and an
intruder."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import kvstore

__all__ = ["CHUNK", "Book", "Caller", "Intruder"]

CHUNK = 16 << 10
KEYS = 240
#: Seconds that a waiting call may take: more than any deadline of a tier in the test.
PATIENCE = 20.0


class Book:
    """What each key may hold: its current version. A key is used by whoever has its lock."""

    def __init__(self, seed: int) -> None:
        self.keys = [hashlib.blake2b(f"{seed}/{i}".encode(), digest_size=16).digest() for i in range(KEYS)]
        self._versions = dict.fromkeys(self.keys, 0)
        self._locks = {key: threading.Lock() for key in self.keys}

    @contextmanager
    def borrowed(self, keys: list[bytes]) -> Iterator[list[bytes]]:
        """Those of `keys` that nobody else uses; theirs is the right to store and delete."""
        mine = [key for key in keys if self._locks[key].acquire(blocking=False)]
        try:
            yield mine
        finally:
            for key in mine:
                self._locks[key].release()

    def payload(self, key: bytes) -> bytes:
        """What is to be stored under `key` now."""
        return _payload(key, self._versions[key])

    def deleted(self, key: bytes) -> None:
        """The current version is gone, and may never come back."""
        self._versions[key] += 1

    def is_current(self, key: bytes, data: bytes) -> bool:
        """Whether `data` is what a borrowed `key` may hold."""
        return data == self.payload(key)

    @staticmethod
    def is_some_version(key: bytes, data: bytes) -> bool:
        """Whether `data` was stored under `key` at some time, whole."""
        return len(data) >= 20 and data == _payload(key, int.from_bytes(data[16:20], "little"))


class Caller(threading.Thread):
    """Does random things to a store until `end`; `lies` are answers that must not have been."""

    def __init__(self, store: kvstore.Store, book: Book, seed: int, end: float) -> None:
        super().__init__(name=f"caller-{seed}")
        self.lies: list[str] = []
        self.failure: BaseException | None = None
        self.calls = 0
        self._store = store
        self._book = book
        self._rng = random.Random(seed)
        self._end = end

    def run(self) -> None:
        actions = [
            self._do_put,
            self._do_get,
            self._do_get,
            self._do_delete,
            self._do_prefetch,
            self._do_read,
            self._do_reserve,
        ]
        try:
            while time.monotonic() < self._end:
                keys = self._rng.sample(self._book.keys, self._rng.randrange(1, 16))
                self._rng.choice(actions)(keys)
                self.calls += 1
        except BaseException as error:
            self.failure = error

    def _do_put(self, keys: list[bytes]) -> None:
        with self._book.borrowed(keys) as mine:
            try:
                self._store.put_many({key: self._book.payload(key) for key in mine}, timeout=PATIENCE)
            except (
                kvstore.NoSpaceError
            ):  # everything leased, or held by tiers that hang: said, and nothing lost
                pass

    def _do_get(self, keys: list[bytes]) -> None:
        with self._book.borrowed(keys) as mine:
            for key, data in self._store.get_many(mine, timeout=PATIENCE).items():
                if not self._book.is_current(key, data):
                    self.lies.append(f"get {key.hex()}: {data[:20].hex()}")

    def _do_delete(self, keys: list[bytes]) -> None:
        with self._book.borrowed(keys[:3]) as mine:
            try:
                self._store.delete(mine, timeout=PATIENCE)
            except kvstore.BackendError:  # it may come back or not: its version stays the current one
                pass
            else:
                for key in mine:
                    self._book.deleted(key)

    def _do_prefetch(self, keys: list[bytes]) -> None:
        self._store.lookup(keys)
        job = self._store.prefetch(keys)
        if self._rng.random() < 0.3:
            job.cancel()
            return
        outcome = job.result(PATIENCE)
        if sorted((*outcome.promoted, *outcome.missing, *outcome.skipped)) != sorted(keys):
            self.lies.append(f"prefetch: {outcome}")

    def _do_read(self, keys: list[bytes]) -> None:
        with self._store.read(keys) as lease:
            for key, view in lease.items():
                if not Book.is_some_version(key, bytes(view)):
                    self.lies.append(f"read {key.hex()}: {bytes(view[:20]).hex()}")

    def _do_reserve(self, keys: list[bytes]) -> None:
        with self._book.borrowed(keys[:4]) as mine:
            lease = self._store.reserve(mine)
            for key, view in lease.items():
                payload = self._book.payload(key)
                view[: len(payload)] = payload
                lease.set_length(key, len(payload))
            if self._rng.random() < 0.3:
                lease.abort()
            else:
                lease.commit()


class Intruder(threading.Thread):
    """Deletes and damages files of a tier, and kills workers, until `end`."""

    def __init__(self, store: kvstore.Store, root: Path, seed: int, end: float) -> None:
        super().__init__(name="intruder")
        self.failure: BaseException | None = None
        self.deeds = 0
        self._store = store
        self._root = root
        self._rng = random.Random(seed)
        self._end = end
        self._rest = threading.Event()

    def run(self) -> None:
        try:
            while time.monotonic() < self._end:
                self._rest.wait(0.05)
                self._rng.choice([self._do_delete, self._do_damage, self._do_cut, self._do_kill])()
        except BaseException as error:
            self.failure = error

    def _do_file(self) -> Path | None:
        files = list(self._root.rglob("*.kv"))
        return self._rng.choice(files) if files else None

    def _do_delete(self) -> None:
        if (file := self._do_file()) is not None:
            file.unlink(missing_ok=True)
            self.deeds += 1

    def _do_cut(self) -> None:
        if (file := self._do_file()) is not None:
            try:
                os.truncate(file, self._rng.randrange(CHUNK))
                self.deeds += 1
            except FileNotFoundError:
                pass

    def _do_damage(self) -> None:
        if (file := self._do_file()) is None:
            return
        try:
            with file.open("r+b") as opened:
                if size := os.fstat(opened.fileno()).st_size:
                    opened.seek(self._rng.randrange(size))
                    opened.write(b"\xa5")
                    self.deeds += 1
        except FileNotFoundError:
            pass

    def _do_kill(self) -> None:
        pids = getattr(self._store._engine, "pids", [])
        if pids and self._rng.random() < 0.2:
            with suppress(ProcessLookupError):  # it has died of a fault, and been reaped just now
                os.kill(self._rng.choice(pids), signal.SIGKILL)
            self.deeds += 1


def _payload(key: bytes, version: int) -> bytes:
    rng = random.Random(key + version.to_bytes(4, "little"))
    return key + version.to_bytes(4, "little") + rng.randbytes(rng.randrange(CHUNK - 20))
