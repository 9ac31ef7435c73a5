"""Trace readers: formats, compression, guessing, limits, and errors that say where."""

from __future__ import annotations

import bz2
import gzip
import lzma
import struct
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.traces import Request, read_references, read_requests

MOONCAKE = b'{"timestamp": 27, "input_length": 700, "output_length": 5, "hash_ids": [46, 57]}\n'
NAMED = b'{"timestamp": 0.5, "session_id": "a", "hash_ids": ["x", 3], "model": "ignored"}\n'
RAGPULSE = (
    b'{"timestamp": "82", "session_id": "17-af", "hash_ids": {"system": [8, 9], "web": [], "user": [7]}}\n'
)
NUMBERS = [0, 1, 2**32 - 1, 7]
U32LE = struct.pack("<4I", *NUMBERS)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_jsonl_requests(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", MOONCAKE + b"\n" + NAMED + RAGPULSE)
    assert list(read_requests(path)) == [
        Request(27.0, [46, 57], 700, 5, ""),
        Request(0.5, ["x", 3], 0, 0, "a"),
        Request(82_000.0, [8, 9, 7], 0, 0, "17-af"),
    ]
    assert list(read_references(path)) == [46, 57, "x", 3, 8, 9, 7]


def test_limit_counts_requests(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", MOONCAKE * 3 + b"not reached\n")
    assert len(list(read_requests(path, limit=2))) == 2
    assert list(read_references(path, limit=2)) == [46, 57] * 2
    numbers = write(tmp_path / "numbers.txt", b"1\n2\n3\nnot reached\n")
    assert list(read_references(numbers, limit=2)) == [1, 2]


def test_text_skips_stars_and_blank_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "loop.trc", b"5\n\n*\n 6 \r\n5")
    assert list(read_references(path)) == [5, 6, 5]


def test_each_reference_of_a_plain_trace_is_a_request(tmp_path: Path) -> None:
    path = write(tmp_path / "pages.u32le", U32LE)
    assert list(read_requests(path)) == [Request(0.0, (number,)) for number in NUMBERS]


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)],
)
@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", MOONCAKE, [46, 57]),
        ("a.txt", b"3\n4\n", [3, 4]),
        ("a.u32le", U32LE, NUMBERS),
        ("a_u32le", U32LE, NUMBERS),
        ("tells_nothing", b" \n" + MOONCAKE, [46, 57]),
        ("tells_nothing.trace", b"*\n12\n*\n13\n", [12, 13]),
        ("tells_nothing.bin", U32LE, NUMBERS),
    ],
)
def test_auto_goes_by_name_or_content(
    tmp_path: Path, suffix: str, compress: type[bytes], name: str, content: bytes, expected: list[int]
) -> None:
    path = write(tmp_path / (name + suffix), compress(content))
    assert list(read_references(path)) == expected


def test_a_given_format_overrides_the_name(tmp_path: Path) -> None:
    path = write(tmp_path / "odd.jsonl", b"5\n6\n")
    assert list(read_references(path, format="text")) == [5, 6]


def test_numbers_across_blocks(tmp_path: Path) -> None:
    numbers = list(range(600_000))
    path = write(tmp_path / "big.u32le.gz", gzip.compress(struct.pack("<600000I", *numbers), 1))
    assert list(read_references(path)) == numbers


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("a.jsonl", MOONCAKE + b"\n{torn\n", "a.jsonl, line 3: not a request"),
        ("a.jsonl", MOONCAKE + b'{"timestamp": 1}\n', "a.jsonl, line 2: .*hash_ids"),
        ("a.jsonl", b'{"hash_ids": [1, {}]}\n', "a.jsonl, line 1: "),
        ("a.jsonl", b'{"hash_ids": [], "timestamp": "noon"}\n', "a.jsonl, line 1: .*noon"),
        ("a.jsonl.gz", gzip.compress(MOONCAKE + b"5\n"), "a.jsonl.gz, line 2: "),
        ("a.txt", b"1\n*\n\n2 3\n", "a.txt, line 4: not a number: b'2 3'"),
        ("a.u32le", U32LE + b"\0", "a.u32le: ends within"),
        ("a.txt.gz", b"1\n", "cannot read the trace .*a.txt.gz"),
        ("a.txt.gz", gzip.compress(b"1\n2\n")[:-4], "cannot read the trace .*a.txt.gz"),
        ("a.gz", gzip.compress(b"1\n" * 9)[:-12] + b"\xff" * 12, "cannot read the trace .*a.gz"),
        ("a.xz", lzma.compress(b"1\n")[:40], "cannot read the trace .*a.xz"),
    ],
)
def test_bad_content_names_file_and_line(tmp_path: Path, name: str, content: bytes, where: str) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(ConfigError, match=where):
        list(read_references(path))


def test_missing_file_and_unknown_format(tmp_path: Path) -> None:
    for name in ("absent.jsonl", "absent"):
        with pytest.raises(ConfigError, match=f"cannot read the trace .*{name}"):
            list(read_requests(tmp_path / name))
    with pytest.raises(ConfigError, match="unknown trace format 'csv'; did you mean"):
        read_requests(tmp_path / "absent", format="csv")


@pytest.mark.parametrize(
    ("name", "requests", "references", "unique"),
    [
        ("mooncake_conversation_first2000.jsonl", 2000, 54_559, 38_788),
        ("ragpulse_0_trace.jsonl.gz", 7106, 71_583, 21_857),
        ("weka16_merged.jsonl.gz", 451, 354_584, None),
        ("oltp_u32le.xz", None, 914_145, None),
        ("lirs/sprite.trace.gz", None, 133_996, None),
    ],
)
def test_reference_traces(
    shared_data: Path, name: str, requests: int | None, references: int, unique: int | None
) -> None:
    path = shared_data / name
    keys = list(read_references(path))
    assert len(keys) == references
    assert unique is None or len(set(keys)) == unique
    assert requests is None or sum(1 for _ in read_requests(path)) == requests


def test_reference_sessions(shared_data: Path) -> None:
    requests = list(read_requests(shared_data / "weka16_merged.jsonl.gz"))
    assert len({request.session for request in requests}) == 16
    first = next(read_requests(shared_data / "ragpulse_0_trace.jsonl.gz"))
    assert first.timestamp_ms == 82_000
    assert (first.input_length, first.output_length) == (3112, 192)
