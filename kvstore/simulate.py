"""What a policy would hit: the policies of the store over the references of a trace, without bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle, groupby
from os import PathLike
from typing import Any, NamedTuple

from .errors import ConfigError
from .policy import make_policy
from .remedies import install

__all__ = ["Curve", "plot", "simulate", "sweep"]


class Curve(NamedTuple):
    """Result of one policy at one capacity.

    Attributes
    ----------
    policy : str
        Its name.
    capacity : int
        Chunks.
    requests : int
        References to chunks.
    hits : int
        References to resident chunks; the first one to a chunk never is.
    hit_ratio : float
        ``hits / requests``, 0 without requests.
    """

    policy: str
    capacity: int
    requests: int
    hits: int
    hit_ratio: float


def simulate(references: Iterable[Any], policy: str, capacity: int) -> Curve:
    """Run one policy over a sequence of references.

    Parameters
    ----------
    references : iterable
        Keys, of any hashable type; every reference is to one chunk, and every miss is filled.
    policy : str
        A name in :data:`kvstore.policy.POLICIES`.
    capacity : int
        Chunks that the cache holds, at least 1.

    Raises
    ------
    ConfigError
        There is no such policy, or the capacity is below one chunk.
    """
    instance = make_policy(policy, capacity)
    access, victims, add = instance.access, instance.victims, instance.add
    misses, requests = 0, 0
    for requests, key in enumerate(references, 1):  # noqa: B007  the last one is the number of them
        if not access(key):
            if misses >= capacity:
                victims(1, None, (key,))
            misses += 1
            add(key)
    hits = requests - misses
    return Curve(policy, capacity, requests, hits, hits / requests if requests else 0.0)


def sweep(references: Iterable[Any], policies: Sequence[str], capacities: Sequence[int]) -> list[Curve]:
    """Run every policy at every capacity; parameters and errors are those of :func:`simulate`.

    Returns
    -------
    list of Curve
        By policy, then by capacity, in the order given.
    """
    for policy in policies:
        for capacity in capacities:
            make_policy(policy, capacity)  # refuses before the trace is read
    known = list(references)
    return [simulate(known, policy, capacity) for policy in policies for capacity in capacities]


def plot(curves: Iterable[Curve], path: str | PathLike[str]) -> None:
    """Draw hit ratios over capacity, one line for each policy.

    Parameters
    ----------
    curves : iterable of Curve
        As :func:`sweep` returns them.
    path : path
        Of the picture; its suffix tells the format (``.png``, ``.svg``, ``.pdf``).

    Raises
    ------
    ConfigError
        Matplotlib is not installed, or cannot write that file.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"drawing needs matplotlib: {install('plot')}") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    by_policy = groupby(sorted(curves), key=lambda curve: curve.policy)
    for (policy, group), style in zip(by_policy, cycle(("-", "--", ":"))):
        points = list(group)
        axes.plot(
            [curve.capacity for curve in points],
            [100 * curve.hit_ratio for curve in points],
            linestyle=style,
            marker="o",
            label=policy,
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("capacity (chunks)")
    axes.set_ylabel("hit ratio (%)")
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.3)
    axes.legend(title="policy")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the picture {path}: {error}") from error
