"""Small objects that several processes change together: read with a version, replaced only where that version
still stands.

All times are those of the server, so that nobody's clock matters.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from ..errors import ConfigError
from ._s3_client import Client, server_time
from ._s3_errors import ObjectExistsError, S3Error

__all__ = ["Version", "VersionedObjects"]

_CONFLICT = 409
_TRIAL = "accounting/trial"
_NO_TAG = '"00000000000000000000000000000000"'


class Version(NamedTuple):
    """An object as it stood when it was read.

    Attributes
    ----------
    data : bytes
    tag : str
        Stands for this content; empty for an object that is absent.
    changed, now : float
        When it was written, and when it was read, in seconds since the epoch, by the clock of the server.
    """

    data: bytes
    tag: str
    changed: float
    now: float


class VersionedObjects:
    """Small objects below a namespace of a bucket.

    Parameters
    ----------
    client : Client
        Connected when it is first needed, unless it is already.
    directory : str
        Name of the namespace below the client's prefix.
    borrows : bool
        The client is somebody else's, who closes it.
    """

    def __init__(self, client: Client, directory: str, *, borrows: bool = False) -> None:
        self._client = client
        self._directory = directory
        self._borrows = borrows
        self._tried = False

    def read(self, name: str) -> Version | None:
        """An object; None when it is absent."""
        return self._connect().run(self._read, name)

    async def _read(self, name: str) -> Version | None:
        try:
            answer = await self._client.call("get_object", Key=self._path(name))
        except FileNotFoundError:
            return None
        data = []
        while piece := await self._client.read(answer["Body"], 1 << 16):
            data.append(piece)
        return Version(
            b"".join(data), answer["ETag"], answer["LastModified"].timestamp(), server_time(answer)
        )

    def replace(self, name: str, data: bytes, tag: str) -> bool:
        """Write an object if its version is still that of `tag`, or if it is absent and `tag` is empty.

        Returns
        -------
        bool
            False when another version is there. It may come from this call, when an answer was lost and the
            client has repeated the request; else nothing has been written.

        Raises
        ------
        ConfigError
            The server ignores the condition; nothing has been written.
        """
        client = self._connect()
        if not self._tried:
            client.run(self._try_conditions)
            self._tried = True
        return client.run(self._replace, name, data, tag)

    async def _replace(self, name: str, data: bytes, tag: str) -> bool:
        condition = {"IfMatch": tag} if tag else {"IfNoneMatch": "*"}
        try:
            await self._client.call("put_object", Key=self._path(name), Body=data, **condition)
        except (FileNotFoundError, ObjectExistsError):  # deleted meanwhile, or replaced
            return False
        except S3Error as error:
            if error.status != _CONFLICT:
                raise
            return False
        return True

    async def _try_conditions(self) -> None:
        """See whether the server honours the condition, by an object of our own."""
        name = f"{_TRIAL}.{os.urandom(8).hex()}"
        await self._client.call("put_object", Key=self._path(name), Body=b"")
        try:
            honoured = not await self._replace(name, b"", _NO_TAG)
        except S3Error:  # it refuses the condition altogether
            honoured = False
        with suppress(OSError):
            await self._client.call("delete_object", Key=self._path(name))
        if not honoured:
            raise ConfigError(
                f"{self._client.url}: the S3 server does not honour If-Match, which capacity and ttl of a "
                "bucket need; leave them out, and use rules of the bucket or kvstore prune"
            )

    def times(self, names: Sequence[str]) -> list[float | None]:
        """When each object was written last; None for those that are absent. One HEAD each."""
        return self._connect().run(self._times, names)

    async def _times(self, names: Sequence[str]) -> list[float | None]:
        found: list[float | None] = [None] * len(names)
        rest = iter(range(len(names)))

        async def take_turns() -> None:
            for index in rest:
                with suppress(FileNotFoundError):
                    answer = await self._client.call("head_object", Key=self._path(names[index]))
                    found[index] = answer["LastModified"].timestamp()

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._client.concurrency, len(names))):
                    group.create_task(take_turns())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return found

    def close(self) -> None:
        """Close the connections of the client; they are made again when they are needed."""
        if not self._borrows:
            self._client.close()

    def _connect(self) -> Client:
        if not self._client.is_open:
            self._client.connect()
        return self._client

    def _path(self, name: str) -> str:
        return "/".join(part for part in (self._client.prefix, self._directory, name) if part)
