"""An engine with processes of its own: a program that is told on stdin what to do, and answers in JSON.

``python engine_process.py '{"model": ..., "extra": ..., "options": ...}'`` prints ``"ready"``; then each line
of input, ``answers`` or ``cached``, is about the prompts that all tests share. What follows on the line are
``kv_transfer_params`` as JSON, and then ``answers`` is about one token of each.

Ranks that wait for work spin, each on a core of its own. On some kernels ``sched_yield`` in a loop keeps
everybody else waiting for that core, up to half a minute: with as many ranks as cores, the I/O workers too.
Here they spin as they do on older Pythons, which gives the core away. Processes that are spawned import this
file, and so do the same.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import vllm.distributed.utils
from tiny_engines import Engine, open_engine, prompts

vllm.distributed.utils.USE_SCHED_YIELD = False


def obey(engine: Engine, order: str) -> object:
    """What the engine answers to one line."""
    verb, _, params = order.partition(" ")
    asked = prompts()
    if verb == "cached":
        return engine.cached(asked)
    return engine.answers(asked, tokens=1, **json.loads(params)) if params else engine.answers(asked)


def main() -> None:
    """Serve until the input ends."""
    told = json.loads(sys.argv[1])
    with open_engine(Path(told["model"]), told["extra"], **told["options"]) as engine:
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            print(json.dumps(obey(engine, line.strip())), flush=True)


if __name__ == "__main__":
    main()
