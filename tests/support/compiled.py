"""Tests of the compiled part of the POSIX backend."""

from __future__ import annotations

import pytest

from kvstore.backends.compiled import why_not

__all__ = ["needs_compiled"]

#: For what is only there where a compiler was.
needs_compiled = pytest.mark.skipif(bool(why_not()), reason=f"nothing compiled here: {why_not()}")
