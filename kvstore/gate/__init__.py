"""Where peers come in: the owner's side of serving, and the process that serves."""

from .gate import Gate
from .process import ServeSpec

__all__ = ["Gate", "ServeSpec"]
