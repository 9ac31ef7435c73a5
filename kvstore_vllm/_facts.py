"""Fields of an identity, and values in plain JSON types."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

__all__ = ["Facts", "Unrepresentable", "plain"]


class Unrepresentable(Exception):
    """A value cannot be told exactly; the message says which and why."""


class Facts:
    """Fields as they are established, and what could not be.

    Attributes
    ----------
    fields : dict
        Name -> plain value.
    unknown : list of str
        A line for each field that could not be established.
    """

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.unknown: list[str] = []

    def add(self, name: str, find: Callable[[], Any], remedy: str = "") -> None:
        """Add the field `name`, or note that it is unknown: whatever fails makes the run private, no more."""
        try:
            self.fields[name] = plain(find())
        except Exception as error:
            why = str(error) if isinstance(error, Unrepresentable) else f"{type(error).__name__}: {error}"
            line = " ".join(why.split())
            self.unknown.append(f"{name}: {line}" + (f" ({remedy})" if remedy else ""))


def plain(value: Any) -> Any:
    """`value` in types that JSON holds exactly.

    Raises
    ------
    Unrepresentable
        There is no such form: its text may differ from process to process.
    """
    if value is None or (isinstance(value, bool | str | int) and not isinstance(value, Enum)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, Set):
        return sorted((plain(item) for item in value), key=repr)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [plain(item) for item in value]
    return _of_object(value)


def _of_object(value: Any) -> Any:
    kind = type(value)
    if (kind.__module__, kind.__name__) == ("torch", "dtype"):
        return str(value).removeprefix("torch.")
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    raise Unrepresentable(f"{kind.__module__}.{kind.__qualname__} has no exact text")
