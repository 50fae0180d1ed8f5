"""What people delete is gone within a minute or so, whichever replica deleted it, without a pass of the retention."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from makeway_quota.artifacts.base import ORPHAN_AGE
from makeway_quota.artifacts.folder import ArtifactFolder
from makeway_quota.backends.base import BackendError
from makeway_quota.history import retention as history
from makeway_quota.history.retention import Keep, Retention
from makeway_quota.store import Store, open_store
from makeway_quota.store.records import Change, SharedFiles
from makeway_quota.store.storage import contents
from makeway_quota.store.storage.contents import DELETED_AGE

LARGE = 1000


@pytest.fixture
def replicas(url: str, tmp_path: Path) -> Iterator[tuple[Store, Store]]:
    """Open the same database twice: a leader's store and that of another replica."""
    with (
        closing(open_store(url, ArtifactFolder(tmp_path / "artifacts"), LARGE)) as leader,
        closing(open_store(url, ArtifactFolder(tmp_path / "artifacts"), LARGE)) as other,
    ):
        yield leader, other


def ended(store: Store, job, id: str, *given: object) -> None:  # type: ignore[no-untyped-def]
    store.add_workload(job(id), *given, now=0.0)
    store.commit([Change(id, {"state": "failed", "ended_at": 1.0})], now=1.0)


def delete(store: Store, id: str, now: float) -> None:
    """Delete a job as a request does."""
    while store.pruning.forget_outputs_of(id, 100, now):
        pass
    assert store.pruning.forget_ended(id, now) is not None


def files(folder: Path) -> list[bytes]:
    return sorted(path.read_bytes()[:1] for path in (folder / "artifacts").glob("??/*"))


def older(folder: Path, seconds: float) -> None:
    """Have all large files been written so long ago."""
    for path in (folder / "artifacts").glob("??/*"):
        at = path.stat().st_mtime - seconds
        os.utime(path, (at, at))


async def seen(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 (the database has no event for it)
            await asyncio.sleep(0.01)


async def test_a_folder_goes_soon_wherever_its_job_was_deleted_and_no_pass_begins(
    replicas: tuple[Store, Store], job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "PROBE_SECONDS", 0.01)
    leader, other = replicas
    for id in ("a", "stuck", "b"):
        ended(leader, job, id)
    purged: list[str] = []
    tries: list[str] = []

    async def purge(id: str, team: str) -> bool:
        tries.append(id)
        if id == "stuck":
            raise BackendError("the disk is read-only")
        purged.append(id)
        return True

    term = leader.take_term("test", 0.0)
    keeper = Retention(leader, Keep(), purge, lambda: term, clock=lambda: 100.0, monotonic=lambda: 0.0, rest=0.0)
    task = asyncio.create_task(keeper.run())
    try:
        await seen(lambda: leader.pruning.last() is not None)
        first = leader.pruning.last()
        for store, id in ((other, "a"), (other, "stuck"), (leader, "b")):
            await asyncio.to_thread(delete, store, id, 50.0)
            await seen(lambda id=id: id in tries)
        await seen(lambda: purged == ["a", "b"])
        await asyncio.sleep(0.2)
        assert tries.count("stuck") == 1, "it is tried again by the next pass"
        assert leader.pruning.last() == first, "no pass began"
    finally:
        task.cancel()


async def test_large_files_go_a_minute_after_a_deletion_unless_they_are_used_again(
    replicas: tuple[Store, Store], tmp_path: Path, job
) -> None:
    leader, other = replicas
    named = {name: [("f", name.encode() * LARGE, False)] for name in "acu"}
    for name, given in named.items():
        ended(leader, job, name, given)
    leader.add_workload(job("copy"), SharedFiles("c"), now=0.0)
    leader.outputs.append(("a", 1, 0), "result", 0, b"r" * LARGE, 10**6)
    older(tmp_path, 3600)
    for name in named:
        await asyncio.to_thread(delete, other, name, 1000.0)
    assert leader.contents.clear(1000.0 + DELETED_AGE) == 0, "a submission of the same may be under way"
    assert files(tmp_path) == [b"a", b"c", b"r", b"u"]
    other.add_workload(job("again"), named["u"], now=1001.0)
    assert leader.contents.clear(1001.0 + DELETED_AGE) == 2
    assert files(tmp_path) == [b"c", b"u"]
    assert leader.files("copy")[0].data == b"c" * LARGE
    assert leader.files("again")[0].data == b"u" * LARGE
    assert leader.contents.clear(1e9) == 0
    ended(leader, job, "late", [("f", b"l" * LARGE, False)])
    delete(other, "late", 5000.0)
    assert leader.contents.clear(1.0) == 0, "it is too new by the clock of the folder, whatever the service's is"
    assert files(tmp_path) == [b"c", b"l", b"u"]
    older(tmp_path, ORPHAN_AGE + 60)
    assert leader.contents.collect(4e9).removed == 1, "then it goes as any other that has no row"


def test_a_content_that_is_removed_once_more_while_it_is_cleared_stays_noted(
    sqlite_url: str, job, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, given = open_store(sqlite_url), [("f", b"x" * contents.MIN_ARTIFACT_BYTES, False)]
    ended(store, job, "one", given)
    delete(store, "one", 100.0)
    remove = store.contents._remove_unused

    def used_meanwhile(digests: Sequence[str]) -> int:
        monkeypatch.setattr(store.contents, "_remove_unused", remove)
        gone = remove(digests)
        ended(store, job, "two", given)
        delete(store, "two", 200.0)
        return gone

    monkeypatch.setattr(store.contents, "_remove_unused", used_meanwhile)
    store.contents.clear(101.0 + DELETED_AGE)
    with store._database.read() as connection:
        assert connection.exec_driver_sql("SELECT at FROM dropped").scalars().all() == [200.0]
    store.close()


def test_a_replica_whose_clock_is_a_minute_ahead_removes_nothing_that_is_under_way(sqlite_url: str, job) -> None:
    store = open_store(sqlite_url)
    ended(store, job, "one", [("f", b"x" * contents.MIN_ARTIFACT_BYTES, False)])
    delete(store, "one", 1000.0)
    store.contents.clear(1000.0 + contents.UNDER_WAY + contents.CLOCKS_DIFFER - 1)
    with store._database.read() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM dropped").scalar() == 1
    store.close()


def test_the_notes_of_deletions_do_not_pile_up(store: Store, job) -> None:
    for number in range(5):
        ended(store, job, f"j{number}", [("f", bytes([number]) * contents.MIN_ARTIFACT_BYTES, False)])
        delete(store, f"j{number}", 100.0)
    store.contents.clear(1e9)
    with store._database.read() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM dropped").scalar_one() == 0
