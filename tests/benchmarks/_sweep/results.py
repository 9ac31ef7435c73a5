"""What a sweep has found: one point for each configuration and number of users, as JSON and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec
import numpy as np

from .contender import Round

__all__ = ["Point", "Sweep", "Wait", "make_point"]


class Wait(msgspec.Struct, frozen=True):
    """Milliseconds to the first token, over all users and rounds."""

    mean: float
    p50: float
    p95: float
    p99: float


class Point(msgspec.Struct, frozen=True):
    """One configuration with one number of users.

    Attributes
    ----------
    configuration : str
    users : int
    rounds : int
        Of which `throughput` is the median; the first time that prompts are asked is not among them.
    throughput : float
        Requests per second.
    computing : float
        The same of the first time, when everything is computed.
    gain : float
        `throughput` as a multiple of `computing`.
    against : dict
        Another configuration -> throughput as a multiple of its: median over pairs of neighbouring rounds.
    wait : Wait
    sources : dict
        Source -> share of the prompts' tokens that came from there; the shares add up to 1.
    """

    configuration: str
    users: int
    rounds: int
    throughput: float
    computing: float
    gain: float
    against: dict[str, float]
    wait: Wait
    sources: dict[str, float]


class Sweep(msgspec.Struct, frozen=True):
    """All points, and where they were measured.

    Attributes
    ----------
    machine : dict
        What it was, in words: name -> words.
    prompt_tokens : int
    on_device, in_host : float
        Prompts that fit.
    points : list of Point
    """

    machine: dict[str, str]
    prompt_tokens: int
    on_device: float
    in_host: float
    points: list[Point]

    def write(self, path: Path) -> None:
        """Write as JSON."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def make_point(
    configuration: str, first: Round, rounds: Sequence[Round], others: dict[str, Sequence[Round]]
) -> Point:
    """Sum up the rounds of one configuration.

    Parameters
    ----------
    configuration : str
    first : Round
        When everything had to be computed.
    rounds : sequence of Round
    others : dict
        Another configuration -> its rounds, each a neighbour in time of the one at the same place here.
    """
    throughput = median(each.throughput for each in rounds)
    tokens = {source: sum(each.tokens[source] for each in rounds) for source in rounds[0].tokens}
    return Point(
        configuration,
        len(first.waits),
        len(rounds),
        _short(throughput),
        _short(first.throughput),
        _short(throughput / first.throughput),
        {name: _short(_ratio(rounds, theirs)) for name, theirs in others.items()},
        _wait([wait for each in rounds for wait in each.waits]),
        {source: _short(n / sum(tokens.values())) for source, n in tokens.items() if n},
    )


def _ratio(ours: Sequence[Round], theirs: Sequence[Round]) -> float:
    return median(one.throughput / other.throughput for one, other in zip(ours, theirs, strict=True))


def _wait(seconds: list[float]) -> Wait:
    parts: Any = np.percentile(seconds, (50, 95, 99))
    return Wait(*(_short(1e3 * value) for value in (fmean(seconds), *parts.tolist())))


def _short(value: float) -> float:
    """Four digits: more would only pretend."""
    return float(f"{value:.4g}")
