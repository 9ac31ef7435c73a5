"""The frame: golden files, an independent reader, and every way to be refused."""

from __future__ import annotations

import runpy
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import xxhash
from independent_reader import read_object

from kvstore import frame
from kvstore.errors import CorruptChunkError
from kvstore.namespace import Namespace

DATA = Path(__file__).parent.parent / "data"
make_golden = SimpleNamespace(**runpy.run_path(str(DATA / "make_golden.py")))
KEY = bytes(range(16))
FINGERPRINT = bytes(range(100, 116))
GOLDEN = DATA / "golden" / "v1"
GOLDEN_FILES = sorted(GOLDEN.rglob("*.kv"))


def make_object(payload: bytes = b"payload", key: bytes = KEY, padding: int = 0) -> bytearray:
    header = memoryview(bytearray(frame.HEADER_SIZE))
    frame.build(header, memoryview(payload), key=key, fingerprint=FINGERPRINT, created_ns=1)
    return bytearray(bytes(header) + payload + bytes(padding))


def verify(data: bytes, size: int | None = None, room: int = 8192, key: bytes = KEY) -> bytes:
    out = memoryview(data)[frame.HEADER_SIZE :][:room]
    total = len(data) if size is None else size
    header = memoryview(data)[: frame.HEADER_SIZE]
    return bytes(out[: frame.verify(header, out, total, key=key, fingerprint=FINGERPRINT)])


def reseal(data: bytearray) -> bytearray:
    """Make the header's checksum right again after a change."""
    data[4080:4096] = xxhash.xxh3_128(data[:4080]).digest()
    return data


# The format.


def test_golden_files_are_all_there() -> None:
    assert len(GOLDEN_FILES) == len(make_golden.CHUNKS)


@pytest.mark.parametrize("path", GOLDEN_FILES, ids=lambda path: path.stem[:8])
def test_golden_files_by_the_independent_reader(path: Path) -> None:
    key, _, created, payload = read_object(path)
    number = created - make_golden.CREATED_NS
    key_size, size, _ = make_golden.CHUNKS[number]
    assert key == make_golden.make_key(number, key_size)
    assert payload == make_golden.make_payload(number, size)


@pytest.mark.parametrize("path", GOLDEN_FILES, ids=lambda path: path.stem[:8])
def test_golden_files_by_the_code(path: Path) -> None:
    key, fingerprint, created, payload = read_object(path)
    data = memoryview(path.read_bytes())
    header, out = data[:4096], data[4096:]
    assert frame.verify(header, out, len(data), key=key, fingerprint=fingerprint) == len(payload)
    rebuilt = memoryview(bytearray(b"\xff" * 4096))
    frame.build(rebuilt, memoryview(payload), key=key, fingerprint=fingerprint, created_ns=created)
    assert rebuilt == header


def test_golden_manifest_is_still_that_of_its_directory() -> None:
    (path,) = GOLDEN.glob("*/namespace.json")
    assert Namespace.from_manifest(path.read_bytes()).directory == path.parent.name


@pytest.mark.parametrize(("length", "size"), [(0, 4096), (1, 8192), (4096, 8192), (4097, 12288)])
def test_size_of_an_object_on_storage(length: int, size: int) -> None:
    assert frame.object_size(length) == size


def test_parse_gives_the_fields() -> None:
    header = frame.parse(memoryview(make_object())[:4096])
    digest = xxhash.xxh3_128(b"payload").digest()
    assert header == frame.Header(KEY, FINGERPRINT, 7, 1, digest)


def test_creation_time_is_now_unless_given() -> None:
    header = memoryview(bytearray(frame.HEADER_SIZE))
    frame.build(header, memoryview(b""), key=KEY, fingerprint=FINGERPRINT)
    assert frame.parse(header).created_ns > 1_700_000_000_000_000_000


@pytest.mark.parametrize(("key", "fingerprint"), [(b"", FINGERPRINT), (bytes(65), FINGERPRINT), (KEY, b"x")])
def test_build_refuses_what_has_no_room(key: bytes, fingerprint: bytes) -> None:
    with pytest.raises(ValueError, match="no frame"):
        frame.build(memoryview(bytearray(4096)), memoryview(b""), key=key, fingerprint=fingerprint)


# Refusals.


def test_accepts_padding_and_none() -> None:
    assert verify(make_object()) == b"payload"
    assert verify(make_object(padding=4096 - 7)) == b"payload"


@pytest.mark.parametrize("bit", range(8))
def test_refuses_every_flipped_byte_of_the_header(bit: int) -> None:
    data = make_object()
    for position in range(frame.HEADER_SIZE):
        data[position] ^= 1 << bit
        with pytest.raises(CorruptChunkError):
            verify(data)
        data[position] ^= 1 << bit
    assert verify(data) == b"payload"


def test_refuses_every_flipped_bit_of_the_payload() -> None:
    data = make_object()
    for position in range(7 * 8):
        data[frame.HEADER_SIZE + position // 8] ^= 1 << position % 8
        with pytest.raises(CorruptChunkError, match="payload checksum"):
            verify(data)
        data[frame.HEADER_SIZE + position // 8] ^= 1 << position % 8


@pytest.mark.parametrize(
    ("offset", "field", "reason"),
    [
        (0, b"\x93KVCHNK\r", "bad magic"),
        (8, struct.pack("<H", 2), "format version 2 is newer"),
        (8, struct.pack("<H", 0), "impossible header: version 0"),
        (10, struct.pack("<H", 1), "flags 0x1"),
        (12, struct.pack("<H", 65), "key of 65 bytes"),
        (12, struct.pack("<H", 0), "key of 0 bytes"),
        (12, struct.pack("<H", 15), "of another key, 000102030405060708090a0b0c0d0e$"),
        (16, bytes(16), "of another namespace, 0{32}$"),
        (32, struct.pack("<Q", 6), "torn: 4103 bytes, but the header announces a payload of 6"),
        (32, struct.pack("<Q", 2**64 - 1), "torn"),
    ],
)
def test_names_what_a_sealed_header_has_wrong(offset: int, field: bytes, reason: str) -> None:
    data = make_object()
    data[offset : offset + len(field)] = field
    with pytest.raises(CorruptChunkError, match=reason):
        verify(reseal(data))


def test_names_the_rest() -> None:
    with pytest.raises(CorruptChunkError, match="torn: 4095 bytes are less than a header"):
        verify(make_object(), size=4095)
    with pytest.raises(CorruptChunkError, match="does not fit a chunk of 6 bytes"):
        verify(make_object(), room=6)
    with pytest.raises(frame.ForeignChunkError, match="another key") as refused:
        verify(make_object(), key=bytes(16))
    assert refused.value.key == bytes(16)
    damaged = make_object()
    damaged[4000] = 1
    with pytest.raises(CorruptChunkError, match="header checksum"):
        verify(damaged)
