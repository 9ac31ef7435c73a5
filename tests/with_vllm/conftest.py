"""Tests of the adapter with vLLM, on a CPU.

Where vLLM is not installed, as in the plain environment, they are left out: the head of the report says so.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from support.vllm_environment import prepare

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

prepare()


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
