"""Tier URLs: where the query begins, what must not stand in them, and their normal form."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes

from ..errors import ConfigError

__all__ = ["default_name", "label", "local_path", "normalise", "scheme_of", "split_url", "with_query"]

_CHAIN = re.compile(r"::(?![0-9A-Fa-f:.%]*\])")  # but not the "::" inside an IPv6 address
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(:[0-9]*)?")
_BUCKET = re.compile(r"arn:.*|[^:]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_OBJECT_STORES = frozenset(
    {"abfs", "abfss", "adl", "az", "gcs", "gs", "oci", "oss", "r2", "s3", "s3a", "wasb"}
)


def split_url(url: str) -> tuple[str, dict[str, str]]:
    """Location and options of a tier URL.

    Parameters
    ----------
    url : str
        A URL, a chained URL (its options follow the last component), or a local path.

    Returns
    -------
    location : str
        In normal form, see :func:`normalise`.
    options : dict
        Name -> text.

    Raises
    ------
    ConfigError
        The URL is malformed, repeats an option, or holds credentials; these are not repeated in the message.

    Examples
    --------
    >>> split_url("/mnt/nvme/kv/?capacity=2TiB&workers=4")
    ('file:///mnt/nvme/kv', {'capacity': '2TiB', 'workers': '4'})
    """
    _refuse_credentials(url)
    *outer, last = _CHAIN.split(url)
    last, _, query = last.partition("?")
    if any("?" in component for component in outer):
        raise ConfigError(
            f"{label(url)}: options follow the last component of a chained URL; otherwise use the dict form"
        )
    location = normalise("::".join([*outer, last]))
    options: dict[str, str] = {}
    for item in filter(None, query.split("&")):
        name, _, value = item.partition("=")
        if name in options:
            raise ConfigError(f"{label(location)}: the option {name!r} is given twice")
        options[name] = unquote(value)
        if not value:
            raise ConfigError(f"{label(location)}: the option {name!r} has no value")
    return location, options


def with_query(location: str, options: dict[str, str]) -> str:
    """`location` with `options`, whose texts need no escapes."""
    query = "&".join(f"{name}={text}" for name, text in options.items())
    return f"{location}?{query}" if query else location


def normalise(location: str) -> str:
    """Normal form of a URL without options.

    Local paths become absolute ``file://`` URLs without ``.`` and ``..``, escaped as ``Path.as_uri`` does it;
    other URLs get a lower-case scheme and lose a slash at their end; chained URLs stay as they are.

    Examples
    --------
    >>> normalise("/mnt/../kv store"), normalise("S3://bucket/kv/")
    ('file:///kv%20store', 's3://bucket/kv')
    """
    _refuse_credentials(location)
    if not location.strip():
        raise ConfigError("a tier without a URL; write one such as file:///mnt/kv")
    if "?" in location:
        raise ConfigError(f"{label(location)}: options are fields of their own here, not part of the URL")
    _refuse_stray_characters(location)
    if _CHAIN.search(location):
        if not all(_CHAIN.split(location)):
            raise ConfigError(f"{label(location)}: a component of the chained URL is empty")
        return location
    scheme, separator, rest = location.partition("://")
    if not separator:
        return _normalise_path(location)
    scheme = scheme.lower()
    if not _SCHEME.fullmatch(scheme):
        raise ConfigError(f"{label(location)}: not a URL scheme: {scheme!r}")
    if scheme == "file":
        return _normalise_file(rest)
    rest = rest.rstrip("/")
    if scheme == "ram" and rest:
        raise ConfigError(f"{label(location)}: the host tier has no path; write ram://?capacity=64GiB")
    if scheme in _OBJECT_STORES and (not rest or rest.startswith("/")):
        raise ConfigError(f"{label(location)}: no bucket; write {scheme}://bucket/prefix")
    return f"{scheme}://{rest}"


def scheme_of(location: str) -> str:
    """Scheme of a location in normal form; of a chained one, the first.

    Examples
    --------
    >>> scheme_of("s3://bucket"), scheme_of("simplecache::s3://bucket")
    ('s3', 'simplecache')
    """
    return _CHAIN.split(location)[0].partition("://")[0]


def local_path(location: str) -> str:
    """Path of a ``file://`` location in normal form.

    Examples
    --------
    >>> local_path("file:///mnt/kv%20store")
    '/mnt/kv store'
    """
    return os.fsdecode(unquote_to_bytes(location.removeprefix("file://")))


def default_name(scheme: str) -> str:
    """Name of the first tier of this scheme that is given none."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", scheme)


def label(location: str) -> str:
    """How messages name a tier that has no name; what follows a "?" may hold secrets."""
    return f"tier {location.partition('?')[0]!r}"


def _normalise_path(path: str) -> str:
    if like := re.match(r"([A-Za-z][A-Za-z0-9+.-]*)(:|//)", path):
        scheme = like[1].lower()
        raise ConfigError(f"{label(path)}: not a URL; write {scheme}://... or, for a local path, ./{path}")
    home = os.path.expanduser(path)  # noqa: PTH111  Path.expanduser raises where there is no such user
    return _file_url(home)


def _normalise_file(rest: str) -> str:
    rest = rest.removeprefix("localhost") if rest.startswith("localhost/") else rest
    where = label(f"file://{rest}")
    if not rest:
        raise ConfigError(f"{where}: no path; write one such as file:///mnt/kv")
    if not re.match(r"/|\.\.?(/|$)", rest):
        remedy = f"file:///{rest} for an absolute path, file://./{rest} for a relative one"
        raise ConfigError(f"{where}: a file URL has no host; write {remedy}")
    if "#" in rest:
        raise ConfigError(f"{where}: a tier's URL has no fragment; write %23 for a '#' in a path")
    if _BAD_ESCAPE.search(rest):
        raise ConfigError(f"{where}: '%' begins an escape such as %20; write %25 for a '%' in a path")
    return _file_url(local_path(rest))


def _file_url(path: str) -> str:
    if "\0" in path:
        raise ConfigError(f"{label(path)}: a path cannot hold the character NUL")
    return Path(os.path.abspath(path)).as_uri()


def _refuse_stray_characters(location: str) -> None:
    """Raise where more than the URL was pasted from a line or a field; a local path may hold anything."""
    is_url = "://" in location
    if location[0].isspace() or (is_url and (location[-1].isspace() or _CONTROL.search(location))):
        raise ConfigError(
            f"{label(location)}: white space around a URL, or a control character in it; "
            "remove it, or write it as an escape such as %20"
        )


def _refuse_credentials(url: str) -> None:
    """Raise when a component holds a password, or could; nothing that follows its scheme is repeated."""
    for component in _CHAIN.split(url):
        scheme, separator, rest = component.partition("://")
        if not separator:
            local = "@" not in component or component.startswith(("/", "."))
            if not local and (":" in component or component != url):
                _raise_credentials(url)
            continue
        user, at, host = re.split(r"[/?]", rest, maxsplit=1)[0].rpartition("@")
        store = scheme.lower() in _OBJECT_STORES
        # A password with "/" or "?" ends the authority early; what is left looks like a port, but no number.
        if ":" in user or (store and at) or not (_BUCKET if store else _HOST).fullmatch(host):
            _raise_credentials(url)


def _raise_credentials(url: str) -> None:
    scheme = re.match(rf"{_SCHEME.pattern}(?=::|://)", url)
    where = label(f"{scheme[0]}://...") if scheme else "a tier"
    raise ConfigError(
        f"{where}: the URL holds credentials, or a port that is no number; "
        "pass credentials in storage_options or in the environment of the client, never in the URL"
    )
