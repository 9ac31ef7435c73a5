"""Copies between the engine's block tensors and host slots."""

from __future__ import annotations

from kvstore.arena import Arena
from kvstore.errors import ConfigError

from .base import Copier, Transfer
from .cpu import CpuCopier
from .layout import RowLayout

__all__ = ["Copier", "CpuCopier", "RowLayout", "Transfer", "make_copier"]


def make_copier(layout: RowLayout, arena: Arena) -> Copier:
    """The copier for the device that holds the tensors.

    Raises
    ------
    ConfigError
        There is none for that device.
    """
    kinds = {tensor.owner.device.type for tensor in layout.tensors}
    if kinds <= {"cpu"}:
        return CpuCopier(layout, arena)
    if kinds == {"cuda"}:
        from .cuda import CudaCopier  # imports torch

        return CudaCopier(layout, arena)
    raise ConfigError(
        f"KV blocks on {', '.join(sorted(kinds))} cannot be offloaded, only those on cpu or cuda"
    )
