"""Configuration of one tier: frozen structures, and their forms as URL and dict."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..address import Address
from ..errors import ConfigError
from .options import OPTIONS, find_option
from .urls import default_name, label, local_path, normalise, scheme_of, split_url, with_query

__all__ = ["HostConfig", "TierConfig", "read_tier"]

_HOST_URL = "ram://"
_ANY_PEER = "peer://"
_HOST_NAME = "host"
#: Schemes of what this machine has, or has mounted.
_NEAR = ("file", "memory")
#: Seconds that the others get to open, however short their timeout is.
_LEAST_TO_CONNECT = 5.0


class HostConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The host memory tier.

    Attributes
    ----------
    name : str
    capacity : int
        Bytes.
    policy : {"lru", "arc", "priority"}
        Which chunks leave host memory first.
    pin : {"auto", "on", "off"}
        Whether host memory is pinned for device copies.
    serve : str or None
        Address at which peers may read.
    transport : {"auto", "zmq", "nixl"}
        How chunks go to peers.
    storage_options : dict
        What peers have to prove, which is secret: never shown by ``repr``.

    Examples
    --------
    >>> HostConfig(capacity=64 * 2**30, policy="arc").to_url()
    'ram://?capacity=64GiB&policy=arc'
    """

    name: str = _HOST_NAME
    capacity: int
    policy: Literal["lru", "arc", "priority"] = OPTIONS["policy"].default
    pin: Literal["auto", "on", "off"] = OPTIONS["pin"].default
    serve: str | None = OPTIONS["serve"].default
    transport: Literal["auto", "zmq", "nixl"] = OPTIONS["transport"].default
    storage_options: dict[str, Any] = {}

    def __post_init__(self) -> None:
        """Check every option."""
        where = f"tier {self.name!r}" if self.name else label(_HOST_URL)
        if self.capacity is None:
            raise ConfigError(f"{where}: the host tier needs a capacity, such as ram://?capacity=64GiB")
        msgspec.structs.force_setattr(self, "name", self.name or _HOST_NAME)
        _settle(self, "ram", where)
        _settle_arguments(self, where)
        if self.storage_options and self.serve is None:
            raise ConfigError(f"{where}: the host tier has no storage_options, unless it is served (serve=)")

    @property
    def scheme(self) -> str:
        """Always ``"ram"``."""
        return "ram"

    def to_url(self) -> str:
        """The tier as a URL, without options that have their defaults.

        Raises
        ------
        ConfigError
            There are ``storage_options``, which no URL may hold.
        """
        _refuse_arguments(self)
        return with_query(_HOST_URL, _texts(self, _HOST_NAME))

    def to_dict(self) -> dict[str, Any]:
        """The tier as a dict, without options that have their defaults; ``storage_options`` included."""
        return {"url": _HOST_URL, **_plains(self, _HOST_NAME), **_arguments(self)}

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """Name and value of each field that says something; used by ``rich`` and by ``repr``."""
        return _shown(self)

    def __repr__(self) -> str:
        """Without the values of ``storage_options``."""
        return _format(self)


class TierConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A secondary tier.

    Attributes
    ----------
    url : str
        Scheme and path, without options.
    name : str
        Empty until the tier is part of a :class:`StoreConfig`, unless given.
    capacity : int or None
        Bytes; None is no limit.
    write : {"through", "on-evict", "off"}
    read : bool
    timeout : float
        Seconds.
    retries, workers, concurrency : int
    required : bool
    min_free : int or None
        Bytes; of ``file://`` only, as are `durability`, `direct` and `mode`.
    ttl : float or None
        Seconds.
    total : int or None
        Bytes of all namespaces together.
    durability : {"none", "data", "full"}
    direct : {"auto", "on", "off"}
    mode : int
        Permission bits of files.
    transport : {"auto", "zmq", "nixl"}
        How chunks come from a peer; of ``peer://`` only.
    peers : int
        Of ``peer://`` without an address only, as is the next: peers that are connected at a time.
    allow : tuple of str
        Hosts that requests may name, see :func:`kvstore.address.is_allowed`.
    storage_options : dict
        Arguments of the filesystem, which may be secrets: never shown by ``repr``.

    Examples
    --------
    >>> TierConfig(url="/mnt/nvme/kv", capacity=2 * 2**40).to_url()
    'file:///mnt/nvme/kv?capacity=2TiB'
    >>> TierConfig(url="s3://bucket/kv", write="on-evict", timeout=0.5).to_dict()
    {'url': 's3://bucket/kv', 'write': 'on-evict', 'timeout': '500ms'}
    """

    url: str
    name: str = OPTIONS["name"].default
    capacity: int | None = OPTIONS["capacity"].default
    write: Literal["through", "on-evict", "off"] = OPTIONS["write"].default
    read: bool = OPTIONS["read"].default
    timeout: float = OPTIONS["timeout"].default
    retries: int = OPTIONS["retries"].default
    workers: int = OPTIONS["workers"].default
    concurrency: int = OPTIONS["concurrency"].default
    required: bool = OPTIONS["required"].default
    min_free: int | None = OPTIONS["min_free"].default
    ttl: float | None = OPTIONS["ttl"].default
    total: int | None = OPTIONS["total"].default
    durability: Literal["none", "data", "full"] = OPTIONS["durability"].default
    direct: Literal["auto", "on", "off"] = OPTIONS["direct"].default
    mode: int = OPTIONS["mode"].default
    transport: Literal["auto", "zmq", "nixl"] = OPTIONS["transport"].default
    peers: int = OPTIONS["peers"].default
    allow: tuple[str, ...] = OPTIONS["allow"].default
    storage_options: dict[str, Any] = {}

    def __post_init__(self) -> None:
        """Check every option and bring the URL into its normal form."""
        if not isinstance(self.url, str):
            raise ConfigError(f"a tier's url is text, not {type(self.url).__name__}")
        msgspec.structs.force_setattr(self, "url", normalise(self.url))
        where = f"tier {self.name!r}" if self.name else label(self.url)
        if self.scheme == "ram":
            raise ConfigError(f"{where}: the host tier is a HostConfig, and comes first")
        if self.scheme == "peer":
            _check_peer(self, where)
        _settle(self, self.scheme, where)
        if self.scheme == "peer":
            msgspec.structs.force_setattr(self, "write", "off")
        _settle_arguments(self, where)

    @property
    def scheme(self) -> str:
        """Scheme of the URL; of a chained one, the first."""
        return scheme_of(self.url)

    @property
    def is_near(self) -> bool:
        """Whether operations are system calls, or less; elsewhere each asks a server."""
        return self.scheme in _NEAR

    @property
    def opening_timeout(self) -> float:
        """Seconds that a backend may take to open: more than an operation, where a client library has to be
        imported and to connect."""
        return self.timeout if self.is_near else max(self.timeout, _LEAST_TO_CONNECT)

    @property
    def most(self) -> int | None:
        """Bytes that a namespace may take, by the lower one of `capacity` and `total`; None is no limit."""
        return min((limit for limit in (self.capacity, self.total) if limit is not None), default=None)

    @property
    def dials(self) -> bool:
        """Whether it stands for peers that requests name, ``peer://`` without an address."""
        return self.url == _ANY_PEER

    @property
    def path(self) -> str:
        """Local path of a ``file://`` tier; of others, what follows the first ``://``."""
        return local_path(self.url) if self.scheme == "file" else self.url.partition("://")[2]

    def is_at(self, other: TierConfig) -> bool:
        """Whether both are the same place of the same storage."""
        return not self.dials and (self.url, self.storage_options) == (other.url, other.storage_options)

    def to_url(self) -> str:
        """The tier as a URL, without options that have their defaults.

        Raises
        ------
        ConfigError
            There are ``storage_options``, which no URL may hold.
        """
        _refuse_arguments(self)
        return with_query(self.url, _texts(self, default_name(self.scheme)))

    def to_dict(self) -> dict[str, Any]:
        """The tier as a dict, without options that have their defaults; ``storage_options`` included."""
        return {"url": self.url, **_plains(self, default_name(self.scheme)), **_arguments(self)}

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """Name and value of each field that says something; used by ``rich`` and by ``repr``."""
        return [("url", self.url), *_shown(self)]

    def __repr__(self) -> str:
        """Without the values of ``storage_options``."""
        return _format(self)


