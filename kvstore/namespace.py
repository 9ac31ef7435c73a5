"""Namespaces: the identity fields that make bytes interchangeable, their fingerprint and manifest.

Chunks of different namespaces live side by side under one root, each in the directory named by its
fingerprint. The manifest in that directory spells the fields out, so that a directory is never trusted by its
name alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from types import MappingProxyType
from typing import Any, NoReturn, Self

from .errors import ConfigError, NamespaceMismatchError
from .frame import FORMAT_VERSION
from .keys import fingerprint_of, plain_fields

__all__ = ["ABSENT", "HASH", "Namespace"]

HASH = "xxh3-128"
ABSENT = "<absent>"
"""What stands in :attr:`NamespaceMismatchError.differing` for a field that one side does not have."""

_OWN_FIELDS = ("chunk_size", "format_version", "hash")
_SHOWN_FIELDS = 6
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, eq=False)
class Namespace:
    """Identity of what is stored.

    Two namespaces are equal when their fingerprints are. The order of fields does not matter; the types of
    values do: 1, 1.0 and True are different.

    Parameters
    ----------
    fields : mapping of str to scalar, list or mapping
        What tells the caller's bytes apart: model, revision, dtype, layout, ... Must have exact forms in
        JSON.
    chunk_size : int
        Size of a chunk in bytes, at least 1.

    Raises
    ------
    ConfigError
        A value has no exact form in JSON, a field has a reserved name (``chunk_size``, ``format_version``,
        ``hash``: kvstore adds these), or the chunk size is not a positive number.

    Examples
    --------
    >>> small = Namespace({"model": "m", "dtype": "bfloat16"}, chunk_size=4096)
    >>> small == Namespace({"dtype": "bfloat16", "model": "m"}, chunk_size=4096)
    True
    >>> small == Namespace({"model": "m", "dtype": "bfloat16"}, chunk_size=8192)
    False
    """

    fields: Mapping[str, Any]
    chunk_size: int

    def __post_init__(self) -> None:
        """Check the fields and keep a read-only copy."""
        fields = plain_fields(self.fields)
        for name in _OWN_FIELDS:
            if name in fields:
                raise ConfigError(f"namespace: the field {name!r} is kvstore's own; leave it out")
        if isinstance(self.chunk_size, bool) or not isinstance(self.chunk_size, int) or self.chunk_size < 1:
            raise ConfigError(f"chunk_size must be a positive number of bytes, not {self.chunk_size!r}")
        object.__setattr__(self, "fields", MappingProxyType(fields))

    @property
    def identity(self) -> dict[str, Any]:
        """All identity fields: the caller's and kvstore's own."""
        own = {"chunk_size": self.chunk_size, "format_version": FORMAT_VERSION, "hash": HASH}
        return {**self.fields, **own}

    @cached_property
    def fingerprint(self) -> bytes:
        """Digest of :attr:`identity`, 16 bytes."""
        return fingerprint_of(self.identity)

    @property
    def directory(self) -> str:
        """Name of the directory under a tier's root: the fingerprint in hex."""
        return self.fingerprint.hex()

    @cached_property
    def manifest(self) -> bytes:
        """Content of ``namespace.json``: JSON with ``created_by``, ``fields`` and ``fingerprint``."""
        content = {"created_by": _created_by(), "fields": self.identity, "fingerprint": self.directory}
        return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode("ascii")

    def check_manifest(self, data: bytes) -> None:
        """Return when `data` is a sound manifest of this namespace.

        Parameters
        ----------
        data : bytes
            Content of a ``namespace.json``.

        Raises
        ------
        NamespaceMismatchError
            The manifest is torn, is not consistent in itself, or is of another namespace; ``differing`` has
            the fields.
        """
        found, declared = _read_manifest(data)
        differing = _differences(found, self.identity)
        _check_fingerprint(found, declared, differing)
        if differing:
            _mismatch(f"the manifest is of another namespace than {self.directory}", differing)

    @classmethod
    def from_manifest(cls, data: bytes) -> Self:
        """The namespace of an existing directory.

        Parameters
        ----------
        data : bytes
            Content of its ``namespace.json``.

        Raises
        ------
        NamespaceMismatchError
            The manifest is torn, is not consistent in itself, or is of a format that this version cannot
            read.
        """
        found, declared = _read_manifest(data)
        own = {name: found.get(name, ABSENT) for name in _OWN_FIELDS}
        differing = _differences(own, {**own, "format_version": FORMAT_VERSION, "hash": HASH})
        if differing:
            _mismatch("the manifest is of a format that this version of kvstore cannot read", differing)
        _check_fingerprint(found, declared, differing)
        try:
            return cls({name: found[name] for name in found if name not in own}, own["chunk_size"])
        except ConfigError:
            _mismatch("the manifest has no valid chunk size", {"chunk_size": (own["chunk_size"], "bytes")})

    def __eq__(self, other: object) -> bool:
        """Whether bytes are interchangeable between the two."""
        return self.fingerprint == other.fingerprint if isinstance(other, Namespace) else NotImplemented

    def __hash__(self) -> int:
        """Hash of the fingerprint."""
        return hash(self.fingerprint)

    def __reduce__(self) -> tuple[type[Self], tuple[dict[str, Any], int]]:
        """Pickle by the arguments, because a read-only view of a mapping does not pickle."""
        return type(self), (dict(self.fields), self.chunk_size)


def _created_by() -> str:
    try:
        return f"kvstore {metadata.version('kvstore-tiers')}"
    except metadata.PackageNotFoundError:  # run from a source tree
        return "kvstore"


def _read_manifest(data: bytes) -> tuple[dict[str, Any], object]:
    """Identity fields of a manifest, and the fingerprint that it declares."""
    try:
        content = json.loads(data)
        return plain_fields(content["fields"]), content["fingerprint"]
    except (ValueError, TypeError, KeyError, RecursionError):
        expected = "JSON with fields and fingerprint"
        _mismatch("the manifest is torn or is no manifest", {"manifest": (f"{len(data)} bytes", expected)})


def _check_fingerprint(
    fields: Mapping[str, Any], declared: object, differing: Mapping[str, tuple[object, object]]
) -> None:
    actual = fingerprint_of(fields).hex()
    if declared != actual:
        pairs = {"fingerprint": (declared, actual), **differing}
        _mismatch("the manifest's fingerprint is not that of its own fields: was it edited?", pairs)


def _differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, tuple[object, object]]:
    """Fields that differ; values are compared as JSON text, in which 1, 1.0 and true are different."""
    pairs = {
        name: (found.get(name, ABSENT), expected.get(name, ABSENT)) for name in sorted({*found, *expected})
    }
    return {name: pair for name, pair in pairs.items() if _text(pair[0]) != _text(pair[1])}


def _mismatch(reason: str, differing: dict[str, tuple[object, object]]) -> NoReturn:
    shown = [
        f"{_shorten(_text(name)[1:-1])}: found {_shorten(_text(found))}, expected {_shorten(_text(expected))}"
        for name, (found, expected) in list(differing.items())[:_SHOWN_FIELDS]
    ]
    if len(differing) > _SHOWN_FIELDS:
        shown.append(f"and {len(differing) - _SHOWN_FIELDS} more")
    raise NamespaceMismatchError(f"{reason} ({'; '.join(shown)})", differing)


def _text(value: object) -> str:
    """`value` as JSON: one line of ASCII, whatever it holds."""
    return json.dumps(value, sort_keys=True)


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
