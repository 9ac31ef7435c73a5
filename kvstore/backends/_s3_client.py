"""One S3 client: an s3fs filesystem on fsspec's event loop.

Who owns what: the loop is that of the process, in a thread of its own, and the only one that touches clients.
Any thread may call :meth:`Client.run`, which waits for a coroutine on the loop. Workers that are threads
share it: with a loop for each they would be slower, for loops compete for the interpreter.

A request passes through four bounds, from the inside out: at most `concurrency` connections, a time-out of
the socket, botocore's own retries, and a deadline of the whole operation. s3fs would repeat once more what
botocore has given up; that is switched off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from botocore.utils import parse_timestamp
from fsspec.asyn import get_loop
from s3fs import S3FileSystem

from ..errors import ClosedError, ConfigError
from ._s3_errors import explain, without_user

__all__ = ["Client", "age_of", "server_time"]

#: Share of the tier's timeout an operation may take: it ends before the engine takes the worker for hung.
_OPERATION = 0.8
#: Share of it that a connection may be silent: an attempt that hangs leaves time for another.
_SILENCE = 0.4
#: Seconds that an operation may take until the server has answered for the first time.
_OPENING = 4.0
#: Requests at a time that nobody waits for: the connections are there for the others.
_MOST_BEGUN = 2
#: Seconds that closing may take.
_CLOSING = 2.0

_T = TypeVar("_T")


class Client:
    """Requests to one bucket.

    Parameters
    ----------
    url : str
        Of the tier: ``s3://bucket/prefix``.
    options : mapping
        Arguments of `s3fs.S3FileSystem`.
    timeout : float
        Seconds of the tier's deadline.
    retries : int
        Attempts of botocore after the first.
    concurrency : int
        Requests at a time.

    Attributes
    ----------
    url : str
    concurrency : int
    bucket, prefix : str
        From the URL; known when connected.
    """

    def __init__(
        self, url: str, options: Mapping[str, Any], *, timeout: float, retries: int, concurrency: int
    ) -> None:
        self.url = url
        self.concurrency = concurrency
        self._options = _options(options, timeout=timeout, retries=retries, concurrency=concurrency)
        self._usual_patience = _OPERATION * timeout
        self._patience = _OPENING
        self._endpoint = ""
        self._trouble: Exception | None = None
        self._session: Any = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._begun: set[asyncio.Task[Any]] = set()  # those of them that nobody waits for
        self._closed = True

    def connect(self) -> None:
        """Build the filesystem; nothing is asked of the server. May be called again."""
        self.close()
        self._closed = False
        self.run(self._build)

    async def _build(self) -> None:
        try:
            self._fs = S3FileSystem(**self._options)
            self._fs.retries = 1
            self._session = await self._fs.set_session()
            parsers = self._fs.session.get_component("response_parser_factory")
            parsers.set_parser_defaults(timestamp_parser=_read_time)
        except Exception as error:
            raise explain(error, self.url, "") from None
        self.bucket, self.prefix, _ = self._fs.split_path(self.url)
        self._endpoint = without_user(self._session.meta.endpoint_url)
        self._session.meta.events.register("needs-retry.s3", self._note_attempt)

    def _note_attempt(self, caught_exception: Exception | None, **_: object) -> None:
        """Remember what befell the last attempt: when time runs out between two, that is the reason."""
        self._trouble = caught_exception
        if caught_exception is None:  # there is a server
            self._patience = self._usual_patience

    @property
    def is_open(self) -> bool:
        """Whether it has been connected, and not been closed since."""
        return not self._closed

    def run(self, function: Callable[..., Awaitable[_T]], *arguments: Any) -> _T:
        """Wait for ``function(*arguments)``, a coroutine on the loop.

        Raises
        ------
        S3Error
            It has not ended by its deadline; it is cancelled then, and touches no argument any longer.
        ClosedError
            The client is closed, or was meanwhile.
        """
        return asyncio.run_coroutine_threadsafe(self._bounded(function, *arguments), get_loop()).result()

    async def _bounded(self, function: Callable[..., Awaitable[_T]], *arguments: Any) -> _T:
        if self._closed:
            raise ClosedError(f"{self.url}: the client is closed")
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            async with asyncio.timeout(self._patience):
                return await function(*arguments)
        except TimeoutError as error:
            raise explain(self._trouble or error, self.url, self._endpoint) from None
        except asyncio.CancelledError:
            raise ClosedError(f"{self.url}: the client was closed meanwhile") from None
        finally:
            self._tasks.discard(task)

    def begin(self, function: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        """On the loop: begin ``function(*arguments)``; nobody waits for its end, and its failure is none.

        While two others are under way, nothing is begun.
        """
        if len(self._begun) >= _MOST_BEGUN:
            return

        async def attempt() -> None:
            with suppress(ConfigError, OSError):
                await self._bounded(function, *arguments)

        task = asyncio.ensure_future(attempt())
        for tasks in (self._tasks, self._begun):
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Make one request about the bucket.

        Parameters
        ----------
        operation : str
            As botocore names it.
        **arguments
            Of the operation.

        Raises
        ------
        FileNotFoundError
            There is no such object.
        ObjectExistsError
            A condition of the request does not hold.
        ConfigError, S3Error
            See :func:`explain`.
        """
        try:
            answer: dict[str, Any] = await self._fs._call_s3(operation, Bucket=self.bucket, **arguments)
        except Exception as error:
            raise explain(error, self.url, self._endpoint) from None
        return answer

    def pages(self, **arguments: str) -> Iterator[dict[str, Any]]:
        """Answers to ListObjectsV2, one after the other."""
        more: dict[str, str] = {}
        while True:
            page = self.run(self._list, {**arguments, **more})
            yield page
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    async def _list(self, arguments: Mapping[str, str]) -> dict[str, Any]:
        return await self.call("list_objects_v2", **arguments)

    def directories(self) -> Iterator[str]:
        """What names below the prefix start with, up to the next ``/``."""
        root = f"{self.prefix}/" if self.prefix else ""
        for page in self.pages(Prefix=root, Delimiter="/"):
            for row in page.get("CommonPrefixes", []):
                yield row["Prefix"][len(root) :].rstrip("/")

    async def read(self, body: Any, size: int) -> bytes:
        """Some bytes of an answer's body, `size` at most; none at its end.

        Raises
        ------
        S3Error
            The connection broke before the end.
        """
        try:
            data: bytes = await body.read(size)
        except Exception as error:
            raise explain(error, self.url, self._endpoint) from None
        return data

    def close(self) -> None:
        """Cancel what is under way, and close the connections."""
        if not self._closed:
            done = asyncio.run_coroutine_threadsafe(self._close(), get_loop())
            wait([done], _CLOSING)

    async def _close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()


