"""Copies chunks from one tier to another, so that a node's disk is warm before traffic arrives.

What is to be copied is decided here, in the caller's thread; :mod:`kvstore.copying._crew` has the steps by
which each chunk is copied. No step depends on an earlier copy having ended well: one that was killed is
simply made again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from heapq import heappop, heappush
from typing import Any, Literal

from ..backends import namespaces
from ..backends.layout import Kind, object_name
from ..config import TierConfig
from ..config.tiers import read_tier
from ..errors import ConfigError, NamespaceMismatchError
from ..namespace import Namespace
from ..units import parse_size
from ._checkpoint import Checkpoint
from ._crew import Copied, Crew, Route, Space, total

__all__ = ["Copied", "copy"]

#: A namespace and the chunks of it that are wanted; None is all of them.
_Work = tuple[Space, Iterable[bytes] | None]
#: Options that only stores keep, together with those that write to the same place.
_LIMITS = ("capacity", "total", "min_free", "ttl")


def copy(
    source: str | os.PathLike[str] | Mapping[str, Any] | TierConfig,
    target: str | os.PathLike[str] | Mapping[str, Any] | TierConfig,
    *,
    namespace: str | None = None,
    keys: Iterable[bytes] | None = None,
    limit_bytes: int | str | None = None,
    rate: int | str | None = None,
    workers: int = 4,
    resume: str | os.PathLike[str] | None = None,
    verify: Literal["source", "target"] = "source",
    progress: Callable[[Copied], object] | None = None,
) -> Copied:
    """Copy chunks, with the manifests of their namespaces, from one tier to another.

    What the target has is neither read nor written. A chunk whose checksum does not hold is never copied.

    Parameters
    ----------
    source, target : str, mapping or TierConfig
        Secondary tiers; a mapping has the URL under ``"url"`` and may have ``"storage_options"``. The target
        has no ``capacity``, ``total``, ``min_free`` or ``ttl``: only stores keep them.
    namespace : str, optional
        Directory of the only namespace that is wanted; all of them by default.
    keys : iterable of bytes, optional
        The only chunks that are wanted, in this order; `namespace` is needed when the source has several.
    limit_bytes : int or str, optional
        Only the hottest chunks: those written last, by their times at the source, that take no more than this
        on storage. They are copied hottest first; keys and times of all of them are in memory.
    rate : int or str, optional
        Bytes of payload per second at most, of all workers together, as in ``"200MB/s"``.
    workers : int
        Threads, each with connections and a buffer of its own.
    resume : path, optional
        File that says how far the copy has come, so that one that was killed does not list what it has done
        and counts on; removed at the end. Only for copies of whole namespaces.
    verify : {"source", "target"}
        ``"source"``: every chunk is verified when it has been read; the object at the target carries the
        checksum of these bytes, and whoever reads it verifies it. ``"target"``: it is also read back at once.
    progress : callable, optional
        Gets the counts so far, in the caller's thread.

    Returns
    -------
    Copied

    Raises
    ------
    ConfigError
        The arguments are wrong, or there is no such tier or namespace.
    NamespaceMismatchError
        A manifest at the source is not sound (nothing has been copied), or one at the target is of another
        namespace (nothing has been copied into that).
    OSError
        A tier failed, after the retries that its options allow.
    """
    route = Route(_tier(source), _tier(target), workers, _rate(rate), verify == "target")
    _check(route, keys, limit_bytes, resume, verify)
    spaces = _find(route.source, namespace)
    if resume is None:
        done = Copied()
        for _, _, more in _steps(route, _select(route.source, spaces, keys, limit_bytes)):
            done = total(done, more)
            if progress is not None:
                progress(done)
        return done
    with Checkpoint(resume, route.source.url, route.target.url, namespace) as place:
        ahead = [(space, None) for space in spaces if space.directory >= place.directory]
        for space, key, more in _steps(route, ahead, place):
            place.mark(space.directory, object_name(key), total(place.done, more))
            if progress is not None:
                progress(place.done)
        return place.done


def _steps(
    route: Route, work: Iterable[_Work], place: Checkpoint | None = None
) -> Iterator[tuple[Space, bytes, Copied]]:
    """Do the work; yields the namespace, last key and outcome of each batch, in order."""
    for space, keys in work:
        after = place.name if place is not None and place.directory == space.directory else ""
        with Crew(route, space) as crew, closing(space.connect(route.source)) as source:
            if keys is None:
                source.attach()
                entries = (entry for entry in source.entries(after) if entry.kind is Kind.OBJECT)
                keys = (entry.key for entry in entries if entry.key is not None)
            for key, outcome in crew.copy(keys):
                yield space, key, outcome


def _find(tier: TierConfig, wanted: str | None) -> list[Space]:
    try:
        found = [(name, data) for name, data in namespaces(tier) if wanted in (None, name)]
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"there is nothing at {tier.url}") from None
    if wanted is not None and not found:
        raise ConfigError(f"{tier.url} has no namespace {wanted!r}; see: kvstore ls {tier.url}")
    return [_identify(directory, manifest) for directory, manifest in found]


def _identify(directory: str, manifest: bytes | None) -> Space:
    if manifest is None:
        raise NamespaceMismatchError(f"{directory}: the manifest is missing; name another namespace")
    try:
        space = Space(Namespace.from_manifest(manifest), manifest)
    except NamespaceMismatchError as error:
        raise NamespaceMismatchError(f"{directory}: {error}", error.differing) from None
    if space.directory != directory:
        raise NamespaceMismatchError(f"{directory}: the manifest is that of {space.directory}")
    return space


def _select(
    tier: TierConfig, spaces: list[Space], keys: Iterable[bytes] | None, limit: int | str | None
) -> list[_Work]:
    if limit is not None:
        return _hottest(tier, spaces, _size(limit, "limit_bytes"))
    if keys is not None and len(spaces) != 1:
        raise ConfigError(f"{tier.url} has {len(spaces)} namespaces: name the one that the keys are of")
    return [(space, keys) for space in spaces]


def _hottest(tier: TierConfig, spaces: list[Space], limit: int) -> list[_Work]:
    """The chunks of all namespaces together that were written last; in each, the last one first."""
    coldest: list[tuple[float, int, bytes, int]] = []
    size = 0
    for number, space in enumerate(spaces):
        with closing(space.connect(tier)) as backend:
            backend.attach()
            for row in backend.scan():
                heappush(coldest, (row.mtime, number, row.key, row.size))
                size += row.size
                while size > limit:
                    size -= heappop(coldest)[3]
    found: list[list[bytes]] = [[] for _ in spaces]
    for _, number, key, _ in sorted(coldest, reverse=True):
        found[number].append(key)
    return [(space, some) for space, some in zip(spaces, found, strict=True) if some]


def _check(
    route: Route,
    keys: Iterable[bytes] | None,
    limit: int | str | None,
    resume: str | os.PathLike[str] | None,
    verify: str,
) -> None:
    """Refuse what contradicts itself."""
    if route.source.is_at(route.target):
        raise ConfigError(f"source and target are the same: {route.source.url}")
    for name in _LIMITS:
        if getattr(route.target, name) is not None:
            raise ConfigError(
                f"{route.target.url}: stores keep {name}, copies do not: leave it out, and say how much to "
                "copy (--hottest, limit_bytes)"
            )
    if keys is not None and limit is not None:
        raise ConfigError("a list of keys and a limit of bytes exclude each other")
    if resume is not None and (keys is not None or limit is not None):
        raise ConfigError(
            "resume is for whole namespaces; a list of keys, or the hottest bytes, need no file: "
            "what the target has is skipped"
        )
    if verify not in ("source", "target"):
        raise ConfigError(f"verify is 'source' or 'target', not {verify!r}")
    if not isinstance(route.workers, int) or route.workers < 1:
        raise ConfigError(f"workers must be a number of threads, at least 1, not {route.workers!r}")


def _tier(tier: str | os.PathLike[str] | Mapping[str, Any] | TierConfig) -> TierConfig:
    found = read_tier(tier)
    if not isinstance(found, TierConfig):
        raise ConfigError("ram:// is the memory of one store: there is nothing to copy from or to")
    return found


def _rate(rate: int | str | None) -> int | None:
    if rate is None:
        return None
    size = _size(rate.removesuffix("/s") if isinstance(rate, str) else rate, "rate")
    if not size:
        raise ConfigError("rate: write more than 0 bytes per second, such as 50MB/s")
    return size


def _size(value: int | str, name: str) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
