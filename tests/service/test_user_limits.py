"""Limits of one person: pending jobs, submissions a minute, log followers, results; clones by digest."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from makeway_api.errors import MakewayError
from makeway_api.models import Job
from makeway_quota.backends.base import NodeStatus
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.services.limits.user_limits import FILES_PER_SUBMISSION, UserLimits
from makeway_quota.store.records import Change, NewWorkload
from makeway_quota.store.store import Store, open_store
from running import SAMPLE, Running, running

BUSY = [NodeStatus("local", "", (0,), virtual=True)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"sqlite:///{tmp_path / 'db.sqlite'}")


def job(number: int, owner: str = "ana") -> NewWorkload:
    return NewWorkload(f"j-{number:08d}", "job", "rnd", "gpu1", owner, gpus=1000)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_jobs_that_ended_are_forgotten_though_nothing_was_submitted_before(store: Store) -> None:
    limits = UserLimits(store, pending=3, submissions=0, followers=0)
    store.add_workload(job(1), now=1.0)
    older = store.active()
    store.commit([Change("j-00000001", {"state": "cancelled"})], now=2.0)
    limits.count_existing(older)
    assert limits.waiting == 0, "what was read before the end is older"
    assert limits._versions == {}
    store.close()


def test_pending_jobs_are_counted_through_their_whole_life(store: Store) -> None:
    store.add_workload(job(1), now=1.0)
    limits = UserLimits(store, pending=3, submissions=0, followers=0)
    limits.count_existing(store.active())
    store.add_workload(job(2), now=1.0)
    store.add_workload(job(3, "bo"), now=1.0)
    with limits.submitting("ana", 1):
        with pytest.raises(MakewayError) as refused, limits.submitting("ana", 1):
            raise AssertionError("a fourth job is being written")
    assert (refused.value.code, refused.value.status) == ("too_many_pending", 429)
    assert refused.value.numbers == {"pending": 3, "submitted": 1, "most": 3}
    assert refused.value.message.startswith("ana has 3 pending jobs, and 3 is the most for one person.")
    store.commit([Change("j-00000001", {"state": "running"})], now=2.0)
    store.commit([Change("j-00000002", {"state": "cancelled"})], now=2.0)
    with limits.submitting("ana", 3):
        pass
    store.commit([Change("j-00000001", {"state": "pending"})], now=3.0)
    with pytest.raises(MakewayError), limits.submitting("ana", 3):
        pass
    assert limits.waiting == 2
    store.close()


def test_commands_and_environments_of_pending_jobs_are_bounded(store: Store) -> None:
    limits = UserLimits(store, pending=1000, submissions=0, followers=0)
    limits.count_existing(())
    large = replace(job(1), command=("x" * 2**20,), env={"A": "y" * 2**20})
    store.add_workload(large, now=1.0)
    with limits.submitting("ana", 31, 2 * 2**20 - 2**10):
        pass
    with pytest.raises(MakewayError) as refused, limits.submitting("ana", 32, 2 * 2**20):
        pass
    assert (refused.value.code, refused.value.status) == ("pending_too_large", 429)
    assert "have 2 MiB, and 64 MiB is the most" in refused.value.message
    with limits.submitting("bo", 32, 2 * 2**20):
        pass
    store.commit([Change(large.id, {"state": "cancelled"})], now=2.0)
    with limits.submitting("ana", 32, 2 * 2**20):
        pass
    store.close()


def test_a_minute_has_room_for_so_many_submissions(store: Store) -> None:
    clock = Clock()
    limits = UserLimits(store, pending=0, submissions=60, followers=0, clock=clock)
    for _ in range(60):
        with limits.submitting("ana", 1):
            pass
    with pytest.raises(MakewayError) as refused, limits.submitting("ana", 1):
        pass
    assert (refused.value.code, refused.value.numbers) == ("too_many_submissions", {"per_minute": 60, "retry_after": 1})
    with limits.submitting("bo", 1):
        pass
    clock.now = -100.0  # a clock that runs backwards takes nothing away
    with pytest.raises(MakewayError), limits.submitting("ana", 1):
        pass
    clock.now = 10.0
    for _ in range(10):
        with limits.submitting("ana", 1):
            pass
    with pytest.raises(MakewayError), limits.submitting("ana", 1):
        pass
    clock.now = 1000.0
    with limits.submitting("ana", 100):  # more at once than a minute has room for: takes all of it
        pass
    with pytest.raises(MakewayError), limits.submitting("ana", 1):
        pass
    clock.now += 1
    limits.count_request("ana")
    store.close()


def test_many_files_count_as_more_submissions(store: Store) -> None:
    limits = UserLimits(store, pending=0, submissions=60, followers=0, clock=lambda: 0.0)
    for many, files in ((1, FILES_PER_SUBMISSION - 1), (2, 10 * FILES_PER_SUBMISSION), (30, 0)):
        with limits.submitting("ana", many, 0, files):
            pass
    with pytest.raises(MakewayError) as refused, limits.submitting("ana", 1, 0, 7 * FILES_PER_SUBMISSION):
        pass
    assert refused.value.numbers["retry_after"] == 1, "7 are left of 60"
    with limits.submitting("ana", 7):
        pass
    store.close()


def test_log_followers_are_counted(store: Store) -> None:
    limits = UserLimits(store, pending=0, submissions=0, followers=1)
    with limits.following("ana"):
        with limits.following("bo"):
            pass
        with pytest.raises(MakewayError) as refused, limits.following("ana"):
            pass
        assert refused.value.code == "too_many_followers"
    with limits.following("ana"):
        pass
    store.close()


async def refusal(run: Running, person: str, count: int) -> list[Job | str]:
    async def one(number: int) -> Job | str:
        try:
            return await run.submit(person, f"job {number}", profile="gpu1")
        except MakewayError as error:
            return error.code

    return await asyncio.gather(*(one(number) for number in range(count)))


async def test_waiting_jobs_are_counted_from_the_start_of_the_service(tmp_path: Path) -> None:
    async with running(tmp_path, backend=MemoryBackend([])) as run:
        assert run.service.services.context.limits.counted_existing


async def test_many_submissions_at_once_do_not_pass_the_limit(tmp_path: Path) -> None:
    async with running(tmp_path, backend=MemoryBackend([]), MAKEWAY_MAX_PENDING_JOBS=5) as run:
        answers = await refusal(run, "ana", 12)
        assert sum(isinstance(answer, Job) for answer in answers) == 5
        assert {answer for answer in answers if isinstance(answer, str)} == {"too_many_pending"}
        made = next(answer for answer in answers if isinstance(answer, Job))
        assert isinstance((await refusal(run, "bo", 1))[0], Job), "the limit is per person"
        with pytest.raises(MakewayError, match="3 more do not fit"):
            await run.client("ana").clone(made.id, 3)
        await run.client("ana").cancel(made.id)
        with pytest.raises(MakewayError, match="2 more do not fit"):
            await run.client("ana").clone(made.id, 2)
        assert len(await run.client("ana").clone(made.id, 1)) == 1
        with pytest.raises(MakewayError, match="5 pending jobs"):
            await run.client("ana").resume(made.id)


async def test_a_clone_shares_files_by_digest_and_takes_no_secrets(tmp_path: Path) -> None:
    shared = SAMPLE.read_text(encoding="utf-8").replace("settings:", "settings:\n  work: team", 1)
    async with running(tmp_path, shared, backend=MemoryBackend([])) as run:
        made = await run.submit(
            "ana",
            "train",
            profile="gpu1",
            team="rnd",
            env={"API_KEY": "secret"},
            files=[{"path": "a/b.py", "data": "YWJj", "executable": True}, {"path": "c", "data": ""}],
        )
        store = run.service.components.store
        mine = await run.client("ana").clone(made.id, 2)
        theirs = await run.client("lea").clone(made.id, 1)
        other = await run.client("ana").clone(made.id, 2, {"files": [{"path": "x", "data": "eHl6"}]})
        for copy in (*mine, *theirs):
            assert store.files(copy.id) == store.files(made.id)
            assert len(store.files(copy.id)) == 2
        for copy in other:
            assert [(file.path, file.data) for file in store.files(copy.id)] == [("x", b"xyz")]
        rows = {copy.id: store.workload(copy.id) for copy in (*mine, *theirs)}
        envs = {copy.id: dict(row.env) if (row := rows[copy.id]) else {} for copy in (*mine, *theirs)}
        assert [envs[copy.id].get("API_KEY") for copy in mine] == ["secret", "secret"]
        assert "API_KEY" not in envs[theirs[0].id]


async def test_results_are_sent_in_parts_up_to_a_limit(tmp_path: Path) -> None:
    backend = MemoryBackend(BUSY, real_time=True)
    async with running(tmp_path, backend=backend, MAKEWAY_MAX_RESULT_MB=3) as run:
        made = await run.submit("ana", "train", profile="gpu1")
        await run.job(made.id, "running")
        for size in (0, 1, 2_999_999, 3_000_000):
            backend.attempts[made.id, 1].result = content = bytes(range(256)) * (size // 256) + bytes(size % 256)
            assert await run.client("ana").result(made.id) == content
        backend.attempts[made.id, 1].result = bytes(3_000_001)
        with pytest.raises(MakewayError) as refused:
            await run.client("ana").result(made.id)
        assert refused.value.code == "result_too_large"
        assert refused.value.numbers == {"bytes": 3_000_001, "limit_bytes": 3_000_000}
