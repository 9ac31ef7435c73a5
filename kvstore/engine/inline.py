"""The inline engine: batches run in the caller's thread when it polls. Deterministic; for tests and tools."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from .base import Batch, Completion, Doorbell, Engine
from .worker import Worker

__all__ = ["InlineEngine"]


class InlineEngine(Engine):
    """Runs what was submitted at the next :meth:`poll`, in the order of the verbs.

    Parameters
    ----------
    workers : sequence of Worker
        One for each tier.
    """

    immediate = True

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = list(workers)
        self._bell = Doorbell()
        self.pending: list[Batch] = []

    def start(self) -> list[Exception | None]:
        errors: list[Exception | None] = []
        for worker in self._workers:
            try:
                worker.open()
                errors.append(None)
            except Exception as error:
                errors.append(error)
        return errors

    def submit(self, batch: Batch) -> None:
        self.pending.append(batch)
        self._bell.ring()

    def poll(self) -> list[Completion]:
        self._bell.answer()
        done: list[Completion] = []
        batches, self.pending = sorted(self.pending, key=attrgetter("verb")), []
        for batch in batches:
            self._workers[batch.tier].run(batch, done.append)
        return done

    def abandon(self, batch: Batch) -> None:
        """Nothing to do: no batch outlives the poll that runs it."""

    def fileno(self) -> int:
        return self._bell.fd

    def close(self, timeout: float) -> None:
        for worker in self._workers:
            worker.close()
        self._bell.close()
