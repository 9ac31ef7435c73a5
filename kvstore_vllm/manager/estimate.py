"""Load or recompute: how long each would take, from what has been measured so far.

Loading a head takes the time for what is queued before it and for its own bytes, at the bandwidth of the
promotions of late. Computing it takes its tokens, at the rate at which the engine has been filling chunks.
While one of the two is not known, loading is worth a try, and what has been measured long ago is not known
any more: storage that was slow once gets another chance.
"""

from __future__ import annotations

__all__ = ["Estimator", "Rate"]

#: Weight of the newest measurement.
_NEWEST = 0.3
#: Seconds for which a measurement counts.
_KEPT = 60.0
#: Tokens of a step below which it says nothing about how fast a prompt is computed.
_LEAST_TOKENS = 128
#: How much longer than computing a head loading it may take: meanwhile the device is free for others.
_PATIENCE = 2.0


class Rate:
    """A smoothed rate that is forgotten when it has not been measured for a while."""

    def __init__(self) -> None:
        self._value = 0.0
        self._measured = float("-inf")

    def measure(self, amount: float, seconds: float, now: float) -> None:
        """Something of `amount` took `seconds`."""
        if amount > 0 and seconds > 0:
            old, rate = self.at(now), amount / seconds
            self._value = rate if old is None else old + _NEWEST * (rate - old)
            self._measured = now

    def at(self, now: float) -> float | None:
        """Amount per second; None when it is not known."""
        return self._value if now - self._measured < _KEPT else None


class Estimator:
    """Measures promotions and prefill, and compares what they would take.

    Promotions share the tiers' bandwidth and are served one after the other, so each is measured from its own
    start or from the end of the one before it, whichever is later.
    """

    def __init__(self) -> None:
        self._loads = Rate()  # chunks per second
        self._prefill = Rate()  # tokens per second
        self._loaded_at = float("-inf")
        self._tokens = 0
        self._step_began = float("-inf")

    def promoted(self, chunks: int, began: float, now: float) -> None:
        """A promotion of `chunks`, begun at the time `began`, has ended."""
        self._loads.measure(chunks, now - max(began, self._loaded_at), now)
        self._loaded_at = now

    def computing(self, tokens: int) -> None:
        """The engine computes so many tokens of a request in this step."""
        self._tokens += tokens

    def step(self, now: float) -> None:
        """The engine has come to its next step."""
        if self._tokens >= _LEAST_TOKENS:
            self._prefill.measure(self._tokens, now - self._step_began, now)
        self._tokens = 0
        self._step_began = now

    def worth_loading(self, chunks: int, tokens: int, queued: int, now: float) -> bool:
        """Whether to load `chunks`, behind `queued` others, rather than compute the `tokens` they hold."""
        loads, prefill = self._loads.at(now), self._prefill.at(now)
        if loads is None or prefill is None:
            return True
        return (queued + chunks) / loads <= _PATIENCE * tokens / prefill
