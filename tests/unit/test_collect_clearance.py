"""Making room in a root while others come and go, are at work, or are out of reach."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import pytest

from kvstore.backends import BackendContext
from kvstore.backends.posix import PosixBackend
from kvstore.collect.accounting import Accounts, Share
from kvstore.collect.places import Root
from kvstore.collect.report import Report
from kvstore.config import TierConfig
from support.object_store import Bucket
from support.roots import CHUNK, SIZE, A, B, C, Rig, ask, until_done

ONE, TWO, THREE, FOUR = (bytes([number]) * 8 for number in range(1, 5))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def hold(rig: Rig, space: str, objects: int, *, share: int = 0, counted: bool = True) -> Any:
    """Begin the books of a namespace, and take the lead there: somebody is collecting."""

    def begin(accounts: Accounts) -> None:
        accounts.size, accounts.chunks = objects * SIZE, objects
        accounts.counted, accounts.strangers = counted, int(not counted)
        accounts.share = Share(share * SIZE, "begun")

    books = rig.books_of(space)
    books.change(begin)
    assert books.take_lead()
    return books


def test_who_comes_while_the_namespaces_are_listed_keeps_its_share(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    until_done(rig.collector(A, 100 * SIZE), ask(ONE, 30))
    until_done(rig.collector(C, 100 * SIZE), ask(THREE, 66))
    directories, granted = Root.directories, []

    def directories_and_then(root: Root) -> list[str]:
        there = directories(root)
        monkeypatch.undo()
        granted.append(until_done(rig.collector(B, 100 * SIZE), ask(TWO, 4)).granted)
        return there

    monkeypatch.setattr(Root, "directories", directories_and_then)
    until_done(rig.collector(C, 100 * SIZE), Report(FOUR))  # above the high watermark
    assert granted == [4 * SIZE]
    assert rig.shares() == {A: 30, B: 4, C: 66}


def test_what_is_out_of_reach_of_its_books_counts_as_it_is_listed(rig: Rig) -> None:
    rig.write(B, *range(60))
    (rig.path / B / "accounting" / "state.json").mkdir(parents=True)  # no user can read that, not even root
    collector = rig.collector(A, 100 * SIZE)
    with pytest.raises(OSError, match="directory"):
        until_done(collector, ask(ONE, 95))
    assert until_done(collector, ask(ONE, 40)).granted == 40 * SIZE
    assert rig.shares() == {A: 40, B: 60}


def test_nobody_is_granted_anything_before_all_are_counted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.write(B, *range(60))
    enter = Root.enter

    def enter_all_but_one(root: Root, directory: str) -> AbstractContextManager[Any]:
        if directory == B:
            raise PermissionError(directory)
        return enter(root, directory)

    monkeypatch.setattr(Root, "enter", enter_all_but_one)
    collector = rig.collector(A, 100 * SIZE)
    with pytest.raises(PermissionError, match=B):
        until_done(collector, ask(ONE, 1))
    root = rig.books.read()
    assert root is not None
    assert not root.counted
    monkeypatch.undo()
    assert until_done(collector, ask(ONE, 40)).granted == 40 * SIZE
    assert rig.shares() == {A: 40, B: 60}


def test_a_namespace_that_is_being_surveyed_keeps_what_it_was_granted(rig: Rig) -> None:
    rig.write(B, 1)
    busy = hold(rig, B, 1, share=60, counted=False)
    assert until_done(rig.collector(A, 100 * SIZE), ask(ONE, 40)).granted == 40 * SIZE
    assert rig.shares() == {A: 40, B: 60}
    busy.close()


def test_an_empty_namespace_is_listed_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.write(A, 1)
    rig.backend(B)
    scan, scans = PosixBackend.scan, []

    def note_scan(backend: PosixBackend) -> Any:
        scans.append(backend)
        return scan(backend)

    monkeypatch.setattr(PosixBackend, "scan", note_scan)
    with closing(rig.total(A, 100 * SIZE)) as total:
        for _ in range(3):
            total.make_room(SIZE, math.inf)
            assert len(scans) == 2
    assert rig.shares() == {A: 1, B: 0}


def test_where_nothing_can_be_deleted_the_next_survey_does_not_look(rig: Rig) -> None:
    rig.write(B, *range(20), age=1000)
    busy = hold(rig, B, 20)
    rig.write(A, *range(10))
    collector = rig.collector(A, 30 * SIZE, most=16)
    assert until_done(collector, ask(ONE, 4)).granted == 0
    assert until_done(collector, ask(ONE, 4)).granted == 4 * SIZE
    assert len(rig.left(B)) == 20
    assert len(rig.left(A)) < 10
    busy.close()


def test_it_looks_there_again_after_a_while(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.collect.clearance._PATIENCE", 0.0)
    rig.write(B, *range(20), age=1000)
    busy = hold(rig, B, 20)
    rig.write(A, *range(10))
    collector = rig.collector(A, 30 * SIZE, most=16)
    assert until_done(collector, ask(ONE, 4)).granted == 0
    busy.close()
    assert until_done(collector, ask(ONE, 4)).granted == 4 * SIZE
    assert len(rig.left(B)) < 20
    assert len(rig.left(A)) == 10


def test_a_look_at_the_books_of_the_root_changes_nothing(rig: Rig) -> None:
    with closing(rig.total(A, 100 * SIZE)) as total:
        assert total.is_over()
    assert rig.books.read() is None


def test_namespaces_of_a_directory(rig: Rig) -> None:
    for name in (B, A, "accounting", "other"):
        (rig.path / name).mkdir()
    (rig.path / C).touch()
    with closing(Root(TierConfig(url=str(rig.path)), rig.backend(A))) as root:
        assert root.directories() == [A, B]


def test_namespaces_of_a_bucket_are_listed_by_the_client_there_is(
    moto_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("s3fs", reason="no s3fs (pip install '.[s3]')")
    from kvstore.backends._s3_client import Client
    from kvstore.backends.s3 import S3Backend

    for name in (f"{A}/namespace.json", f"{B}/file", f"{C}/file", "other/namespace.json", "accounting/file"):
        moto_bucket.client().put_object(Bucket=moto_bucket.name, Key=f"kv/{name}", Body=b"{}")
    context = BackendContext(bytes.fromhex(A), b"{}", CHUNK)
    tier = TierConfig(url=moto_bucket.url, storage_options=moto_bucket.options)
    call, calls = Client.call, []

    async def note_call(client: Client, operation: str, **arguments: Any) -> dict[str, Any]:
        calls.append((client, operation))
        return await call(client, operation, **arguments)

    with closing(S3Backend(context, moto_bucket.url, A, moto_bucket.options)) as backend:
        backend.open()
        with closing(Root(tier, backend)) as root:
            monkeypatch.setattr(Client, "call", note_call)
            assert root.directories() == [A, B, C]
        assert calls == [(backend._client, "list_objects_v2")]
