"""A content whose last job was deleted goes soon from each place, but not from under a submission of the same."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from makeway_quota.store import Store, open_store
from makeway_quota.store.records import Change, NewWorkload
from makeway_quota.store.storage.contents import DELETED_AGE
from storage import Place, of_bucket, of_folder

FILE = [("f", b"x" * 5000, False)]


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Return each of the places, before any service used it."""
    if request.param == "folder":
        return of_folder(tmp_path / "a")
    return of_bucket(request.getfixturevalue("bucket"))


def deleted(store: Store, place: Place) -> None:
    """Add a job with a file that is some minutes old, and delete it."""
    store.add_workload(NewWorkload("first", "job", "rnd", "gpu1", "ana"), FILE, now=0.0)
    store.commit([Change("first", {"state": "failed", "ended_at": 1.0})], now=1.0)
    place.age(DELETED_AGE + 5)
    assert store.pruning.forget_ended("first", 100.0) is not None


def sizes(place: Place) -> list[int]:
    return [stored.size for part in place.artifacts.list_pages() for stored in part]


def test_a_deleted_content_goes(place: Place, tmp_path: Path) -> None:
    with closing(open_store(f"sqlite:///{tmp_path / 'db'}", place.artifacts, 1000)) as store:
        deleted(store, place)
        assert (store.contents.clear(100.0), sizes(place)) == (0, [5000])
        assert (store.contents.clear(101.0 + DELETED_AGE), sizes(place)) == (1, [])


def test_a_submission_of_the_same_that_is_under_way_keeps_it(place: Place, tmp_path: Path) -> None:
    with closing(open_store(f"sqlite:///{tmp_path / 'db'}", place.artifacts, 1000)) as store:
        deleted(store, place)
        store.contents.keep(FILE)
        store.contents.clear(101.0 + DELETED_AGE)
        assert sizes(place) == [5000]
        store.add_workload(NewWorkload("second", "job", "rnd", "gpu1", "ana"), FILE, now=300.0)
        assert store.files("second")[0].data == FILE[0][1]
