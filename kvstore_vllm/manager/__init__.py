"""The scheduler's side of the adapter: vLLM's offloading manager over a :class:`kvstore.Store`."""

from .heads import GroupInfo
from .manager import KVStoreManager

__all__ = ["GroupInfo", "KVStoreManager"]
