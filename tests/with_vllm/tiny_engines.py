"""Real engines over tiny models with random weights: nothing is downloaded, everything is reproducible.

Weights come from a fixed seed, prompts are token ids, the data type is float32 and decoding is greedy: equal
computation gives equal tokens. The device cache holds two and a half of the prompts: to serve a third one,
blocks must be evicted.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from vllm import LLM, SamplingParams

from kvstore import Store

__all__ = [
    "BLOCK",
    "CHUNK_BYTES",
    "LENGTH",
    "Engine",
    "Outputs",
    "make_model",
    "offloading",
    "open_engine",
    "prompts",
]

#: Tokens: of a block, of a prompt, of the vocabulary.
BLOCK, LENGTH, _VOCABULARY = 32, 400, 512
#: Bytes of one block of the llama: 3 layers, keys and values, 2 heads of 32 floats.
CHUNK_BYTES = BLOCK * 3 * 2 * 2 * 32 * 4

Outputs = list[tuple[int, ...]]

_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,  # large enough that what stands far back in a prompt tells
}


def make_model(kind: str, folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a model of `kind` ("llama", "mistral", ...) with random weights; returns its folder."""
    torch.manual_seed(seed)
    config = _CONFIGS[kind](changes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def _llama(changes: dict[str, Any]) -> Any:
    return transformers.LlamaConfig(**{**_SIZES, "num_hidden_layers": 3, **changes})


def _mistral(changes: dict[str, Any]) -> Any:
    """Sliding windows of 96 tokens in all layers."""
    sizes = {**_SIZES, "num_hidden_layers": 3, "head_dim": 32, "sliding_window": 96}
    return transformers.MistralConfig(**{**sizes, **changes})


def _gemma(changes: dict[str, Any]) -> Any:
    """Every second layer has a sliding window of 96 tokens: two groups of blocks."""
    kinds = ["sliding_attention", "full_attention"] * 2
    sizes = {**_SIZES, "num_hidden_layers": 4, "head_dim": 32, "sliding_window": 96, "layer_types": kinds}
    return transformers.Gemma3TextConfig(**{**sizes, "architectures": ["Gemma3ForCausalLM"], **changes})


def _deepseek(changes: dict[str, Any]) -> Any:
    """Latent attention (MLA) of the one size that vLLM has it for, without experts."""
    sizes = {**_SIZES, "num_hidden_layers": 3, "num_key_value_heads": 4, "first_k_dense_replace": 3}
    experts = {
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
    }
    latent = {
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    }
    return transformers.DeepseekV2Config(
        **{**sizes, **experts, **latent, "n_group": 1, "topk_group": 1, **changes}
    )


_CONFIGS = {"deepseek": _deepseek, "gemma": _gemma, "llama": _llama, "mistral": _mistral}


def prompts(count: int = 6, *, length: int = LENGTH, seed: int = 0) -> list[list[int]]:
    """Token ids of `count` prompts that have nothing in common."""
    generator = random.Random(seed)
    return [[generator.randrange(3, _VOCABULARY) for _ in range(length)] for _ in range(count)]


def offloading(*tiers: Any, capacity: int = 200 * CHUNK_BYTES, **options: Any) -> dict[str, Any]:
    """``kv_connector_extra_config`` with a host tier of `capacity` bytes over `tiers`.

    Requests may wait long for what comes up: the machine may be busy with other things than the tiers.
    """
    return {
        "spec_name": "KVStoreOffloadingSpec",
        "spec_module_path": "kvstore_vllm",
        "tiers": [f"ram://?capacity={capacity}", *tiers],
        "lookup_timeout": "60s",
        **options,
    }


class Engine:
    """An engine, in this process unless the environment says otherwise.

    Attributes
    ----------
    llm : LLM
    steps : list of float
        Seconds of each step that :meth:`answers_of_steps` and :meth:`decode` have made.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.llm = LLM(**options)
        self.steps: list[float] = []

    def close(self) -> None:
        """End the engine, and let go of it: its memory is freed when nobody has it."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm

    def answers(self, batch: Sequence[Sequence[int]], *, tokens: int = 8, **params: Any) -> Outputs:
        """What it generates for each prompt, all of them asked at once; `params` are their
        ``kv_transfer_params``."""
        return [tuple(output.outputs[0].token_ids) for output in self._generate(batch, tokens, params)]

    def cached(self, batch: Sequence[Sequence[int]], **params: Any) -> list[int]:
        """How many tokens of each prompt, asked one by one, need not be computed."""
        return [self._generate([prompt], 1, params)[0].num_cached_tokens or 0 for prompt in batch]

    def answers_of_steps(
        self, batch: Sequence[Sequence[int]], *, tokens: int = 8, aborted: float = 0.0, seed: int = 0
    ) -> list[tuple[int, ...] | None]:
        """As :meth:`answers`, step by step; about this share of the requests is aborted, and answers None."""
        generator = random.Random(seed)
        engine = self.llm.llm_engine
        for number, prompt in enumerate(batch):
            engine.add_request(str(number), {"prompt_token_ids": list(prompt)}, _parameters(tokens))
        found: list[tuple[int, ...] | None] = [None] * len(batch)
        doomed = {number for number in range(len(batch)) if generator.random() < aborted}
        while engine.has_unfinished_requests():
            for output in self._step():
                if output.finished and int(output.request_id) not in doomed:
                    found[int(output.request_id)] = tuple(output.outputs[0].token_ids)
            now = [number for number in doomed if generator.random() < 0.05]
            engine.abort_request([str(number) for number in now])
        return found

    def answer_by_steps(
        self, prompt: Sequence[int], *, tokens: int, before_step: Callable[[int], object]
    ) -> tuple[int, ...]:
        """What it generates for one prompt; before each step `before_step` is told how many tokens it has."""
        engine = self.llm.llm_engine
        found: tuple[int, ...] = ()
        engine.add_request("by steps", {"prompt_token_ids": list(prompt)}, _parameters(tokens))
        while engine.has_unfinished_requests():
            before_step(len(found))
            for output in self._step():
                found = tuple(output.outputs[0].token_ids)
        return found

    def decode(
        self, batch: Sequence[Sequence[int]], tokens: int, *, beside: Sequence[Sequence[int]] = ()
    ) -> list[float]:
        """Generate for `batch` while the prompts `beside` wait for their chunks; seconds of each step."""
        engine, before = self.llm.llm_engine, len(self.steps)
        for name, asked in (("decoded", batch), ("beside", beside)):
            for number, prompt in enumerate(asked):
                asked_for = {"prompt_token_ids": list(prompt)}
                engine.add_request(f"{name} {number}", asked_for, _parameters(tokens))
        left = len(batch)
        while left:
            outputs = self._step()
            assert not [output for output in outputs if output.request_id.startswith("beside")]
            left -= sum(output.finished for output in outputs)
        engine.abort_request([f"beside {number}" for number in range(len(beside))])
        assert not engine.has_unfinished_requests()
        return self.steps[before:]

    def forget(self) -> None:
        """Forget what the device has, and only that."""
        assert self.llm.reset_prefix_cache()

    def reset(self) -> None:
        """Forget what the device has, and tell the adapter."""
        assert self.llm.reset_prefix_cache(reset_connector=True)

    def settle(self) -> None:
        """Return when all that can be stored has been: stores are begun one step after they were prepared."""
        for number in range(3):
            self._generate([[number + 3] * 4], 2)
        assert self.store.flush(timeout=60)

    @property
    def manager(self) -> Any:
        """The scheduler's side of the adapter."""
        connector = self.llm.llm_engine.engine_core.engine_core.scheduler.connector
        return connector.connector_scheduler.manager

    @property
    def store(self) -> Store:
        """The store of the manager."""
        store: Store = self.manager.store
        return store

    def _step(self) -> list[Any]:
        began = time.perf_counter()
        outputs: list[Any] = self.llm.llm_engine.step()
        self.steps.append(time.perf_counter() - began)
        return outputs

    def _generate(
        self, batch: Sequence[Sequence[int]], tokens: int, params: dict[str, Any] | None = None
    ) -> list[Any]:
        asked = [{"prompt_token_ids": list(prompt)} for prompt in batch]
        return self.llm.generate(asked, _parameters(tokens, params), use_tqdm=False)


def _parameters(tokens: int, params: dict[str, Any] | None = None) -> SamplingParams:
    extra = {"kv_transfer_params": params} if params else None
    return SamplingParams(
        temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True, extra_args=extra
    )


@contextmanager
def open_engine(model: Path, extra: dict[str, Any] | None = None, **options: Any) -> Iterator[Engine]:
    """An engine over `model`; `extra` is its ``kv_connector_extra_config``, None for no offloading."""
    if extra is not None:
        options["kv_transfer_config"] = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    engine = Engine(
        {
            "model": str(model),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 768,
            "block_size": BLOCK,
            "num_gpu_blocks_override": 32,
            "max_num_batched_tokens": 2048,
            "seed": 0,
            "disable_log_stats": False,
            **options,
        }
    )
    try:
        yield engine
    finally:
        engine.close()
