"""``kvstore warm``: fill a tier from another before traffic arrives."""

from __future__ import annotations

from typing import Annotated

import typer

from ._copying import Hottest, KeyFile, Rate, Resume, Verify, Workers, transfer, two_tiers
from ._options import Json, Namespace, StorageOptions

__all__ = ["run"]


def run(
    source: Annotated[str, typer.Option("--from", metavar="URL", help="Where the chunks are.")],
    target: Annotated[str, typer.Option("--to", metavar="URL", help="The tier to be filled.")],
    namespace: Namespace = None,
    keys: KeyFile = None,
    hottest: Hottest = None,
    rate: Rate = None,
    workers: Workers = 4,
    resume: Resume = None,
    verify: Verify = "source",
    storage_option: StorageOptions = None,
    json: Json = False,
) -> int:
    """Copy chunks to a tier from another, such as to a node's disk from a bucket: all, some, or the hottest.

    Chunks that are there already are skipped, so that a copy that was killed is simply made again. Every
    chunk is verified. Exits with 1 when some are corrupt; these are not copied.
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
