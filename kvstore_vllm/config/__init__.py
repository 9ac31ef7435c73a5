"""Configuration of the adapter: ``kv_connector_extra_config`` -> :class:`AdapterConfig`.

Two forms are read: ours (``tiers``) and that of vLLM's own tiering (``cpu_bytes_to_use`` with
``secondary_tiers``). :func:`parse` is the only way in, and needs neither vLLM nor torch.
"""

from .adapter import AdapterConfig, AdapterTier
from .keys import KEYS, TIER_KEYS
from .native import secondary_tier
from .parser import parse
from .topology import check_topology

__all__ = [
    "KEYS",
    "TIER_KEYS",
    "AdapterConfig",
    "AdapterTier",
    "check_topology",
    "parse",
    "secondary_tier",
]
