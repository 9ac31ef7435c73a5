"""The conformance suite of backends: subclass :class:`BackendTests` in a test module of yours.

``docs/reference/backends.md`` shows how. The suite needs pytest. Objects are planted, read and damaged
through *raw access* that you provide and that bypasses the backend, so that reading is never tested by the
code that wrote.
"""

from __future__ import annotations

import hashlib
import mmap
from abc import abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

import pytest

from .. import frame
from ..backends.base import Backend, BackendContext
from ..errors import CorruptChunkError, NamespaceMismatchError

__all__ = ["BackendTests", "make_key"]

_CHUNK_SIZE = 64 * 1024
_FINGERPRINT = bytes(range(16))
_REGIONS = {
    "magic": 0,
    "version": 8,
    "flags": 10,
    "key length": 12,
    "reserved": 14,
    "fingerprint": 16,
    "payload length": 32,
    "creation time": 40,
    "payload checksum": 48,
    "key": 64,
    "zeros": 2000,
    "header checksum": 4095,
    "first byte of payload": 4096,
    "last byte of payload": 4096 + _CHUNK_SIZE - 1,
}


def make_key(number: int) -> bytes:
    """A key of 16 bytes; the same for the same number."""
    return hashlib.blake2b(number.to_bytes(8), digest_size=16).digest()


def _make_payload(number: int, size: int = _CHUNK_SIZE) -> bytes:
    return hashlib.shake_256(number.to_bytes(8)).digest(size)


def _make_object(key: bytes, payload: bytes, fingerprint: bytes = _FINGERPRINT) -> bytes:
    header = bytearray(frame.HEADER_SIZE)
    frame.build(memoryview(header), memoryview(payload), key=key, fingerprint=fingerprint)
    return bytes(header) + payload


def _make_slot(size: int = _CHUNK_SIZE, content: bytes = b"") -> memoryview:
    slot = memoryview(mmap.mmap(-1, size))
    slot[: len(content)] = content
    return slot