def _options(options: Mapping[str, Any], *, timeout: float, retries: int, concurrency: int) -> dict[str, Any]:
    """Arguments of the filesystem: the user's, and the bounds of a worker where the user has set none.

    Bodies are neither signed nor summed up by the client: each chunk has a checksum of its own, which is
    verified when it is read. What else is off would take a good part of the time of a request.
    """
    theirs = dict(options.get("config_kwargs") or {})
    config = {
        "max_pool_connections": concurrency,
        "connect_timeout": _SILENCE * timeout,
        "read_timeout": _SILENCE * timeout,
        "retries": {"mode": "standard", "total_max_attempts": retries + 1},
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "parameter_validation": False,
        "user_agent": "kvstore",
        **theirs,
        "s3": {"payload_signing_enabled": False, **(theirs.get("s3") or {})},
    }
    ours = {"asynchronous": True, "skip_instance_cache": True, "use_listings_cache": False}
    return {**options, **ours, "config_kwargs": config}


def _read_time(value: Any) -> datetime:
    """A time in an answer. The client's own parser would take most of the time of a long listing."""
    for parse in (datetime.fromisoformat, parsedate_to_datetime):  # of listings, and of headers
        try:
            return parse(value)
        except (TypeError, ValueError):
            pass
    time: datetime = parse_timestamp(value)
    return time


def server_time(answer: Mapping[str, Any]) -> float:
    """When the server has answered, in seconds since the epoch, by its own clock."""
    return _read_time(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()


def age_of(answer: Mapping[str, Any]) -> float:
    """Seconds since the object of an answer was written, by the clock of the server."""
    return server_time(answer) - float(answer["LastModified"].timestamp())
