"""A root of several namespaces in a directory, with collectors that keep to its total, turn by turn."""

from __future__ import annotations

import os
import time
from pathlib import Path

from kvstore.backends import BackendContext
from kvstore.backends.posix import PosixBackend
from kvstore.collect.accounting import Accounts
from kvstore.collect.collector import Collector
from kvstore.collect.directory import DirectoryBooks
from kvstore.collect.limits import Limits
from kvstore.collect.places import Root
from kvstore.collect.report import Answer, Report, Row
from kvstore.collect.survey import MOST_VICTIMS
from kvstore.collect.total import Total
from kvstore.config import TierConfig

from .chunks import chunk_key

__all__ = ["CHUNK", "SIZE", "A", "B", "C", "Rig", "ask", "until_done"]

CHUNK = 4096
SIZE = 2 * CHUNK
"""Of an object on storage."""
A, B, C = "a" * 32, "b" * 32, "c" * 32
"""Namespaces."""


class Rig:
    """A root with namespaces, and collectors over it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "kv"
        self.path.mkdir()
        self.books = DirectoryBooks(str(self.path))  # of the root
        self._collectors: list[Collector] = []

    def backend(self, space: str) -> PosixBackend:
        """A namespace, made if it is not there."""
        backend = PosixBackend(
            BackendContext(bytes.fromhex(space), b"manifest", CHUNK), str(self.path / space)
        )
        backend.open()
        return backend

    def total(self, space: str, total: int, most: int = MOST_VICTIMS) -> Total:
        """What a collector of a namespace needs of the root."""
        root = Root(TierConfig(url=str(self.path), total=total), self.backend(space))
        return Total(root, space, Limits(total, None, None, SIZE), most=most)

    def collector(
        self,
        space: str,
        total: int,
        capacity: int | None = None,
        seconds: float = 0.05,
        most: int = MOST_VICTIMS,
    ) -> Collector:
        """A collector of a namespace, as each instance has one."""
        collector = Collector(
            self.backend(space),
            DirectoryBooks(str(self.path / space), seconds=seconds),
            Limits(capacity, None, None, SIZE),
            total=self.total(space, total, most),
        )
        self._collectors.append(collector)
        return collector

    def books_of(self, space: str) -> DirectoryBooks:
        """Books of a namespace, as another process has them."""
        return DirectoryBooks(str(self.path / space))

    def write(self, space: str, *numbers: int, age: float = 0.0) -> None:
        """Store chunks that were used last `age` seconds ago."""
        backend = self.backend(space)
        for number in numbers:
            backend.write(chunk_key(number), memoryview(bytes(CHUNK)))
            key = chunk_key(number).hex()
            when = time.time() - age
            os.utime(self.path / space / key[:2] / f"{key}.kv", (when, when))

    def left(self, space: str) -> set[int]:
        """Numbers of the chunks that are stored."""
        there = {found.key for found in self.backend(space).scan()}
        return {number for number in range(200) if chunk_key(number) in there}

    def shares(self) -> dict[str, int]:
        """Of the root's books, in objects."""
        root = self.books.read() or Accounts()
        return {space: share.size // SIZE for space, share in root.shares.items()}

    def close(self) -> None:
        """Close the collectors."""
        for collector in self._collectors:
            collector.close()


def ask(name: bytes, objects: int, *, created: int = 0, claimed: int = 0) -> Report:
    """A report of an instance that wants room for so many objects."""
    size = objects * SIZE
    return Report(name, created, created * SIZE, claimed=claimed * SIZE, least=SIZE, needed=size, wanted=size)


def until_done(collector: Collector, report: Report) -> Answer:
    """Turns, each asking for what is not yet granted, until there is nothing to do."""
    granted = 0
    removed: list[Row] = []
    for _ in range(200):
        answer = collector.turn(report)
        removed += answer.removed
        granted += answer.granted
        if not answer.more:
            return answer._replace(granted=granted, removed=removed)
        report = report._replace(
            claimed=report.claimed + answer.granted,
            needed=report.needed - answer.granted,
            wanted=report.wanted - answer.granted,
        )
    raise AssertionError("it does not come to an end")
