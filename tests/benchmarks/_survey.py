"""Run by ``test_bench_million.py`` in a process of its own: counts a directory, as a store's collector does.

Prints, as JSON, the objects found, the turns that it took, the longest of them in seconds, and the bytes by
which the process has grown at its largest.
"""

from __future__ import annotations

import json
import sys
import time
from resource import RUSAGE_SELF, getrusage

from kvstore.backends import create_files
from kvstore.collect.collector import Collector
from kvstore.collect.directory import DirectoryBooks
from kvstore.collect.limits import Limits
from kvstore.collect.report import Report
from kvstore.config import TierConfig
from kvstore.namespace import Namespace


def survey(root: str, namespace: Namespace) -> dict[str, float]:
    """Count what is in `root`, turn by turn, until the books know it."""
    backend = create_files(TierConfig(url=root), namespace)
    backend.open()
    books = DirectoryBooks(f"{root}/{namespace.directory}")
    collector = Collector(backend, books, Limits(1 << 50, None, None, namespace.chunk_size))
    before, turns, more = _peak(), [], True
    while more:
        started = time.perf_counter()
        answer = collector.turn(Report(b"million-"))
        turns.append(time.perf_counter() - started)
        more = answer.more
    collector.close()
    return {"chunks": answer.chunks, "turns": len(turns), "longest": max(turns), "grown": _peak() - before}


def _peak() -> int:
    """The most memory that this process has had, in bytes."""
    return getrusage(RUSAGE_SELF).ru_maxrss << 10


if __name__ == "__main__":
    root, chunk = sys.argv[1:]
    print(json.dumps(survey(root, Namespace({"model": "million"}, int(chunk)))))
