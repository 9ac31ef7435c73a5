"""The contract of an engine: what executes transfers, away from the thread that asks for them.

The store owns all decisions; an engine owns workers and backends, and nothing else. A *transfer batch* names keys and
slots of one tier; payload goes between storage and the arena's slots inside the workers, never through the messages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import IntEnum
from typing import NamedTuple

__all__ = ["Batch", "Completion", "Engine", "Result", "Status", "Verb"]


class Verb(IntEnum):
    """What a batch asks of a tier. Lower values go first within a tier: reads before writes."""

    PROBE = 0
    READ = 1
    DELETE = 2
    WRITE = 3
    SCAN = 4


class Status(IntEnum):
    """How one item ended."""

    OK = 0
    MISSING = 1  # PROBE, READ: no such object
    CORRUPT = 2  # READ: refused; QUARANTINED says whether it was moved aside
    FAILED = 3  # the storage failed
    TIMEOUT = 4  # past its deadline: the slot stays quarantined until the worker answers or is reaped
    DIED = 5  # the worker ended with it in its hands
    CANCELLED = 6  # never started


class Batch(NamedTuple):
    """Items of one verb for one tier.

    ``slots`` and ``lengths`` (bytes of payload) are parallel to ``keys``; both are empty for verbs that move nothing.
    """

    id: int
    tier: int
    verb: Verb
    keys: list[bytes]
    slots: list[int] = []  # noqa: RUF012  never mutated
    lengths: list[int] = []  # noqa: RUF012


class Result(NamedTuple):
    """Outcome of one item.

    ``value`` is the payload length for READ, 1 when WRITE created the object (else 0), 1 when CORRUPT was moved to
    quarantine; ``seconds`` is the time that the verb took in the worker.
    """

    status: Status
    value: int = 0
    seconds: float = 0.0
    error: str = ""


class Completion(NamedTuple):
    """Some items of a batch have ended: those from index `first` on, one result each.

    A SCAN ends with one result and brings its rows (key, size in bytes, mtime) in ``rows``, in as many completions as it likes.
    """

    id: int
    first: int
    results: list[Result]
    rows: list[tuple[bytes, int, float]] = []  # noqa: RUF012


class Engine(ABC):
    """Executes batches. Every method but :meth:`wait` is called by one thread at a time (the store's lock-holder)."""

    @abstractmethod
    def start(self) -> list[BaseException | None]:
        """Open every tier's backend in its workers; for each tier None, or why it cannot be reached."""

    @abstractmethod
    def submit(self, batch: Batch) -> None:
        """Queue a batch; never blocks."""

    @abstractmethod
    def poll(self) -> list[Completion]:
        """What has ended since the last call; never blocks."""

    @abstractmethod
    def wait(self, timeout: float) -> None:
        """Return when :meth:`poll` has something to report, or after `timeout` seconds; any thread may wait."""

    @abstractmethod
    def drain(self, timeout: float) -> bool:
        """Wait until nothing is queued or running; False when `timeout` seconds were not enough."""

    @abstractmethod
    def close(self, timeout: float) -> None:
        """End the workers and close the backends, in at most about `timeout` seconds. Queued batches are dropped."""
