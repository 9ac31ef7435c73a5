"""Units are read exactly, written exactly, and refused with the remedy."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.units import format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1024", 1024),
        ("7B", 7),
        ("64GiB", 64 * 1024**3),
        ("500MB", 500_000_000),
        ("2tib", 2 * 1024**4),
        (" 3 KiB ", 3072),
        ("1.5GiB", 3 * 1024**3 // 2),
        ("0.001KB", 1),
        ("1.000000000000001PB", 10**15 + 1),
        (12345, 12345),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "wrong", ["", "GiB", "-1", -1, "64G", "64 gigs", "1e9", "1.5B", "0.3KiB", "nan", True, 1.0, None]
)
def test_what_is_no_size_is_refused_with_a_remedy(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"64GiB|smaller unit") as caught:
        parse_size(wrong)  # type: ignore[arg-type]
    assert repr(wrong) in str(caught.value)


@given(st.integers(0, 2**80))
@example(0)
@example(1000 * 1024)
def test_every_size_survives_its_text(size: int) -> None:
    assert parse_size(format_size(size)) == size


def test_sizes_are_written_in_the_shortest_exact_way() -> None:
    sizes = [0, 1, 1023, 1024, 1000, 1000 * 1024, 2**30 + 1]
    assert [format_size(size) for size in sizes] == [
        "0B",
        "1B",
        "1023B",
        "1KiB",
        "1KB",
        "1000KiB",
        "1073741825B",
    ]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2s", 2.0),
        ("50ms", 0.05),
        ("10us", 1e-5),
        ("1.5min", 90.0),
        ("2h", 7200.0),
        ("1d", 86400.0),
        ("3", 3.0),
        (7, 7.0),
        (0.25, 0.25),
    ],
)
def test_durations(text: str | float, seconds: float) -> None:
    parsed = parse_duration(text)
    assert parsed == seconds
    assert type(parsed) is float


@pytest.mark.parametrize(
    "wrong", ["", "s", "-2s", "2 weeks", "1e3", math.nan, math.inf, -0.5, True, None, "inf"]
)
def test_what_is_no_duration_is_refused_with_a_remedy(wrong: object) -> None:
    with pytest.raises(ValueError, match="as in 2s, 50ms"):
        parse_duration(wrong)  # type: ignore[arg-type]


@given(st.floats(0, allow_infinity=False, allow_nan=False))
@example(0.0)
@example(-0.0)
@example(0.1 + 0.2)
@example(5e-324)
@example(1e300)
def test_every_duration_survives_its_text_to_the_last_bit(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


def test_durations_are_written_in_a_readable_unit() -> None:
    seconds = [0.0, 0.05, 2.0, 2.5, 5400.0, 172800.0, 1.5e-5]
    assert [format_duration(s) for s in seconds] == ["0s", "50ms", "2s", "2.5s", "90min", "2d", "15us"]


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_only_durations_are_written(wrong: float) -> None:
    with pytest.raises(ValueError, match="finite and not negative"):
        format_duration(wrong)
    with pytest.raises(ValueError, match="not negative"):
        format_size(-1)
