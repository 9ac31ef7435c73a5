"""The sweep itself: more and more users, and all configurations in turns with each number of them."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import vllm

from .configurations import NOTHING, VLLM
from .contender import Contender, Round
from .geometry import new_prompts
from .results import Point, make_point

__all__ = ["Advance", "describe_machine", "measure", "run_sweep", "work_of"]

#: Rounds after the first one: at least so many, and at least so many requests.
_ROUNDS, _REQUESTS = 5, 24

#: Told how many requests have just been answered, and by whom.
Advance = Callable[[int, str], None]


def run_sweep(contenders: Mapping[str, Contender], users: Sequence[int], advance: Advance) -> list[Point]:
    """Measure all `contenders` with each number of `users`.

    Parameters
    ----------
    contenders : mapping
        Name of the configuration -> its engine.
    users : sequence of int
    advance : callable
        Hears of :func:`work_of` requests in all.
    """
    return [point for count in users for point in measure(contenders, count, advance)]


def work_of(contenders: int, users: Sequence[int]) -> int:
    """Requests of a sweep."""
    return contenders * sum(count * (_rounds(count) + 1) for count in users)


def measure(
    contenders: Mapping[str, Contender], users: int, advance: Advance = lambda count, name: None
) -> list[Point]:
    """Ask each of `contenders` for the same new prompts, one for each user, again and again, in turns.

    In the first round everything has to be computed.

    Parameters
    ----------
    contenders : mapping
        Name of the configuration -> its engine.
    users : int
    advance : callable, optional
    """
    prompts = new_prompts(users, seed=users)
    rounds: dict[str, list[Round]] = {name: [] for name in contenders}
    for number in range(_rounds(users) + 1):
        order = list(contenders) if number % 2 == 0 else list(reversed(contenders))
        for name in order:
            rounds[name].append(contenders[name].ask(prompts))
            advance(users, f"{users} users, {name}")
    points = []
    for name, (first, *again) in rounds.items():
        others = {other: rounds[other][1:] for other in (NOTHING, VLLM) if other in rounds and other != name}
        points.append(make_point(name, first, again, others))
    return points


def _rounds(users: int) -> int:
    return max(_ROUNDS, -(-_REQUESTS // users))


def describe_machine() -> dict[str, str]:
    """What this machine is, and what it does at the moment, in words."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    processor = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor[0].partition(":")[2].strip() if processor else platform.machine(),
        "cores": str(os.cpu_count()),
        "memory": f"{memory / 2**30:.0f} GiB",
        "system": f"Linux {platform.release().partition('-')[0]}, Python {platform.python_version()}",
        "engine": f"vLLM {vllm.__version__.partition('+')[0]}, torch {torch.__version__.partition('+')[0]}",
        "load before": f"{os.getloadavg()[0]:.1f}",
    }
