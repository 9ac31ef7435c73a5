"""Writers of the same keys at the same moment: threads with a client each, and processes."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from threading import Barrier
from typing import Any, NamedTuple

from ..backends import create
from ._trial import Trial, make_slot

__all__ = ["Race", "race_processes", "race_threads", "run_child"]

_THREADS = 4
_PROCESSES = 3
#: Longest wait (seconds) for other threads to be ready.
_PATIENCE = 60.0
_CHILD = "from kvstore.conformance._race import run_child; run_child()"


class Race(NamedTuple):
    """Outcome of the race for one key.

    ``created`` says of each writer whether it was told that it created the object; ``winner`` is the one
    whose bytes are there, None when they are those of nobody.
    """

    created: list[bool]
    winner: int | None

    @property
    def is_exact(self) -> bool:
        """Whether exactly one was told so, and its bytes are there."""
        return self.created.count(True) == 1 and self.created.index(True) == self.winner


def race_threads(trial: Trial) -> list[Race]:
    """Let threads write one key after the other, each key at the same moment."""
    clients = trial.clients(_THREADS)
    payloads = [trial.payload(number) for number in range(_THREADS)]
    keys = trial.new_keys(trial.rounds)
    start = Barrier(_THREADS)

    def write(number: int, key: bytes) -> bool:
        start.wait(_PATIENCE)
        return clients[number].write(key, payloads[number])

    with ThreadPoolExecutor(_THREADS) as pool:
        created = [list(pool.map(write, range(_THREADS), [key] * _THREADS)) for key in keys]
    return _judge(trial, keys, created, payloads)


def race_processes(trial: Trial) -> list[Race]:
    """Let processes write the same keys in the same order, all beginning together."""
    keys = trial.new_keys(trial.rounds)
    payloads = [trial.payload(number) for number in range(_PROCESSES)]
    with ExitStack() as running:
        children = [running.enter_context(_Child()) for _ in payloads]
        for child, payload in zip(children, payloads, strict=True):
            child.tell(pickle.dumps((trial.tier, trial.namespace, keys, bytes(payload))))
        for child in children:
            child.hear()
        for child in children:
            child.tell(b"go\n")
        answers = [json.loads(child.hear()) for child in children]
    return _judge(trial, keys, list(map(list, zip(*answers, strict=True))), payloads)


def _judge(
    trial: Trial, keys: Sequence[bytes], created: Sequence[list[bool]], payloads: Sequence[memoryview]
) -> list[Race]:
    (reader,) = trial.clients(1)
    races = []
    for key, told in zip(keys, created, strict=True):
        found = trial.read(reader, key)
        winners = [number for number, payload in enumerate(payloads) if payload == found]
        races.append(Race(told, winners[0] if winners else None))
    return races


class _Child:
    """A process that runs :func:`run_child`; a context manager, which ends it."""

    def __enter__(self) -> _Child:
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def tell(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def hear(self) -> bytes:
        """Its next line."""
        assert self._process.stdout is not None and self._process.stderr is not None
        line = self._process.stdout.readline()
        if not line:
            reason = self._process.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
            raise OSError(f"a process that writes has failed: {reason}")
        return line


def run_child() -> None:
    """A writer: reads what to write, waits for the word, and prints what it was told of each key."""
    tier, namespace, keys, payload = _read_task()
    slot = make_slot(len(payload), payload)
    with closing(create(tier, namespace)) as backend:
        backend.open()
        print("ready", flush=True)
        sys.stdin.buffer.readline()
        print(json.dumps([backend.write(key, slot) for key in keys]), flush=True)


def _read_task() -> tuple[Any, ...]:
    task: tuple[Any, ...] = pickle.load(sys.stdin.buffer)
    return task
