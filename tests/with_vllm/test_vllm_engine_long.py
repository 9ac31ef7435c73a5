"""Prompts larger than host memory: computed in parts, each of which takes the place of what a tier has got.

The tests decide when storage works. Between two of its turns it stands still.
"""

from __future__ import annotations

from contextlib import ExitStack
from math import inf
from pathlib import Path
from typing import Any

import pytest
from tiny_engines import BLOCK, CHUNK_BYTES, Engine, Outputs, make_model, offloading, open_engine, prompts

from kvstore_vllm.worker import KVStoreWorker
from support.processes import engine_of, stopped

#: Chunks of host memory.
HOST = 12
#: Prompts, in chunks; each has some tokens more.
TWICE, FOUR_TIMES = 2 * HOST, 4 * HOST
#: Tokens to generate: while they are, what was not stored yet is offered again.
TOKENS = 24
#: An engine that computes such prompts, one at a time, two chunks in a step.
OPTIONS = {
    "max_model_len": (FOUR_TIMES + 2) * BLOCK,
    "num_gpu_blocks_override": FOUR_TIMES + 4,
    "max_num_batched_tokens": 2 * BLOCK,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for long prompts."""
    return make_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(autouse=True)
def fast_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies from the device have ended when the step has that began them."""
    submit = KVStoreWorker.submit_store

    def submit_and_wait(worker: KVStoreWorker, job_id: int, *specs: Any) -> bool:
        accepted = submit(worker, job_id, *specs)
        worker.wait({job_id})
        return accepted

    monkeypatch.setattr(KVStoreWorker, "submit_store", submit_and_wait)


@pytest.fixture(scope="module")
def wanted(llama: Path) -> dict[int, tuple[int, ...]]:
    """What an engine without offloading answers, by the chunks of the prompt."""
    with open_engine(llama, **OPTIONS) as engine:
        return {chunks: ask(engine, chunks) for chunks in (TWICE, FOUR_TIMES)}


def prompt_of(chunks: int) -> list[int]:
    return prompts(1, length=chunks * BLOCK + 5)[0]


def ask(engine: Engine, chunks: int) -> tuple[int, ...]:
    return engine.answers([prompt_of(chunks)], tokens=TOKENS)[0]


def extra(folder: Path, host: int = HOST) -> dict[str, object]:
    return offloading(f"file://{folder}?timeout=600s", capacity=host * CHUNK_BYTES)


def fill(llama: Path, folder: Path, chunks: int, apart: float) -> tuple[tuple[int, ...], int]:
    """Ask for the first time; storage has a turn whenever the host has got so many chunks more, and when the
    prompt has been computed. The answer, and how many chunks the tier did not get."""
    with open_engine(llama, extra(folder), **OPTIONS) as engine, ExitStack() as still:
        turn: float = 1  # until then it answers that it has nothing

        def before_step(tokens: int) -> None:
            nonlocal turn
            stored = engine.store.stats().host.writes
            if tokens or stored >= turn:
                still.close()
                assert engine.store.flush(timeout=600)
                still.enter_context(stopped(engine_of(engine.store).pids))
                turn = stored + apart

        answer = engine.answer_by_steps(prompt_of(chunks), tokens=TOKENS, before_step=before_step)
        still.close()
        engine.settle()
        return answer, engine.store.stats().tier("file").dropped


def cached_after_restart(llama: Path, folder: Path, chunks: int, host: int) -> tuple[int, Outputs]:
    """How many chunks need not be computed, and two answers: from the tier, and after the device forgot."""
    with open_engine(llama, extra(folder, host), **OPTIONS) as engine:
        [cached] = engine.cached([prompt_of(chunks)])
        first = ask(engine, chunks)
        engine.forget()
        return cached // BLOCK, [first, ask(engine, chunks)]


@pytest.mark.parametrize("chunks", [TWICE, FOUR_TIMES])
def test_storage_that_keeps_pace_gets_all_of_a_prompt(
    llama: Path, wanted: dict[int, tuple[int, ...]], tmp_path: Path, chunks: int
) -> None:
    """On the whole: it has a turn whenever the host is full of what no tier has."""
    found = fill(llama, tmp_path, chunks, apart=HOST)
    assert found == (wanted[chunks], 0)
    answers = [wanted[chunks]] * 2
    assert cached_after_restart(llama, tmp_path, chunks, 2 * chunks) == (chunks, answers)
    assert cached_after_restart(llama, tmp_path, chunks, HOST) == (HOST // 2, answers)


def test_storage_may_fall_behind_by_as_much_as_the_host_holds(
    llama: Path, wanted: dict[int, tuple[int, ...]], tmp_path: Path
) -> None:
    """It stands still until all of the prompt has been computed; what does not fit waits on the device."""
    found = fill(llama, tmp_path, TWICE, apart=inf)
    assert found == (wanted[TWICE], 0)
    assert cached_after_restart(llama, tmp_path, TWICE, 2 * TWICE) == (TWICE, [wanted[TWICE]] * 2)
