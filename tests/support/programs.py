"""Programs that tests run in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

__all__ = ["run"]

_ROOT = Path(__file__).parents[2]


def run(code: str, *args: object, **options: Any) -> str:
    """Output of a program, without white space around it; `options` are those of ``subprocess.run``."""
    command = [sys.executable, "-P", "-c", textwrap.dedent(code), *map(str, args)]
    done = subprocess.run(
        command, cwd=_ROOT, text=True, check=True, timeout=60, stdout=subprocess.PIPE, **options
    )
    return str(done.stdout).strip()
