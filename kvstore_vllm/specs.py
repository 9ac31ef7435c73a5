"""What the scheduler hands to the ranks with each job."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import LoadStoreSpec

__all__ = ["SlotSpec"]


@dataclass(eq=False)
class SlotSpec(LoadStoreSpec):  # type: ignore[misc]
    """Host slots of one job.

    Attributes
    ----------
    slots : ndarray of int64, shape (chunks,)
        One per chunk, in the order of the keys: group by group, and along the request within a group.
    ticket : int
        Counts the jobs of one direction from 1, without gaps; see `AckWords`.
    """

    slots: NDArray[np.int64]
    ticket: int

    def __post_init__(self) -> None:
        self.slots = np.ascontiguousarray(self.slots, dtype=np.int64)
