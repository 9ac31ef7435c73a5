"""Shares of a total: how namespaces divide what their root may hold.

The books of a root say what each namespace may take; those of a namespace, too, and nothing is granted
beyond. Two books cannot be changed at once, and whoever changes them may die in between. What holds at every
moment, once the root is counted: in its books a share is no smaller than in those of the namespace. So what
the namespaces are granted together never passes the total, and a change that is lost leaves a share too large
in the root, never too small. What is there without a grant, by stores without the limit or from before the
root was counted, is covered by a share, too, whatever the total is, until room is made. The one exception is
a namespace whose books could not be read when the root was counted: its share is what is stored there.

To raise a share:

1. Read it in the namespace, stamp included.
2. Raise it in the root, as far as there is room, under a new stamp (:func:`raise_share`).
3. Enter what the root says in the namespace, if the share there is still that of step 1
   (:func:`enter_share`). Else somebody has lowered or raised it meanwhile: nothing is entered.

To lower a share to what is taken:

1. Read it in the root, stamp included, when it is at least what the namespace holds (:func:`cover`).
2. Lower it in the namespace, under a new stamp (:func:`lower_share`): raises that are under way are not
   entered.
3. Lower it in the root, if the share there is still that of step 1 (:func:`follow`). Else somebody raises it.

Each step is one change of one book. When an answer is lost and the step is repeated, the outcome is the same,
or a share in the root that is too large until it is lowered next.
"""

from __future__ import annotations

import os

from .accounting import Accounts, Share
from .limits import Free, Limits

__all__ = ["cover", "drop", "enter_share", "follow", "lower_share", "new_stamp", "raise_share"]


def new_stamp() -> str:
    """A stamp that no other share has had."""
    return os.urandom(8).hex()


def raise_share(
    directory: str, old: Share, needed: int, wanted: int, stamp: str, limits: Limits, root: Accounts
) -> Share:
    """Raise the share of `directory`, which is `old` in its own books, to `wanted` bytes, above the high
    watermark only to `needed` bytes; returns it as it is then, `old` if there is no room."""
    have = root.shares.get(directory, Share()).size
    room = limits.room(root.shared_out, 0, Free.endless())
    size = have + max(0, min(wanted - have, max(room - limits.step, min(needed - have, room))))
    if size <= old.size:
        return old
    root.shares[directory] = Share(size, stamp)
    return root.shares[directory]


def enter_share(old: Share, new: Share, accounts: Accounts) -> bool:
    """Enter a share that was raised in the root, if it is still `old`; returns whether it is `new` now."""
    if accounts.share == old:
        accounts.share = new
    return accounts.share == new


def cover(directory: str, size: int, stamp: str, root: Accounts) -> Share:
    """Make sure that the share of `directory` is at least `size` bytes, which are taken whatever the total
    is; returns it."""
    share = root.shares.get(directory, Share())
    if share.size < size or directory not in root.shares:
        share = root.shares[directory] = Share(size, stamp)
    return share


def lower_share(seen: Share, stamp: str, accounts: Accounts) -> int:
    """Lower the share to what is taken; returns its bytes. It may grow, up to what was `seen` in the root."""
    accounts.share = Share(min(accounts.taken, max(accounts.share.size, seen.size)), stamp)
    return accounts.share.size


def follow(directory: str, seen: Share, size: int, root: Accounts) -> None:
    """Lower the share of `directory` to `size` bytes, if it is still what was `seen`."""
    if root.shares.get(directory) == seen:
        root.shares[directory] = Share(size, seen.stamp)


def drop(directory: str, seen: Share, root: Accounts) -> None:
    """Forget the share of a namespace that was removed, if it is still what was `seen`."""
    if root.shares.get(directory) == seen:
        del root.shares[directory]