class BackendTests:
    """What every backend must do; tests of a capability run where it is claimed."""

    context = BackendContext(_FINGERPRINT, b'{"fields": {}}\n', _CHUNK_SIZE)

    @abstractmethod
    def make_backend(self, context: BackendContext) -> Backend:
        """A new backend, not yet opened; those of one test share storage, which is empty at first."""

    @abstractmethod
    def raw_get(self, key: bytes) -> bytes | None:
        """All bytes of the object of `key` in the namespace of :attr:`context`; None when there is none."""

    @abstractmethod
    def raw_set(self, key: bytes, data: bytes) -> None:
        """Make `data` the object of `key`, creating or replacing it."""

    @abstractmethod
    def raw_list(self) -> list[str]:
        """Names of everything in the namespace, temporary and quarantined files too, but not the manifest."""

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        """A backend, open."""
        backend = self.make_backend(self.context)
        with closing(backend):
            backend.open()
            yield backend

    # Round trips.

    @pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 40_000, _CHUNK_SIZE - 1, _CHUNK_SIZE])
    def test_reads_what_it_wrote(self, backend: Backend, size: int) -> None:
        key, payload = make_key(1), _make_payload(1, size)
        assert backend.write(key, _make_slot(content=payload)[:size]) is True
        out = _make_slot(content=b"\xff" * _CHUNK_SIZE)
        assert backend.read_into(key, out) == size
        assert out[:size] == payload

    @pytest.mark.parametrize("size", [1, 1000, 5000])
    def test_chunk_size_need_not_be_aligned(self, size: int) -> None:
        context = BackendContext(_FINGERPRINT, self.context.manifest, size)
        backend = self.make_backend(context)
        with closing(backend):
            backend.open()
            payload = _make_payload(2, size)
            assert backend.write(make_key(2), _make_slot(size, payload)) is True
            out = _make_slot(size)
            assert backend.read_into(make_key(2), out) == size
            assert out == payload

    @pytest.mark.parametrize("length", [16, 17, 32, 64])
    def test_takes_keys_of_every_length(self, backend: Backend, length: int) -> None:
        key = bytes(range(256 - length, 256))
        assert backend.write(key, _make_slot(content=b"abc")[:3])
        assert backend.exists([key, key[:-1]]) == [True, False]
        assert [row.key for row in backend.scan()] == [key]

    def test_object_is_frame_and_payload(self, backend: Backend) -> None:
        payload = _make_payload(3)
        backend.write(make_key(3), _make_slot(content=payload))
        found = self.raw_get(make_key(3))
        assert found is not None
        assert found[frame.HEADER_SIZE :] == payload
        header = frame.parse(memoryview(found)[: frame.HEADER_SIZE])
        assert (header.key, header.fingerprint, header.length) == (make_key(3), _FINGERPRINT, len(payload))

    def test_reads_what_another_wrote(self, backend: Backend) -> None:
        payload = _make_payload(4, 5000)
        self.raw_set(make_key(4), _make_object(make_key(4), payload))
        out = _make_slot()
        assert backend.exists([make_key(4)]) == [True]
        assert backend.read_into(make_key(4), out) == 5000
        assert out[:5000] == payload

    def test_reads_padded_objects(self, backend: Backend) -> None:
        payload = _make_payload(5, 5000)
        self.raw_set(make_key(5), _make_object(make_key(5), payload) + bytes(8192 - 5000))
        out = _make_slot()
        assert backend.read_into(make_key(5), out) == 5000
        assert out[:5000] == payload

    def test_leaves_nothing_but_objects(self, backend: Backend) -> None:
        for number in range(5):
            backend.write(make_key(number), _make_slot())
        assert len(self.raw_list()) == 5

    # Misses.

    def test_absent_is_a_miss(self, backend: Backend) -> None:
        assert backend.exists([make_key(1)]) == [False]
        assert backend.read_into(make_key(1), _make_slot()) is None
        assert list(backend.scan()) == []
        assert backend.exists([]) == []

    def test_deleted_is_a_miss(self, backend: Backend) -> None:
        keys = [make_key(number) for number in range(3)]
        for key in keys[:2]:
            backend.write(key, _make_slot())
        backend.delete([keys[0], keys[2]])
        assert backend.exists(keys) == [False, True, False]
        assert backend.read_into(keys[0], _make_slot()) is None
        assert backend.write(keys[0], _make_slot()) is True

    # First writer wins.

    def test_second_writer_changes_nothing(self, backend: Backend) -> None:
        first, second = _make_payload(1), _make_payload(2)
        assert backend.write(make_key(1), _make_slot(content=first)) is True
        assert backend.write(make_key(1), _make_slot(content=second)) is False
        out = _make_slot()
        backend.read_into(make_key(1), out)
        assert out == first

    def test_of_racing_writers_one_wins(self, backend: Backend) -> None:
        if not backend.capabilities.first_writer_wins:
            pytest.skip("the backend does not claim first_writer_wins")
        slots = [_make_slot(content=_make_payload(number)) for number in range(4)]
        out = _make_slot()
        with ThreadPoolExecutor(len(slots)) as pool:
            for key in map(make_key, range(50)):
                created = list(pool.map(partial(backend.write, key), slots))
                assert backend.read_into(key, out) == _CHUNK_SIZE
                assert [slot == out for slot in slots] == created
                assert created.count(True) == 1

    def test_readers_see_whole_objects_or_none(self, backend: Backend) -> None:
        if not backend.capabilities.atomic_create:
            pytest.skip("the backend does not claim atomic_create")
        slot = _make_slot(content=_make_payload(1))
        keys = [make_key(number) for number in range(100)]
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(lambda: [backend.write(key, slot) for key in keys])
            out = _make_slot()
            for key in keys:
                while (length := backend.read_into(key, out)) is None:
                    if writing.done():
                        writing.result()
                assert length == _CHUNK_SIZE
                assert out == slot

    # Refusals: no wrong byte is served.

    @pytest.mark.parametrize("region", _REGIONS)
    def test_refuses_a_flipped_bit(self, backend: Backend, region: str) -> None:
        damaged = bytearray(_make_object(make_key(1), _make_payload(1)))
        damaged[_REGIONS[region]] ^= 0x10
        self.raw_set(make_key(1), bytes(damaged))
        with pytest.raises(CorruptChunkError) as refused:
            backend.read_into(make_key(1), _make_slot())
        assert refused.value.key == make_key(1)

    @pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 4096 + _CHUNK_SIZE - 1])
    def test_refuses_a_torn_object(self, backend: Backend, size: int) -> None:
        self.raw_set(make_key(1), _make_object(make_key(1), _make_payload(1))[:size])
        with pytest.raises(CorruptChunkError, match="torn"):
            backend.read_into(make_key(1), _make_slot())

    @pytest.mark.parametrize("extra", [1, 4096, 100_000])
    def test_refuses_a_longer_object(self, backend: Backend, extra: int) -> None:
        self.raw_set(make_key(1), _make_object(make_key(1), _make_payload(1)) + bytes(extra))
        with pytest.raises(CorruptChunkError, match="torn"):
            backend.read_into(make_key(1), _make_slot())

    def test_refuses_a_larger_chunk(self, backend: Backend) -> None:
        payload = _make_payload(1, _CHUNK_SIZE + 1)
        self.raw_set(make_key(1), _make_object(make_key(1), payload))
        with pytest.raises(CorruptChunkError, match="does not fit"):
            backend.read_into(make_key(1), _make_slot())

    def test_reads_many_as_it_reads_one(self, backend: Backend) -> None:
        payloads = {make_key(number): _make_payload(number, 100 * number) for number in range(1, 20)}
        for key, payload in payloads.items():
            self.raw_set(key, _make_object(key, payload))
        keys = [make_key(number) for number in range(20)]
        self.raw_set(keys[7], _make_object(keys[8], payloads[keys[8]]))
        slots = [_make_slot() for _ in keys]
        outcomes = list(backend.read_many(keys, slots))
        assert outcomes[0] is None
        assert isinstance(outcomes[7], CorruptChunkError)
        assert outcomes[7].key == keys[7]
        for number in {*range(1, 20)} - {7}:
            assert outcomes[number] == 100 * number
            assert slots[number][: 100 * number] == payloads[keys[number]]
        assert list(backend.read_many([], [])) == []

    def test_reads_several_batches_at_a_time(self, backend: Backend) -> None:
        if not backend.capabilities.overlaps:
            pytest.skip("this backend reads one batch after another")
        payloads = {make_key(number): _make_payload(number, 100 * number) for number in range(1, 21)}
        for key, payload in payloads.items():
            self.raw_set(key, _make_object(key, payload))
        keys, slots = list(payloads), [_make_slot() for _ in payloads]
        first = backend.read_many(keys[:10], slots[:10])
        found = [next(first)]
        second = backend.read_many(keys[10:], slots[10:])
        assert backend.exists([keys[0], make_key(0)]) == [True, False]
        found += [*first, *second]
        assert found == [100 * number for number in range(1, 21)]
        for number, (payload, slot) in enumerate(zip(payloads.values(), slots, strict=True), 1):
            assert slot[: 100 * number] == payload

    def test_refuses_the_object_of_another_key(self, backend: Backend) -> None:
        self.raw_set(make_key(1), _make_object(make_key(2), _make_payload(2)))
        with pytest.raises(CorruptChunkError, match=f"another key, {make_key(2).hex()}"):
            backend.read_into(make_key(1), _make_slot())

    def test_refuses_the_object_of_another_namespace(self, backend: Backend) -> None:
        self.raw_set(make_key(1), _make_object(make_key(1), _make_payload(1), b"another fingerpr"))
        with pytest.raises(CorruptChunkError, match="another namespace"):
            backend.read_into(make_key(1), _make_slot())

    def test_quarantine_makes_room(self, backend: Backend) -> None:
        if not backend.capabilities.quarantine:
            pytest.skip("the backend does not claim quarantine")
        self.raw_set(make_key(1), b"not an object")
        assert backend.quarantine(make_key(1)) is True
        assert backend.exists([make_key(1)]) == [False]
        assert self.raw_get(make_key(1)) is None
        assert len(self.raw_list()) == 1
        assert list(backend.scan()) == []
        assert backend.write(make_key(1), _make_slot()) is True
        assert backend.quarantine(make_key(2)) is False

    # Listing, and life.

    def test_scan_lists_every_object(self, backend: Backend) -> None:
        keys = {make_key(number) for number in range(300)}
        for key in keys:
            backend.write(key, _make_slot()[:100])
        rows = list(backend.scan())
        assert {row.key for row in rows} == keys
        assert len(rows) == len(keys)
        stored = self.raw_get(rows[0].key)
        assert stored is not None
        assert {row.size for row in rows} == {len(stored)}

    def test_objects_survive_reopening(self, backend: Backend) -> None:
        backend.write(make_key(1), _make_slot(content=_make_payload(1)))
        again = self.make_backend(self.context)
        with closing(again):
            again.open()
            out = _make_slot()
            assert again.read_into(make_key(1), out) == _CHUNK_SIZE
            assert out == _make_payload(1)

    def test_another_manifest_is_refused(self, backend: Backend) -> None:
        backend.write(make_key(1), _make_slot())
        stored = self.raw_get(make_key(1))
        impostor = self.make_backend(BackendContext(_FINGERPRINT, b"another manifest", _CHUNK_SIZE))
        with closing(impostor), pytest.raises(NamespaceMismatchError):
            impostor.open()
        assert self.raw_get(make_key(1)) == stored

    def test_close_after_a_failed_open_or_none(self) -> None:
        self.make_backend(self.context).close()
