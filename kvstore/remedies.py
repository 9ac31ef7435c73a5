"""What error messages advise."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["install", "nearest"]


def nearest(name: str, valid: Iterable[str]) -> str:
    """The remedy for a wrong `name`: the valid one that is most like it, or all of them.

    Examples
    --------
    >>> nearest("capcity", ["capacity", "name"]), nearest("x", ["capacity", "name"])
    ("did you mean 'capacity'?", 'valid: capacity, name')
    """
    names = sorted(valid)
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"valid: {', '.join(names)}"


def install(extra: str) -> str:
    """The remedy where a package is missing that comes with an `extra` of this distribution.

    Examples
    --------
    >>> install("s3")
    "pip install '.[s3]' in a clone of kvstore"
    """
    return f"pip install '.[{extra}]' in a clone of kvstore"
