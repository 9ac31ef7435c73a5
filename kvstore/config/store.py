"""Configuration of a whole store: one host tier, secondary tiers in order, and settings that they share."""

from __future__ import annotations

import mmap
import tomllib
from collections.abc import Collection, Iterable, Mapping
from itertools import combinations
from typing import Any, Literal, Self

import msgspec
import tomli_w

from ..errors import ConfigError
from ..frame import object_size
from ..keys import plain_fields
from ..remedies import nearest
from ..units import format_size
from .options import OPTIONS, SETTINGS
from .tiers import HostConfig, TierConfig, read_tier
from .urls import default_name

__all__ = ["StoreConfig", "check_places", "check_settings", "read_toml"]


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that :func:`kvstore.open` needs to know.

    Attributes
    ----------
    host : HostConfig
    tiers : tuple of TierConfig
        In the order in which they are asked; every one has a name of its own.
    namespace : dict
        The caller's identity fields, in plain JSON types.
    chunk_size : int
        Bytes.
    engine : {"threads", "processes", "inline"}
    nice : int or None
    affinity : tuple of int or None
        CPU numbers.

    Raises
    ------
    ConfigError
        A value is not valid, two tiers have one name, or a tier has no room for a single chunk.

    Examples
    --------
    >>> config = StoreConfig(host=HostConfig(capacity=2**30), tiers=(TierConfig(url="/mnt/kv"),))
    >>> config.tiers[0].name, StoreConfig.from_toml(config.to_toml()) == config
    ('file', True)
    """

    host: HostConfig
    tiers: tuple[TierConfig, ...] = ()
    namespace: dict[str, Any] = {}
    chunk_size: int = SETTINGS["chunk_size"].default
    engine: Literal["threads", "processes", "inline"] = SETTINGS["engine"].default
    nice: int | None = SETTINGS["nice"].default
    affinity: tuple[int, ...] | None = SETTINGS["affinity"].default

    def __post_init__(self) -> None:
        """Check the settings, name the tiers, and check what concerns several of them."""
        settled: dict[str, Any] = {
            name: option.parse(getattr(self, name), "store") for name, option in SETTINGS.items()
        }
        settled["namespace"] = plain_fields(self.namespace)
        settled["tiers"] = _name_tiers(self.host, self.tiers)
        for name, value in settled.items():
            msgspec.structs.force_setattr(self, name, value)
        _check_capacities(self)

    def to_dict(self) -> dict[str, Any]:
        """The store as plain data, without settings that have their defaults; secrets included."""
        settings = {
            name: option.plain(getattr(self, name))
            for name, option in SETTINGS.items()
            if getattr(self, name) != option.default
        }
        namespace = {"namespace": self.namespace} if self.namespace else {}
        return {
            **settings,
            **namespace,
            "tiers": [self.host.to_dict(), *(tier.to_dict() for tier in self.tiers)],
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_dict`; a tier may also be a URL or a structure.

        Raises
        ------
        ConfigError
            It is not valid.
        """
        check_settings(fields, {*SETTINGS, "namespace", "tiers"})
        settings = dict(fields)
        tiers = settings.pop("tiers", ())
        if isinstance(tiers, str | Mapping) or not isinstance(tiers, list | tuple):
            raise ConfigError(f"store: tiers is a list of URLs or mappings, not {type(tiers).__name__}")
        host, secondary = _split_tiers([read_tier(tier) for tier in tiers])
        return cls(host=host, tiers=secondary, **settings)

    def to_toml(self) -> str:
        """The store as TOML; secrets of the tiers included.

        Raises
        ------
        ConfigError
            The namespace or some ``storage_options`` hold a value that TOML cannot, such as None.
        """
        fields = self.to_dict()
        _check_toml(fields.get("namespace", {}), "namespace")
        for tier in self.tiers:
            _check_toml(tier.storage_options, f"tier {tier.name!r}: storage_options")
        return tomli_w.dumps(fields)

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """The inverse of :meth:`to_toml`.

        Raises
        ------
        ConfigError
            It is not TOML, or not a valid configuration.
        """
        return cls.from_dict(read_toml(text))


