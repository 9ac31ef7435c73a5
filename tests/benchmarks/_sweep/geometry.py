"""Sizes of everything: the model, the prompts, and what device and host have room for.

A token is 32 KiB of keys and values, a chunk 1 MiB, a prompt 62 chunks. Computing a prompt takes one core
about a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_engines import BLOCK, make_model, prompts

__all__ = [
    "ENGINE",
    "HOST",
    "PROMPTS_IN_HOST",
    "PROMPTS_ON_DEVICE",
    "PROMPT_TOKENS",
    "new_prompts",
    "write_model",
]

PROMPT_TOKENS = 2_000
#: Prompts that fit.
PROMPTS_ON_DEVICE, PROMPTS_IN_HOST = 2.5, 4.0

_HIDDEN, _LAYERS = 512, 8
_BLOCKS_OF_PROMPT = PROMPT_TOKENS // BLOCK + 1
#: Bytes of a chunk: one block, of keys and values in float32.
_CHUNK = BLOCK * _LAYERS * 2 * _HIDDEN * 4
#: Bytes of the host tier.
HOST = int(PROMPTS_IN_HOST * _BLOCKS_OF_PROMPT) * _CHUNK
#: Options of every engine.
ENGINE: dict[str, Any] = {
    "max_model_len": PROMPT_TOKENS + BLOCK,
    "num_gpu_blocks_override": int(PROMPTS_ON_DEVICE * _BLOCKS_OF_PROMPT) + 1,
}


def write_model(folder: Path) -> Path:
    """Write the model, a Llama with random weights; returns its folder."""
    return make_model(
        "llama",
        folder,
        hidden_size=_HIDDEN,
        intermediate_size=1408,
        num_hidden_layers=_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        initializer_range=0.02,
    )


def new_prompts(users: int, seed: int) -> list[list[int]]:
    """A prompt for each of `users`; none of another seed begins like one of these."""
    return prompts(users, length=PROMPT_TOKENS, seed=seed)
