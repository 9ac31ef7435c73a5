"""The real command line, run in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["COMMAND", "ENVIRONMENT", "Command", "Ran"]

COMMAND = [sys.executable, "-m", "kvstore"]
ENVIRONMENT = {**{k: v for k, v in os.environ.items() if k != "KVSTORE_CONFIG"}, "COLUMNS": "100"}


class Ran(NamedTuple):
    """What a command left: its exit code and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout, of a command that wrote nothing to stderr."""
        assert not self.err
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


class Command:
    """``kv("ls", url, code=0)`` runs ``kvstore ls URL`` in `folder` and checks its exit code."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, *arguments: object, code: int = 0, **variables: str) -> Ran:
        done = subprocess.run(
            [*COMMAND, *map(str, arguments)],
            cwd=self._folder,
            env={**ENVIRONMENT, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=110,
        )
        assert done.returncode == code, done
        assert "Traceback" not in done.stderr
        return Ran(done.returncode, done.stdout, done.stderr)
