"""Objects in a bucket of S3, or of a server that speaks its protocol.

Requests of each verb:

- *probe*: one HEAD for each key, several at a time.
- *read*: one GET of a range as long as the largest object. The answer names the object's size, so that a
  longer one is known as such. The body goes into the buffers piece by piece, as it comes.
- *write*: one PUT with the condition that the object be new (``If-None-Match: *``), so that the first writer
  wins. The body is sent from the buffers. Where a server ignores or refuses the condition, which :meth:`open`
  finds out, a HEAD goes ahead: of writers at the same moment the last one's bytes stay.
- *touch*, in a tier with limits: one CopyObject of an object onto itself, after a read of one that was
  written or touched more than an hour ago. Its time of modification then says when it was last used; storage
  class and encryption stay the same. At most two are under way, so that reads have the connections; an object
  that is read meanwhile is touched after a later read.
- *delete*: one DeleteObjects for up to 1000 keys.
- *scan*: one ListObjectsV2 for each 1000 objects.

An object appears whole or not at all, so that there are no temporary names. What a client's errors mean is in
:mod:`kvstore.backends._s3_errors`.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .. import frame
from ..errors import ConfigError
from ._s3_body import PIECE, Body
from ._s3_client import Client, age_of
from ._s3_errors import ObjectExistsError, S3Error
from ._s3_versions import VersionedObjects
from .base import BackendContext, Capabilities
from .files import FileBackend
from .layout import MANIFEST, Entry, aside_name, classify, is_namespace, object_name

__all__ = ["S3Backend", "namespaces"]

#: Keys in a request that deletes.
_MOST_KEYS = 1000
#: Seconds: the precision of "last used".
_STAMP_EVERY = 3600.0
#: What a copy of an object would not take over by itself.
_KEPT = ("StorageClass", "ServerSideEncryption", "SSEKMSKeyId", "BucketKeyEnabled")
#: Longest pause (seconds) before a write is repeated that met another of the same key.
_PAUSE = 0.05
_CONFLICT, _RANGE_NOT_SATISFIABLE, _NOT_IMPLEMENTED = 409, 416, 501


class S3Backend(FileBackend):
    """One namespace below a prefix of a bucket.

    Parameters
    ----------
    context : BackendContext
    url : str
        Root of the tier, ``s3://bucket/prefix``.
    directory : str
        Name of the namespace below it.
    storage_options : mapping
        Arguments of `s3fs.S3FileSystem`: ``key``, ``secret``, ``token``, ``profile``, ``anon``,
        ``endpoint_url``, ``client_kwargs``, ``config_kwargs``, ...; what is absent comes from the environment
        and the files of the AWS tools.
    timeout : float
        Seconds that an operation may take.
    retries : int
        Further attempts of the client at a request that failed.
    concurrency : int
        Requests and connections at a time.
    stamp : bool
        Whether an object that is read is touched.
    """

    capabilities = Capabilities(atomic_create=True, first_writer_wins=True, quarantine=True, retries=True)

    def __init__(
        self,
        context: BackendContext,
        url: str,
        directory: str,
        storage_options: Mapping[str, Any] | None = None,
        *,
        timeout: float = 10.0,
        retries: int = 2,
        concurrency: int = 16,
        stamp: bool = False,
    ) -> None:
        super().__init__(context)
        self._stamp = stamp
        self._directory = directory
        self._borrows = False
        self._concurrency = concurrency
        self._conditional = True
        self._client = Client(
            url, storage_options or {}, timeout=timeout, retries=retries, concurrency=concurrency
        )

    def open(self) -> None:
        """As the base does; then see whether the server honours the condition of a write.

        Raises
        ------
        ConfigError
            The credentials or the bucket are wrong.
        BackendError
            The server cannot be reached; it takes 4 seconds at most to find out.
        """
        super().open()
        self._conditional = self._client.run(self._honours_conditions)
        self.capabilities = replace(self.capabilities, first_writer_wins=self._conditional)

    async def _honours_conditions(self) -> bool:
        """Write the manifest again, as it is, with the condition that there be none."""
        stored = await self._read_small(MANIFEST)
        if stored is None:  # somebody has removed the namespace just now
            return False
        try:
            return self._conditional and not await self._create(MANIFEST, Body(memoryview(stored)))
        except ConfigError:  # a reader's credentials: there will be no writes
            return False

    def versioned(self) -> VersionedObjects:
        """Small objects of the namespace that several change together, by way of this backend's client."""
        return VersionedObjects(self._client, self._directory, borrows=self._borrows)

    def versioned_in_root(self) -> VersionedObjects:
        """The same in the root of the tier; closing them closes nothing."""
        return VersionedObjects(self._client, "", borrows=True)

    def beside(self, directory: str) -> S3Backend:
        """Another namespace of the same root, by way of this backend's client; closing it closes nothing."""
        if not self._client.is_open:
            self._client.connect()
        other = copy.copy(self)
        other._directory, other._borrows = directory, True
        other._find_root()
        return other

    def neighbours(self) -> list[str]:
        """Names of the namespaces of the same root, its own among them; none of them is read."""
        if not self._client.is_open:
            self._client.connect()
        return [name for name in self._client.directories() if is_namespace(name)]

    def attach(self) -> None:
        """Build the client."""
        self._client.connect()
        self._find_root()

    def _find_root(self) -> None:
        self._root = "/".join(part for part in (self._client.prefix, self._directory) if part)

    def close(self) -> None:
        """Close the connections."""
        if not self._borrows:
            self._client.close()

    # Reading.

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key has an object: one HEAD each."""
        return self._client.run(self._look, [object_name(key) for key in keys])

    async def _look(self, names: Sequence[str]) -> list[bool]:
        found = [False] * len(names)
        rest = iter(range(len(names)))

        async def take_turns() -> None:
            for index in rest:
                found[index] = await self._is_there(names[index])

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._concurrency, len(names))):
                    group.create_task(take_turns())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return found

    async def _is_there(self, name: str) -> bool:
        try:
            await self._client.call("head_object", Key=self._path(name))
        except FileNotFoundError:
            return False
        return True

    def get_object(self, key: bytes, header: memoryview, payload: memoryview) -> int | None:
        """Read an object into the buffers: one GET."""
        return self._client.run(self._get, object_name(key), header, payload)

    async def _get(self, name: str, header: memoryview, payload: memoryview) -> int | None:
        wanted = header.nbytes + payload.nbytes
        try:
            answer = await self._client.call(
                "get_object", Key=self._path(name), Range=f"bytes=0-{wanted - 1}"
            )
        except FileNotFoundError:
            return None
        except S3Error as error:
            if error.status != _RANGE_NOT_SATISFIABLE:
                raise
            return 0  # an empty object has no first byte
        size = _size_of(answer)
        await self._receive(answer["Body"], [header, payload], min(size, wanted))
        if self._stamp and age_of(answer) > _STAMP_EVERY:
            kept = {field: answer[field] for field in _KEPT if field in answer}
            self._client.begin(self._touch, name, kept)
        return size

    async def _touch(self, name: str, kept: Mapping[str, Any]) -> None:
        path = self._path(name)
        source = {"Bucket": self._client.bucket, "Key": path}
        await self._client.call(
            "copy_object", Key=path, CopySource=source, MetadataDirective="REPLACE", **kept
        )

    async def _receive(self, body: Any, buffers: Sequence[memoryview], size: int) -> None:
        """Fill `buffers` in turn with the first `size` bytes of a body."""
        try:
            for buffer in buffers:
                here = min(buffer.nbytes, size)
                size -= here
                done = 0
                while done < here:
                    data = await self._client.read(body, min(PIECE, here - done))
                    if not data:
                        raise S3Error("an object's body is shorter than announced", retryable=True)
                    buffer[done : done + len(data)] = data
                    done += len(data)
            at_end = not await self._client.read(body, 1)  # then the connection can be used again
        except BaseException:
            body.close()
            raise
        if not at_end:
            body.close()

    # Writing.

    def put_object(self, key: bytes, header: memoryview, payload: memoryview) -> bool:
        """Create an object from the buffers: one PUT."""
        return self._client.run(self._create, object_name(key), Body(header, payload))

    async def _create(self, name: str, body: Body) -> bool:
        if not self._conditional and await self._is_there(name):
            return False
        while True:
            condition = {"IfNoneMatch": "*"} if self._conditional else {}
            try:
                await self._client.call("put_object", Key=self._path(name), Body=body, **condition)
            except ObjectExistsError as error:
                return error.retried and await self._is_ours(name, body)
            except S3Error as error:
                if error.status == _NOT_IMPLEMENTED and self._conditional:
                    self._conditional = False
                    return await self._create(name, body)
                if error.status != _CONFLICT:
                    raise
                await asyncio.sleep(random.random() * _PAUSE)  # the outcome of the other write is not known
            else:
                return True

    async def _is_ours(self, name: str, body: Body) -> bool:
        """Whether an object is what an earlier attempt has written, the answer to which was lost."""
        start = body.start(frame.HEADER_SIZE)
        stored = memoryview(bytearray(len(start)))
        return bool(await self._get(name, stored, stored[:0]) == len(body) and stored == start)

    # The rest.

    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete the objects of `keys`: one request for each thousand."""
        names = [object_name(key) for key in keys]
        for start in range(0, len(names), _MOST_KEYS):
            self._client.run(self._delete, names[start : start + _MOST_KEYS])

    async def _delete(self, names: Sequence[str]) -> None:
        objects = [{"Key": self._path(name)} for name in names]
        answer = await self._client.call("delete_objects", Delete={"Objects": objects, "Quiet": True})
        if errors := answer.get("Errors"):
            codes = ", ".join(sorted({str(error.get("Code")) for error in errors}))
            raise S3Error(f"{len(errors)} of {len(names)} objects cannot be deleted: {codes}")

    def set_aside(self, name: str) -> bool:
        """Copy an object to ``quarantine/`` and delete it; False where that fails, or where it is sound."""
        return self._succeeds(self._move, name, aside_name(name))

    async def _move(self, name: str, target: str) -> None:
        source = {"Bucket": self._client.bucket, "Key": self._path(name)}
        await self._client.call("copy_object", Key=self._path(target), CopySource=source)
        moved = await self._read_small(target)
        if moved is not None and self.is_sound(name, moved):
            await self._client.call("delete_object", Key=self._path(target))
            raise S3Error("a sound object stays where it is")
        await self._client.call("delete_object", Key=self._path(name))

    def remove_file(self, name: str) -> bool:
        """Delete an object; False where it is gone or cannot be deleted."""
        return self._succeeds(self._remove, name)

    async def _remove(self, name: str) -> None:
        await self._client.call("head_object", Key=self._path(name))  # deleting what is absent succeeds
        await self._client.call("delete_object", Key=self._path(name))

    def _succeeds(self, function: Callable[..., Awaitable[None]], *arguments: str) -> bool:
        try:
            self._client.run(function, *arguments)
        except (ConfigError, OSError):
            return False
        return True

    def entries(self, after: str = "") -> Iterator[Entry]:
        """Every object of the namespace whose name follows `after`; one page of the listing is in memory.

        The order is that of S3, by the bytes of whole names. It differs from that of other backends for names
        that kvstore does not give: ``a.txt`` comes before ``a/z``.
        """
        start = len(self._root) + 1
        for page in self._client.pages(Prefix=f"{self._root}/", StartAfter=self._path(after)):
            for row in page.get("Contents", []):
                name = row["Key"][start:]
                if name and not name.endswith("/"):  # those are marks of directories, made by other tools
                    kind, key = classify(name)
                    yield Entry(name, kind, key, int(row["Size"]), row["LastModified"].timestamp())

    def read_file(self, name: str) -> bytes | None:
        """Content of a small object."""
        return self._client.run(self._read_small, name)

    async def _read_small(self, name: str) -> bytes | None:
        return await _read_small(self._client, self._path(name))

    def create_file(self, name: str, data: bytes) -> bool:
        """Create an object in the way that chunks are created."""
        return self._client.run(self._create, name, Body(memoryview(data)))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def namespaces(
    url: str, storage_options: Mapping[str, Any] | None = None, *, timeout: float = 10.0, retries: int = 2
) -> Iterator[tuple[str, bytes | None]]:
    """Directory and manifest (None where absent) of each namespace below `url`.

    Raises
    ------
    ConfigError
        The credentials or the bucket are wrong.
    OSError
        `url` cannot be listed.
    """
    client = Client(url, storage_options or {}, timeout=timeout, retries=retries, concurrency=1)
    try:
        client.connect()
        root = f"{client.prefix}/" if client.prefix else ""
        for name in client.directories():
            manifest = client.run(_read_small, client, f"{root}{name}/{MANIFEST}")
            if manifest is not None or is_namespace(name):
                yield name, manifest
    finally:
        client.close()


async def _read_small(client: Client, path: str) -> bytes | None:
    try:
        answer = await client.call("get_object", Key=path)
    except FileNotFoundError:
        return None
    pieces = []
    while piece := await client.read(answer["Body"], PIECE):
        pieces.append(piece)
    return b"".join(pieces)


def _size_of(answer: Mapping[str, Any]) -> int:
    """Size of the whole object of which an answer brings the start."""
    total = str(answer.get("ContentRange", "")).rpartition("/")[2]
    return int(total) if total.isdigit() else int(answer["ContentLength"])
