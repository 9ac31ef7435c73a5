"""What ``ls``, ``stat`` and ``verify`` share: the namespaces of a tier, and their facts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ..backends.layout import MANIFEST
from ..collect.prune import find_books
from ..config import TierConfig
from ..errors import ConfigError
from ..scan import Space, Status, scan, spaces
from ._output import Advance, size

__all__ = ["describe", "nothing_in", "recall", "select"]


def select(tier: TierConfig, namespace: str | None = None) -> Iterator[Space]:
    """The namespaces of `tier`, or the one whose directory is `namespace`.

    Raises
    ------
    ConfigError
        There is no such tier, or no such namespace in it, or `tier` itself is a namespace.
    """
    found = False
    try:
        for space in spaces(tier):
            if namespace in (None, space.directory):
                found = True
                yield space
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"there is no directory at {tier.url}") from None
    if found:
        return
    if tier.scheme == "file" and os.path.exists(f"{tier.path}/{MANIFEST}"):
        root, _, name = tier.url.rpartition("/")
        raise ConfigError(f"{tier.url} is a namespace; name its tier: {root} --namespace {name}")
    if namespace is not None:
        raise ConfigError(f"{tier.url} has no namespace {namespace!r}; see: kvstore ls {tier.url}")


def nothing_in(url: str) -> str:
    """What to say where :func:`select` found no namespace."""
    return f"no namespace in {url}: nothing has been stored there, or it is not the root of a tier"


def recall(tier: TierConfig, space: Space) -> dict[str, Any] | None:
    """Facts of a namespace from the books of those who share its limits; None when there are none.

    Facts are those of :func:`describe`; what only a listing tells is None.
    """
    found = find_books(tier, space.directory)
    if found is None:
        return None
    books, accounts = found
    books.close()
    if not accounts.counted:
        return None
    unknown = dict.fromkeys(("oldest", "newest", "temporary", "quarantined", "foreign"))
    return {
        "directory": space.directory,
        "fields": None if space.namespace is None else space.namespace.identity,
        "problem": space.problem,
        "source": "books",
        "chunks": accounts.chunks,
        "bytes": accounts.size,
        **unknown,
    }


def describe(space: Space, advance: Advance) -> dict[str, Any]:
    """Facts of a namespace from a listing, without reading objects.

    Bytes are those on storage. ``oldest`` and ``newest`` are in seconds since the epoch, None without chunks.
    """
    counts = dict.fromkeys(Status, 0)
    total, oldest, newest = 0, 0.0, 0.0
    for number, finding in enumerate(scan(space, read=False), 1):
        counts[finding.status] += 1
        if finding.status is Status.LISTED:
            total += finding.size
            oldest = min(oldest or finding.mtime, finding.mtime)
            newest = max(newest, finding.mtime)
        if not number % 100:
            advance(number, f"{number:,} files, {size(total)}")
    return {
        "directory": space.directory,
        "fields": None if space.namespace is None else space.namespace.identity,
        "problem": space.problem,
        "source": "files",
        "chunks": counts[Status.LISTED],
        "bytes": total,
        "oldest": oldest or None,
        "newest": newest or None,
        "temporary": counts[Status.TEMP] + counts[Status.STALE_TEMP],
        "quarantined": counts[Status.QUARANTINED],
        "foreign": counts[Status.FOREIGN],
    }
