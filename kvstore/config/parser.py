"""The one way from what users write (URLs, dicts, TOML, the environment) to a :class:`StoreConfig`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Never, TypeVar

import msgspec

from ..errors import ConfigError
from ..remedies import nearest
from .store import StoreConfig, check_settings, read_toml
from .tiers import HostConfig, TierConfig

__all__ = ["CONFIG_VARIABLE", "parse"]

CONFIG_VARIABLE = "KVSTORE_CONFIG"

_Tier = TypeVar("_Tier", HostConfig, TierConfig)


def parse(
    *tiers: str | os.PathLike[str] | Mapping[str, Any] | HostConfig | TierConfig,
    namespace: Mapping[str, Any] | None = None,
    chunk_size: int | str | None = None,
    engine: str | None = None,
    serve: str | None = None,
    nice: int | None = None,
    affinity: Sequence[int] | None = None,
    storage_options: Mapping[str, Mapping[str, Any]] | None = None,
    config: str | os.PathLike[str] | None = None,
    **unknown: Never,
) -> StoreConfig:
    """Check a configuration in any of its forms and freeze it; nothing is opened or created.

    Parameters
    ----------
    *tiers : str, path, mapping, HostConfig or TierConfig
        The host tier first. A path is a local directory. A mapping has the URL under ``"url"``, and beside it
        options and ``"storage_options"``.
    namespace : mapping, optional
        Identity fields.
    chunk_size : int or str, optional
        Bytes, or text with a unit; 2 MiB by default.
    engine : {"threads", "processes", "inline"}, optional
    serve : str, optional
        Address at which peers may read host memory, such as ``tcp://127.0.0.1:5710``.
    nice : int, optional
        Scheduling priority of the workers.
    affinity : sequence of int, optional
        CPUs of the workers.
    storage_options : mapping, optional
        Name of a tier -> arguments of its filesystem, added to those that the tier has; for peers, and for a
        host tier that is served, what they have to prove.
    config : path, optional
        A TOML file. With neither tiers nor `config`, the environment variable ``KVSTORE_CONFIG`` names one.
        What is given as an argument replaces what the file says; tiers replace all tiers of the file.
    **unknown
        Refused, with the nearest name that is valid.

    Returns
    -------
    StoreConfig

    Raises
    ------
    ConfigError
        Something is not valid; the message is one line that names the option, the tier and the remedy.

    Examples
    --------
    >>> config = parse("ram://?capacity=64GiB&policy=arc", "/mnt/nvme/kv?capacity=2TiB", chunk_size="1MiB")
    >>> config.host.capacity, config.tiers[0].url, config.tiers[0].name, config.chunk_size
    (68719476736, 'file:///mnt/nvme/kv', 'file', 1048576)
    """
    check_settings(unknown, parse.__kwdefaults__ or ())
    if config is None and not tiers:
        config = os.environ.get(CONFIG_VARIABLE) or None
        if config is None:
            raise ConfigError(
                f"no tiers; give URLs, the host tier first, or a TOML file with config= or {CONFIG_VARIABLE}"
            )
    given = {
        "tiers": tiers or None,
        "namespace": namespace,
        "chunk_size": chunk_size,
        "engine": engine,
        "nice": nice,
        "affinity": affinity,
    }
    fields = {} if config is None else _read_file(Path(config))
    fields.update((name, value) for name, value in given.items() if value is not None)
    found = StoreConfig.from_dict(fields)
    if serve is not None:
        host = msgspec.structs.replace(found.host, serve=serve)
        found = msgspec.structs.replace(found, host=host)
    return _add_storage_options(found, storage_options or {})


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return read_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration file {str(path)!r}: {error.strerror}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigError(f"configuration file {str(path)!r}: {error}") from None


def _add_storage_options(config: StoreConfig, more: Mapping[str, Mapping[str, Any]]) -> StoreConfig:
    host = config.host
    names = [*([host.name] if host.serve is not None else []), *(tier.name for tier in config.tiers)]
    for name, options in more.items():
        if name not in names:
            remedy = nearest(str(name), names) if names else "there are no secondary tiers"
            raise ConfigError(f"storage_options: there is no tier {name!r} that takes them; {remedy}")
        if not isinstance(options, Mapping):
            raise ConfigError(f"tier {name!r}: storage_options is a mapping from names to values")

    def with_more(tier: _Tier) -> _Tier:
        options = {**tier.storage_options, **more.get(tier.name, {})}
        return msgspec.structs.replace(tier, storage_options=options)

    return msgspec.structs.replace(config, host=with_more(host), tiers=tuple(map(with_more, config.tiers)))
