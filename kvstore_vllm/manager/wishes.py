"""What one request asks for: ``kv_transfer_params``, and the tiers that vLLM lets it load from.

``priority`` (0 goes first, 100 goes last), ``ttl`` and ``tiers`` are about the chunks that it stores. The
store keeps priorities, for as long as ``ttl`` says (:mod:`.retention`); chunks of a priority below
``secondary_offload_min_priority`` stay in host memory. ``tiers`` names those that they go to.

``remote_prefiller`` and ``remote_kv_source`` name a peer to load from; the former is computing the chunks
meanwhile. ``remote_decoder`` says that another instance is going to ask for them. Chunks are named by their
content, so that ``kv_request_id`` says nothing that matters here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_offload.base import Locality, Medium, ReqContext

from kvstore.address import Address, is_allowed
from kvstore.units import parse_duration

from ..config import AdapterConfig, AdapterTier

__all__ = ["WishReader", "Wishes"]

_log = logging.getLogger(__name__)

#: Retention priority of a request that names none, as TensorRT-LLM has it.
_USUAL = 35


@dataclass(frozen=True)
class Wishes:
    """What a request wishes.

    Attributes
    ----------
    priority : int or None
        Retention priority that was asked for.
    ttl : float or None
        Seconds for which the chunks are worth keeping in host memory.
    stores : tuple of str or None
        Names of the tiers that its chunks go to; None for all.
    loads : tuple of str or None
        Tiers and peers that it may be loaded from, as :class:`kvstore.Store` takes them; None for the usual
        ones.
    most_load : int or None
        Tokens that may be loaded.
    prefiller : str or None
        The peer that is computing its chunks.
    has_decoder : bool
        Whether another instance is going to ask for its chunks.
    """

    priority: int | None = None
    ttl: float | None = None
    stores: tuple[str, ...] | None = None
    loads: tuple[str, ...] | None = None
    most_load: int | None = None
    prefiller: str | None = None
    has_decoder: bool = False


class WishReader:
    """Reads requests; what is wrong or cannot be granted is left out, with one warning a kind.

    Parameters
    ----------
    config : AdapterConfig
    """

    def __init__(self, config: AdapterConfig) -> None:
        self._min_priority = config.min_priority
        self._written = [tier.name for tier in config.tiers if tier.config.write != "off"]
        self._read = [tier for tier in config.tiers if tier.config.read and not tier.config.dials]
        self._dialled = [tier for tier in config.tiers if tier.config.read and tier.config.dials]
        self._host = config.host.name
        self._keeps_priorities = config.host.policy == "priority"
        self._warned: set[str] = set()

    def read(self, context: ReqContext) -> Wishes:
        """What a request wishes."""
        params = context.kv_transfer_params
        params = params if isinstance(params, Mapping) else {}
        priority = self._priority(params)
        stores = self._stores(params.get("tiers"))
        if (_USUAL if priority is None else priority) < self._min_priority:
            stores = ()
        prefiller = self._peer(params, "remote_prefiller", context)
        source = prefiller or self._peer(params, "remote_kv_source", context)
        most = _integer(params.get("max_load_tokens"))
        return Wishes(
            priority=priority,
            ttl=self._ttl(params.get("ttl")),
            stores=stores,
            loads=self._loads(context, source),
            most_load=most if most is None or most >= 0 else None,
            prefiller=prefiller,
            has_decoder=isinstance(params.get("remote_decoder"), Mapping),
        )

    def _priority(self, params: Mapping[str, Any]) -> int | None:
        given = params.get("priority")
        priority = _integer(given)
        if given is not None and (priority is None or not 0 <= priority <= 100):
            self._warn(f"priority must be a whole number from 0 to 100, not {given!r}: ignored")
            return None
        return priority

    def _ttl(self, given: object) -> float | None:
        if given is None:
            return None
        seconds = _seconds(given)
        if seconds is None:
            self._warn(f"ttl is a time such as 30 (seconds) or '5min', not {given!r}: ignored")
        elif not self._keeps_priorities:
            self._warn("ttl: the host tier heeds it with policy=priority only: ignored")
            return None
        return seconds

    def _stores(self, given: object) -> tuple[str, ...] | None:
        if given is None:
            return None
        if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
            self._warn(f"tiers is a list of names, not {given!r}: ignored")
            return None
        if unknown := [name for name in given if name not in (*self._written, self._host)]:
            valid = ", ".join(self._written) or "none"
            self._warn(f"tiers: {unknown[0]!r} is no tier that is written (those are: {valid}): left out")
        return tuple(name for name in self._written if name in given)

    def _loads(self, context: ReqContext, peer: str | None) -> tuple[str, ...] | None:
        """Names for the store; None where they would be all but peers."""
        allowed = [tier.name for tier in self._read if _allows(context, tier)]
        if peer is not None:
            return (*allowed, peer)
        return None if len(allowed) == len(self._read) and allowed else tuple(allowed)

    def _peer(self, params: Mapping[str, Any], role: str, context: ReqContext) -> str | None:
        """The peer that plays this role, if it may be asked."""
        given = params.get(role)
        if given is None:
            return None
        peer = _address(given)
        if peer is None:
            self._warn(f"{role} takes remote_host and remote_port: ignored")
            return None
        tiers = [tier for tier in self._dialled if is_allowed(peer.host, tier.config.allow)]
        if not tiers:
            self._warn(
                f"{role}: no tier lets requests name {peer.host!r}: ignored; "
                f"add it to 'allow' of p2p or of a tier peer://"
            )
        return (
            f"peer{str(peer).removeprefix('tcp')}" if any(_allows(context, tier) for tier in tiers) else None
        )

    def _warn(self, text: str) -> None:
        kind = text.split(maxsplit=1)[0]
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("kv_transfer_params: %s", text)


def _address(given: object) -> Address | None:
    if not isinstance(given, Mapping):
        return None
    host, port = given.get("remote_host"), given.get("remote_port")
    if isinstance(port, str) and port.isascii() and port.isdecimal():
        port = int(port)
    if not isinstance(host, str) or not host or type(port) is not int or not 0 < port < 65536:
        return None
    return Address(host.strip("[]"), port)


def _allows(context: ReqContext, tier: AdapterTier) -> bool:
    """Whether the request may be loaded from `tier`; a peer's memory is of no medium that vLLM names."""
    medium = None if tier.config.scheme == "peer" else Medium.STORAGE
    locality = None if tier.locality is None else Locality(tier.locality)
    return bool(context.load_tier_filter.allows(medium, locality))


def _seconds(value: Any) -> float | None:
    """A time above zero; None for anything else."""
    try:
        return parse_duration(value) or None
    except (ValueError, OverflowError):
        return None


def _integer(value: object) -> int | None:
    return value if type(value) is int else None
