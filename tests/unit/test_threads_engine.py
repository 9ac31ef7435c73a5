"""The threads engine: when its bell rings. ``conformance/test_engines.py`` has what every engine must do."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator, Sequence

import pytest

from kvstore.backends import Backend, BackendContext, StoredObject
from kvstore.engine.base import Batch, Verb
from kvstore.engine.threads import ThreadsEngine, ThreadTier
from kvstore.engine.worker import Worker
from support.chunks import CHUNK

PATIENCE = 20.0


class Stepwise(Backend):
    """Does nothing, one chunk for each step that it may take; tells when it comes to the next."""

    def __init__(self) -> None:
        super().__init__(BackendContext(fingerprint=bytes(16), manifest=b"", chunk_size=CHUNK))
        self.may = threading.Semaphore(0)
        self.asks = threading.Semaphore(0)

    def open(self) -> None:
        pass

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [True] * len(keys)

    def delete(self, keys: Sequence[bytes]) -> None:
        pass

    def scan(self) -> Iterator[StoredObject]:
        yield from ()

    def _step(self) -> None:
        self.asks.release()
        assert self.may.acquire(timeout=PATIENCE)

    def get_object(self, key: bytes, header: memoryview, payload: memoryview) -> int | None:
        self._step()
        return None

    def put_object(self, key: bytes, header: memoryview, payload: memoryview) -> bool:
        self._step()
        return True

    def take_step(self) -> None:
        """Let the chunk of now end, and wait until the worker has come to the next one."""
        self.may.release()
        assert self.asks.acquire(timeout=PATIENCE)


@pytest.fixture
def backend() -> Stepwise:
    return Stepwise()


@pytest.fixture
def engine(backend: Stepwise) -> Iterator[ThreadsEngine]:
    slot = memoryview(bytearray(CHUNK))
    engine = ThreadsEngine([ThreadTier("t", lambda: Worker(backend, lambda _: slot), 1, PATIENCE)])
    assert engine.start() == [None]
    yield engine
    for _ in range(20):
        backend.may.release()
    engine.close(PATIENCE)


def submit(engine: ThreadsEngine, verb: Verb, batches: int) -> None:
    for number in range(batches):
        engine.submit(Batch(number, 0, verb, [number.to_bytes(16)], [0], [CHUNK]))


def rings(engine: ThreadsEngine) -> bool:
    return bool(select.select([engine.fileno()], [], [], 0)[0])


def test_ends_of_writes_wait_while_there_is_enough_to_do(engine: ThreadsEngine, backend: Stepwise) -> None:
    submit(engine, Verb.WRITE, 5)
    assert backend.asks.acquire(timeout=PATIENCE)
    rung = []
    for _ in range(4):
        backend.take_step()
        rung.append(rings(engine))
    assert rung == [False, False, False, True]  # when the fourth ends, one is left
    assert [completion.id for completion in engine.poll()] == [0, 1, 2, 3]
    backend.may.release()
    engine.wait(PATIENCE)
    assert [completion.id for completion in engine.poll()] == [4]


def test_whoever_polls_gets_what_has_ended_all_the_same(engine: ThreadsEngine, backend: Stepwise) -> None:
    submit(engine, Verb.WRITE, 5)
    assert backend.asks.acquire(timeout=PATIENCE)
    backend.take_step()
    assert [completion.id for completion in engine.poll()] == [0]


def test_ends_of_reads_do_not_wait(engine: ThreadsEngine, backend: Stepwise) -> None:
    submit(engine, Verb.READ, 5)
    assert backend.asks.acquire(timeout=PATIENCE)
    backend.take_step()
    assert rings(engine)
