"""Threads for operations that mostly wait: many at a time, results in order.

Unlike those of :class:`concurrent.futures.ThreadPoolExecutor` they are daemons, so that one that hangs in the
storage does not keep the interpreter from ending.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

__all__ = ["Crew"]

_T = TypeVar("_T")
_Task = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class Crew:
    """Up to `size` threads, started as they are needed; one thread gives them work."""

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._threads = 0
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()

    def map(self, function: Callable[..., _T], *columns: Iterable[Any]) -> Iterator[_T]:
        """``function`` of each row of `columns`, `size` of them at a time, in the order of the rows.

        Raises
        ------
        RuntimeError
            The system has no thread at all for it; then nothing has been begun.
        """
        tasks: list[_Task] = [(Future(), function, row) for row in zip(*columns, strict=True)]
        self._enlist(len(tasks))  # first: what is queued is done, whether or not anybody waits for it
        for task in tasks:
            self._tasks.put(task)
        return (task[0].result() for task in tasks)

    def _enlist(self, wanted: int) -> None:
        """Start threads for so many tasks; fewer do where the system has no more."""
        while self._threads < min(self._size, wanted):
            try:
                threading.Thread(target=self._serve, name=self._name, daemon=True).start()
            except RuntimeError:
                if not self._threads:
                    raise
                return
            self._threads += 1

    def close(self) -> None:
        """Let the threads end, each when it is through with what it has."""
        for _ in range(self._threads):
            self._tasks.put(None)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, function, row = task
            try:
                future.set_result(function(*row))
            except BaseException as error:
                future.set_exception(error)
            del task, future, row  # nothing is kept while waiting for the next
