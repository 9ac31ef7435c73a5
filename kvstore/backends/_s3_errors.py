"""What an S3 client's errors mean to the user: one line that says what is wrong and what to do.

The texts are put together from names and numbers only. What a server or the client library says is never
repeated, for it may hold parts of the credentials.
"""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

import aiohttp
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from ..errors import BackendError, ConfigError

__all__ = ["ObjectExistsError", "S3Error", "explain", "without_user"]

_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.ProfileNotFound,
    boto.SSOError,
    boto.TokenRetrievalError,
)
_HOW_TO_GIVE_THEM = (
    "give key and secret, or profile, in storage_options, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
)
#: Codes with which a server refuses the credentials themselves, whatever its status.
_WRONG_CREDENTIALS = frozenset(
    {
        "AuthorizationHeaderMalformed",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    }
)
_TRANSPORT = (boto.HTTPClientError, boto.ConnectionError, aiohttp.ClientError, TimeoutError)
_TOO_MANY_REQUESTS = 429


class S3Error(BackendError):
    """A request failed, for a reason that is not about its object.

    Attributes
    ----------
    status : int
        HTTP status of the answer; 0 when there was none.
    """

    def __init__(self, message: str, *, status: int = 0, retryable: bool = False) -> None:
        super().__init__(message, retryable=retryable)
        self.status = status


class ObjectExistsError(FileExistsError):
    """A condition that an object be new does not hold.

    Attributes
    ----------
    retried : bool
        The client had sent the request before, so that the object may be its own.
    """

    def __init__(self, message: str, *, retried: bool = False) -> None:
        super().__init__(message)
        self.retried = retried


def explain(error: Exception, url: str, endpoint: str) -> Exception:
    """The exception to raise in place of one of s3fs, botocore or aiohttp.

    Parameters
    ----------
    error : Exception
    url : str
        The tier's.
    endpoint : str
        URL of the server, as :func:`without_user` makes it; empty while it is not known.

    Returns
    -------
    Exception
        `FileNotFoundError` when there is no such object, `ObjectExistsError` when a condition does not hold,
        `ConfigError` for what only the user can mend, `S3Error` for all else.
    """
    answer = error if isinstance(error, boto.ClientError) else error.__cause__
    if isinstance(answer, boto.ClientError):
        return _explain_answer(answer, url)
    where = f"{url}: the S3 server {endpoint}".rstrip()
    if isinstance(error, boto.SSLError | aiohttp.ClientSSLError):
        return S3Error(f"{where} cannot be trusted: no TLS connection; check endpoint_url and certificates")
    if isinstance(error, _CREDENTIALS):
        return ConfigError(f"{url}: no credentials for S3 ({type(error).__name__}); {_HOW_TO_GIVE_THEM}")
    if isinstance(error, _TRANSPORT):
        why = _transport_failure(error)
        return S3Error(f"{where} does not answer: {why}; check endpoint_url and the network", retryable=True)
    if isinstance(error, ResponseParserError):
        return S3Error(f"{where} does not answer as one; check endpoint_url", retryable=True)
    if isinstance(error, TypeError):  # unexpected keyword arguments: these texts hold names, not values
        return ConfigError(f"{url}: storage_options: {error}")
    if isinstance(error, boto.BotoCoreError | KeyError | ValueError):
        return ConfigError(f"{url}: the S3 client refuses storage_options: {type(error).__name__}")
    return S3Error(f"{where}: {type(error).__name__}")


def _explain_answer(error: boto.ClientError, url: str) -> Exception:
    """The exception for an answer that is an error."""
    metadata = error.response.get("ResponseMetadata", {})
    status = int(metadata.get("HTTPStatusCode") or 0)
    code = str(error.response.get("Error", {}).get("Code") or status)
    said = f"{code}, {status}" if code.isalpha() else str(status)
    if code == "NoSuchBucket":
        return ConfigError(f"{url}: there is no such bucket; create it, or mend the URL")
    if status == 404:
        return FileNotFoundError(f"{url}: no such object")
    if status == 412:
        return ObjectExistsError(f"{url}: the object exists", retried=bool(metadata.get("RetryAttempts")))
    if code in _WRONG_CREDENTIALS or status == 401:
        return ConfigError(f"{url}: the S3 server refuses the credentials ({said}); {_HOW_TO_GIVE_THEM}")
    if status == 403:
        return ConfigError(
            f"{url}: access is denied ({said}); a tier needs s3:ListBucket of the bucket, and s3:GetObject, "
            "s3:PutObject and s3:DeleteObject of its objects"
        )
    if status in (301, 307):
        return ConfigError(f"{url}: the bucket is elsewhere ({said}); set its region_name in client_kwargs")
    retryable = status >= 500 or status in (408, 409, _TOO_MANY_REQUESTS) or code == "RequestTimeout"
    return S3Error(f"{url}: the S3 server refuses a request ({said})", status=status, retryable=retryable)


def _transport_failure(error: Exception) -> str:
    """Why a connection could not be made, or broke."""
    cause = getattr(error, "kwargs", {}).get("error", error)  # botocore keeps what it wraps there
    reason = getattr(cause, "os_error", None)
    if isinstance(reason, socket.gaierror):
        return "its name is not known"
    if isinstance(reason, OSError) and reason.errno:
        return os.strerror(reason.errno).lower()
    if isinstance(error, boto.ConnectTimeoutError | boto.ReadTimeoutError | TimeoutError):
        return "timed out"
    return f"the connection broke ({type(cause).__name__})"


def without_user(endpoint: str) -> str:
    """An endpoint's URL without user, password, path and query."""
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts.netloc else ""
