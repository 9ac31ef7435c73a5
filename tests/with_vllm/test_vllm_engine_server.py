"""The API server, as users run it."""

from __future__ import annotations

import json
import signal
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from process_tree import Tree, start_tree
from tiny_engines import BLOCK, LENGTH, Outputs, offloading, prompts

from support.object_store import free_ports
from support.processes import wait_for

CHUNKS = LENGTH // BLOCK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


class Server:
    """A server and its clients."""

    def __init__(self, tree: Tree, port: int) -> None:
        self.tree = tree
        self._url = f"http://127.0.0.1:{port}"
        self._client = OpenAI(base_url=f"{self._url}/v1", api_key="none")

    def answers(self) -> tuple[Outputs, list[int]]:
        """What it generates for each prompt, and how many tokens of each were not computed."""
        found, cached = [], []
        for prompt in prompts():
            answer: Any = self._client.completions.create(
                model="tiny",
                prompt=prompt,
                max_tokens=8,
                temperature=0,
                extra_body={"return_token_ids": True, "ignore_eos": True},
            )
            found.append(tuple(answer.choices[0].token_ids))
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        return found, cached

    def metrics(self) -> dict[str, float]:
        """Samples by name and labels."""
        text = urllib.request.urlopen(f"{self._url}/metrics", timeout=10).read().decode()
        rows = (line.rpartition(" ") for line in text.splitlines() if line and line[0] != "#")
        return {name: float(value) for name, _, value in rows}

    def is_up(self) -> bool:
        """Whether it answers."""
        assert self.tree.popen.poll() is None, self.tree.log[-6000:]
        try:
            urllib.request.urlopen(f"{self._url}/health", timeout=1).close()
        except OSError:
            return False
        return True


@pytest.fixture
def server(llama: Path, tmp_path: Path) -> Iterator[Server]:
    [port] = free_ports(1)
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": offloading(str(tmp_path / "kv"), capacity=2 << 20),
    }
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        f"--model={llama}", "--served-model-name=tiny",
        f"--port={port}", "--host=127.0.0.1", "--skip-tokenizer-init", "--dtype=float32", "--enforce-eager",
        "--max-model-len=768", f"--block-size={BLOCK}", "--num-gpu-blocks-override=32", "--seed=0",
        "--enable-prompt-tokens-details", f"--kv-transfer-config={json.dumps(transfer)}",
    ]  # fmt: skip
    with start_tree(command, tmp_path / "log", VLLM_ENABLE_V1_MULTIPROCESSING="1") as tree:
        server = Server(tree, port)
        wait_for(server.is_up, 120)
        yield server


def test_served_measured_and_ended(server: Server, expected: Outputs) -> None:
    assert server.answers() == (expected, [0] * len(expected))
    found, cached = server.answers()
    assert found == expected
    assert sum(cached) >= BLOCK * CHUNKS
    metrics = server.metrics()
    assert total(metrics, "vllm:prompt_tokens_cached_by_source_total", 'source="disk"') > 0
    assert total(metrics, "vllm:kvstore_tier_hits_total", 'tier="file"') > 0
    assert total(metrics, "vllm:kvstore_host_slots_used", "") > 0
    server.tree.popen.send_signal(signal.SIGTERM)
    server.tree.await_end()
    assert server.tree.leftovers() == []


def total(metrics: dict[str, float], name: str, label: str) -> float:
    """Sum of a metric's samples with a label."""
    return sum(value for row, value in metrics.items() if row.startswith(name) and label in row)
