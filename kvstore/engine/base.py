"""The contract of an engine: what executes transfers, away from the thread that asks for them.

The store owns all decisions; an engine owns workers and backends, and nothing else. A *batch* names keys and
slots of one tier; payload goes between storage and the arena's slots inside the workers, never through the
messages.

Every item of a submitted batch gets exactly one result, whatever happens to the worker.
"""

from __future__ import annotations

import select
from abc import ABC, abstractmethod
from collections.abc import Collection
from enum import IntEnum
from typing import ClassVar, NamedTuple, Protocol

from ..doorbell import Doorbell

__all__ = [
    "BATCH_LIMIT",
    "Batch",
    "Completion",
    "Doorbell",
    "Engine",
    "Result",
    "Slots",
    "Status",
    "Verb",
    "answer_all",
    "may_join",
]


#: Items in a batch at most: with the longest keys its message fits the sockets of the processes engine.
BATCH_LIMIT = 1024


class Verb(IntEnum):
    """What a batch asks of a tier. Lower values go first within a tier: reads before writes."""

    PROBE = 0
    READ = 1
    DELETE = 2
    WRITE = 3
    SCAN = 4
    COLLECT = 5


class Status(IntEnum):
    """How one item ended."""

    OK = 0
    MISSING = 1  # PROBE, READ: no such object
    CORRUPT = 2  # READ: refused; `value` says whether it was moved to quarantine
    FAILED = 3  # the storage failed
    TIMEOUT = 4  # past its deadline, not answered yet: given by the planner, never by an engine
    DIED = 5  # the worker ended with it in its hands
    CANCELLED = 6  # never started


class Slots(Protocol):
    """Memory that workers move bytes to and from: an arena, or rows that somebody else has laid out."""

    fd: int
    """Descriptor of the memory, which worker processes inherit."""

    def view(self, slot: int, /) -> memoryview:
        """Writable memory of one slot, page aligned."""


class Batch(NamedTuple):
    """Items of one verb for one tier, :data:`BATCH_LIMIT` at most.

    `slots` and `lengths` (bytes of payload) are parallel to `keys`; they are empty for verbs that move
    nothing. `address` is that of the peer to ask, for a tier whose peers are named by requests.
    """

    id: int
    tier: int
    verb: Verb
    keys: list[bytes]
    slots: list[int]
    lengths: list[int]
    address: str = ""


class Result(NamedTuple):
    """Outcome of one item.

    `value` is the payload length for READ, 1 when WRITE created the object (else 0), 1 when a CORRUPT object
    was moved to quarantine, the bytes granted for COLLECT; `seconds` is the time that the verb took in the
    worker; of a chunk in a batch that the backend read as such, the time since the one before it.
    """

    status: Status
    value: int = 0
    seconds: float = 0.0
    error: str = ""


class Completion(NamedTuple):
    """Some items of a batch have ended: those from index `first` on, one result each.

    A SCAN has one item and brings `rows` (key, size in bytes, mtime in seconds) in as many completions as it
    likes, its result in the last. So does a COLLECT; :mod:`kvstore.collect.report` says what its key and rows
    mean. `counters` are increments of the backend's own metrics.
    """

    id: int
    first: int
    results: list[Result]
    rows: list[tuple[bytes, int, float]]
    counters: dict[str, float]


def may_join(waiting: Batch, running: Batch, verbs: Collection[Verb]) -> bool:
    """Whether a worker that is at `running` may have `waiting`, too, if batches of `verbs` are welcome; for a
    connection to another peer everybody waits."""
    return waiting.verb in verbs and waiting.address == running.address


def answer_all(batch: Batch, result: Result) -> Completion:
    """One completion that gives every item of `batch` the same `result`."""
    return Completion(batch.id, 0, [result] * max(1, len(batch.keys)), [], {})


class Engine(ABC):
    """Executes batches. One thread at a time (the store's lock-holder) calls everything but :meth:`wait`."""

    #: Whether :meth:`poll` runs what was submitted, so that polling again brings its completions.
    immediate: ClassVar[bool] = False

    @abstractmethod
    def start(self) -> list[Exception | None]:
        """Open every tier's backend in its workers; for each tier None, or why it cannot be reached."""

    @abstractmethod
    def submit(self, batch: Batch) -> None:
        """Queue a batch; never blocks."""

    def has_news(self) -> bool:
        """Whether :meth:`poll` may return anything now; for engines that know it cheaply."""
        return True

    @abstractmethod
    def poll(self) -> list[Completion]:
        """What has ended since the last call; never blocks."""

    @abstractmethod
    def abandon(self, batch: Batch) -> None:
        """`batch` is past its deadline: see to it that the tier goes on without the worker that has it.

        Its items are answered all the same, when the worker answers or is gone; an item that is never
        answered keeps its slot out of use.
        """

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable while :meth:`poll` has something to report."""

    def wait(self, timeout: float) -> None:
        """Return when :meth:`poll` has something to report, or after `timeout` seconds; any thread may
        wait."""
        poller = select.poll()  # unlike select() at home with any number of open descriptors
        poller.register(self.fileno(), select.POLLIN)
        poller.poll(max(0.0, timeout) * 1000)

    @abstractmethod
    def close(self, timeout: float) -> None:
        """End the workers and close the backends, in about `timeout` seconds at most. Queued batches are
        dropped."""