def read_tier(
    tier: str | PathLike[str] | Mapping[str, Any] | HostConfig | TierConfig,
) -> HostConfig | TierConfig:
    """One tier from any of its forms.

    Raises
    ------
    ConfigError
        It is not valid; the message names the option and the tier.
    """
    if isinstance(tier, HostConfig | TierConfig):
        return tier
    if isinstance(tier, PathLike):
        tier = Path(tier).absolute().as_uri()
    fields: dict[str, Any] = {"url": tier} if isinstance(tier, str) else _copy(tier)
    url = fields.pop("url", None)
    if not isinstance(url, str):
        raise ConfigError("a tier given as a mapping needs its URL as text under 'url'")
    storage_options = fields.pop("storage_options", None) or {}
    location, query = split_url(url)
    scheme = scheme_of(location)
    name = query.get("name") or fields.get("name")
    where = f"tier {name!r}" if name else label(location)
    for option in (*query, *fields):
        find_option(option, scheme, where)
        if option in query and option in fields:
            raise ConfigError(f"{where}: the option {option!r} is given twice, in the URL and beside it")
    options = {**query, **fields}
    if scheme != "ram":
        return TierConfig(url=location, storage_options=storage_options, **options)
    return HostConfig(**{"capacity": None, **options}, storage_options=storage_options)


def _copy(tier: object) -> dict[str, Any]:
    if not isinstance(tier, Mapping) or not all(isinstance(name, str) for name in tier):
        raise ConfigError(f"a tier is a path, a URL or a mapping of options, not {type(tier).__name__}")
    return dict(tier)


def _settle(config: HostConfig | TierConfig, scheme: str, where: str) -> None:
    """Replace the options of a new structure by their parsed values."""
    for name in filter(OPTIONS.__contains__, config.__struct_fields__):
        option = OPTIONS[name]
        value = getattr(config, name)
        if type(value) is type(option.default) and value == option.default:
            continue
        if not option.applies_to(scheme):
            find_option(name, scheme, where)
        msgspec.structs.force_setattr(config, name, option.parse(value, where))


def _changed(config: HostConfig | TierConfig, usual_name: str) -> list[str]:
    """Options that do not have their defaults, in the order of the table."""
    usual = {"name": usual_name}
    return [
        name
        for name, option in OPTIONS.items()
        if name in config.__struct_fields__
        and option.applies_to(config.scheme)
        and getattr(config, name) not in (usual.get(name), option.default)
    ]


def _texts(config: HostConfig | TierConfig, usual_name: str) -> dict[str, str]:
    return {name: OPTIONS[name].format(getattr(config, name)) for name in _changed(config, usual_name)}


def _plains(config: HostConfig | TierConfig, usual_name: str) -> dict[str, Any]:
    return {name: OPTIONS[name].plain(getattr(config, name)) for name in _changed(config, usual_name)}


def _check_peer(config: TierConfig, where: str) -> None:
    """A peer has an address, unless requests name it, and is only read, whether that is said or not."""
    if not config.dials:
        try:
            Address.parse(config.url.partition("://")[2])
        except ValueError as error:
            raise ConfigError(f"{where}: {error} (example: peer://10.0.0.1:5710)") from None
        for name in ("peers", "allow"):
            if getattr(config, name) != OPTIONS[name].default:
                raise ConfigError(f"{where}: {name!r} is an option of peer:// without an address")
    if config.write == "off":
        msgspec.structs.force_setattr(config, "write", OPTIONS["write"].default)


def _settle_arguments(config: HostConfig | TierConfig, where: str) -> None:
    options = config.storage_options
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        raise ConfigError(f"{where}: storage_options is a mapping from names to values")
    msgspec.structs.force_setattr(config, "storage_options", dict(options))


def _refuse_arguments(config: HostConfig | TierConfig) -> None:
    if config.storage_options:
        where = config.name or getattr(config, "url", _HOST_URL)
        raise ConfigError(f"tier {where!r}: storage_options cannot be in a URL; use the dict form")


def _arguments(config: HostConfig | TierConfig) -> dict[str, Any]:
    return {"storage_options": dict(config.storage_options)} if config.storage_options else {}


def _shown(config: HostConfig | TierConfig) -> list[tuple[str, Any]]:
    count = len(config.storage_options)
    hidden = [("storage_options", f"<{count} hidden>")] if count else []
    return [*((name, getattr(config, name)) for name in _changed(config, "")), *hidden]


def _format(config: HostConfig | TierConfig) -> str:
    fields = ", ".join(f"{name}={value!r}" for name, value in config.__rich_repr__())
    return f"{type(config).__name__}({fields})"
