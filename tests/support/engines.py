"""The engines that tests of whole stores run on."""

from __future__ import annotations

__all__ = ["BACKGROUND", "ENGINES"]

BACKGROUND = ["threads", "processes"]
"""Those that work while the caller does something else: they have deadlines."""

ENGINES = ["inline", *BACKGROUND]
