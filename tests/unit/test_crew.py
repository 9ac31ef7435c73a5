"""Threads for operations that mostly wait."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from kvstore.engine.crew import Crew

#: Longest that a test waits for what must come (seconds).
PATIENCE = 20.0
HANGS = """
import threading
from kvstore.engine.crew import Crew
begun = threading.Event()
Crew(2, "hangs").map(lambda _: (begun.set(), threading.Event().wait()), [1])
begun.wait()
"""


def test_results_come_in_order_from_several_threads_at_a_time() -> None:
    crew, meet = Crew(3, "crew"), threading.Barrier(3)

    def work(number: int, factor: int) -> int:
        if number < 3:
            meet.wait(PATIENCE)  # broken unless three of them are here at a time
        return number * factor

    assert list(crew.map(work, range(20), [10] * 20)) == [10 * number for number in range(20)]
    crew.close()


def test_no_more_threads_than_there_is_work_for() -> None:
    crew = Crew(8, "few")
    assert list(crew.map(lambda _: threading.current_thread().name, [1])) == ["few"]
    assert sum(thread.name == "few" for thread in threading.enumerate()) == 1
    crew.close()


class Refused(threading.Thread):
    """A thread that the system has no room for, once `left` have been started."""

    left = 0

    def start(self) -> None:
        if not Refused.left:
            raise RuntimeError("can't start new thread")
        Refused.left -= 1
        super().start()


def test_where_threads_run_out_those_there_do_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "Thread", Refused)
    Refused.left = 2
    crew = Crew(8, "few")
    assert list(crew.map(lambda number: number + 1, range(20))) == list(range(1, 21))
    crew.close()


def test_without_any_thread_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "Thread", Refused)
    Refused.left = 0
    crew, done = Crew(8, "none"), list[int]()
    with pytest.raises(RuntimeError):
        crew.map(done.append, [1, 2])
    Refused.left = 1
    list(crew.map(done.append, [3]))
    assert done == [3]
    crew.close()


def test_an_error_is_raised_where_its_result_would_come() -> None:
    crew = Crew(2, "crew")
    results = crew.map(lambda number: 1 // number, [1, 0])
    assert next(results) == 1
    with pytest.raises(ZeroDivisionError):
        next(results)
    crew.close()


def test_closed_it_ends_its_threads() -> None:
    crew = Crew(2, "ending")
    threads = set(crew.map(lambda _: threading.current_thread(), range(8)))
    crew.close()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_a_thread_that_hangs_does_not_keep_the_interpreter() -> None:
    subprocess.run([sys.executable, "-c", HANGS], check=True, timeout=PATIENCE)
