"""All that depends on the version of vLLM, and every name of it that is private: 0.32 and 0.33.

Nothing here raises when a private name has gone: what it was good for is then left out.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["check_version", "current_config", "key_positions", "unfit", "window_chunks"]

_log = logging.getLogger(__name__)

#: The versions of which the whole of the tests has run on the first, and the contract tests on all.
_OLDEST, _NEWEST = (0, 32), (0, 33)


def check_version(version: str) -> str:
    """One line about a version of vLLM that nobody has tried; empty for those that are known.

    Parameters
    ----------
    version : str
        As in ``vllm.__version__``.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return f"vLLM calls itself {version!r}, which is no version that kvstore_vllm knows"
    found = (int(match[1]), int(match[2]))
    if _OLDEST <= found <= _NEWEST:
        return ""
    known = " and ".join(f"{major}.{minor}" for major, minor in (_OLDEST, _NEWEST))
    return f"kvstore_vllm is made for vLLM {known}, this is {version}: it may not work"


def current_config() -> Any | None:
    """vLLM's configuration, which is set while a worker is constructed and its caches are registered."""
    from vllm.config import vllm

    look = getattr(vllm, "get_current_vllm_config_or_none", None)
    return None if look is None else look()


def unfit(vllm_config: Any) -> str:
    """Why this engine cannot go on from blocks that it did not compute, in one line; empty where it can.

    vLLM's reference implementation of latent attention for CPUs takes no context from the cache. vLLM turns
    its own prefix cache off there, but a connector's blocks it would take, and answer wrongly.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or vllm_config.cache_config.enable_prefix_caching:
        return ""
    if not vllm_config.model_config.use_mla:
        return ""
    return "vLLM's latent attention (MLA) on this CPU cannot use blocks from a cache: run without offloading"


def key_positions(context: Any) -> Mapping[bytes, int]:
    """Keys of a request -> number of tokens up to the end of their chunk; empty where they are not known.

    vLLM fills it before the first lookup of the request.
    """
    found = getattr(context, "_offload_key_positions", None)
    return found if isinstance(found, Mapping) else {}


def window_chunks(groups: Sequence[Any], vllm_config: Any | None, blocks_per_chunk: int) -> list[int | None]:
    """For each group the number of chunks at the end of a prefix that it needs; None for all of them.

    Since 0.33 vLLM says so; before, it follows from what the layers of the group say of their cache.

    Parameters
    ----------
    groups : sequence of OffloadingGroupConfig
    vllm_config : VllmConfig or None
        With the layers of this worker; without it groups that vLLM says nothing of count as unlimited.
    blocks_per_chunk : int
    """
    told = [getattr(group, "sliding_window_size_in_chunks", None) for group in groups]
    if vllm_config is None:
        return told
    return [
        _window_of(group, vllm_config, group.tokens_per_block * blocks_per_chunk)
        if window is None
        else window
        for group, window in zip(groups, told, strict=True)
    ]


def _window_of(group: Any, vllm_config: Any, tokens_per_chunk: int) -> int | None:
    """That of all layers; those that differ share a group only where all of it is kept."""
    layers = vllm_config.compilation_config.static_forward_context
    specs = [layers[name].get_kv_cache_spec(vllm_config) for name in group.layer_names if name in layers]
    windows = {_window_of_layer(spec, tokens_per_chunk) for spec in specs}
    return windows.pop() if len(windows) == 1 else None


def _window_of_layer(spec: Any, tokens_per_chunk: int) -> int | None:
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec

    if isinstance(spec, MambaSpec):
        return 1
    if isinstance(spec, SlidingWindowSpec):
        # It reaches back one token less than it is wide, and further for tokens that are only proposed.
        back = spec.sliding_window - 1 + spec.extra_retained_tokens
        return -(-max(int(spec.sliding_window), int(back)) // tokens_per_chunk)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return -(-int(spec.attention_chunk_size) // tokens_per_chunk)
    return None
