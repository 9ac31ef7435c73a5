"""What a store tells the collector of a shared tier, and what it hears back.

Both fit the messages of an engine: a report is packed into the key of a COLLECT, an answer into its result
and the last of its rows.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple, Self

__all__ = ["INSTANCE_BYTES", "Answer", "Report", "Row"]

#: Key, bytes, seconds since the epoch.
Row = tuple[bytes, int, float]

INSTANCE_BYTES = 8
"""Length of the name of an instance."""

_FORMAT = struct.Struct(f">{INSTANCE_BYTES}s9Q??")
_DONE, _MORE = b"", b"+"


class Report(NamedTuple):
    """One instance's part in a namespace.

    Attributes
    ----------
    instance : bytes
        Its name, random.
    created, created_bytes, deleted, deleted_bytes : int
        Objects that it has created and deleted, and their bytes on storage, since it was opened.
    unsure : int
        Deletions among them, and others, of which the instance does not know how much they deleted; and
        objects among the created ones of which it does not know whether they are there.
    claimed : int
        Bytes granted earlier that are being written, or not spent yet.
    least, needed, wanted : int
        Bytes more that the first waiting write, all that wait, and those expected soon ask for.
    leaving : bool
        This is its last report.
    work : bool
        The collector may work before it answers; if not, it answers at once, as far as it can.
    """

    instance: bytes
    created: int = 0
    created_bytes: int = 0
    deleted: int = 0
    deleted_bytes: int = 0
    unsure: int = 0
    claimed: int = 0
    least: int = 0
    needed: int = 0
    wanted: int = 0
    leaving: bool = False
    work: bool = True

    def pack(self) -> bytes:
        """The report as bytes."""
        return _FORMAT.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """What :meth:`pack` has made."""
        return cls(*_FORMAT.unpack(data))


class Answer(NamedTuple):
    """How a turn of the collector ended.

    Attributes
    ----------
    granted : int
        Bytes that the instance may write beyond those it has claimed.
    size, chunks : int
        What the namespace holds: bytes on storage, and objects.
    more : bool
        The collector has not come to its end; it goes on when it is called again.
    removed : sequence of Row
        What it has deleted.
    """

    granted: int
    size: int
    chunks: int
    more: bool
    removed: Sequence[Row] = ()

    def rows(self) -> list[Row]:
        """The answer, but for what is granted, as rows."""
        return [*self.removed, (_MORE if self.more else _DONE, self.size, float(self.chunks))]

    @classmethod
    def of(cls, granted: int, rows: Sequence[Row]) -> Self:
        """What :meth:`rows` has made."""
        mark, size, chunks = rows[-1]
        return cls(granted, size, int(chunks), mark == _MORE, rows[:-1])
