"""A request of which the test itself offers the chunks to the manager, as vLLM's scheduler side does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from small_world import TOKENS, Prompt, World, group_keys
from vllm.v1.kv_offload.base import ReqContext

__all__ = ["Offers"]


class Offers:
    """One request, which may be computed in parts.

    Parameters
    ----------
    world : World
    name : str
        The chunks go by its length.
    chunks : int
    **params
        Its ``kv_transfer_params``.
    """

    def __init__(self, world: World, name: str, chunks: int, **params: Any) -> None:
        self._manager = world.manager
        self.context = ReqContext(name, params or None)
        self.keys = group_keys(Prompt(name, tuple(range(len(name), len(name) + chunks))))
        for place, key in enumerate(self.keys, 1):
            self.context.set_offload_key_position(key, place * TOKENS)
        self._manager.on_new_request(self.context)

    def offer(self, chunks: slice = slice(None)) -> Sequence[bytes] | None:
        """Which of these chunks are taken; their copies end at once."""
        output = self._manager.prepare_store(self.keys[chunks], self.context)
        if output is None:
            return None
        self._manager.complete_store(set(output.keys_to_store), self.context)
        taken: list[bytes] = output.keys_to_store
        return taken
