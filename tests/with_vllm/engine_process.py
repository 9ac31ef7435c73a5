"""An engine with processes of its own: a program that is told on stdin what to do, and answers in JSON.

``python engine_process.py '{"model": ..., "extra": ..., "options": ...}'`` prints ``"ready"``; then each line
of input, ``answers`` or ``cached``, is about the prompts that all tests share.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tiny_engines import Engine, open_engine, prompts


def obey(engine: Engine, order: str) -> object:
    """What the engine answers to one line."""
    asked = prompts()
    return engine.answers(asked) if order == "answers" else engine.cached(asked)


def main() -> None:
    """Serve until the input ends."""
    told = json.loads(sys.argv[1])
    with open_engine(Path(told["model"]), told["extra"], **told["options"]) as engine:
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            print(json.dumps(obey(engine, line.strip())), flush=True)


if __name__ == "__main__":
    main()
