"""What the manager keeps of a request, and how it answers while the request has to wait."""

from __future__ import annotations

from collections.abc import Container

from vllm.v1.kv_offload.base import LookupResult

from kvstore import Prefix

from .heads import group_of
from .promotion import Plan
from .wishes import Wishes

__all__ = ["RequestState"]


class RequestState:
    """State of one request.

    vLLM asks for the keys of a request one by one, in *walks*, one for each group, and waits with the
    request when a walk meets RETRY. A walk over a group with full attention ends at a MISS; so RETRY for its
    first key and MISS for its second end it after two calls. A walk over a group with a window goes
    backwards, ends when it has seen a window of hits, and takes nothing but misses for a miss: there every
    answer is HIT_PENDING.

    Attributes
    ----------
    wishes : Wishes
    plan : Plan or None
        The latest; it may be over.
    deferred : bool
        Whether the request has had to wait.
    seen : dict
        Keys asked for in the first walks, where vLLM does not tell all keys at once.
    seen_in : int or None
        The step of these walks.
    asked : float or None
        When they were, until there is a plan.
    waits_until : float or None
        How long chunks that a prefiller is computing are waited for, once that has begun.
    next_look : float
        When to ask the prefiller again.
    found : bool
        Whether the prefiller has a chunk that was waited for: then a plan is to be made.
    came : bytes
        The key of that chunk.
    computed : int
        Tokens up to the end of the last chunk that the engine is known to have computed.
    stored : Prefix or None
        What of the request is stored, once it has turned out to be larger than the host.
    """

    def __init__(self, wishes: Wishes) -> None:
        self.wishes = wishes
        self.plan: Plan | None = None
        self.deferred = False
        self.seen: dict[bytes, None] = {}
        self.seen_in: int | None = None
        self.asked: float | None = None
        self.waits_until: float | None = None
        self.next_look = float("-inf")
        self.found = False
        self.came = b""
        self.computed = 0
        self.stored: Prefix | None = None
        self._retried: dict[int, tuple[int, bytes]] = {}  # group -> step and key of an open walk

    def wait(self, key: bytes, step: int, windowed: Container[int]) -> LookupResult:
        """The answer for `key` while the request has to wait.

        Parameters
        ----------
        key : bytes
        step : int
            Number of the engine's step: with a new one, walks begin anew.
        windowed : container of int
            The groups with a window.
        """
        group = group_of(key)
        if group in windowed:
            return LookupResult.HIT_PENDING
        last = self._retried.get(group)
        if last is not None and last[0] == step and last[1] != key:
            del self._retried[group]
            return LookupResult.MISS
        self._retried[group] = (step, key)
        return LookupResult.RETRY
