"""Readers of workload traces.

Formats, each plain or compressed (``.gz``, ``.xz``, ``.bz2``):

===========  ==========================================================================================
``jsonl``    one request a line, as Mooncake publishes them: ``timestamp``, ``hash_ids`` and optionally
             ``input_length``, ``output_length`` (tokens), ``session_id``. Other fields are ignored
``u32le``    one reference after the other, little-endian 32-bit numbers without a header
``text``     one reference a line, decimal; blank lines and ``*`` are skipped
===========  ==========================================================================================

In ``jsonl`` a numeric timestamp is in milliseconds (Mooncake), one in a string is in seconds (RAGPulse), and
``hash_ids`` may be a mapping of parts to lists (RAGPulse), which are joined in order. Requests come in the
order of the file, which need not be that of time.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import sys
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, cast

import msgspec

from .errors import ConfigError

__all__ = ["TRACE_FORMATS", "Key", "Request", "read_references", "read_requests"]

Key = int | str
"""What names a chunk in a trace."""

TRACE_FORMATS: Final = ("auto", "jsonl", "text", "u32le")
"""What `format` may be; ``auto`` goes by the file's name, or by its content where that does not tell."""

_OPENERS: Final[dict[str, Callable[..., IO[bytes]]]] = {
    ".gz": cast(Any, gzip.open),
    ".xz": cast(Any, lzma.open),
    ".bz2": cast(Any, bz2.open),
}
_SUFFIXES: Final = {".jsonl": "jsonl", ".txt": "text", ".u32le": "u32le", ".u32": "u32le"}
_READ_ERRORS: Final = (OSError, EOFError, lzma.LZMAError, zlib.error)
_BLOCK: Final = 1 << 20
_SAMPLE: Final = 4096


class Request(NamedTuple):
    """One request of a trace.

    Attributes
    ----------
    timestamp_ms : float
        Since the start of the trace.
    keys : sequence of int or str
        Its chunks, in order.
    input_length, output_length : int
        Tokens, 0 when the trace does not say.
    session : str
        Empty when the trace does not say.
    """

    timestamp_ms: float
    keys: Sequence[Key]
    input_length: int = 0
    output_length: int = 0
    session: str = ""


class _Row(msgspec.Struct):
    """A line of a jsonl trace."""

    hash_ids: list[Key] | dict[str, list[Key]]
    timestamp: float | str = 0.0
    input_length: int = 0
    output_length: int = 0
    session_id: Key = ""


def read_requests(
    path: str | PathLike[str], format: str = "auto", limit: int | None = None
) -> Iterator[Request]:
    """Read the requests of a trace, one by one.

    Parameters
    ----------
    path : path
        Of the file.
    format : str
        One of :data:`TRACE_FORMATS`. In the formats without requests each reference is one, at time 0.
    limit : int, optional
        Stop after so many requests.

    Raises
    ------
    ConfigError
        The file cannot be read, or is not what `format` says: names the file and the line. Raised when the
        reader gets there.
    """
    path = Path(path)
    reader = _READERS[_resolve(path, format)]
    return islice(reader(path), limit)


def read_references(
    path: str | PathLike[str], format: str = "auto", limit: int | None = None
) -> Iterator[Key]:
    """Read the chunk references of a trace, one by one: of each request its keys in order.

    Parameters and errors are those of :func:`read_requests`; `limit` counts requests too.
    """
    path = Path(path)
    resolved = _resolve(path, format)
    if resolved in _NUMBERS:
        return islice(_NUMBERS[resolved](path), limit)
    return (key for request in read_requests(path, resolved, limit) for key in request.keys)


def _resolve(path: Path, format: str) -> str:
    """The format to read `path` in."""
    if format not in TRACE_FORMATS:
        nearest = get_close_matches(format.lower(), TRACE_FORMATS, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"unknown trace format {format!r}; did you mean {nearest!r}? Valid: {', '.join(TRACE_FORMATS)}"
        )
    if format != "auto":
        return format
    name = path.with_suffix("") if path.suffix in _OPENERS else path
    if name.suffix in _SUFFIXES:
        return _SUFFIXES[name.suffix]
    if name.name.endswith("_u32le"):
        return "u32le"
    return _guess(path)


def _guess(path: Path) -> str:
    """Tell the format by how the file begins."""
    try:
        with _open(path) as file:
            sample = file.read(_SAMPLE)
    except _READ_ERRORS as error:
        raise _unreadable(path, error) from error
    if sample.lstrip().startswith(b"{"):
        return "jsonl"
    return "u32le" if sample.strip(b"0123456789* \t\r\n") else "text"


def _open(path: Path) -> IO[bytes]:
    opener = _OPENERS.get(path.suffix)
    return opener(path) if opener else path.open("rb")


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"cannot read the trace {path}: {error}")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1."""
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                if stripped := line.strip():
                    yield number, stripped
    except _READ_ERRORS as error:
        raise _unreadable(path, error) from error


def _jsonl(path: Path) -> Iterator[Request]:
    decode = msgspec.json.Decoder(_Row).decode
    for number, line in _lines(path):
        try:
            row = decode(line)
            timestamp = row.timestamp
            if isinstance(timestamp, str):
                timestamp = float(timestamp) * 1000
        except ValueError as error:  # msgspec's errors are ValueErrors
            raise ConfigError(f"{path}, line {number}: not a request: {error}") from error
        ids = row.hash_ids
        keys = [key for part in ids.values() for key in part] if isinstance(ids, dict) else ids
        yield Request(timestamp, keys, row.input_length, row.output_length, str(row.session_id))


def _text(path: Path) -> Iterator[int]:
    for number, line in _lines(path):
        if line == b"*":
            continue
        try:
            yield int(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: not a number: {line[:40]!r}") from error


def _u32le(path: Path) -> Iterator[int]:
    try:
        with _open(path) as file:
            while block := file.read(_BLOCK):
                if len(block) % 4:
                    raise ConfigError(f"{path}: ends within a 32-bit number; its format is not u32le")
                numbers = array("I", block)
                if sys.byteorder == "big":
                    numbers.byteswap()
                yield from numbers
    except _READ_ERRORS as error:
        raise _unreadable(path, error) from error


def _each_alone(path: Path, read: Callable[[Path], Iterator[int]]) -> Iterator[Request]:
    return (Request(0.0, (key,)) for key in read(path))


_NUMBERS: Final[dict[str, Callable[[Path], Iterator[int]]]] = {"text": _text, "u32le": _u32le}
_READERS: Final[dict[str, Callable[[Path], Iterator[Request]]]] = {
    "jsonl": _jsonl,
    "text": lambda path: _each_alone(path, _text),
    "u32le": lambda path: _each_alone(path, _u32le),
}
