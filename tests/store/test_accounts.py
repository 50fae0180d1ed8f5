"""The account of what is kept: every way in counts, every removal is subtracted, and a new count finds the same."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from alembic import command
from makeway_quota.store import Store, accounts, open_store
from makeway_quota.store.accounts import PATH_BYTES, ROW_BYTES
from makeway_quota.store.database.reserve import LOW, SLICES, Reserve
from makeway_quota.store.errors import StorageLimitExceeded
from makeway_quota.store.migrate import alembic_config
from makeway_quota.store.records import ByteLimits, Change, SharedFiles, Submission


def kept(store: Store, owner: str = "ana") -> dict[str, int]:
    """Return the bytes of a person by kind."""
    result: Counter[str] = Counter()
    for account in store.accounts.list_lines(owner):
        result[account.kind] += account.bytes
    return dict(result)


def recounted(store: Store, owner: str = "ana") -> dict[str, int]:
    store.accounts.recount(owner)
    return kept(store, owner)


def test_every_way_in_is_counted_and_a_new_count_finds_the_same(store: Store, job) -> None:
    files = [("a.py", b"x" * 1000, False), ("b.bin", b"y" * 300_000, False)]
    store.add_workload(job("j1", command=("c" * 500,), env={"A": "b"}, source="s" * 100), files, now=0.0)
    weight, paths = 500 + 2 + 100, 2 * PATH_BYTES + len("a.py") + len("b.bin")
    assert kept(store) == {"jobs": ROW_BYTES + weight, "files": 301_000 + paths}
    assert recounted(store) == kept(store)
    for at in range(3):
        store.outputs.append(("j1", 1, 0), "log", at * 50, b"l" * 50, 10**6)
    store.outputs.append(("j1", 1, 0), "log", 100, b"l" * 50, 10**6)  # sent again
    store.outputs.append(("j1", 1, 0), "result", 0, b"r" * 400_000, 10**6)
    store.outputs.append(("j1", 1, 0), "error", 0, b"e" * 10, 10**6)
    before = kept(store)
    assert (before["logs"], before["results"]) == (150, 400_010)
    assert recounted(store) == before
    assert store.accounts.of("ana", "rnd") == (sum(before.values()),) * 4
    assert store.accounts.of("bo", "ops") == (0, 0, sum(before.values()), 0)
    assert store.accounts.of("bo", "rnd") == (0, *[sum(before.values())] * 2, 0)
    assert store.accounts.of_teams(["rnd", "ops"]) == {"rnd": sum(before.values()), "ops": 0, "": sum(before.values())}
    store.accounts.measured({"j1": 777, "gone": 5}, 9.0)
    assert recounted(store) == before | {"folders": 777}


def test_what_clones_share_counts_once_for_as_long_as_one_of_them_is_there(store: Store, job) -> None:
    store.add_workload(job("j1"), [("a", b"x" * 1000, False)], now=0.0)
    for number in range(2, 6):
        store.add_workload(job(f"j{number}"), SharedFiles("j1"), now=0.0)
    assert kept(store)["files"] == recounted(store)["files"] == 1000 + 5 * (PATH_BYTES + 1)
    store.commit([Change(f"j{number}", {"state": "failed"}) for number in range(1, 6)], now=1.0)
    assert store.pruning.forget_ended("j1", 2.0) is not None
    assert recounted(store)["files"] == 1000 + 4 * (PATH_BYTES + 1), "the copies hold the content"
    for number in range(2, 6):
        store.pruning.forget_ended(f"j{number}", 2.0)
    assert recounted(store) == {}


@pytest.mark.parametrize(("owner", "team"), [("ana", "rnd"), ("ana", "ops"), ("bo", "rnd"), ("bo", "ops")])
def test_a_copy_counts_at_once_what_it_adds_for_its_owner_in_its_team(store: Store, job, owner: str, team: str) -> None:
    files = [(f"{at}/a", b"x" * 1000, False) for at in range(20)] + [("b", b"y" * 300_000, False)]
    store.add_workload(job("j1"), files, now=0.0)
    there = {name: kept(store, name) for name in ("ana", "bo")}
    for at in range(2):
        new = job(f"{owner}{team}{at}", owner=owner, team=team)
        store.add_workload(new, SharedFiles("j1"), now=0.0)
        counted = kept(store, owner)
        assert counted["files"] > there[owner].get("files", 0) + 20 * PATH_BYTES
        assert recounted(store, owner) == counted
    store.add_workload(job("again", owner=owner, team=team), files, now=0.0)
    counted = kept(store, owner)
    assert recounted(store, owner) == counted, "what was sent once more"
    for limit, fits in ((300_000, False), (400_000, True)):
        new = Submission(job(f"late{limit}", owner="cy", team="dev"), SharedFiles("j1"), kept=ByteLimits(person=limit))
        assert isinstance(store.add_workloads([new], now=0.0)[0], StorageLimitExceeded) != fits


def test_a_content_that_many_jobs_of_others_have_counts_once(
    store: Store, job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "NEAR", 2)
    content = [("a", b"x" * 1000, False)]
    for at in range(4):
        store.add_workload(job(f"j{at}"), content, now=0.0)
    for at in range(2):
        store.add_workload(job(f"b{at}", owner="bo"), content, now=0.0)
        assert kept(store, "bo")["files"] == 1000 + (at + 1) * (PATH_BYTES + 1)
    assert recounted(store, "bo") == kept(store, "bo")


def test_a_long_log_is_counted_as_it_is_kept(store: Store, job) -> None:
    store.add_workload(job("j1"), now=0.0)
    rng, sent = random.Random(1), [0, 0]
    for _ in range(200):
        worker, size = rng.randrange(2), rng.randrange(1, 3000)
        store.outputs.append(("j1", 1, worker), "log", sent[worker], b"x" * size, 40_000)
        sent[worker] += size
    assert kept(store)["logs"] <= 40_000
    assert recounted(store) == kept(store)
    store.outputs.drop(("j1", 1, 0), "log")
    store.outputs.drop(("j1", 1, 1), "log")
    assert kept(store).get("logs", 0) == recounted(store).get("logs", 0) == 0


def test_of_a_gang_one_result_is_kept_that_of_its_first_worker(store: Store, job) -> None:
    store.add_workload(job("j1", workers=3), now=0.0)
    assert store.outputs.append(("j1", 1, 2), "result", 0, b"two" * 100, 10**6) == 300
    assert store.outputs.append(("j1", 1, 0), "result", 0, b"zero", 10**6) == 4
    assert store.outputs.append(("j1", 1, 1), "result", 0, b"one", 10**6) == 3
    assert store.outputs.append(("j1", 1, 2), "result", 300, b"two" * 100_000, 10**6) == 300_300, "taken, and dropped"
    assert store.outputs.append(("j1", 1, 0), "result", 4, b"!", 10**6) == 5
    assert store.outputs.read("j1", 1, "result", 0, 100) == (b"zero!", 5)
    assert kept(store)["results"] == 5 == recounted(store)["results"]


def test_an_account_of_an_earlier_version_is_counted_at_the_first_pass(store: Store, job) -> None:
    store.add_workload(job("j1"), [("a", b"x" * 1000, False)], now=0.0)
    there = kept(store)
    with store._database.write() as connection:
        command.downgrade(alembic_config(connection), "0016")
        command.upgrade(alembic_config(connection), "head")
    assert kept(store) == {}
    for owner in store.accounts.people():
        store.accounts.recount(owner)
    assert kept(store) == there


def test_sizes_of_large_files_of_an_earlier_version_are_found(sqlite_url: str, job) -> None:
    store = open_store(sqlite_url)
    store.add_workload(job("j1"), [("a", b"x" * 400_000, False)], now=0.0)
    with store._database.write() as connection:
        connection.exec_driver_sql("UPDATE blobs SET size = 0")
    assert recounted(store)["files"] < 1000
    store.contents.collect(1.0)
    assert recounted(store)["files"] == 400_000 + PATH_BYTES + 1
    store.close()


def test_the_reserve_is_given_up_part_by_part_and_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 10**12
    monkeypatch.setattr("makeway_quota.store.database.reserve.free_bytes", lambda folder: free)
    reserve = Reserve(tmp_path)
    reserve.fill()
    parts = list((tmp_path / "reserve").iterdir())
    assert len(parts) == SLICES
    assert all(part.stat().st_blocks * 512 >= 4 * 2**20 for part in parts)
    assert reserve.before_write()
    assert len(list((tmp_path / "reserve").iterdir())) == SLICES, "nothing is given up while there is room"
    free = LOW - 1
    for slices in reversed(range(SLICES)):
        assert reserve.before_write()
        assert len(list((tmp_path / "reserve").iterdir())) == slices
    assert not reserve.before_write()
    reserve.fill()
    assert list((tmp_path / "reserve").iterdir()) == [], "not while the disk is full"


def test_work_that_gets_another_owner_counts_for_that_one(store: Store, job) -> None:
    store.add_workload(job("j1", owner="ana"), now=0.0)
    there = kept(store, "ana")
    store.commit([Change("j1", {"state": "failed"})], now=1.0)
    store.people.give("ana", "bo", "root", 2.0)
    assert (kept(store, "ana"), kept(store, "bo")) == ({}, there)


def test_what_would_pass_a_limit_is_refused_in_the_transaction_that_writes_it(store: Store, job) -> None:
    limits = ByteLimits(person=30_000, team=50_000, whole=90_000, share=25_000)

    def tries(owner: str, team: str, *sizes: int) -> list[str]:
        """Add jobs with sources of these sizes in one transaction; return which limit refused each."""
        new = [
            Submission(job(f"{owner}{team}{store.last_event_id()}-{at}", owner=owner, team=team, source="s" * size),
                       kept=limits)
            for at, size in enumerate(sizes)
        ]  # fmt: skip
        return [
            answer.which if isinstance(answer, StorageLimitExceeded) else type(answer).__name__
            for answer in store.add_workloads(new, now=0.0)
        ]

    assert tries("ana", "rnd", 10_000, 4000) == ["Workload", "share"]
    assert tries("ana", "rnd", 2000) == ["Workload"], "one that was refused takes nothing"
    assert tries("ana", "ops", 1000) == ["person"]
    assert tries("bo", "rnd", 15_000, 1000) == ["Workload", "team"]
    assert tries("bo", "ops", 0) == ["Workload"]
    assert tries("cy", "ops", 17_000, 17_000) == ["Workload", "person"], "with what the same transaction adds"
    assert tries("di", "dev", 12_000) == ["whole"]
    with pytest.raises(StorageLimitExceeded) as refused:
        store.outputs.append(("anarnd0-0", 1, 0), "result", 0, b"r" * 2000, 10**6, kept=limits)
    assert (refused.value.which, refused.value.size) == ("share", 2000)
    assert store.outputs.read("anarnd0-0", 1, "result", 0, 10) == (b"", 0)
    assert recounted(store, "ana") == kept(store, "ana")


@pytest.mark.parametrize("seed", range(3))
def test_replicas_that_write_and_count_at_once_agree_with_a_new_count(url: str, job, seed: int) -> None:
    """Members submit and send results through two replicas, while one of them recounts and deletes."""
    stores, limits = (
        [open_store(url), open_store(url)],
        ByteLimits(person=900_000, team=1_500_000, share=800_000),
    )
    rng, done = random.Random(seed), Counter[str]()
    plans = [
        [(rng.choice(["ana", "bo", "cy"]), rng.randrange(5), rng.randrange(60_000), n) for n in range(25)]
        for _ in stores
    ]

    def work(at: int) -> None:
        store = stores[at]
        for owner, what, size, n in plans[at]:
            id = f"{owner}-{at}-{n}"
            if what == 0:
                store.accounts.recount(owner)
            elif what == 1 and n:
                for gone in store.pruning.ended_jobs(owner, 1e9, 1):
                    store.pruning.forget_ended(gone, 5.0)
                store.accounts.recount(owner)
            else:
                new = Submission(job(id, owner=owner), [("f", bytes([at, n]) * size, False)], kept=limits)
                [answer] = store.add_workloads([new], now=float(n))
                done[type(answer).__name__] += 1
                if not isinstance(answer, Exception):
                    with suppress(StorageLimitExceeded):
                        store.outputs.append((id, 1, 0), "result", 0, b"r" * size, 10**6, kept=limits)
                    if what == 2:
                        store.commit([Change(id, {"state": "failed"})], now=float(n))
            assert store.accounts.of(owner, "rnd")[1] <= limits.team

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, range(2)))
    assert done["Workload"] > 10
    assert done["StorageLimitExceeded"], "the limit was met"
    for owner in ("ana", "bo", "cy"):
        before = kept(stores[0], owner)
        assert recounted(stores[1], owner) == before
    for store in stores:
        store.close()
