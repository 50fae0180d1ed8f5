"""What workers send is kept once, in order, within its limits; what they report is seen by every replica."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from makeway_quota.artifacts.base import ORPHAN_AGE
from makeway_quota.artifacts.folder import ArtifactFolder
from makeway_quota.store import Store, open_store
from makeway_quota.store.records import Change
from makeway_quota.store.reports.worker_reports import AlreadyClaimed
from makeway_quota.store.storage.outputs import GROW, OutOfPlace, TooLong

LARGE = 1000
LIMIT = 64 * 2**20
KEY = ("j1", 1, 0)
SECOND = ("j1", 1, 1)


@pytest.fixture
def store(url: str, tmp_path: Path, job) -> Iterator[Store]:
    """Open a store with a job, on each of the databases; pieces of 1000 bytes are kept outside."""
    opened = open_store(url, ArtifactFolder(tmp_path / "artifacts"), LARGE)
    opened.add_workload(job("j1"), now=0.0)
    yield opened
    opened.close()


def log(store: Store, offset: int = 0, size: int = 10**6) -> bytes:
    return store.outputs.read("j1", 1, "log", offset, size)[0]


def test_what_is_sent_again_is_kept_once(store: Store) -> None:
    outputs = store.outputs
    assert outputs.append(KEY, "log", 0, b"one ", LIMIT) == 4
    assert outputs.append(KEY, "log", 0, b"one ", LIMIT) == 4
    assert outputs.append(KEY, "log", 2, b"e two", LIMIT) == 7
    assert outputs.append(KEY, "log", 7, b"", LIMIT) == 7
    assert outputs.read("j1", 1, "log", 0, 100) == (b"one two", 7)
    assert outputs.read("j1", 1, "log", 4, 2) == (b"tw", 7)
    assert outputs.read("j1", 1, "log", 9, 2) == (b"", 7)
    assert outputs.read("j1", 2, "log", 0, 100) == (b"", 0)


def test_what_is_missing_is_asked_for_unless_it_was_dropped(store: Store) -> None:
    outputs = store.outputs
    outputs.append(KEY, "log", 0, b"abc", LIMIT)
    with pytest.raises(OutOfPlace) as missing:
        outputs.append(KEY, "log", 10, b"xyz", LIMIT)
    assert missing.value.expected == 3
    assert outputs.append(KEY, "log", 10, b"xyz", LIMIT, dropped=True) == 13
    assert log(store) == b"abcxyz", "the log has no hole: the worker noted what it dropped"


@pytest.mark.parametrize("size", [10, LARGE, GROW])
def test_a_log_reads_the_same_in_pieces_of_any_size(store: Store, size: int) -> None:
    whole = bytes(at % 251 for at in range(5 * GROW))
    for at in range(0, len(whole), size * 7):
        store.outputs.append(KEY, "log", at, whole[at : at + size * 7], LIMIT)
    assert log(store) == whole
    assert log(store, 12_345, 40_000) == whole[12_345:52_345]


def test_workers_of_a_gang_share_one_log_in_the_order_of_arrival(store: Store) -> None:
    outputs = store.outputs
    outputs.append(KEY, "log", 0, b"[0] a\n", LIMIT)
    outputs.append(SECOND, "log", 0, b"[1] b\n", LIMIT)
    outputs.append(KEY, "log", 6, b"[0] c\n", LIMIT)
    outputs.append(SECOND, "log", 0, b"[1] b\n", LIMIT)
    assert log(store) == b"[0] a\n[1] b\n[0] c\n"
    assert log(store, 6, 6) == b"[1] b\n"


def test_a_log_beyond_its_limit_loses_its_middle(store: Store) -> None:
    limit, piece = 40_000, 2_000
    for at in range(0, 100_000, piece):
        store.outputs.append(KEY, "log", at, bytes([at // piece % 256]) * piece, limit)
        gap = store.outputs.gap("j1", 1)
        held = at + piece - (gap[1] - gap[0] if gap else 0)
        assert held <= limit
    assert gap is not None
    assert gap[0] == limit // 2
    assert log(store, 0, limit) == b"".join(bytes([at]) * piece for at in range(10))
    assert log(store, gap[0]) == b""
    assert log(store, gap[1]).endswith(bytes([49]) * piece)
    assert store.outputs.read("j1", 1, "log", 0, 1)[1] == 100_000


def test_a_quiet_workers_log_is_known_to_its_end_when_its_pieces_are_dropped(store: Store) -> None:
    limit, piece = 40_000, 2_000
    outputs = store.outputs
    outputs.append(KEY, "log", 0, b"k" * 20_000, limit)
    outputs.append(SECOND, "log", 0, b"quiet", limit)
    for at in range(20_000, 100_000, piece):
        outputs.append(KEY, "log", at, b"k" * piece, limit)
    assert b"quiet" not in log(store, 0, 20_010)
    assert outputs.append(SECOND, "log", 0, b"quiet", limit) == 5, "it is not kept a second time"
    assert outputs.append(SECOND, "log", 5, b" no more", limit) == 13
    for at in range(100_000, 200_000, piece):
        outputs.append(KEY, "log", at, b"k" * piece, limit)
    assert outputs.append(SECOND, "log", 0, b"quiet no more", limit) == 13
    assert outputs.read("j1", 1, "log", 0, 1)[1] == 200_013


def test_what_is_refused_is_not_kept_outside(store: Store, tmp_path: Path) -> None:
    outputs = store.outputs
    with pytest.raises(OutOfPlace):
        outputs.append(KEY, "log", 10, b"l" * LARGE, LIMIT)
    with pytest.raises(TooLong):
        outputs.append(KEY, "result", 0, b"r" * LARGE, LARGE - 1)
    outputs.append(KEY, "error", 0, b"e" * 500, LIMIT)
    assert outputs.append(KEY, "error", 0, b"e" * LARGE, LIMIT) == LARGE
    assert outputs.read("j1", 1, "error", 0, 2 * LARGE) == (b"e" * LARGE, LARGE)
    assert not list((tmp_path / "artifacts").glob("??/*"))


def test_nothing_after_dropped_bytes_changes_nothing(store: Store) -> None:
    outputs = store.outputs
    outputs.append(KEY, "log", 0, b"abc", LIMIT)
    assert outputs.append(KEY, "log", 10, b"", LIMIT, dropped=True) == 3
    outputs.append(SECOND, "log", 0, b"second", LIMIT)
    assert outputs.append(KEY, "log", 10, b"xyz", LIMIT, dropped=True) == 13
    assert log(store) == b"abcsecondxyz"


def test_only_a_log_may_lack_something(store: Store) -> None:
    store.outputs.append(KEY, "result", 0, b"abc", LIMIT)
    with pytest.raises(OutOfPlace):
        store.outputs.append(KEY, "result", 10, b"xyz", LIMIT, dropped=True)


def test_a_result_is_the_first_workers_and_has_a_limit(store: Store) -> None:
    outputs = store.outputs
    assert not outputs.has("j1", 1, "result")
    outputs.append(SECOND, "result", 0, b"second", LIMIT)
    outputs.append(KEY, "result", 0, b"r" * 5_000, LIMIT)
    outputs.append(KEY, "result", 5_000, b"!", LIMIT)
    assert outputs.read("j1", 1, "result", 4_998, 10) == (b"rr!", 5_001)
    assert outputs.has("j1", 1, "result")
    with pytest.raises(TooLong):
        outputs.append(KEY, "result", 5_001, b"more", 5_003)
    assert outputs.read("j1", 1, "result", 0, 0) == (b"", 5_001)


def test_a_part_of_a_result_goes_with_the_report_that_the_rest_will_not_come(store: Store) -> None:
    for key in (KEY, SECOND):
        store.worker_reports.claim(key, "a-launcher", 1.0)
        store.outputs.append(key, "result", 0, b"r" * 5_000, LIMIT)
    store.outputs.append(KEY, "log", 0, b"log", LIMIT)
    store.worker_reports.write(SECOND, {"exit": {"exit_code": 0, "ended_at": 5.0, "result_unsent": False}}, 5.0)
    assert store.outputs.read("j1", 1, "result", 0, 0) == (b"", 5_000)
    for key in (SECOND, KEY):
        assert store.outputs.has("j1", 1, "result")
        store.worker_reports.write(key, {"exit": {"exit_code": 0, "ended_at": 5.0, "result_unsent": True}}, 6.0)
    assert not store.outputs.has("j1", 1, "result"), "or it would be taken for the whole"
    assert log(store) == b"log"


def test_large_pieces_are_outside_and_go_with_their_workload(store: Store, tmp_path: Path) -> None:
    store.outputs.append(KEY, "log", 0, b"l" * LARGE, LIMIT)
    store.outputs.append(KEY, "result", 0, b"r" * LARGE, LIMIT)
    assert len(list((tmp_path / "artifacts").glob("??/*"))) == 2
    assert store.pruning.orphans("", 100)[0] == []
    now = 10 * ORPHAN_AGE + 2e9
    assert store.contents.collect(now).removed == 0
    store.commit([Change("j1", {"state": "failed", "ended_at": 1.0})], now=1.0)
    store.pruning.forget_workloads(2.0, 10)
    assert store.outputs.read("j1", 1, "log", 0, 10) == (b"", 0)
    orphans = [digest for digest, _ in store.pruning.orphans("", 100)[0]]
    assert len(orphans) == 2
    assert store.pruning.forget_blobs(orphans, 0.0) == 2


def test_a_piece_that_is_also_a_file_in_the_database_is_kept(url: str, tmp_path: Path, job: Any) -> None:
    data = b"r" * LARGE
    with closing(open_store(url)) as before:
        before.add_workload(job("j1"), [("kept.bin", data, False)], now=0.0)
    with closing(open_store(url, ArtifactFolder(tmp_path / "artifacts"), LARGE)) as store:
        store.outputs.append(KEY, "result", 0, data, LIMIT)
        for outside in (tmp_path / "artifacts").glob("??/*"):
            os.utime(outside, (1.0, 1.0))
        assert store.contents.collect(2e9).removed == 1
        assert store.outputs.read("j1", 1, "result", 0, LARGE) == (data, LARGE)


def test_one_launcher_claims_a_worker(store: Store) -> None:
    reports = store.worker_reports
    first = reports.claim(KEY, "a", 1.0)
    assert reports.claim(KEY, "a", 2.0) == first
    with pytest.raises(AlreadyClaimed):
        reports.claim(KEY, "b", 3.0)
    reports.claim(SECOND, "b", 3.0)


def test_every_change_of_a_report_is_found_by_its_serial(store: Store) -> None:
    reports = store.worker_reports
    assert reports.write(KEY, {"step": 1}, 1.0) is None, "it was never claimed"
    reports.claim(KEY, "a", 1.0)
    reports.claim(SECOND, "b", 1.0)
    seen = reports.after(0)
    assert [item.key for item in seen] == [KEY, SECOND]
    written = reports.write(KEY, {"step": 2}, 5.0)
    assert written is not None
    assert reports.after(seen[-1].serial) == [written]
    ended = reports.write(SECOND, {"exit": {"exit_code": 0}}, 6.0)
    assert ended is not None
    assert reports.write(SECOND, {"step": 3}, 7.0) == ended, "an end stays"
    assert reports.after(ended.serial) == []
    reports.heard({SECOND: 9.0})
    [heard] = reports.after(ended.serial)
    assert (heard.key, heard.heard_at, heard.report) == (SECOND, 9.0, ended.report)
    reports.forget("j1", 1)
    assert reports.after(0) == []
    assert reports.claim(KEY, "c", 9.0).serial > heard.serial, "a reader that knows the last one finds the next"
    reports.forget("j1", 1)
    assert reports.write(KEY, {}, 10.0) is None
