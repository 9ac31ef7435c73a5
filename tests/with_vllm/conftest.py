"""Tests of the adapter with vLLM, on a CPU.

Where vLLM is not installed, as in the plain environment, they are left out: the head of the report says so.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

#: Must stand before vLLM is imported; processes that tests start inherit it.
os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Llama with random weights."""
    from tiny_engines import make_model

    return make_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def expected(llama: Path) -> list[tuple[int, ...]]:
    """What an engine without offloading answers to ``prompts()``."""
    from tiny_engines import open_engine, prompts

    with open_engine(llama) as engine:
        return engine.answers(prompts())
