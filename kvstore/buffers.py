"""Payload that callers hand in: what counts as bytes, and copying it while other threads run."""

from __future__ import annotations

__all__ = ["Buffer", "copy", "view_of"]

Buffer = bytes | bytearray | memoryview


def view_of(data: Buffer, limit: int) -> memoryview:
    """The bytes of `data`, without a copy.

    Raises
    ------
    TypeError
        They are not contiguous, or `data` holds references to objects.
    ValueError
        There are more than `limit`.
    """
    try:
        given = _memory_of(data)
        if given.format == "O":
            raise TypeError  # references to objects are not what anybody means to store
        view = given.cast("B") if given.nbytes else memoryview(b"")
    except (TypeError, ValueError):
        raise TypeError(
            f"data must be contiguous bytes, or an array of numbers in C order, not this "
            f"{type(data).__name__}; copy it first, as with bytes() or numpy.ascontiguousarray()"
        ) from None
    if len(view) > limit:
        raise ValueError(f"data of {len(view)} bytes is longer than a chunk ({limit} bytes)")
    return view


def _memory_of(data: Buffer) -> memoryview:
    try:
        return memoryview(data)
    except ValueError:  # an array of numbers that the buffer protocol has no letter for, such as bfloat16
        if not hasattr(data, "view"):
            raise
        return memoryview(data.view("u1"))


def copy(source: memoryview, target: memoryview) -> None:
    """Copy to the start of `target`, and let other threads run meanwhile, as slice assignment would not."""
    import numpy as np  # a third of the start-up of a worker process, which has no use for it

    np.copyto(np.asarray(target)[: len(source)], np.asarray(source))
