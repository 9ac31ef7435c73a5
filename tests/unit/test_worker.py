"""The worker: parts of large batches, and keys that fail alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from kvstore.backends import Backend, BackendContext, StoredObject
from kvstore.engine.base import Batch, Completion, Status, Verb
from kvstore.engine.worker import Worker
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
    worker = Worker(backend, lambda _slot: memoryview(bytearray(CHUNK)))
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
