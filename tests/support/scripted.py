"""An engine whose workers do what a test tells them, and a clock that only the test moves.

Batches wait in ``held`` until the test lets them run: whole or item by item, in any order, well or badly, in
time or long after their deadline. The work itself is done by the real :class:`kvstore.engine.worker.Worker`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.arena import Arena
from kvstore.backends import create
from kvstore.config import StoreConfig, parse
from kvstore.engine.base import Batch, Completion, Doorbell, Engine, Result, Status, Verb
from kvstore.engine.worker import Worker
from kvstore.namespace import Namespace
from kvstore.opening import BackendFactory, assemble
from kvstore.store import Store

from .chunks import CHUNK

__all__ = ["Clock", "Held", "ScriptedEngine", "open_scripted"]

PAGE = 4096


class Clock:
    """Seconds that pass only when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


@dataclass(eq=False)
class Held:
    """A batch in a worker's hands: the first `done` items are answered."""

    batch: Batch
    done: int = 0
    abandoned: bool = False

    @property
    def left(self) -> int:
        """Items without an answer."""
        return max(1, len(self.batch.keys)) - self.done

    def rest(self, n: int) -> Batch:
        """The next `n` items as a batch of their own."""
        part = slice(self.done, self.done + n)
        batch = self.batch
        return batch._replace(keys=batch.keys[part], slots=batch.slots[part], lengths=batch.lengths[part])


class ScriptedEngine(Engine):
    """Holds every batch until it is told what to do with it.

    Attributes
    ----------
    held : list of Held
        Batches with items that have no answer yet, in order of submission.
    unread : list of (Held, Completion)
        Answers that the store has not polled yet.
    submitted : list of Batch
        Everything that was ever submitted.
    down : set of int
        Tiers that cannot be opened at start.
    before_run : callable
        Called with each batch that is about to be executed for real.
    script : deque of int
        What happens while a caller waits: each wait takes one number and runs that batch of ``held`` (modulo
        their count); a negative number, or none, lets the time pass.
    """

    immediate = True  # nothing happens behind the caller's back, so that there is no need of an idle pump

    def __init__(self, workers: Sequence[Worker], slot: Callable[[int], memoryview], clock: Clock) -> None:
        self._workers = list(workers)
        self._slot = slot
        self._clock = clock
        self._bell = Doorbell()
        self.unread: list[tuple[Held, Completion]] = []
        self.held: list[Held] = []
        self.down: set[int] = set()
        self.submitted: list[Batch] = []
        self.before_run: Callable[[Batch], None] = lambda _batch: None
        self.script: deque[int] = deque()
        self.closed = False

    # The contract.

    def start(self) -> list[Exception | None]:
        errors: list[Exception | None] = []
        for index, worker in enumerate(self._workers):
            if index in self.down:
                errors.append(OSError("down"))
            else:
                worker.open()
                errors.append(None)
        return errors

    def submit(self, batch: Batch) -> None:
        self.submitted.append(batch)
        self.held.append(Held(batch))

    def poll(self) -> list[Completion]:
        self._bell.answer()
        unread, self.unread = self.unread, []
        return [completion for _, completion in unread]

    def abandon(self, batch: Batch) -> None:
        for held in self.held:
            if held.batch.id == batch.id:
                held.abandoned = True

    def fileno(self) -> int:
        return self._bell.fd

    def wait(self, timeout: float) -> None:
        choice = self.script.popleft() if self.script else -1
        if choice >= 0 and self.held:
            self.run(self.held[choice % len(self.held)])
        elif not self.unread:
            self._clock.advance(max(timeout, 0.001))

    def close(self, timeout: float) -> None:
        self.closed = True
        self.held.clear()
        for worker in self._workers:
            worker.close()
        self._bell.close()

    # What a test does.

    def run(self, held: Held, n: int | None = None) -> None:
        """Execute the next `n` items, all by default."""
        n = held.left if n is None else min(n, held.left)
        part = held.rest(n)
        self.before_run(part)
        self._workers[part.tier].run(part, lambda c: self._emit(held, c._replace(first=c.first + held.done)))
        self._advance(held, n)

    def fail(self, held: Held, n: int | None = None, *, after: bool = False) -> None:
        """The storage fails for the next `n` items: before it has done anything, or after it has done it."""
        n = held.left if n is None else min(n, held.left)
        part = held.rest(n)
        if after:
            self.before_run(part)
            self._workers[part.tier].run(part, lambda _: None)
        if part.verb is Verb.READ:  # the content of a slot is undefined after an error
            for slot in part.slots:
                self._slot(slot)[:] = b"\xee" * PAGE
        self._answer(held, n, Result(Status.FAILED, error="it failed"))

    def die(self, held: Held) -> None:
        """The worker ends with the rest of a batch in its hands."""
        self._answer(held, held.left, Result(Status.DIED, error="it died"))

    def cancel(self, held: Held) -> None:
        """The rest of a batch is never started."""
        self._answer(held, held.left, Result(Status.CANCELLED))

    def run_all(self) -> None:
        """Execute everything held, in order of submission."""
        for held in list(self.held):
            self.run(held)

    def find(self, verb: Verb, key: bytes | None = None) -> Held:
        """The first batch of `verb` (with `key` in it) that is held."""
        return next(h for h in self.held if h.batch.verb is verb and (key is None or key in h.batch.keys))

    def count(self, verb: Verb, key: bytes) -> int:
        """How often `key` has been submitted for `verb`."""
        return sum(batch.keys.count(key) for batch in self.submitted if batch.verb is verb)

    def _answer(self, held: Held, n: int, result: Result) -> None:
        self._emit(held, Completion(held.batch.id, held.done, [result] * n, [], {}))
        self._advance(held, n)

    def _advance(self, held: Held, n: int) -> None:
        held.done += n
        if not held.left:
            self.held.remove(held)

    def _emit(self, held: Held, completion: Completion) -> None:
        self.unread.append((held, completion))
        self._bell.ring()


def open_scripted(
    *tiers: str, slots: int = 4, policy: str = "lru", clock: Clock | None = None, down: Sequence[int] = ()
) -> tuple[Store, ScriptedEngine, Clock]:
    """A store of `slots` host slots over `tiers`, with its engine and its clock."""
    clock = clock or Clock()
    engines: list[ScriptedEngine] = []

    def engine_of(
        config: StoreConfig, namespace: Namespace, arena: Arena, factory: BackendFactory
    ) -> ScriptedEngine:
        workers = [Worker(factory(tier, namespace), arena.view) for tier in config.tiers]
        engine = ScriptedEngine(workers, arena.view, clock)
        engine.down.update(down)
        engines.append(engine)
        return engine

    config = parse(
        f"ram://?capacity={slots * PAGE}&policy={policy}&pin=off", *tiers, chunk_size=CHUNK, engine="inline"
    )
    store = assemble(config, create, engine_of=engine_of, clock=clock)
    return store, engines[0], clock
