"""``kvstore copy``: what ``warm`` does, for somebody who moves a cache."""

from __future__ import annotations

from typing import Annotated

import typer

from ._copying import Hottest, KeyFile, Rate, Resume, Verify, Workers, transfer, two_tiers
from ._options import Json, Namespace, StorageOptions

__all__ = ["run"]


def run(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Where the chunks are.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The tier that gets them.")],
    namespace: Namespace = None,
    keys: KeyFile = None,
    hottest: Hottest = None,
    rate: Rate = None,
    workers: Workers = 4,
    resume: Resume = None,
    verify: Verify = "target",
    storage_option: StorageOptions = None,
    json: Json = False,
) -> int:
    """Copy a tier to another, and read back what has been written; otherwise as warm.

    Exits with 1 when chunks are corrupt; these are not copied.
    """
    return transfer(
        *two_tiers(source, target, storage_option),
        namespace=namespace,
        keys=keys,
        hottest=hottest,
        rate=rate,
        workers=workers,
        resume=resume,
        verify=verify,
        as_json=json,
    )
