"""The worker process: receives batches over a socket, moves bytes between storage and the shared arena,
reports.

Started by :mod:`kvstore.engine.processes` with a fresh interpreter, so that it holds nothing of its parent
but the descriptors it was given. Two threads: the main one works; the other watches the parent through a
pidfd and ends the process when the parent is gone, for the socket tells that only once every forked copy of
the parent is gone too.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import BinaryIO

import msgspec

from ..arena import Arena
from ..backends import Backend
from ..config import TierConfig
from ..namespace import Namespace
from .base import Batch, Completion
from .worker import Worker

__all__ = ["Spec", "decode_hello", "main"]

#: Largest message on either socket; a socket's buffer must hold it whole.
MESSAGE_LIMIT = 128 << 10


@dataclass(frozen=True)
class Spec:
    """Everything a worker process is told; it arrives pickled, in memory that only parent and child can
    see."""

    number: int
    parent: int
    arena_fd: int
    jobs_fd: int
    results_fd: int
    tier: TierConfig
    namespace: Namespace
    factory: Callable[[TierConfig, Namespace], Backend]
    concurrency: int
    nice: int | None
    affinity: tuple[int, ...] | None


def main(spec_file: BinaryIO) -> None:
    """Serve until the parent closes the socket, or is gone."""
    spec: Spec = pickle.load(spec_file)
    spec_file.close()
    _watch(spec.parent)
    if spec.nice is not None:
        os.nice(spec.nice)
    if spec.affinity is not None:
        os.sched_setaffinity(0, spec.affinity)
    jobs = socket.socket(fileno=spec.jobs_fd)
    results = socket.socket(fileno=spec.results_fd)
    worker = Worker(
        spec.factory(spec.tier, spec.namespace),
        Arena.from_fd(spec.arena_fd).view,
        retries=spec.tier.retries,
        timeout=spec.tier.timeout,
        concurrency=spec.concurrency,
    )
    results.send(_hello(spec.number, worker))
    _serve(jobs, results, worker, spec.number)


def decode_hello(counters: bytes) -> Exception | None:
    """Why a worker could not open its backend, from the first message of its process."""
    error: Exception | None = pickle.loads(counters)
    return error


def _watch(parent: int) -> None:
    """End this process with the parent, whatever it is doing."""
    pidfd = os.pidfd_open(parent)
    if os.getppid() != parent:  # it was gone before the look, and its number may be somebody else's
        os._exit(1)

    def wait() -> None:
        select.select([pidfd], [], [])
        os._exit(1)

    threading.Thread(target=wait, name="kvstore-parent", daemon=True).start()


def _hello(number: int, worker: Worker) -> bytes:
    error: Exception | None = None
    try:
        worker.open()
    except Exception as caught:
        error = caught
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)  # some exceptions only fail on the way back
    except Exception:
        pickled = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return msgspec.msgpack.encode((number, pickled))


def _serve(jobs: socket.socket, results: socket.socket, worker: Worker, number: int) -> None:
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Batch)
    heap: list[tuple[int, int, Batch]] = []
    order = count()

    def emit(completion: Completion) -> None:
        results.send(encoder.encode((number, completion)))

    while True:
        try:
            data = jobs.recv(MESSAGE_LIMIT, socket.MSG_DONTWAIT if heap else 0)
        except BlockingIOError:
            worker.run(heappop(heap)[2], emit)
            continue
        except OSError:
            data = b""
        if not data:
            break
        batch = decoder.decode(data)
        heappush(heap, (batch.verb, next(order), batch))
    worker.close()
    sys.exit(0)
