"""Jobs: results, waiting, awaiting, cancelling, and a store that closes meanwhile."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import ClosedError, Prefetched, Store
from kvstore.config import parse
from kvstore.opening import assemble
from kvstore.testing.faults import Fault, FaultPlan, Rule
from support.chunks import CHUNK, chunk_key, payload

PAGE = 4096
KEYS = [chunk_key(number) for number in range(8)]
A, B = KEYS[:2]
HUNG = Rule(Fault.HANG, "exists")
Opened = tuple[Store, FaultPlan]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """Opens stores over a directory that holds all but the last of ``KEYS``, and their plans of faults."""
    opened: list[Opened] = []

    def open_one(*rules: Rule, engine: str = "threads", slots: int = 8, timeout: str = "60s") -> Opened:
        url = f"file://{tmp_path}?retries=0&timeout={timeout}"
        config = parse(f"ram://?capacity={slots * PAGE}&pin=off", url, chunk_size=CHUNK, engine=engine)
        plan = FaultPlan(rules)
        opened.append((assemble(config, plan), plan))
        return opened[-1]

    with open_one(engine="inline")[0] as store:
        store.put_many({key: payload(key) for key in KEYS[:-1]})
    yield open_one
    for store, plan in opened:
        plan.heal()
        store.close()


@pytest.mark.parametrize("engine", ["inline", "threads"])
def test_result_tells_what_became_of_each_key(open_store: Callable[..., Opened], engine: str) -> None:
    store, _ = open_store(engine=engine)
    assert store.get(A) == payload(A)
    job = store.prefetch([B, A, KEYS[-1], B])
    assert job.result(timeout=20) == Prefetched((B,), (KEYS[-1],), (A,))
    assert job.result() == job.result(timeout=0)
    assert job.done()


def test_inline_jobs_have_ended_when_the_call_returns(open_store: Callable[..., Opened]) -> None:
    store, _ = open_store(engine="inline")
    assert store.prefetch(KEYS).future.done()


def test_a_job_for_nothing(open_store: Callable[..., Opened]) -> None:
    store, _ = open_store(HUNG)
    assert store.prefetch([]).result(timeout=0) == ((), (), ())


def test_result_keeps_its_timeout_and_the_job_goes_on(open_store: Callable[..., Opened]) -> None:
    store, plan = open_store(HUNG)
    job = store.prefetch([A])
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        job.result(timeout=0.1)
    assert 0.09 < time.monotonic() - started < 5.0
    assert not job.done()
    plan.heal()
    assert job.result(timeout=20).promoted == (A,)


def test_a_job_ends_with_the_deadline_of_its_tier(open_store: Callable[..., Opened]) -> None:
    store, _ = open_store(HUNG, timeout="200ms")
    assert store.prefetch([A]).result(timeout=20).missing == (A,)


def test_done_looks_for_completions(open_store: Callable[..., Opened]) -> None:
    store, _ = open_store()
    job = store.prefetch([A])
    deadline = time.monotonic() + 20
    while not job.done():
        assert time.monotonic() < deadline
    assert job.future.result(timeout=0).promoted == (A,)


def test_cancel_starts_no_more_transfers(open_store: Callable[..., Opened]) -> None:
    store, plan = open_store(HUNG)
    job = store.prefetch(KEYS)
    assert job.cancel() is True
    assert job.done()
    with pytest.raises(concurrent.futures.CancelledError):
        job.result()
    plan.heal()
    assert store.flush()
    store.get(KEYS[-1], timeout=20)  # whatever the job had started has ended
    assert store.stats().tiers[1].reads == 0


def test_cancel_after_the_end(open_store: Callable[..., Opened]) -> None:
    store, _ = open_store(engine="inline")
    job = store.prefetch([A])
    assert job.cancel() is False
    assert job.result().promoted == (A,)


def test_cancelling_one_of_two_leaves_the_other_alone(open_store: Callable[..., Opened]) -> None:
    store, plan = open_store(HUNG)
    one, other = store.prefetch([A, B]), store.prefetch([A, B])
    one.cancel()
    plan.heal()
    assert other.result(timeout=20).promoted == (A, B)


def test_callbacks_of_the_future_may_use_the_store(open_store: Callable[..., Opened]) -> None:
    store, plan = open_store(HUNG)
    seen: list[Any] = []
    job = store.prefetch([A])
    job.future.add_done_callback(lambda future: seen.append((future.result().promoted, store.lookup([A]))))
    plan.heal()
    job.result(timeout=20)
    assert [promoted for promoted, _ in seen] == [(A,)]


def test_closing_the_store_ends_its_jobs(open_store: Callable[..., Opened]) -> None:
    store, plan = open_store(HUNG)
    job = store.prefetch([A])
    threading.Timer(0.05, plan.heal).start()  # close waits for the worker
    store.close()
    assert job.done()
    with pytest.raises(ClosedError):
        job.result()


# In an event loop.


@pytest.mark.parametrize("engine", ["inline", "threads"])
async def test_await(open_store: Callable[..., Opened], engine: str) -> None:
    store, _ = open_store(engine=engine)
    assert (await store.prefetch(KEYS[:3])).promoted == tuple(KEYS[:3])


async def test_many_jobs_are_awaited_at_once_and_the_loop_goes_on(open_store: Callable[..., Opened]) -> None:
    store, plan = open_store(HUNG)
    jobs = [store.prefetch(KEYS[:n]) for n in range(1, 6)]
    waiting = [asyncio.ensure_future(_wait(job)) for job in jobs]
    done, pending = await asyncio.wait(waiting, timeout=0.1)
    assert not done, "the loop was free to look"
    plan.heal()
    results = await asyncio.gather(*pending)
    assert all(not outcome.missing for outcome in results)


async def test_await_of_a_cancelled_job(open_store: Callable[..., Opened]) -> None:
    store, _ = open_store(HUNG)
    job = store.prefetch([A])
    waiting = asyncio.ensure_future(_wait(job))
    await asyncio.sleep(0)
    job.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        await waiting


async def test_cancelling_the_task_leaves_the_job_alone(open_store: Callable[..., Opened]) -> None:
    store, plan = open_store(HUNG)
    job = store.prefetch([A])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(_wait(job), timeout=0.05)
    plan.heal()
    assert (await job).promoted == (A,)


async def test_a_store_that_closes_under_an_await(open_store: Callable[..., Opened]) -> None:
    store, plan = open_store(HUNG)
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    store.prefetch(KEYS[1:])  # keeps the workers, so that the next is still queued when the store closes
    waiting = asyncio.ensure_future(_wait(store.prefetch([A])))
    await asyncio.sleep(0.02)
    closing = asyncio.ensure_future(asyncio.to_thread(store.close, 0.1))
    with pytest.raises(ClosedError):
        await waiting
    assert await closing is True
    plan.heal()
    del waiting
    gc.collect()
    await asyncio.sleep(0.02)
    assert complaints == []


async def _wait(job: Any) -> Prefetched:
    outcome: Prefetched = await job
    return outcome
