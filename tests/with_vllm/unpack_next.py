"""A program that fetches the Python files of a vLLM that is not installed, to compare the adapter with them.

``python unpack_next.py FOLDER``: downloads the wheel with pip; FOLDER holds what ``PYTHONPATH`` may name.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

_WHEEL = "vllm==0.33.0"


def main(folder: Path) -> None:
    """Fill `folder`, unless it is there."""
    if folder.is_dir():
        return
    with tempfile.TemporaryDirectory() as place:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*download, f"--dest={place}", _WHEEL], check=True)
        [wheel] = Path(place).glob("*.whl")
        with ZipFile(wheel) as content:
            names = [name for name in content.namelist() if name.endswith((".py", "/METADATA"))]
            content.extractall(folder, names)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
