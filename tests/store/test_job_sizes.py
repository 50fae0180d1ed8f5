"""What is kept of one job: exactly the bytes by which its owner's account is smaller once the job is deleted."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from makeway_quota.store import Store
from makeway_quota.store.accounts import PATH_BYTES, ROW_BYTES
from makeway_quota.store.records import Attempt, Change, SharedFiles
from makeway_quota.store.storage.job_sizes import OutputSize


def counted(store: Store, owner: str) -> Counter[str]:
    """Count an account anew and return it by kind."""
    store.accounts.recount(owner)
    result: Counter[str] = Counter()
    for line in store.accounts.list_lines(owner):
        result[line.kind] += line.bytes
    return result


@pytest.mark.parametrize("seed", range(2))
def test_a_deletion_frees_what_the_job_is_said_to_keep(store: Store, job, seed: int) -> None:
    rng, jobs = random.Random(seed), dict[str, str]()
    contents = [bytes([97 + n]) * rng.choice((10, 5_000, 300_000)) for n in range(5)]
    for number in range(16):
        id, owner, team = f"j{number}", rng.choice(("ana", "bo")), rng.choice(("rnd", "ops"))
        same = [other for other, whose in jobs.items() if whose == owner]
        files = (
            SharedFiles(rng.choice(same))
            if same and rng.random() < 0.3
            else [(f"f{at}", rng.choice(contents), False) for at in range(rng.randrange(4))]
        )
        store.add_workload(job(id, owner=owner, team=team, source="s" * rng.randrange(900)), files, now=float(number))
        jobs[id] = owner
        for attempt in range(1, rng.randrange(1, 4)):
            opened = Attempt(id, attempt, 0.0)
            store.commit([Change(id, {"state": "running", "attempt": attempt}, open_attempt=opened)], now=1.0)
            for kind in ("log", "result", "error"):
                size = rng.choice((0, 100, 400_000))
                store.outputs.append((id, attempt, 0), kind, 0, kind.encode() * (size // 5), 10**7)
        if rng.random() < 0.5:
            store.accounts.measured({id: rng.randrange(10**6)}, 9.0)
        store.commit([Change(id, {"state": "failed", "ended_at": float(number)})], now=2.0)
    order = list(jobs)
    rng.shuffle(order)
    for id in order:
        owner = jobs[id]
        before, size = counted(store, owner), store.job_sizes.of(id)
        largest = store.job_sizes.largest(owner, 100)
        assert [one.bytes for one in largest] == sorted((one.bytes for one in largest), reverse=True)
        assert {one.id: one.bytes for one in largest}[id] == sum(size.values())
        assert store.pruning.forget_ended(id, 3.0) is not None
        assert before - counted(store, owner) == Counter({kind: n for kind, n in size.items() if n})
    assert store.job_sizes.of("j1") == {}


def test_the_jobs_that_keep_the_most_are_found_beside_many_that_share_a_file(store: Store, job) -> None:
    store.add_workload(job("first"), [("data", b"x" * 500_000, False)], now=0.0)
    for number in range(60):
        store.add_workload(job(f"copy{number:02}"), SharedFiles("first"), now=1.0)
    store.add_workload(job("alone"), [("own", b"y" * 100_000, False)], now=2.0)
    store.add_workload(job("lives"), [("own", b"z" * 900_000, False)], now=2.0)
    ids = ["first", "alone", *(f"copy{number:02}" for number in range(60))]
    store.commit([Change(id, {"state": "succeeded", "ended_at": 5.0}) for id in ids], now=5.0)
    result = store.job_sizes.largest("ana", 3)
    assert (result[0].id, result[0].bytes) == ("alone", ROW_BYTES + PATH_BYTES + 3 + 100_000)
    assert {one.bytes for one in result[1:]} == {ROW_BYTES + PATH_BYTES + 4}, "the file stays with the other copies"
    assert store.job_sizes.queued("ana") == ROW_BYTES


def test_the_output_of_one_attempt_is_deleted_alone(store: Store, job) -> None:
    store.add_workload(job("j1"), now=0.0)
    for attempt in (1, 2):
        store.outputs.append(("j1", attempt, 0), "log", 0, b"l" * 300_000, 10**6)
        store.outputs.append(("j1", attempt, 1), "result", 0, b"r" * 1000, 10**6)
    assert store.job_sizes.outputs("j1") == {1: OutputSize(300_000, 1000), 2: OutputSize(300_000, 1000)}
    while store.pruning.forget_outputs_of("j1", 1, 3.0, attempt=1):
        pass
    assert store.job_sizes.outputs("j1") == {2: OutputSize(300_000, 1000)}
    assert store.outputs.read("j1", 2, "log", 0, 5) == (b"lllll", 300_000)
    assert store.outputs.read("j1", 1, "log", 0, 5) == (b"", 0)
