"""Entry point ``vllm.general_plugins``: makes our names known to vLLM, so that no module path is needed.

vLLM calls it in each of its processes, and may do so more than once.
"""

from __future__ import annotations

import logging

__all__ = ["register"]

_log = logging.getLogger(__name__)

_SPEC = "KVStoreOffloadingSpec"
_TIER = "KVStoreTier"


def register() -> None:
    """Register the spec and the tier with vLLM's factories; a second call changes nothing.

    A vLLM without these factories is left as it is: a plug-in that nobody asked for breaks no engine.
    """
    try:
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError as error:
        _log.warning("kvstore is not registered with vLLM, which has no tiered offloading here: %s", error)
        return
    for add, name in (
        (OffloadingSpecFactory.register_spec, _SPEC),
        (SecondaryTierFactory.register_tier, _TIER),
    ):
        try:
            add(name, __package__, name)
        except ValueError:  # registered before
            _log.debug("%s is registered already", name)
