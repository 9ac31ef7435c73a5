"""kvstore as the offloading backend of vLLM: evicted KV blocks come back instead of being recomputed.

vLLM finds two names here, given as ``spec_module_path`` or ``module_path``, or registered by
:mod:`kvstore_vllm.plugin`. They are imported when somebody asks for them, for they need vLLM and torch;
importing the package needs neither.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .spec import KVStoreOffloadingSpec
    from .tier import KVStoreTier

__all__ = ["KVStoreOffloadingSpec", "KVStoreTier"]

_HOMES = {"KVStoreOffloadingSpec": ".spec", "KVStoreTier": ".tier"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)
