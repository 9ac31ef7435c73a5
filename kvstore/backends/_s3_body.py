"""The body of a request that stores an object."""

from __future__ import annotations

from collections.abc import AsyncIterator

__all__ = ["PIECE", "Body"]

PIECE = 256 << 10
"""Bytes that go to or come from a socket at a time."""


class Body:
    """Buffers as the body of a request: sent piece by piece, without a copy.

    A file for botocore, which may want to sign it and to send it again; an asynchronous iterable for aiohttp.
    """

    def __init__(self, *buffers: memoryview) -> None:
        self._buffers = buffers
        self._at = 0

    def __len__(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        for buffer in self._buffers:
            for start in range(0, buffer.nbytes, PIECE):
                yield buffer[start : start + PIECE]

    def start(self, size: int) -> bytes:
        """The first `size` bytes, of a first buffer that has them."""
        return bytes(self._buffers[0][:size])

    def read(self, size: int = -1) -> bytes:
        rest = b"".join(self._buffers)[self._at :]
        data = rest if size < 0 else rest[:size]
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self))[whence]
        return self._at

    def tell(self) -> int:
        return self._at
