"""The fault kit: storage that fails on demand, for tests of backends and of whole stores.

``docs/how-to/test-a-backend-with-faults.md`` shows how. A :class:`FaultPlan` has :class:`Rule` objects and
injects what they say, into backends (:class:`FaultyBackend`) or into filesystems
(``fault::file:///path``, :class:`FaultFileSystem`). Importing this package makes the scheme known to fsspec.
"""

from fsspec import register_implementation

from .backend import FaultyBackend
from .filesystem import FaultFileSystem
from .plan import FaultPlan, Injection
from .rules import Fault, Rule

__all__ = ["Fault", "FaultFileSystem", "FaultPlan", "FaultyBackend", "Injection", "Rule"]

register_implementation("fault", FaultFileSystem, clobber=True)
