"""The worker: parts of large batches, keys that fail alone, and batches that the backend reads as such."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from kvstore.backends import Backend, BackendContext, Capabilities, StoredObject
from kvstore.engine.base import Batch, Completion, Status, Verb
from kvstore.engine.worker import Worker
from kvstore.errors import BackendError, CorruptChunkError
from support.chunks import CHUNK

KEYS = [number.to_bytes(16) for number in range(256)]


class Listing(Backend):
    """Knows which keys it has, and which it chokes on."""

    def __init__(self, bad: Sequence[bytes]) -> None:
        super().__init__(BackendContext(fingerprint=bytes(16), manifest=b"", chunk_size=CHUNK))
        self.bad = set(bad)
        self.gone: set[bytes] = set()
        self.asked = 0

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        self._choke(keys)
        return [key not in self.gone for key in keys]

    def delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._choke([key])
            self.gone.add(key)

    def _choke(self, keys: Sequence[bytes]) -> None:
        self.asked += 1
        if self.bad.intersection(keys):
            raise NotADirectoryError("a file where a directory should be")

    def scan(self) -> Iterator[StoredObject]:
        yield from ()

    def get_object(self, key: bytes, header: memoryview, payload: memoryview) -> int | None:
        return None

    def put_object(self, key: bytes, header: memoryview, payload: memoryview) -> bool:
        return False


def run(backend: Backend, verb: Verb) -> list[Completion]:
    worker = Worker(backend, lambda _slot: memoryview(bytearray(CHUNK)), retries=1)
    worker.open()
    done: list[Completion] = []
    worker.run(Batch(1, 0, verb, KEYS, [-1] * len(KEYS), [0] * len(KEYS)), done.append)
    worker.close()
    assert [c.first for c in done] == [sum(len(d.results) for d in done[:n]) for n in range(len(done))]
    assert sum(len(completion.results) for completion in done) == len(KEYS), "one result for each"
    return done


def statuses(done: list[Completion]) -> list[Status]:
    return [result.status for completion in done for result in completion.results]


@pytest.mark.parametrize("verb", [Verb.PROBE, Verb.DELETE])
def test_a_key_that_fails_alone_fails_alone(verb: Verb) -> None:
    found = statuses(run(Listing([KEYS[7], KEYS[200]]), verb))
    assert [n for n, status in enumerate(found) if status is Status.FAILED] == [7, 200]
    assert set(found) == {Status.OK, Status.FAILED}


def test_storage_that_is_down_is_not_asked_for_every_key() -> None:
    backend = Listing(KEYS)
    assert set(statuses(run(backend, Verb.PROBE))) == {Status.FAILED}
    assert backend.asked < len(KEYS) / 4


def test_the_head_of_a_batch_is_answered_before_its_tail() -> None:
    assert len(run(Listing([]), Verb.PROBE)) > 1


# Batches that the backend reads as such.

PASSING = BackendError("the connection broke", retryable=True)


class Batches(Listing):
    """Reads whole batches, each key with its own outcome; what is asked for once more has another one."""

    capabilities = Capabilities(bulk_read=True, quarantine=True)

    def __init__(self, outcomes: dict[bytes, int | Exception | None], then: int | Exception) -> None:
        super().__init__([])
        self.outcomes = outcomes
        self.then = then
        self.again: list[bytes] = []

    def read_many(
        self, keys: Sequence[bytes], outs: Sequence[memoryview]
    ) -> Iterator[int | Exception | None]:
        assert list(keys) == KEYS
        assert len(outs) == len(KEYS)
        for number, key in enumerate(keys):
            yield self.outcomes.get(key, number)

    def read_into(self, key: bytes, out: memoryview) -> int | None:
        self.again.append(key)
        if isinstance(self.then, Exception):
            raise self.then
        return self.then

    def quarantine(self, key: bytes) -> bool:
        return key == KEYS[3]


def test_a_batch_is_left_to_the_backend() -> None:
    backend = Batches({KEYS[3]: CorruptChunkError("torn"), KEYS[5]: None, KEYS[7]: OSError("broken")}, 0)
    results = [result for completion in run(backend, Verb.READ) for result in completion.results]
    failed = {3: Status.CORRUPT, 5: Status.MISSING, 7: Status.FAILED}
    assert [result.status for result in results] == [failed.get(n, Status.OK) for n in range(len(KEYS))]
    assert [result.value for n, result in enumerate(results) if n not in failed] == [
        n for n in range(len(KEYS)) if n not in failed
    ]
    assert results[3].value == 1, "it was moved aside"
    assert backend.again == []


def test_what_fails_in_a_batch_is_repeated_alone() -> None:
    backend = Batches({KEYS[3]: PASSING, KEYS[200]: PASSING}, 77)
    results = [result for completion in run(backend, Verb.READ) for result in completion.results]
    assert {result.status for result in results} == {Status.OK}
    assert [results[3].value, results[200].value] == [77, 77]
    assert backend.again == [KEYS[3], KEYS[200]]


def test_a_batch_that_fails_as_a_whole_is_not_repeated_key_by_key() -> None:
    backend = Batches(dict.fromkeys(KEYS, PASSING), PASSING)
    assert set(statuses(run(backend, Verb.READ))) == {Status.FAILED}
    assert len(backend.again) < 5
