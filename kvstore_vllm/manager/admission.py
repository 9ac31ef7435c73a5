"""What is stored, and for how long it is worth keeping: the threshold, and what a request wishes.

``kv_transfer_params`` of a request may carry ``priority`` (0 goes first, 100 goes last), ``ttl`` and
``tiers``. The store keeps priorities. Chunks of a priority below ``secondary_offload_min_priority``, and
those of a request with ``tiers: []``, stay in host memory. Neither times to live nor tiers are kept by chunk:
a request that asks for these is told so, as is one that names its peers: they are tiers, of all requests.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Threshold", "Wishes", "read_wishes"]

_log = logging.getLogger(__name__)

#: Retention priority of a request that names none, as TensorRT-LLM has it.
_USUAL = 35
#: Parameters of vLLM's own peer tier that name an instance to ask.
_PEERS = ("remote_prefiller", "remote_kv_source")


class Threshold:
    """Lets a chunk pass once it has been offered so many times.

    Parameters
    ----------
    offers : int
        Below 2, everything passes.
    most : int
        Keys whose offers are counted; the least recently offered are forgotten first.
    """

    def __init__(self, offers: int, most: int) -> None:
        self._offers = offers
        self._most = max(1, most)
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    @property
    def active(self) -> bool:
        """Whether anything can be refused."""
        return self._offers >= 2

    def admit(self, keys: Sequence[bytes]) -> list[bytes]:
        """Count an offer of each of `keys`; returns those that pass, in order."""
        counts, passed = self._counts, []
        for key in keys:
            count = counts[key] = counts.pop(key, 0) + 1
            if count >= self._offers:
                passed.append(key)
        while len(counts) > self._most:
            counts.popitem(last=False)
        return passed


@dataclass(frozen=True)
class Wishes:
    """What a request wishes for its chunks.

    Attributes
    ----------
    priority : int or None
        Retention priority that was asked for.
    cascade : bool
        Whether its chunks go to secondary tiers.
    most_load : int or None
        Tokens that may be loaded.
    """

    priority: int | None = None
    cascade: bool = True
    most_load: int | None = None


def read_wishes(params: Mapping[str, Any] | None, min_priority: int, warned: set[str]) -> Wishes:
    """Read ``kv_transfer_params``; what is wrong or cannot be granted is left out, with one warning a kind.

    Parameters
    ----------
    params : mapping, optional
    min_priority : int
        Chunks of a lower priority stay in host memory.
    warned : set of str
        Warnings given so far; extended.
    """
    params = params if isinstance(params, Mapping) else {}
    priority = _integer(params.get("priority"))
    if params.get("priority") is not None and (priority is None or not 0 <= priority <= 100):
        _warn(warned, f"priority must be a whole number from 0 to 100, not {params['priority']!r}: ignored")
        priority = None
    tiers = params.get("tiers")
    if tiers is not None and tiers != []:
        _warn(warned, "tiers: chunks go to all tiers or, with an empty list, to none: ignored")
    if params.get("ttl") is not None:
        _warn(warned, "ttl: no time to live is kept for single chunks, only for tiers: ignored")
    if any(params.get(name) is not None for name in _PEERS):
        _warn(warned, f"{' and '.join(_PEERS)}: the peers asked are the peer:// tiers: ignored")
    kept = (_USUAL if priority is None else priority) >= min_priority and tiers != []
    most = _integer(params.get("max_load_tokens"))
    return Wishes(priority, kept, most if most is None or most >= 0 else None)


def _integer(value: object) -> int | None:
    return value if type(value) is int else None


def _warn(warned: set[str], text: str) -> None:
    kind = text.split(maxsplit=1)[0]
    if kind not in warned:
        warned.add(kind)
        _log.warning("kv_transfer_params: %s", text)
