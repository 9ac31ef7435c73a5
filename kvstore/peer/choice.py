"""Which transports of payload a process has, from what is configured and what is there."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from typing import Literal

from ..address import Address
from ..arena import Arena
from ..config import StoreConfig
from ..errors import BackendError, ConfigError
from ..remedies import install
from .credentials import ClientCredentials, ServerCredentials
from .nixl_agent import is_installed
from .nixl_reader import NixlReader
from .nixl_region import NixlRegion
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

_REMEDY = install("nixl")


def check_transports(config: StoreConfig) -> None:
    """Say, once in a process, that payload of peers goes over TCP only for want of NIXL; imports nothing.

    Raises
    ------
    ConfigError
        NIXL is asked for, and is not installed.
    """
    if is_installed():
        return
    for name, choice in _settled(config):
        _require(choice, f"tier {name!r}")
        if choice != ZMQ:
            _say_once(f"chunks of peers go over TCP, for NIXL is not installed: {_REMEDY}, or transport=zmq")


def settle(
    choice: Choice, credentials: ClientCredentials | ServerCredentials, address: Address | None
) -> Choice:
    """What `choice` comes to with a server at `address`, None for one that is not known yet.

    Left to itself, memory is opened neither where payload has to be encrypted, nor on a network on which
    nobody has to prove anything.
    """
    trusted = credentials.asks or (address is not None and address.is_loopback)
    return "zmq" if choice == "auto" and (credentials.encrypts or not trusted) else choice


def make_nixl_reader(choice: Choice, where: str, *, is_local: bool) -> NixlReader | None:
    """What reads memory over NIXL; None where that is not to be, or is not installed and may be left.

    Raises
    ------
    ConfigError
        NIXL is asked for, and is not installed.
    """
    return NixlReader(is_local=is_local) if _has_nixl(choice, where) else None


def readers_of(choice: Choice, nixl: NixlReader | None, host: str, *, encrypted: bool) -> tuple[Reader, ...]:
    """What a client reads a server at `host` by, the best first; what is encrypted stays with ZMQ."""
    if choice == NIXL or encrypted:
        return (nixl,) if nixl else ()
    stream = StreamReader(host)
    return (nixl, stream) if nixl else (stream,)


def make_regions(
    choice: Choice, arena: Arena, address: Address, where: str, *, encrypted: bool
) -> dict[str, Region]:
    """Transport -> what a server at `address` lets clients read by it, the best first.

    Raises
    ------
    ConfigError
        NIXL is asked for, and is not installed.
    BackendError
        NIXL is asked for, and does not work here.
    """
    regions: dict[str, Region] = {}
    nixl = _make_nixl_region(choice, arena, address, where)
    if nixl is not None:
        regions[NIXL] = nixl
    if choice != NIXL and not encrypted:
        with suppress(OSError):  # an address of another kind
            regions[STREAM] = StreamRegion(address.host, arena.view)
    return regions


def transports_of(choice: Choice, names: Iterable[str]) -> tuple[str, ...]:
    """What a side asks for or offers that has the transports `names` and, unless NIXL is chosen, ZMQ."""
    return tuple(names) if choice == NIXL else (*names, ZMQ)


def _settled(config: StoreConfig) -> Iterator[tuple[str, Choice]]:
    """Name of each tier that serves or reads, and what its choice comes to."""
    host = config.host
    if host.serve is not None:
        asked = ServerCredentials.of(host.storage_options, f"tier {host.name!r}")
        yield host.name, settle(host.transport, asked, Address.parse(host.serve))
    for tier in config.tiers:
        if tier.scheme == "peer":
            shown = ClientCredentials.of(tier.storage_options, f"tier {tier.name!r}")
            address = Address.parse(tier.path) if tier.path else None
            yield tier.name, settle(tier.transport, shown, address)


def _has_nixl(choice: Choice, where: str) -> bool:
    if choice == ZMQ:
        return False
    if not is_installed():
        _require(choice, where)
        return False
    return True


def _make_nixl_region(choice: Choice, arena: Arena, address: Address, where: str) -> NixlRegion | None:
    if not _has_nixl(choice, where):
        return None
    try:
        return NixlRegion(arena.base, arena.slot_size, arena.slots, is_local=address.is_loopback)
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
