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
        """``function`` of each row of `columns`, `size` of them at a time, in the order of the rows."""
        futures: list[Future[_T]] = []
        for row in zip(*columns, strict=True):
            futures.append(Future())
            self._tasks.put((futures[-1], function, row))
        for _ in range(min(self._size, len(futures)) - self._threads):
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()
            self._threads += 1
        return (future.result() for future in futures)

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