def check_places(config: StoreConfig) -> None:
    """Refuse two tiers at one place; called when all ``storage_options`` are known.

    Raises
    ------
    ConfigError
        There are two; the message names both.
    """
    for one, other in combinations(config.tiers, 2):
        if one.is_at(other):
            raise ConfigError(
                f"tiers {one.name!r} and {other.name!r} are the same place, {one.url}; keep one"
            )


def check_settings(names: Iterable[str], valid: Collection[str]) -> None:
    """Refuse names of settings that are not valid.

    Raises
    ------
    ConfigError
        One is not; the message has the nearest that is, or says that it is an option of tiers.
    """
    for name in names:
        if name in valid:
            continue
        if name in OPTIONS:
            raise ConfigError(
                f"store: {name!r} is an option of tiers; write it into the URL of one: ?{name}=..."
            )
        raise ConfigError(f"store: unknown setting {name!r}; {nearest(str(name), valid)}")


def read_toml(text: str) -> dict[str, Any]:
    """What TOML says, unchecked.

    Raises
    ------
    ConfigError
        It is not TOML.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not TOML: {error}") from None


def _split_tiers(tiers: list[HostConfig | TierConfig]) -> tuple[HostConfig, tuple[TierConfig, ...]]:
    hosts = [index for index, tier in enumerate(tiers) if isinstance(tier, HostConfig)]
    if not hosts:
        raise ConfigError("store: there is no host tier; put one first, such as ram://?capacity=64GiB")
    if len(hosts) > 1:
        raise ConfigError(f"store: there are {len(hosts)} host tiers (ram://); keep one")
    host, *secondary = tiers
    if not isinstance(host, HostConfig):
        raise ConfigError(f"store: the host tier (ram://) comes first, not at place {hosts[0] + 1}")
    return host, tuple(tier for tier in secondary if isinstance(tier, TierConfig))


def _name_tiers(host: HostConfig, tiers: tuple[TierConfig, ...]) -> tuple[TierConfig, ...]:
    """`tiers`, where those without a name have got the first free one of their scheme."""
    taken = {host.name}
    for tier in tiers:
        if tier.name in taken:
            raise ConfigError(f"tier {tier.name!r}: this name is given to two tiers; give each its own name=")
        taken |= {tier.name} - {""}  # an empty name is none
    named = []
    for tier in tiers:
        if not tier.name:
            usual = default_name(tier.scheme)
            numbered = (f"{usual}-{number}" for number in range(2, len(taken) + 3))
            name = next(name for name in (usual, *numbered) if name not in taken)
            taken.add(name)
            tier = msgspec.structs.replace(tier, name=name)
        named.append(tier)
    return tuple(named)


def _check_capacities(config: StoreConfig) -> None:
    if config.chunk_size < 1:
        raise ConfigError("store: chunk_size must be at least 1 byte (example: chunk_size=2MiB)")
    # In memory a chunk takes whole pages.
    slot = -(-config.chunk_size // mmap.PAGESIZE) * mmap.PAGESIZE
    _check_capacity(config.host.name, "capacity", config.host.capacity, slot)
    for tier in config.tiers:
        for option, limit in (("capacity", tier.capacity), ("total", tier.total)):
            _check_capacity(tier.name, option, limit, object_size(config.chunk_size))


def _check_capacity(tier: str, option: str, limit: int | None, chunk: int) -> None:
    if limit is not None and limit < chunk:
        raise ConfigError(
            f"tier {tier!r}: {option}={format_size(limit)} is below one chunk, which takes "
            f"{format_size(chunk)} there; raise the {option} or lower chunk_size"
        )


def _check_toml(value: object, where: str) -> None:
    if isinstance(value, Mapping):
        for name, item in value.items():
            _check_toml(item, f"{where}.{name}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_toml(item, f"{where}[{index}]")
    elif not isinstance(value, bool | int | float | str):
        raise ConfigError(f"{where!r} is {type(value).__name__}, which TOML cannot hold; use the dict form")
