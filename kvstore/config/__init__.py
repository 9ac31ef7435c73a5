"""Configuration: URLs, dicts and TOML, read in one place into frozen structures.

:func:`parse` is the only way in; ``to_url``, ``to_dict`` and ``to_toml`` of the structures lead back,
exactly.
"""

from .options import OPTIONS, SETTINGS, Option
from .parser import CONFIG_VARIABLE, parse
from .store import StoreConfig
from .tiers import HostConfig, TierConfig

__all__ = [
    "CONFIG_VARIABLE",
    "OPTIONS",
    "SETTINGS",
    "HostConfig",
    "Option",
    "StoreConfig",
    "TierConfig",
    "parse",
]
