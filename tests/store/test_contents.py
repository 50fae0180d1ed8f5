"""Large files are kept outside the database: whole or not at all, and no longer than a row needs them."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from makeway_quota.artifacts.base import ORPHAN_AGE, ContentUnreadable, StoredContent, read_whole
from makeway_quota.artifacts.folder import ArtifactFolder
from makeway_quota.store import Store, StoreError, open_store
from makeway_quota.store.errors import FilesUnavailable, FileUnreadable
from makeway_quota.store.records import Change, SharedFiles
from makeway_quota.store.tables import blobs
from sqlalchemy import func, select

LARGE = 1000
BIG = b"w" * LARGE
BUNDLE = [("big.bin", BIG, False), ("train.py", b"print(1)", True)]
NOW = time.time()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "large" / "artifacts"


@pytest.fixture
def store(url: str, folder: Path) -> Iterator[Store]:
    """Open a store with a folder, on each of the databases."""
    opened = open_store(url, ArtifactFolder(folder), LARGE)
    yield opened
    opened.close()


def contents(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("??/*") if path.is_file())


def in_database(store: Store) -> int:
    """Return the bytes of all contents in the database."""
    with store._database.read() as connection:
        return int(connection.execute(select(func.sum(func.length(blobs.c.data)))).scalar_one() or 0)


def age(path: Path, seconds: float) -> None:
    os.utime(path, (NOW - seconds, NOW - seconds))


def end(store: Store, *ids: str) -> None:
    """Remove ended workloads, as retention would."""
    store.commit([Change(id, {"state": "failed", "ended_at": 1.0}) for id in ids], now=1.0)
    store.pruning.forget_workloads(2.0, 10)
    store.pruning.forget_blobs([digest for digest, _ in store.pruning.orphans("", 100)[0]], NOW)


def test_large_files_are_outside_and_read_back_whole(store: Store, folder: Path, job) -> None:
    store.add_workload(job("j1"), BUNDLE, now=0.0)
    store.add_workload(job("j2"), [("same.bin", BIG, False)], now=0.0)
    store.add_workload(job("j3"), SharedFiles("j1"), now=0.0)
    [path] = contents(folder)
    assert path.read_bytes() == BIG
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert in_database(store) == len(b"print(1)")
    for id in ("j1", "j3"):
        assert [tuple(file) for file in store.files(id)] == BUNDLE
    assert store.files("j2")[0].data == BIG


def test_contents_go_when_no_workload_refers_to_them(store: Store, folder: Path, job) -> None:
    store.add_workload(job("j1"), BUNDLE, now=0.0)
    store.add_workload(job("j2"), BUNDLE, now=0.0)
    [path] = contents(folder)
    age(path, 2 * ORPHAN_AGE)
    end(store, "j1")
    assert store.contents.collect(NOW) == (0, 1, LARGE), "j2 has it still"
    end(store, "j2")
    assert store.contents.collect(NOW) == (1, 0, 0)
    assert contents(folder) == []


def test_what_may_be_about_to_get_a_row_stays(store: Store, folder: Path, job) -> None:
    store.contents.keep(BUNDLE)
    (folder / "77").mkdir()
    (folder / "77" / ".new-broken").write_bytes(b"half")
    for path in contents(folder):
        age(path, ORPHAN_AGE - 60)
    assert store.contents.collect(NOW).removed == 0
    for path in contents(folder):
        age(path, ORPHAN_AGE + 60)
    store.contents.keep(BUNDLE)  # a later submission of the same content
    assert store.contents.collect(NOW).removed == 1, "the rest of a broken write goes"
    store.add_workload(job("j1"), BUNDLE, now=0.0)
    assert store.files("j1")[0].data == BIG


def test_a_write_that_fails_leaves_nothing_and_takes_no_submission(
    store: Store, folder: Path, job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("makeway_quota.artifacts.folder.os.fsync", full)
    with pytest.raises(StoreError, match="No space left on device"):
        store.add_workload(job("j1"), BUNDLE, now=0.0)
    monkeypatch.undo()
    assert contents(folder) == []
    assert store.workload("j1") is None
    answers = store.add_workloads([(job("j2"), BUNDLE)], now=0.0)
    assert [getattr(answer, "id", None) for answer in answers] == ["j2"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.unlink(), "missing"),
        (lambda path: path.write_bytes(b"x" * LARGE), "damaged"),
        (lambda path: path.write_bytes(b"w"), "damaged"),
    ],
)
def test_a_content_that_is_lost_is_named_and_mended_by_the_next_submission(
    store: Store, folder: Path, job, damage, said: str
) -> None:
    store.add_workload(job("j1"), BUNDLE, now=0.0)
    [path] = contents(folder)
    damage(path)
    with pytest.raises(FileUnreadable, match=rf"“big\.bin”.*{said}"):
        store.files("j1")
    store.add_workload(job("j2"), BUNDLE, now=0.0)
    assert store.files("j1")[0].data == store.files("j2")[0].data == BIG


def test_a_folder_that_is_away_loses_no_content_and_takes_none(store: Store, folder: Path, job) -> None:
    store.add_workload(job("j1"), BUNDLE, now=0.0)
    store.contents.probe()
    assert store.contents.failure() is None
    away = folder.rename(folder.with_name("away"))
    for mount_point in (False, True):
        if mount_point:
            folder.mkdir()  # as where nothing is mounted
        with pytest.raises(FilesUnavailable, match="cannot be read now"):
            store.files("j1")
        with pytest.raises(StoreError, match="not there or not mounted"):
            store.add_workload(job("j2"), BUNDLE, now=0.0)
        with pytest.raises(OSError, match="not mounted"):
            store.contents.collect(NOW)
        store.contents.probe()
        assert "not mounted" in (store.contents.failure() or "")
    assert list(folder.iterdir()) == [], "nothing is written where nothing is mounted"
    folder.rmdir()
    away.rename(folder)
    store.contents.probe()
    assert store.contents.failure() is None
    assert store.files("j1")[0].data == BIG


def test_a_content_that_cannot_be_read_now_is_not_lost(store: Store, folder: Path, job) -> None:
    store.add_workload(job("j1"), BUNDLE, now=0.0)
    [path] = contents(folder)
    path.unlink()
    path.mkdir()
    with pytest.raises(FilesUnavailable, match=r"big\.bin.*Is a directory"):
        store.files("j1")


def test_a_store_is_not_opened_without_the_folder_that_its_rows_refer_to(
    store: Store, url: str, folder: Path, job
) -> None:
    open_store(url, ArtifactFolder(folder.with_name("other")), LARGE).close()
    assert (folder.with_name("other") / "lock").is_file(), "no row refers to a content yet"
    store.add_workload(job("j1"), BUNDLE, now=0.0)
    shutil.rmtree(folder)
    with pytest.raises(StoreError, match="not there or not mounted; mount or restore it"):
        open_store(url, ArtifactFolder(folder), LARGE)
    assert not folder.exists()
    folder.mkdir()
    (folder / "lock").touch()
    open_store(url, ArtifactFolder(folder), LARGE).close()


def test_a_clock_that_is_ahead_removes_nothing_young(store: Store, folder: Path) -> None:
    store.contents.keep(BUNDLE)
    assert store.contents.collect(NOW + 10 * ORPHAN_AGE).removed == 0, "the folder's clock stamps its files"
    [path] = contents(folder)
    age(path, 2 * ORPHAN_AGE)
    assert store.contents.collect(NOW - 10 * ORPHAN_AGE).removed == 0, "the ages have to have passed here, too"
    assert store.contents.collect(NOW).removed == 1


def test_a_write_that_ends_during_a_pass_does_not_end_it(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("77", "88"):
        (folder / name).mkdir()
        (folder / name / ".new-part").write_bytes(b"half")
        age(folder / name / ".new-part", 2 * ORPHAN_AGE)
    list_pages = ArtifactFolder.list_pages

    def ends(self: ArtifactFolder) -> Iterator[list[StoredContent]]:
        for part in list_pages(self):
            path = folder / part[0].place
            path.rename(path.with_name("0" * 64))
            yield part

    monkeypatch.setattr(ArtifactFolder, "list_pages", ends)
    assert store.contents.collect(NOW).removed == 0
    assert len(contents(folder)) == 2


def test_a_database_that_is_opened_without_its_folder_says_so(postgres: str, tmp_path: Path, job) -> None:
    from postgres import empty_database

    url = empty_database(postgres)
    first = open_store(url, ArtifactFolder(tmp_path / "artifacts"), LARGE)
    first.add_workload(job("j1"), BUNDLE, now=0.0)
    first.close()
    other = open_store(url)
    with pytest.raises(FileUnreadable, match="MAKEWAY_ARTIFACTS_DIR, MAKEWAY_ARTIFACTS_S3"):
        other.files("j1")
    other.add_workload(job("j2"), [("other.bin", BIG + b"x", False)], now=0.0)
    assert other.files("j2")[0].data == BIG + b"x", "PostgreSQL keeps large files itself"
    assert other.contents.collect(NOW) == (0, 0, 0)
    other.close()


def test_an_sqlite_file_has_its_folder_beside_it(sqlite_url: str, tmp_path: Path, job) -> None:
    store = open_store(sqlite_url, min_artifact_bytes=LARGE)
    store.add_workload(job("j1"), BUNDLE, now=0.0)
    assert len(contents(tmp_path / "artifacts")) == 1
    store.close()


def test_a_name_that_is_no_digest_never_becomes_a_path(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no SHA-256"):
        read_whole(ArtifactFolder(tmp_path), "../../etc/passwd")
    ArtifactFolder(tmp_path).set_up(used=False, installation="one")
    with pytest.raises(ContentUnreadable, match="missing"):
        read_whole(ArtifactFolder(tmp_path), "0" * 64)
