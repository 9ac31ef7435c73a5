"""Sizes and durations with units, as text and back.

Text is exact both ways: ``parse_size(format_size(n)) == n`` for every number of bytes, and the same for every
finite duration, to the last bit of the float.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

__all__ = ["format_duration", "format_size", "parse_duration", "parse_size"]

_SIZES: dict[str, int] = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTP", start=1)},
}
_SIZES_BY_LOWER = {unit.lower(): factor for unit, factor in _SIZES.items()}
_SECONDS = {
    "us": Decimal("0.000001"),
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "min": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}
_NUMBER_AND_UNIT = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)")


def parse_size(value: str | int) -> int:
    """Number of bytes that `value` names.

    Parameters
    ----------
    value : str or int
        A number of bytes, or a number with one of the units B, KB, MB, GB, TB, PB (powers of 1000) and KiB,
        MiB, GiB, TiB, PiB (powers of 1024); case does not matter.

    Returns
    -------
    int
        Bytes, at least 0.

    Raises
    ------
    ValueError
        `value` is not a size, or not a whole number of bytes.

    Examples
    --------
    >>> parse_size("64GiB"), parse_size("500MB"), parse_size("1.5 KiB"), parse_size(4096)
    (68719476736, 500000000, 1536, 4096)
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return int(value)
    match = _NUMBER_AND_UNIT.fullmatch(value.strip()) if isinstance(value, str) else None
    factor = _SIZES_BY_LOWER.get((match[2] or "B").lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"not a size: {value!r}; write a number of bytes, or a unit as in 64GiB or 500MB")
    # Integers only, because decimals and floats round a large number of bytes.
    whole, _, decimals = match[1].partition(".")
    scale: int = 10 ** len(decimals)
    size, rest = divmod(int(whole + decimals) * factor, scale)
    if rest:
        raise ValueError(f"not a whole number of bytes: {value!r}; use a smaller unit, as in 1536MiB")
    return size


def format_size(size: int) -> str:
    """`size` bytes as the shortest exact text with a unit; :func:`parse_size` gives `size` back.

    Examples
    --------
    >>> format_size(64 * 2**30), format_size(500_000_000), format_size(1537)
    ('64GiB', '500MB', '1537B')
    """
    if size < 0:
        raise ValueError(f"a size is not negative: {size}")
    exact = [(size // factor, unit) for unit, factor in _SIZES.items() if size and size % factor == 0]
    count, unit = min(exact, default=(0, "B"))
    return f"{count}{unit}"


def parse_duration(value: str | float) -> float:
    """Seconds that `value` names.

    Parameters
    ----------
    value : str, float or int
        A number of seconds, or a number with one of the units us, ms, s, min, h, d.

    Returns
    -------
    float
        Seconds, finite and at least 0.

    Raises
    ------
    ValueError
        `value` is not a duration.

    Examples
    --------
    >>> parse_duration("2s"), parse_duration("50ms"), parse_duration("1.5h"), parse_duration(0.25)
    (2.0, 0.05, 5400.0, 0.25)
    """
    seconds = math.nan
    if isinstance(value, str):
        match = _NUMBER_AND_UNIT.fullmatch(value.strip())
        factor = _SECONDS.get(match[2].lower() or "s") if match else None
        if match is not None and factor is not None:
            seconds = float(Decimal(match[1]) * factor)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value) + 0.0  # a negative zero becomes a zero
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f"not a duration: {value!r}; write seconds, or a unit as in 2s, 50ms or 10min")
    return seconds


def format_duration(seconds: float) -> str:
    """`seconds` as exact text with a unit; :func:`parse_duration` gives `seconds` back.

    Examples
    --------
    >>> format_duration(2.0), format_duration(0.05), format_duration(5400.0), format_duration(0.12345)
    ('2s', '50ms', '90min', '123.45ms')
    """
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f"a duration is finite and not negative: {seconds}")
    if seconds and seconds.is_integer():
        whole = int(seconds)
        unit = next(unit for unit in ("d", "h", "min", "s") if whole % int(_SECONDS[unit]) == 0)
        return f"{whole // int(_SECONDS[unit])}{unit}"
    # The shortest repr of a float is a decimal that reads back as the same float; shifting its point loses
    # nothing.
    shortest = Decimal(repr(abs(seconds)))
    unit = "ms" if Decimal("0.001") <= shortest < 1 else "us" if 0 < shortest < 1 else "s"
    return f"{(shortest / _SECONDS[unit]).normalize():f}{unit}"
