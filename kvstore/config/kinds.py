"""Kinds of option values: how each is read from text or Python, and written again."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..address import Address, read_hosts
from ..remedies import nearest
from ..units import format_duration, format_size, parse_duration, parse_size

__all__ = [
    "AUTO",
    "CPUS",
    "HOSTS",
    "LATER",
    "MODE",
    "NAME",
    "SERVE",
    "SIZE",
    "TIMEOUT",
    "Kind",
    "choice",
    "count",
    "switch",
]


class Kind(NamedTuple):
    """How values of one kind are read and written.

    ``parse`` takes text or Python and raises ``ValueError`` with the remedy; ``format`` gives the text of a
    URL, ``plain`` what stands in JSON or TOML.
    """

    parse: Callable[[Any], Any]
    format: Callable[[Any], str]
    plain: Callable[[Any], Any]


def count(low: int, high: int) -> Kind:
    """Whole numbers from `low` to `high`."""

    def parse(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,9}", value):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"not a whole number from {low} to {high}: {value!r}")
        return value

    return Kind(parse, str, int)


def choice(*words: str) -> Kind:
    """One of `words`."""

    def parse(value: object) -> str:
        if value not in words:
            remedy = nearest(value, words) if isinstance(value, str) else f"valid: {', '.join(words)}"
            raise ValueError(f"not a choice: {value!r}; {remedy}")
        return str(value)

    return Kind(parse, str, str)


def switch(true: str, false: str) -> Kind:
    """Booleans, written with the two words given; on, off, true and false are all read."""
    words: dict[object, bool] = {"on": True, "true": True, "off": False, "false": False}

    def parse(value: object) -> bool:
        found = value if isinstance(value, bool) else words.get(value) if isinstance(value, str) else None
        if found is None:
            raise ValueError(f"neither {true} nor {false}: {value!r}")
        return found

    return Kind(parse, lambda value: true if value else false, bool)


def _parse_timeout(value: str | float) -> float:
    seconds = parse_duration(value)
    if seconds == 0:
        raise ValueError("a timeout is more than zero")
    return seconds


def _parse_name(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", value):
        raise ValueError(f"not a name: {value!r}; use 1 to 64 letters, digits, '-' and '_'")
    return value


def _parse_serve(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"not an address: {value!r}")
    return str(Address.parse(value))


def _parse_mode(value: object) -> int:
    if isinstance(value, str) and re.fullmatch(r"(0o)?[0-7]{3,4}", value):
        value = int(value.removeprefix("0o"), 8)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 0o777:
        raise ValueError(f"not a file mode: {value!r}; write it in octal as text")
    if value & 0o600 != 0o600:
        raise ValueError(f"the owner must be able to read and write: {value:04o}")
    return value


def _format_mode(value: int) -> str:
    return f"{value:04o}"


def _parse_cpus(value: object) -> tuple[int, ...]:
    cpus = value.split(",") if isinstance(value, str) else value
    if not isinstance(cpus, Sequence) or not cpus:
        raise ValueError(f"not a list of CPU numbers: {value!r}")
    return tuple(sorted({_CPU.parse(cpu) for cpu in cpus}))


def _format_cpus(value: tuple[int, ...]) -> str:
    return ",".join(map(str, value))


def _parse_hosts(value: object) -> tuple[str, ...]:
    hosts = value.split(",") if isinstance(value, str) else value
    if not isinstance(hosts, Sequence) or not hosts:
        raise ValueError(f"not a list of hosts: {value!r}")
    return read_hosts(hosts)


def _format_hosts(value: tuple[str, ...]) -> str:
    return ",".join(value).replace(":", "%3A")  # in a URL "::" would begin another component


_CPU = count(0, 65535)

SIZE = Kind(parse_size, format_size, format_size)
TIMEOUT = Kind(_parse_timeout, format_duration, format_duration)
NAME = Kind(_parse_name, str, str)
SERVE = Kind(_parse_serve, str, str)
MODE = Kind(_parse_mode, _format_mode, _format_mode)
CPUS = Kind(_parse_cpus, _format_cpus, list)
HOSTS = Kind(_parse_hosts, _format_hosts, list)
AUTO = choice("auto", "on", "off")
LATER = Kind(str, str, str)
"""Values of options that are not available yet; nothing reads them."""
