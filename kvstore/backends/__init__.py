"""Secondary tiers: one backend for each kind of storage, chosen by the scheme of the tier's URL.

A backend's module is imported when a tier asks for it, so that a process pays only for what it uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..remedies import install, nearest
from .base import Backend, BackendContext, Capabilities, StoredObject
from .retry import retryable

if TYPE_CHECKING:
    from ..config import TierConfig
    from ..namespace import Namespace
    from .files import FileBackend

__all__ = [
    "Backend",
    "BackendContext",
    "Capabilities",
    "StoredObject",
    "connect",
    "create",
    "create_files",
    "namespaces",
    "retryable",
]

_S3 = frozenset({"s3", "s3a"})


def create(tier: TierConfig, namespace: Namespace) -> Backend:
    """The backend of `tier` for one namespace, not yet opened.

    Parameters
    ----------
    tier : TierConfig
    namespace : Namespace

    Raises
    ------
    ConfigError
        No backend serves the scheme.
    """
    if tier.scheme == "peer":
        from .peer import PeerBackend

        return PeerBackend(
            _context(namespace),
            tier.path,
            tier.storage_options,
            timeout=tier.timeout,
            concurrency=tier.concurrency,
            transport=tier.transport,
        )
    return create_files(tier, namespace)


def create_files(tier: TierConfig, namespace: Namespace) -> FileBackend:
    """As :func:`create`, for whoever needs files that can be listed; a peer has none.

    Raises
    ------
    ConfigError
        No such backend serves the scheme.
    """
    return connect(tier, _context(namespace), namespace.directory)


def _context(namespace: Namespace) -> BackendContext:
    return BackendContext(
        fingerprint=namespace.fingerprint,
        manifest=namespace.manifest,
        chunk_size=namespace.chunk_size,
        check_manifest=namespace.check_manifest,
    )


def connect(tier: TierConfig, context: BackendContext, directory: str) -> FileBackend:
    """As :func:`create`, for a namespace of which only the directory may be sound."""
    if tier.scheme == "file":
        from . import compiled, posix

        make = posix.PosixBackend if compiled.why_not() else compiled.CompiledBackend
        return make(
            context,
            f"{tier.path.rstrip('/')}/{directory}",
            durability=tier.durability,
            direct=tier.direct,
            mode=tier.mode,
            stamp=tier.write != "off",
        )
    if tier.scheme == "memory":
        from .memory import MemoryBackend

        return MemoryBackend(context, tier.path, directory)
    _check_scheme(tier)
    if tier.scheme in _S3:
        from .s3 import S3Backend

        return S3Backend(
            context,
            tier.url,
            directory,
            tier.storage_options,
            timeout=tier.timeout,
            retries=tier.retries,
            concurrency=tier.concurrency,
            stamp=tier.write != "off" and (tier.capacity, tier.ttl, tier.total) != (None, None, None),
        )
    from .generic import GenericBackend

    return GenericBackend(context, tier.url, directory, tier.storage_options)


def namespaces(tier: TierConfig) -> Iterator[tuple[str, bytes | None]]:
    """Directory and manifest (None where absent) of each namespace in `tier`, in the order of directories.

    Raises
    ------
    ConfigError
        No backend serves the scheme.
    OSError
        The tier cannot be listed.
    """
    if tier.scheme == "file":
        from . import posix

        return posix.namespaces(tier.path)
    if tier.scheme == "memory":
        from . import memory

        return memory.namespaces(tier.path)
    _check_scheme(tier)
    if tier.scheme in _S3:
        from . import s3

        return s3.namespaces(tier.url, tier.storage_options, timeout=tier.timeout, retries=tier.retries)
    from . import generic

    return generic.namespaces(tier.url, tier.storage_options)


def _check_scheme(tier: TierConfig) -> None:
    """Refuse what fsspec does not know before a worker meets it."""
    from fsspec.core import split_protocol
    from fsspec.registry import available_protocols, get_filesystem_class, registry

    where = f"tier {tier.name or tier.url!r}"
    if tier.scheme == "peer":
        raise ConfigError(f"{where}: peers are only read, key by key")
    for link in tier.url.split("::"):
        protocol, path = split_protocol(link)
        scheme = protocol or path
        if protocol is None and not path.isalpha():  # else a filter such as simplecache, and no path
            continue
        known = {"peer", *available_protocols(), *registry}
        if scheme not in known:
            raise ConfigError(f"{where}: unknown scheme {scheme!r}; {nearest(scheme, known)}")
        try:
            get_filesystem_class(scheme)
        except ImportError as error:
            remedy = f": {install('s3')}" if scheme in _S3 else ""
            raise ConfigError(f"{where}: {error}{remedy}") from error
