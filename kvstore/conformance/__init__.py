"""Finds out what a storage guarantees, and how fast it is, by using it as stores do.

The suite that backends are tested with (:mod:`kvstore.testing.backend`) asks whether the code is right; this
asks what holds at one URL, with its server, file system and client. It needs nothing but the URL: objects are
planted through the backend, in a namespace that is made for the purpose and removed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..backends import Capabilities
from ..config import TierConfig
from ._properties import PROPERTIES, Finding, examine_property
from ._speed import Latency, Speed, measure
from ._trial import Trial

__all__ = ["Finding", "Latency", "Report", "Speed", "examine"]

_CHUNK_SIZE = 1 << 20


@dataclass(frozen=True)
class Report:
    """What was found.

    Attributes
    ----------
    url : str
    namespace : str
        Directory in which it was done; it is gone.
    chunk_size : int
        Bytes.
    capabilities : Capabilities
        What the backend claims there.
    findings : tuple of Finding
        One for each property, in the order in which they were examined.
    speed : Speed or None
        None when an operation failed.
    trouble : str
        Why there are no figures.
    """

    url: str
    namespace: str
    chunk_size: int
    capabilities: Capabilities
    findings: tuple[Finding, ...]
    speed: Speed | None
    trouble: str = ""

    @property
    def ok(self) -> bool:
        """Whether everything holds that a store relies on."""
        return not any(finding.required and finding.holds is False for finding in self.findings)


def examine(
    tier: TierConfig,
    *,
    chunk_size: int = _CHUNK_SIZE,
    quick: bool = False,
    progress: Callable[[str], object] | None = None,
) -> Report:
    """Examine the storage at a tier's URL.

    Parameters
    ----------
    tier : TierConfig
    chunk_size : int
        Bytes in the chunks whose reading and writing is timed.
    quick : bool
        Fewer repetitions, and no race of processes.
    progress : callable, optional
        Gets the name of what is examined next.

    Returns
    -------
    Report

    Raises
    ------
    ConfigError, OSError
        The storage cannot be opened, or not be written to: there is nothing to examine.
    """
    tell = progress or (lambda name: None)
    with Trial(tier, chunk_size, quick) as trial:
        capabilities = trial.clients(1)[0].capabilities
        findings = []
        for wanted in PROPERTIES:
            tell(wanted.name)
            findings.append(examine_property(wanted, trial))
        tell("speed")
        try:
            speed, trouble = measure(trial), ""
        except Exception as error:  # clients of storage raise classes of their own
            speed, trouble = None, f"{type(error).__name__}: {error}"
    directory = trial.namespace.directory
    return Report(tier.url, directory, chunk_size, capabilities, tuple(findings), speed, trouble)
