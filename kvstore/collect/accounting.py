"""The accounts of a namespace: what it holds, and what each instance has been granted.

An instance may write only what it has been granted, and a grant counts as taken. So a change that gets lost
with its instance, at any moment, makes the accounts too high, never too low, and the next survey of the
namespace puts that right. Where they are kept, and how instances change them together, is the matter of
:mod:`kvstore.collect.books`.
"""

from __future__ import annotations

import msgspec

from .report import Report

__all__ = ["Accounts", "Lease", "Member", "Share", "Turnover"]

#: Seconds for which the entry of a dead instance is kept: its worker may be replaced, and report again; on
#: object storage one that has slept for a night does, too.
_KEEP = 24 * 3600.0


class Turnover(msgspec.Struct):
    """Objects created and deleted by instances, and their bytes: numbers that only grow."""

    created: int = 0
    created_bytes: int = 0
    deleted: int = 0
    deleted_bytes: int = 0


class Member(Turnover):
    """The entry of one instance.

    `claimed` bytes are granted and not reported as created; `unsure` deletions may have deleted anything;
    `gone` is the time at which it was found dead, 0 while it lives; `seen` that of its last report, on object
    storage only; `capacity` is what it keeps to, 0 for none.
    """

    claimed: int = 0
    capacity: int = 0
    unsure: int = 0
    gone: float = 0.0
    seen: float = 0.0


class Lease(msgspec.Struct, frozen=True):
    """Who collects, on object storage.

    It ends when `beat` has not changed for `seconds`, by the watch of whoever looks; `holder` is empty when
    nobody collects. `change` is the random name of the last change that the holder has made.
    """

    holder: str = ""
    beat: int = 0
    seconds: float = 0.0
    change: str = ""


class Share(msgspec.Struct, frozen=True):
    """What a namespace may take of the total of its root: `size` bytes. `stamp` is another one after each
    change; see :mod:`kvstore.collect.shares`."""

    size: int = 0
    stamp: str = ""


class Accounts(msgspec.Struct):
    """What the books say.

    Attributes
    ----------
    size, chunks : int
        Bytes on storage, and objects.
    counted : bool
        Whether a survey stands behind them.
    doubtful : bool
        Whether an instance has died with a grant in hand, or has deleted it knows not what: a survey has to
        come before the next eviction.
    deleting : bool
        Whether a collector is at work: what it has deleted is entered when it pauses.
    oldest : float
        No object was used last before this time (seconds since the epoch).
    turnover : Turnover
        Of all instances there ever were.
    strangers : int
        How many instances that the books did not know have reported objects that they had created before: a
        survey that was under way then may have missed some.
    lease : Lease
        Who collects, on object storage; in directories a lock says so.
    share : Share
        Of the namespace.
    shares : dict
        In the books of a root, and only there: directory of a namespace -> its share.
    members : dict
        Name of an instance in hex -> its entry.
    """

    size: int = 0
    chunks: int = 0
    counted: bool = False
    doubtful: bool = False
    deleting: bool = False
    oldest: float = 0.0
    turnover: Turnover = msgspec.field(default_factory=Turnover)
    strangers: int = 0
    lease: Lease = Lease()
    share: Share = Share()
    shares: dict[str, Share] = {}
    members: dict[str, Member] = {}

    @property
    def claimed(self) -> int:
        """Bytes granted to all instances."""
        return sum(member.claimed for member in self.members.values())

    @property
    def taken(self) -> int:
        """Bytes on storage, or granted."""
        return self.size + self.claimed

    @property
    def shared_out(self) -> int:
        """Bytes of all shares, in the books of a root."""
        return sum(share.size for share in self.shares.values())

    @property
    def capacities(self) -> set[int]:
        """What living instances keep to."""
        return {member.capacity for member in self.members.values() if member.capacity and not member.gone}

    @property
    def average(self) -> int:
        """Bytes of an object, on average."""
        return self.size // max(1, self.chunks)

    def enter(self, report: Report) -> Member:
        """Take over what an instance reports; returns its entry."""
        name = report.instance.hex()
        member = self.members.get(name) or self._admit(name, report)
        for field in Turnover.__struct_fields__:
            grown = max(0, getattr(report, field) - getattr(member, field))
            setattr(member, field, getattr(report, field))
            setattr(self.turnover, field, getattr(self.turnover, field) + grown)
            part = "size" if field.endswith("bytes") else "chunks"
            self._change(part, grown if field.startswith("created") else -grown)
        self.doubtful = self.doubtful or report.unsure > member.unsure
        member.unsure = report.unsure
        member.claimed = report.claimed
        member.gone = 0.0
        return member

    def _admit(self, name: str, report: Report) -> Member:
        """Make the entry of an instance that is not known.

        It is new, or was forgotten, or the books were lost. How much of what it reports they contain cannot
        be told: nothing is added and nothing subtracted, and if it has created objects, a survey has to come
        before the next grant.
        """
        past = {field: getattr(report, field) for field in Turnover.__struct_fields__}
        self.doubtful = self.doubtful or any(past.values())
        if report.created:
            self.counted = False
            self.strangers += 1
        self.members[name] = Member(**past)
        return self.members[name]

    def grant(self, report: Report, size: int) -> None:
        """An instance that has reported may write `size` bytes."""
        self.members.setdefault(report.instance.hex(), Member()).claimed += size

    def removed(self, chunks: int, size: int) -> None:
        """The collector has deleted so much."""
        self._change("chunks", -chunks)
        self._change("size", -size)

    def bury(self, name: str, now: float) -> None:
        """An instance is dead: what it was granted may have been written."""
        member = self.members[name]
        if member.claimed:
            self.doubtful = True
            self.size += member.claimed
            member.claimed = 0
        member.gone = member.gone or now
        if now - member.gone > _KEEP:
            del self.members[name]

    def reconcile(self, chunks: int, size: int, since: Turnover, strangers: int) -> None:
        """A survey has seen so much, while the turnover went on from `since`, and strangers from so many.

        What came or went meanwhile may have been seen or not, which gives bounds; books within them stay.
        """
        created = self.turnover.created_bytes - since.created_bytes
        deleted = self.turnover.deleted_bytes - since.deleted_bytes
        self.size = min(max(self.size, size - deleted - self.claimed, 0), size + created)
        created = self.turnover.created - since.created
        deleted = self.turnover.deleted - since.deleted
        writing = sum(1 for member in self.members.values() if member.claimed)
        slack = deleted + (self.claimed // max(1, self.average) if writing else 0)
        self.chunks = min(max(self.chunks, chunks - slack, 0), chunks + created)
        self.counted, self.doubtful = strangers == self.strangers, False

    def _change(self, name: str, by: int) -> None:
        setattr(self, name, max(0, getattr(self, name) + by))
