"""Suites for those who write a backend, a policy or an engine, and storage that fails on demand.

Subclass a suite in a test module that pytest collects. What is named here is imported when it is asked for:
the suites need pytest, the fault kit does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import BackendTests, make_key
    from .engine import EngineTests
    from .faults import Fault, FaultFileSystem, FaultPlan, FaultyBackend, Rule
    from .policy import PolicyTests

__all__ = [
    "BackendTests",
    "EngineTests",
    "Fault",
    "FaultFileSystem",
    "FaultPlan",
    "FaultyBackend",
    "PolicyTests",
    "Rule",
    "make_key",
]

_HOMES = {
    "BackendTests": "backend",
    "EngineTests": "engine",
    "Fault": "faults",
    "FaultFileSystem": "faults",
    "FaultPlan": "faults",
    "FaultyBackend": "faults",
    "PolicyTests": "policy",
    "Rule": "faults",
    "make_key": "backend",
}


def __getattr__(name: str) -> Any:
    """Import the module of an exported name at its first use."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    """The exported names, imported or not."""
    return sorted({*globals(), *__all__})
