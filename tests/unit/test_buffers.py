"""Payload in whatever form callers have it."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.buffers import view_of


def test_an_array_whose_numbers_have_no_letter_in_buffers_is_bytes_all_the_same() -> None:
    dates = np.array([1, 2, 3], "datetime64[s]")
    with pytest.raises(ValueError, match="cannot include dtype"):
        memoryview(dates)
    view = view_of(dates, 24)
    assert view == dates.tobytes()
    view[0:8] = (7).to_bytes(8, "little")  # no copy
    assert dates[0] == np.datetime64(7, "s")


@pytest.mark.parametrize("data", [np.array(["a", {}], object), np.zeros((4, 4))[:, ::2], 7, "text"])
def test_what_has_no_bytes_in_one_piece_is_refused(data: object) -> None:
    with pytest.raises(TypeError, match="copy it first"):
        view_of(data, 1024)  # type: ignore[arg-type]


def test_what_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="longer than a chunk"):
        view_of(bytes(9), 8)
