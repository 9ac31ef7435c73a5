"""One of several engines that live in this process and take turns: asked by all users at once, and timed.

A worker's connector is a global variable of vLLM, which has room for one engine: whoever's turn it is puts
its own there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tiny_engines import Engine, open_engine
from vllm import SamplingParams
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.metrics.loggers import PrometheusStatLogger

from .geometry import new_prompts

__all__ = ["COMPUTED", "Contender", "Round", "open_contender"]

#: What stands beside vLLM's names for the sources of cached tokens: those that were computed.
COMPUTED = "computed"
_ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)
_FLUSH_SECONDS = 120.0


class Round(NamedTuple):
    """What it took until all users had an answer.

    Attributes
    ----------
    seconds : float
    waits : list of float
        Seconds that each user waited for the first token.
    tokens : dict
        Source -> tokens of all prompts that came from there.
    """

    seconds: float
    waits: list[float]
    tokens: dict[str, int]

    @property
    def throughput(self) -> float:
        """Requests per second."""
        return len(self.waits) / self.seconds


class Contender:
    """An engine that shares this process with others.

    Parameters
    ----------
    engine : Engine
        The only one with a connector in vLLM's variable.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._core = engine.llm.llm_engine
        self._connector = kv_transfer_state._KV_CONNECTOR_AGENT
        kv_transfer_state._KV_CONNECTOR_AGENT = None

    def ask(self, prompts: Sequence[Sequence[int]]) -> Round:
        """Ask for one token after each of `prompts`, all of them at once; then let the engine settle."""
        with self.turn():
            took = self._ask(prompts)
            self._settle()
        return took

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The engine may be used within the block."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self._connector
        try:
            yield
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = None

    def _ask(self, prompts: Sequence[Sequence[int]]) -> Round:
        before = self._cached_tokens()
        began = time.perf_counter()
        for number, prompt in enumerate(prompts):
            self._core.add_request(str(number), {"prompt_token_ids": list(prompt)}, _ONE_TOKEN)
        waits: list[float] = []
        while len(waits) < len(prompts):
            answered = sum(output.finished for output in self._core.step())
            waits += [time.perf_counter() - began] * answered
        tokens = {source: total - before.get(source, 0) for source, total in self._cached_tokens().items()}
        tokens[COMPUTED] = sum(map(len, prompts)) - sum(tokens.values())
        return Round(waits[-1], waits, tokens)

    def _settle(self) -> None:
        """Return when nothing goes on any more: all that was to be stored is in every tier."""
        scheduler = self._core.engine_core.engine_core.scheduler
        while scheduler.has_requests():
            self._core.step()
        store: Any = scheduler.connector and getattr(self._engine.manager, "store", None)
        if store:
            assert store.flush(timeout=_FLUSH_SECONDS)

    def _cached_tokens(self) -> dict[str, int]:
        """Source -> tokens so far, as ``vllm:prompt_tokens_cached_by_source_total`` says."""
        loggers = self._core.logger_manager.stat_loggers
        [logger] = [logger for logger in loggers if isinstance(logger, PrometheusStatLogger)]
        return {
            sample.labels["source"]: int(sample.value)
            for metric in logger.counter_prompt_tokens_cached_by_source.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
        }


@contextmanager
def open_contender(model: Path, extra: dict[str, Any] | None, **options: Any) -> Iterator[Contender]:
    """As `open_engine`, beside others."""
    with open_engine(model, extra, **options) as engine:
        contender = Contender(engine)
        contender.ask(new_prompts(1, seed=0))  # the first request of an engine takes longer than any other
        yield contender
        kv_transfer_state._KV_CONNECTOR_AGENT = contender._connector
