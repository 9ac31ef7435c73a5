"""The options of a tier and the settings of a store, as data.

Everything that knows an option by name reads these tables: parsing, formatting, defaults, error messages, the
documentation and the command line's help.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..remedies import nearest
from .kinds import (
    AUTO,
    CPUS,
    HOSTS,
    LATER,
    MODE,
    NAME,
    SERVE,
    SIZE,
    TIMEOUT,
    Kind,
    choice,
    count,
    switch,
)

__all__ = ["OPTIONS", "SETTINGS", "Option", "find_option"]

_CREDENTIAL = re.compile(r"secret|token|passw|pwd|credential|signature|auth|key|^sas|^sig$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option: what it takes and where it is valid.

    Attributes
    ----------
    name : str
    kind : Kind
        Its functions read a value and write it.
    default : object
        None where there is no value unless one is given.
    example : str
        A valid value as text.
    help : str
        One line.
    tiers : str
        ``"every"`` tier, the ``"host"`` tier, any ``"secondary"`` tier, or secondary tiers of some schemes,
        such as ``"file"`` or ``"file s3"``; ``"store"`` for settings.
    not_for : tuple of str
        Schemes that do not take it although `tiers` says so.
    available : bool
        False for options that are planned; they are refused by name.
    """

    name: str
    kind: Kind
    default: Any = None
    example: str = ""
    help: str = ""
    tiers: str = "secondary"
    not_for: tuple[str, ...] = ()
    available: bool = True

    def parse(self, value: object, where: str) -> Any:
        """Read `value`, text or Python.

        Raises
        ------
        ConfigError
            It is not valid; the message names the option, `where` it stands, and an example.
        """
        if value is None and self.default is None:
            return None
        try:
            return self.kind.parse(value)
        except ValueError as error:
            raise ConfigError(
                f"{where}: {self.name}: {error} (example: {self.name}={self.example})"
            ) from None

    def format(self, value: Any) -> str:
        """`value` as text, as it stands in a URL."""
        return self.kind.format(value)

    def plain(self, value: Any) -> Any:
        """`value` as it stands in a dict or in TOML."""
        return self.kind.plain(value)

    def applies_to(self, scheme: str) -> bool:
        """Whether a tier of this scheme takes the option."""
        group = "host" if scheme == "ram" else "secondary"
        return scheme not in self.not_for and not {"every", scheme, group}.isdisjoint(self.tiers.split())


def find_option(name: str, scheme: str, where: str) -> Option:
    """The option `name` for a tier of the given scheme.

    Raises
    ------
    ConfigError
        There is none, it is not for this scheme, or it is not available yet. Values are never repeated,
        because a misplaced one can be a secret.
    """
    option = OPTIONS.get(name)
    if option is None:
        if _CREDENTIAL.search(name):
            raise ConfigError(
                f"{where}: {name!r} looks like a credential; pass it in storage_options or the environment"
            )
        valid = [other.name for other in OPTIONS.values() if other.available and other.applies_to(scheme)]
        raise ConfigError(f"{where}: unknown option {name!r}; {nearest(name, valid)}")
    if not option.available:
        raise ConfigError(f"{where}: the option {name!r} is not available yet")
    if scheme in option.not_for:
        raise ConfigError(f"{where}: {name!r} is no option of {scheme}://")
    if not option.applies_to(scheme):
        takers = {"host": "the host tier (ram://)", "secondary": "secondary tiers"}
        schemes = " and ".join(f"{name}://" for name in option.tiers.split())
        taker = takers.get(option.tiers, f"{schemes} tiers")
        raise ConfigError(f"{where}: {name!r} is an option of {taker}, not of {scheme}://")
    return option


def _table(*rows: Option) -> dict[str, Option]:
    return {row.name: row for row in rows}


