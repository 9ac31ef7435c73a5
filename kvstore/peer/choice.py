"""Which transports of payload a process has, from what is configured and what is there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from typing import Literal, TypeVar

from ..arena import Arena
from ..config import HostConfig, StoreConfig, TierConfig
from ..errors import BackendError, ConfigError
from .nixl_memory import NixlReader, NixlRegion, is_installed
from .stream import StreamReader, StreamRegion
from .transport import NIXL, STREAM, ZMQ, Reader, Region

__all__ = [
    "Choice",
    "check_transports",
    "make_nixl_reader",
    "make_regions",
    "readers_of",
    "settle",
    "transports_of",
]

_log = logging.getLogger("kvstore")

Choice = Literal["auto", "zmq", "nixl"]
"""Value of the option ``transport``."""

_T = TypeVar("_T")
_REMEDY = "pip install 'kvstore-tiers[nixl]'"


def check_transports(config: StoreConfig) -> None:
    """Say, once in a process, that payload of peers goes over TCP for want of NIXL; imports nothing.

    Raises
    ------
    ConfigError
        NIXL is asked for, and is not installed.
    """
    peers = (tier for tier in config.tiers if tier.scheme == "peer")
    served = (config.host,) if config.host.serve is not None else ()
    tiers: tuple[HostConfig | TierConfig, ...] = (*served, *peers)
    for tier in tiers:
        if tier.transport != ZMQ and not is_installed():
            _require(tier.transport, f"tier {tier.name!r}")
            _say_once(f"chunks of peers go over TCP, for NIXL is not installed: {_REMEDY}, or transport=zmq")


def settle(choice: Choice, *, encrypted: bool, trusted: bool = True) -> Choice:
    """What `choice` comes to: left to itself, memory is opened neither where payload has to be encrypted nor
    to those who are not trusted."""
    return "zmq" if choice == "auto" and (encrypted or not trusted) else choice


def make_nixl_reader(choice: Choice, where: str) -> NixlReader | None:
    """What reads memory over NIXL; None where that is not to be, or is not there and may be left.

    Raises
    ------
    ConfigError
        NIXL is asked for, and is not installed.
    BackendError
        NIXL is asked for, and does not work here.
    """
    return _make(NixlReader, choice, where)


def readers_of(choice: Choice, nixl: NixlReader | None, host: str, *, encrypted: bool) -> tuple[Reader, ...]:
    """What a client reads a server at `host` by, the best first; what is encrypted stays with ZMQ."""
    if choice == NIXL or encrypted:
        return (nixl,) if nixl else ()
    stream = StreamReader(host)
    return (nixl, stream) if nixl else (stream,)


def make_regions(
    choice: Choice, arena: Arena, host: str, where: str, *, encrypted: bool
) -> dict[str, Region]:
    """Transport -> what a server at `host` lets clients read by it, the best first; raises as
    :func:`make_nixl_reader`."""
    regions: dict[str, Region] = {}
    nixl = _make(lambda: NixlRegion(arena.base, arena.slot_size, arena.slots), choice, where)
    if nixl is not None:
        regions[NIXL] = nixl
    if choice != NIXL and not encrypted:
        with suppress(OSError):  # an address of another kind
            regions[STREAM] = StreamRegion(host, arena.view)
    return regions


def transports_of(choice: Choice, names: Iterable[str]) -> tuple[str, ...]:
    """What a side asks for or offers that has the transports `names` and, unless NIXL is chosen, ZMQ."""
    return tuple(names) if choice == NIXL else (*names, ZMQ)


def _make(make: Callable[[], _T], choice: Choice, where: str) -> _T | None:
    if choice == ZMQ:
        return None
    if not is_installed():
        _require(choice, where)
        return None
    try:
        return make()
    except Exception as error:
        if choice == NIXL:
            raise BackendError(f"{where}: NIXL does not work here: {error}") from error
        _say_once(f"chunks of peers go over TCP, for NIXL does not work here: {error}")
        return None


def _require(choice: Choice, where: str) -> None:
    if choice == NIXL:
        raise ConfigError(f"{where}: transport=nixl needs NIXL: {_REMEDY}")


@cache
def _say_once(message: str) -> None:
    _log.warning(message)
