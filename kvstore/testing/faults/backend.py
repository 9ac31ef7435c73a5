"""A backend around another one, which injects faults below the verification."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ...backends import Backend, Capabilities, StoredObject
from ...backends.posix import PosixBackend
from .plan import FaultPlan
from .rules import Fault, Verb, damage, make_error

__all__ = ["FaultyBackend"]

#: Step of the POSIX write protocol -> the method that it begins with. Step 1 begins the call; step 5, closing
#: the file, follows the method of step 4.
_STEPS = {
    2: "_create_temp",
    3: "_gather",
    4: "_sync_file",
    6: "_publish",
    7: "_unlink_temp",
    8: "_sync_directory",
}


class FaultyBackend(Backend):
    """Does what `inner` does, unless the plan has a fault for the call.

    Parameters
    ----------
    inner : Backend
        Not yet opened.
    plan : FaultPlan
    tier : str
        Name of the tier, for rules about one tier only.

    Raises
    ------
    ValueError
        A rule is about a step of the write protocol, and `inner` is no ``file://`` backend.
    """

    def __init__(self, inner: Backend, plan: FaultPlan, tier: str = "") -> None:
        self.inner = inner
        super().__init__(inner.context)
        self.capabilities = _one_by_one(inner.capabilities)
        self._plan = plan
        self._tier = tier
        self._put = _Put()
        if any(rule.step and rule.tier in ("", tier) for rule in plan.rules):
            self._watch_steps(inner)

    @property
    def counters(self) -> dict[str, float]:
        """Those of the inner backend."""
        return self.inner.counters

    @counters.setter
    def counters(self, counters: dict[str, float]) -> None:
        self.inner.counters = counters

    def open(self) -> None:
        self._meet("open")
        self.inner.open()
        self.capabilities = _one_by_one(self.inner.capabilities)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        self._meet("exists", keys)
        return self.inner.exists(keys)

    def delete(self, keys: Sequence[bytes]) -> None:
        self._meet("delete", keys)
        self.inner.delete(keys)

    def scan(self) -> Iterator[StoredObject]:
        self._meet("scan")
        return self.inner.scan()

    def quarantine(self, key: bytes) -> bool:
        self._meet("quarantine", [key])
        return self.inner.quarantine(key)

    def close(self) -> None:
        self.inner.close()

    def get_object(self, key: bytes, header: memoryview, payload: memoryview) -> int | None:
        fault = self._meet("get", [key])
        if fault is Fault.VANISH:
            self.inner.delete([key])
        size = self.inner.get_object(key, header, payload)
        if size is not None and fault is Fault.SHORT_READ:
            return size // 2
        if size is not None and fault is Fault.FLIPPED_BIT:
            harmed = payload if size > header.nbytes else header
            harmed[0] ^= 1
        return size

    def put_object(self, key: bytes, header: memoryview, payload: memoryview) -> bool:
        self._put.key, self._put.step = key, 0
        fault = self._meet("put", [key])
        self._enter(1)
        try:
            if fault is None:
                return self.inner.put_object(key, header, payload)
            stored = memoryview(damage(fault, b"".join((header, payload))))
            created = self.inner.put_object(key, stored[: header.nbytes], stored[header.nbytes :])
        finally:
            self._put.key = None
        if fault is Fault.SHORT_WRITE:
            raise make_error(Fault.ENOSPC)
        return created

    def _meet(self, verb: Verb, keys: Collection[bytes] = (), step: int = 0) -> Fault | None:
        return self._plan.meet(verb, [key.hex() for key in keys], tier=self._tier, step=step)

    # Steps of the write protocol.

    def _watch_steps(self, inner: Backend) -> None:
        if not isinstance(inner, PosixBackend):
            raise ValueError(f"only file:// tiers write in numbered steps, not a {type(inner).__name__}")
        for step, name in _STEPS.items():
            setattr(inner, name, partial(self._take_step, step, getattr(inner, name)))

    def _take_step(self, step: int, method: Callable[..., Any], *arguments: Any) -> Any:
        self._enter(step)
        result = method(*arguments)
        if step == 4:
            self._enter(5)
        return result

    def _enter(self, step: int) -> None:
        """A put comes to `step`; the methods are also called for manifests and for directories on the way."""
        if self._put.key is not None and self._put.step == step - 1:
            self._put.step = step
            self._meet("put", [self._put.key], step)


def _one_by_one(capabilities: Capabilities) -> Capabilities:
    """Those of a backend that is asked for each chunk by itself, as faults may be about one."""
    return replace(capabilities, bulk_read=False)


class _Put(threading.local):
    """The put that a thread is busy with: its key, and the last step that it has come to."""

    key: bytes | None = None
    step = 0
