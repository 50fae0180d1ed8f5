"""Large commands and long texts: they are in no list and not in memory, every answer is small, one account for all."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from makeway_api.errors import MakewayError
from makeway_api.models import FileIn, JobRequest
from makeway_quota.backends.base import NodeStatus
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.services.jobs.submission_check import MAX_COMMAND_BYTES, check_process, read_files
from makeway_quota.services.limits.user_limits import MAX_LIVE_BYTES, UserLimits
from makeway_quota.store.records import Attempt, Change, NewDecision, NewWorkload
from makeway_quota.store.store import Store, open_store
from makeway_quota.values import Place
from running import URL, Running, python, running

LARGE = ("x" * MAX_COMMAND_BYTES,)
BUSY = [NodeStatus("local", "", (0,), virtual=True)]
NOW = time.time()
MAX_ANSWER = 5_000_000
BELL = "\x07"
"""A character that takes six bytes in JSON"""


def job(number: int, **more: Any) -> NewWorkload:
    return NewWorkload(f"j-{number:08d}", "job", "rnd", "gpu1", "ana", gpus=1000, **more)


def filled(store: Store, many: int, **more: Any) -> list[str]:
    """Add jobs with the largest command, and return their ids."""
    new = [job(number, command=LARGE, **more) for number in range(many)]
    for begin in range(0, many, 100):
        store.add_workloads([(item, (), None) for item in new[begin : begin + 100]], now=NOW + 1)
    return [item.id for item in new]


def test_no_row_that_is_read_among_many_has_what_is_large(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'db.sqlite'}")
    told = []
    store.on_change(told.extend)
    ids = filled(store, 3, env={"A": "b"}, source="code")
    store.commit([Change(ids[0], {"reason_code": "waiting"})], now=NOW + 2)
    page, _ = store.workloads("job")
    for row in (*told, *store.active(), *page):
        assert (row.command, dict(row.env), row.source) == ((), {}, "")
        assert row.weight == MAX_COMMAND_BYTES + 2 + 4
    whole = store.workload(ids[0])
    assert whole is not None
    assert (whole.command, whole.env, whole.source) == (LARGE, {"A": "b"}, "code")
    store.close()


async def test_a_long_command_is_refused_and_the_longest_one_runs(tmp_path: Path) -> None:
    code = "import sys; print(len(sys.argv[1]))"
    words = python(code)
    max_length = MAX_COMMAND_BYTES - sum(map(len, words))
    async with running(tmp_path, gpus=8) as run:
        run_it = await run.submit("ana", "long", profile="gpu1", command=[*words, "y" * max_length])
        assert run_it.command == [*words, "y" * max_length], "the answer shows what was submitted"
        done = await run.job(run_it.id, "succeeded")
        log = await run.client("ana").logs(done.id)
        assert log.text.strip() == str(max_length)
        with pytest.raises(MakewayError) as refused:
            await run.submit("ana", "longer", profile="gpu1", command=[*words, "y" * (max_length + 1)])
        assert (refused.value.code, refused.value.status) == ("bad_command", 422)
        assert "65,537 bytes, and 65,536 is the most: put the code into a file of the job" in refused.value.message


def test_bytes_count_not_characters() -> None:
    check_process(JobRequest(command=["é" * (MAX_COMMAND_BYTES // 2)]))
    with pytest.raises(MakewayError):
        check_process(JobRequest(command=["é" * (MAX_COMMAND_BYTES // 2 + 1)]))
    with pytest.raises(MakewayError):
        check_process(JobRequest(command=["x"], env={"A": "é" * 128_001}))
    names = [FileIn(path=f"{number}/{'n' * 250}", data="") for number in range(4_000)]
    with pytest.raises(MakewayError) as refused:
        read_files(JobRequest(command=["x"], files=names), 1000)
    assert refused.value.code == "file_names_too_long"


def test_every_way_into_the_queue_has_one_account(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'db.sqlite'}")
    limits = UserLimits(store, pending=10_000, submissions=0, followers=0)
    limits.count_existing(())
    maximum = MAX_LIVE_BYTES // MAX_COMMAND_BYTES
    ids = filled(store, maximum - 1)

    def room(size: int = MAX_COMMAND_BYTES) -> bool:
        try:
            with limits.submitting("ana", 1, size):
                return True
        except MakewayError:
            return False

    assert room()
    with limits.submitting("ana", 1, MAX_COMMAND_BYTES):
        assert not room(), "one that is being written counts"
    store.commit([Change(ids[0], {"state": "running"})], now=NOW + 2)
    assert room()
    assert not room(2 * MAX_COMMAND_BYTES), "a running job may return to the queue"
    store.commit([Change(id, {"state": "cancelled"}) for id in ids], now=NOW + 2)
    assert room(maximum * MAX_COMMAND_BYTES)
    again = UserLimits(store, pending=10_000, submissions=0, followers=0)
    again.count_existing(store.active())
    store.commit([Change(id, {"state": "pending", "ended_at": None}) for id in ids], now=NOW + 3)
    with pytest.raises(MakewayError), again.submitting("ana", 1, 2 * MAX_COMMAND_BYTES):
        pass
    store.close()


async def test_a_resumed_job_reserves_its_size(tmp_path: Path) -> None:
    async with running(tmp_path, backend=MemoryBackend(BUSY)) as run:
        await run.service.services.context.count_existing_jobs()
        store = run.service.components.store
        maximum = MAX_LIVE_BYTES // MAX_COMMAND_BYTES
        ids = filled(store, maximum)
        store.commit([Change(ids[0], {"state": "cancelled"})], now=NOW + 2)
        extra = job(9999, command=LARGE)
        store.add_workload(extra, now=NOW + 2)
        with pytest.raises(MakewayError) as refused:
            await run.client("ana").resume(ids[0])
        assert (refused.value.code, refused.value.status) == ("pending_too_large", 429)
        await run.client("ana").cancel(extra.id)
        assert (await run.client("ana").resume(ids[0])).state.value == "pending"
        with pytest.raises(MakewayError):
            await run.client("ana").resume(extra.id)


async def _get(run: Running, path: str) -> Any:
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=run.app)) as client:
        answer = await client.get(f"{URL}/api/v1/{path}", headers={"Authorization": "token root"})
    assert len(answer.content) < MAX_ANSWER, f"{path} has {len(answer.content):,} bytes"
    return answer.json()


async def test_every_list_is_small_and_complete_page_by_page(tmp_path: Path) -> None:
    async with running(tmp_path, backend=MemoryBackend(BUSY)) as run:
        store = run.service.components.store
        ids = filled(store, 1200, name="n" * 200, source="s" * 3_000)
        sentence = BELL * 100_000
        store.commit(
            [
                Change(id, {"state": "cancelled", "message": sentence, "reason_code": "x", "reason_message": sentence})
                for id in ids
            ],
            [NewDecision("cancel", id, "rnd", "ana", "cancelled", sentence, {"a": BELL * 4000}) for id in ids],
            now=NOW + 2,
        )
        result: list[str] = []
        cursor = ""
        while True:
            page = await _get(run, f"jobs?limit=1000{cursor}")
            assert page["jobs"], "a page is never empty while there is a next one"
            assert all(one["command"] == [] and one["source"] == "" for one in page["jobs"])
            result += [one["id"] for one in page["jobs"]]
            if page["next"] is None:
                break
            cursor = f"&cursor={page['next']}"
        assert sorted(result) == sorted(ids)

        seen, before = 0, ""
        while lines := await _get(run, f"decisions?limit=1000{before}"):
            seen += len(lines)
            before = f"&before={lines[-1]['id']}"
        assert seen == 1200


async def test_one_job_with_a_long_history_is_a_small_answer(tmp_path: Path) -> None:
    async with running(tmp_path, backend=MemoryBackend(BUSY)) as run:
        store = run.service.components.store
        store.add_workload(job(1, command=(BELL * 500_000, BELL * 500_000), source=BELL * 5_000_000), now=NOW + 1)
        places = tuple(Place(f"node-{number:05}" + "n" * 50, (0,), (1000,)) for number in range(20_000))
        for number in range(1, 100):
            opened = Attempt("j-00000001", number, NOW, placement=places[:300], message=BELL * 9000)
            fields = {"state": "starting", "attempt": number}
            store.commit([Change("j-00000001", fields, open_attempt=opened)], now=NOW + 2)
            decision = NewDecision("requeue", "j-00000001", "rnd", "ana", "lost", BELL * 9000)
            close = {"ended_at": NOW + 3, "outcome": "lost", "message": BELL * 9000}
            store.commit([Change("j-00000001", {"state": "pending"}, close_attempt=close)], [decision] * 8, now=NOW + 3)
        store.commit([Change("j-00000001", {"state": "cancelled", "placement": places})], now=NOW + 4)
        shown = await _get(run, "jobs/j-00000001")
        assert shown["attempts"][-1]["number"] == 99
        numbers = [one["number"] for one in shown["attempts"]]
        assert numbers == list(range(numbers[0], 100)), "the newest, first one first"
        assert numbers[0] > 1, "all of them are too large for one answer"
        assert "more bytes are not shown" in shown["source"]
        assert len(await _get(run, "jobs")) == 2
        events = await _get(run, "jobs/j-00000001/events")
        assert [one["id"] for one in events] == sorted(one["id"] for one in events)
        assert events[-1]["id"] == store.decisions("j-00000001", limit=1)[0].id


async def test_copies_are_answered_without_what_is_large(tmp_path: Path) -> None:
    async with running(tmp_path, backend=MemoryBackend(BUSY)) as run:
        first = await run.submit("ana", "first", profile="gpu1", command=list(LARGE), source="s" * 900_000)
        copies = await run.client("ana").clone(first.id, 5)
        assert all(copy.command == [] and copy.source == "" for copy in copies)
        assert all((row := run.service.components.store.workload(copy.id)) and row.command == LARGE for copy in copies)
        await asyncio.sleep(0)
