"""A server's memory, for clients that read one-sided over NIXL.

The arena is registered once. Reads do not pass through the server, whose agent has a thread for what UCX must
do in answer to clients; it sleeps between two looks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .nixl_agent import Agent
from .transport import Region

if TYPE_CHECKING:
    from collections.abc import Callable

    from .books import Parcel

__all__ = ["NixlRegion"]


class NixlRegion(Region):
    """A server's memory: slots of equal size from `base` on; where it `is_local`, for this machine only.

    Raises
    ------
    Exception
        Of NIXL's own kinds: there is no transport here, or it cannot register that much memory.
    """

    def __init__(self, base: int, slot_size: int, slots: int, *, is_local: bool) -> None:
        self._base = base
        self._slot_size = slot_size
        self._agent = Agent(has_thread=True, is_local=is_local)
        self._agent.register(base, slots * slot_size)
        self.metadata = self._agent.metadata

    def serve(self, is_wanted: Callable[[Parcel], bool]) -> None:
        pass

    def offer(self, parcel: Parcel) -> int:
        return self._base + parcel.slot * self._slot_size