OPTIONS: dict[str, Option] = _table(
    Option(
        name="name",
        kind=NAME,
        default="",
        example="cold",
        tiers="every",
        help="Name in statistics, events and errors; by default 'host', or the scheme and a number.",
    ),
    Option(
        name="capacity",
        kind=SIZE,
        example="64GiB",
        tiers="every",
        not_for=("peer",),
        help="Most bytes that the tier holds; required for the host tier, no limit by default elsewhere.",
    ),
    Option(
        name="policy",
        kind=choice("lru", "arc", "priority"),
        default="lru",
        example="arc",
        tiers="host",
        help="Which chunks leave host memory first.",
    ),
    Option(
        name="pin",
        kind=AUTO,
        default="auto",
        example="off",
        tiers="host",
        help="Whether host memory is pinned for device copies; auto pins where there is a device.",
    ),
    Option(
        name="serve",
        kind=SERVE,
        example="tcp://127.0.0.1:5710",
        tiers="host",
        help="Address at which peers may read host memory; without a host it is the loopback interface.",
    ),
    Option(
        name="transport",
        kind=choice("auto", "zmq", "nixl"),
        default="auto",
        example="zmq",
        tiers="ram peer",
        help="How chunks come from peers, on both sides; auto takes NIXL where both have it, else TCP.",
    ),
    Option(
        name="write",
        kind=choice("through", "on-evict", "off"),
        default="through",
        example="on-evict",
        not_for=("peer",),
        help="When chunks are written to the tier: at once, before they leave host memory, or never.",
    ),
    Option(
        name="read",
        kind=switch("on", "off"),
        default=True,
        example="off",
        help="Whether chunks are read from the tier.",
    ),
    Option(
        name="timeout",
        kind=TIMEOUT,
        default=10.0,
        example="2s",
        help="Deadline of every operation.",
    ),
    Option(
        name="retries",
        kind=count(0, 100),
        default=2,
        example="3",
        help="How often an operation that failed is repeated, where that may help.",
    ),
    Option(
        name="workers",
        kind=count(1, 1024),
        default=2,
        example="4",
        help="Threads or processes that serve the tier.",
    ),
    Option(
        name="concurrency",
        kind=count(1, 4096),
        default=16,
        example="32",
        help="Operations that one worker of a remote tier has under way at once.",
    ),
    Option(
        name="required",
        kind=switch("true", "false"),
        default=True,
        example="false",
        help="Whether opening fails when the tier cannot be reached; if not, it is down until it answers.",
    ),
    Option(
        name="min_free",
        kind=SIZE,
        example="50GiB",
        tiers="file",
        help="Bytes of the file system that are left free, and the same share of its inodes.",
    ),
    Option(
        name="ttl",
        kind=TIMEOUT,
        example="7d",
        tiers="file s3 s3a",
        help="How long a chunk is kept that nobody uses.",
    ),
    Option(
        name="total",
        kind=SIZE,
        example="10TiB",
        tiers="file s3 s3a",
        help="Most bytes that all namespaces of the tier take together.",
    ),
    Option(
        name="durability",
        kind=choice("none", "data", "full"),
        default="none",
        example="data",
        tiers="file",
        help="What is synced before a chunk counts as written: nothing, its data, or its directory as well.",
    ),
    Option(
        name="direct",
        kind=AUTO,
        default="auto",
        example="on",
        tiers="file",
        help="Whether files bypass the page cache; auto does so where it works and helps.",
    ),
    Option(
        name="mode",
        kind=MODE,
        default=0o600,
        example="0640",
        tiers="file",
        help="Permissions of files, in octal; directories may also be entered by those who may read.",
    ),
    Option(
        name="peers",
        kind=count(1, 64),
        default=8,
        example="16",
        tiers="peer",
        help="Of `peer://` without an address: peers, named by requests, that are connected at a time.",
    ),
    Option(
        name="allow",
        kind=HOSTS,
        default=("loopback",),
        example="10.0.0.0/16,*.svc.cluster.local",
        tiers="peer",
        help="Of `peer://` without an address: hosts that requests may name, as names, `*.domain`, addresses "
        "or networks; `loopback` is this machine, `any` is every host.",
    ),
    Option(name="admit", kind=LATER, available=False),
    Option(name="min_priority", kind=LATER, available=False),
)

SETTINGS: dict[str, Option] = _table(
    Option(
        name="chunk_size",
        kind=SIZE,
        default=2 * 2**20,
        example="2MiB",
        tiers="store",
        help="Largest payload of a chunk.",
    ),
    Option(
        name="engine",
        kind=choice("threads", "processes", "inline"),
        default="threads",
        example="processes",
        tiers="store",
        help="What executes transfers: threads, worker processes, or the caller itself.",
    ),
    Option(
        name="nice",
        kind=count(-20, 19),
        example="5",
        tiers="store",
        help="Scheduling priority of the workers; lower values go first.",
    ),
    Option(
        name="affinity",
        kind=CPUS,
        example="0,1",
        tiers="store",
        help="CPUs that the workers run on.",
    ),
)
