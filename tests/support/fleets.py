"""Fleets over a directory and over a bucket, which know what is stored there and who collects."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from kvstore.collect.accounting import Accounts
from kvstore.collect.directory import LEAD, DirectoryBooks

from .fleet import CAPACITY, Fleet
from .object_store import Bucket

__all__ = ["STEP", "TIMEOUT", "TOTAL", "BucketFleet", "DirectoryFleet"]

STEP = CAPACITY // 20
"""Of the watermarks."""
TIMEOUT = 2
"""Of a tier in a bucket, in seconds; a lease lasts for four times as long."""
TOTAL: dict[str, Any] = {"capacity": None, "total": CAPACITY}
"""Options of a tier whose namespaces together may take as much as one alone does otherwise."""


class DirectoryFleet(Fleet):
    """A fleet over a directory; with the options of :data:`TOTAL`, one that shares the total of its root."""

    def __init__(self, folder: Path, options: dict[str, Any] | None = None) -> None:
        self.root = folder / "kv"
        self.root.mkdir()
        super().__init__({"url": f"file://{self.root}", **(options or {})}, folder)

    @property
    def space(self) -> Path:
        """The directory with the books: the root, or its only namespace."""
        return self.root if "total" in self.tier else next(self.root.iterdir())

    def used(self) -> int:
        return sum(path.stat().st_size for path in self.root.rglob("*.kv"))

    def leader(self) -> int | None:
        """Who has the lock of the collector, by what the kernel says."""
        try:
            inode = os.stat(f"{self.space}/accounting/{LEAD}").st_ino
        except (FileNotFoundError, StopIteration):
            return None
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if "->" not in fields and fields[1] == "FLOCK" and int(fields[5].split(":")[-1]) == inode:
                return int(fields[4])
        return None

    def accounts(self) -> Accounts:
        """What the books say."""
        accounts = DirectoryBooks(str(self.space)).read()
        assert accounts is not None
        return accounts

    def check(self) -> None:
        """The limit holds."""
        self.look()
        assert self.fullest <= CAPACITY


class BucketFleet(Fleet):
    """A fleet over a bucket; with the options of :data:`TOTAL`, one that shares the total of its root."""

    def __init__(self, bucket: Bucket, folder: Path, options: dict[str, Any] | None = None) -> None:
        self._bucket = bucket
        self._client = bucket.client()
        tier = {
            "url": bucket.url,
            "storage_options": bucket.options,
            "timeout": f"{TIMEOUT}s",
            "concurrency": 4,
            "required": False,  # when many start at once it may take longer than that
            **(options or {}),
        }
        super().__init__(tier, folder)

    def used(self) -> int:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket.name)
        rows = (row for page in pages for row in page.get("Contents", []))
        return sum(row["Size"] for row in rows if row["Key"].endswith(".kv"))

    def leader(self) -> int | None:
        """Who has the lease, by what the books say."""
        holder = self.accounts().lease.holder
        return int(holder.split("-")[-2]) if holder else None

    def accounts(self) -> Accounts:
        """What the books say."""
        state = "kv/accounting/state.json"
        if "total" not in self.tier:
            (state,) = (name for name in self._bucket.names("kv/") if name.endswith("/state.json"))
        data = self._client.get_object(Bucket=self._bucket.name, Key=state)["Body"].read()
        return msgspec.json.decode(data, type=Accounts)

    def check(self) -> None:
        """The limit holds, but for what got there with its answer lost."""
        self.look()
        assert self.fullest <= CAPACITY + STEP
