"""A program that compares the adapter's classes with the bases of whichever vLLM is on its path.

Prints JSON: class -> what the base asks for, and where ours does not fit it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

from vllm import __version__
from vllm.v1.kv_offload.base import LoadStoreSpec, OffloadingManager, OffloadingSpec, OffloadingWorker
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

import kvstore_vllm
from kvstore_vllm.manager import KVStoreManager
from kvstore_vllm.specs import SlotSpec
from kvstore_vllm.worker import KVStoreWorker

_PAIRS: list[tuple[type, type]] = [
    (OffloadingManager, KVStoreManager),
    (OffloadingWorker, KVStoreWorker),
    (OffloadingSpec, kvstore_vllm.KVStoreOffloadingSpec),
    (SecondaryTierManager, kvstore_vllm.KVStoreTier),
    (LoadStoreSpec, SlotSpec),
]


def _names(method: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(method).parameters if name != "self"]


def _members(base: type) -> list[str]:
    return sorted(name for name in vars(base) if not name.startswith("_"))


def _compare(base: type, ours: type) -> dict[str, Any]:
    """What `base` has, what of it ours leaves abstract, and parameters that ours does not take alike."""
    unlike = {}
    for name in _members(base):
        theirs, mine = getattr(base, name), getattr(ours, name)
        if callable(theirs) and mine is not theirs and _names(mine)[: len(_names(theirs))] != _names(theirs):
            unlike[name] = [_names(theirs), _names(mine)]
    return {
        "members": _members(base),
        "abstract": sorted(getattr(base, "__abstractmethods__", ())),
        "missing": sorted(getattr(ours, "__abstractmethods__", ())),
        "unlike": unlike,
    }


if __name__ == "__main__":
    report: dict[str, Any] = {base.__name__: _compare(base, ours) for base, ours in _PAIRS}
    print(json.dumps({"version": __version__, "classes": report}))
