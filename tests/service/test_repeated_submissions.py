"""A submission whose answer is lost is repeated with its Idempotency-Key, and submits nothing a second time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from makeway_api import client as api
from makeway_api.client import AsyncClient, Client
from makeway_api.errors import MakewayError, Unreachable
from makeway_api.models import JobRequest, SessionRequest
from makeway_quota.services.limits.user_limits import LOOKUPS_PER_MINUTE
from running import IDLE, URL, Running, running

JOB = {"name": "train", "profile": "gpu1", "command": IDLE}


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path) as made:
        yield made


async def post(run: Running, path: str, body: dict[str, Any], key: str, person: str = "ana") -> httpx2.Response:
    """Send one request with a key, as a client other than Makeway's would."""
    return await run.client(person).http.post(path, json=body, headers={"Idempotency-Key": key})


async def count(run: Running) -> int:
    return len((await run.client("root").jobs(limit=1000)).jobs)


async def test_a_repeated_submission_returns_the_first_job(run: Running) -> None:
    first = await post(run, "/jobs", JOB, "k-1")
    again = await post(run, "/jobs", JOB, "k-1")
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.json()["id"] == first.json()["id"]
    assert await count(run) == 1
    other = await post(run, "/jobs", JOB, "k-2")
    assert other.json()["id"] != first.json()["id"]
    same_key = await post(run, "/jobs", JOB, "k-1", "lea")
    assert same_key.status_code == 422, "lea is in two teams, so that the request names none"
    bo = await post(run, "/jobs", JOB, "k-1", "bo")
    assert bo.json()["owner"] == "bo", "a key is one person's own"


async def test_requests_at_the_same_time_submit_once(run: Running) -> None:
    answers = await asyncio.gather(*(post(run, "/jobs", JOB, "k-1") for _ in range(8)))
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert await count(run) == 1


@pytest.mark.parametrize("changed", [{"name": "other"}, {"files": [{"path": "a.py", "data": "cHJpbnQ="}]}])
async def test_a_key_with_another_content_is_refused(run: Running, changed: dict[str, Any]) -> None:
    await post(run, "/jobs", JOB, "k-1")
    refused = await post(run, "/jobs", JOB | changed, "k-1")
    assert (refused.status_code, refused.json()["code"]) == (422, "key_reused")
    assert "key of its own" in refused.json()["detail"]
    assert await count(run) == 1


@pytest.mark.parametrize("key", ["", "x" * 201, "with space", "\tk"])
async def test_a_key_that_is_none_is_named(run: Running, key: str) -> None:
    refused = await post(run, "/jobs", JOB, key)
    assert refused.status_code == 422
    assert "Idempotency-Key" in refused.json()["detail"]


async def test_a_job_that_was_removed_since_is_told_as_such(run: Running) -> None:
    id = (await post(run, "/jobs", JOB, "k-1")).json()["id"]
    await run.client("ana").cancel(id)
    await run.job(id, "cancelled")
    store = run.service.components.store
    await asyncio.to_thread(store.pruning.forget_workloads, 1e12, 10)
    gone = await post(run, "/jobs", JOB, "k-1")
    assert (gone.status_code, gone.json()["code"]) == (410, "removed")
    assert id in gone.json()["detail"]
    assert await asyncio.to_thread(store.pruning.forget_keys, 1e12, 10) == 1
    assert (await post(run, "/jobs", JOB, "k-1")).status_code == 201


async def test_copies_are_submitted_once_and_missing_ones_are_added(run: Running) -> None:
    id = (await post(run, "/jobs", JOB, "k-0")).json()["id"]
    body = {"n": 3, "overrides": {"name": "copy"}}
    first = [job["id"] for job in (await post(run, f"/jobs/{id}/clone", body, "k-1")).json()]
    again = [job["id"] for job in (await post(run, f"/jobs/{id}/clone", body, "k-1")).json()]
    assert again == first
    assert len(set(first)) == 3
    refused = await post(run, f"/jobs/{id}/clone", body | {"n": 4}, "k-1")
    assert refused.status_code == 422
    assert await count(run) == 4


async def test_a_repeated_session_request_ends_no_session(run: Running) -> None:
    body = SessionRequest(user="ana", server="", profile="gpu1", team="rnd").model_dump(mode="json")
    first, again = [(await post(run, "/sessions", body, "k-1", "spawner")).json() for _ in range(2)]
    assert first["id"] == again["id"]
    assert (await run.granted(first["id"])).phase == "granted"
    other = (await post(run, "/sessions", body, "k-2", "spawner")).json()
    assert other["id"] != first["id"], "a new request for the same server ends the session before"
    ended = (await post(run, "/sessions", body, "k-1", "spawner")).json()
    assert (ended["id"], ended["phase"]) == (first["id"], "over")


async def test_a_repetition_at_a_limit_returns_the_job_and_reads_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, MAKEWAY_MAX_SUBMISSIONS_PER_MINUTE="1") as run:
        first = await post(run, "/jobs", JOB, "k-1")
        again = await post(run, "/jobs", JOB, "k-1")
        assert again.json()["id"] == first.json()["id"]
        reads: list[object] = []
        submitted = run.service.components.store.submitted
        monkeypatch.setattr(
            run.service.components.store, "submitted", lambda keys: reads.append(keys) or submitted(keys)
        )
        for number in range(2 * LOOKUPS_PER_MINUTE):
            assert (await post(run, "/jobs", JOB, f"new-{number}")).status_code == 429
        assert 0 < len(reads) < 1.5 * LOOKUPS_PER_MINUTE


async def test_a_repetition_at_a_limit_waits_for_the_first_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, MAKEWAY_MAX_SUBMISSIONS_PER_MINUTE="1") as run:
        service = run.service.services.submissions
        place, arrived, go_on = service._store_large_files, asyncio.Event(), asyncio.Event()

        async def slow(files: Any) -> None:  # as where a disk is
            arrived.set()
            await go_on.wait()
            await place(files)

        monkeypatch.setattr(service, "_store_large_files", slow)
        first = asyncio.create_task(post(run, "/jobs", JOB, "k-1"))
        await arrived.wait()
        again = asyncio.create_task(post(run, "/jobs", JOB, "k-1"))
        other = await post(run, "/jobs", JOB, "k-2")
        assert other.status_code == 429
        assert not again.done(), "it came before the other one"
        go_on.set()
        answers = [await first, await again]
        assert [answer.status_code for answer in answers] == [201, 201]
        assert len({answer.json()["id"] for answer in answers}) == 1
        assert service._under_way._ends == {}


class Flaky(httpx2.ASGITransport):
    """Carries requests to the service, but loses some answers or answers 502 itself."""

    def __init__(self, run: Running, *trouble: str) -> None:
        super().__init__(app=run.app)
        self.trouble = list(trouble)
        self.sent = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.sent += 1
        what = self.trouble.pop(0) if self.trouble else ""
        if what == "502":
            return httpx2.Response(502, text="bad gateway", request=request)
        answer = await super().handle_async_request(request)
        if what == "lost":
            await answer.aread()
            raise httpx2.ReadError("the connection broke", request=request)
        return answer


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(api, "MAX_PAUSE", 0.01)


@pytest.mark.usefixtures("quick")
async def test_the_client_repeats_a_submission_whose_answer_was_lost(run: Running) -> None:
    flaky = Flaky(run, "502", "lost", "lost")
    async with AsyncClient(URL, "ana", transport=flaky) as client:
        job = await client.submit(JobRequest(**JOB))
        assert flaky.sent == 4
        assert await count(run) == 1
        assert (await client.job(job.id)).name == "train"
        flaky.trouble = ["lost"]
        with pytest.raises(Unreachable):
            await client.cancel(job.id)


@pytest.mark.usefixtures("quick")
async def test_the_client_gives_up_and_does_not_repeat_a_refusal(run: Running) -> None:
    flaky = Flaky(run, *["502"] * 10)
    async with AsyncClient(URL, "ana", transport=flaky) as client:
        with pytest.raises(MakewayError, match="502"):
            await client.submit(JobRequest(**JOB))
        assert flaky.sent == api.ATTEMPTS
        flaky.trouble, flaky.sent = [], 0
        with pytest.raises(MakewayError):
            await client.submit(JobRequest(name="x", profile="none", command=IDLE))
        assert flaky.sent == 1


@pytest.mark.usefixtures("quick")
def test_the_blocking_client_repeats_with_the_same_key() -> None:
    keys: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        keys.append(request.headers["Idempotency-Key"])
        return httpx2.Response(503, text="starting")

    with Client(URL, "ana", transport=httpx2.MockTransport(answer)) as client:
        for _ in range(2):
            with pytest.raises(MakewayError):
                client.submit(JobRequest(**JOB))
    assert len(keys) == 2 * api.ATTEMPTS
    assert len(set(keys)) == 2, "one key for each submission"


def test_the_pause_is_at_least_what_the_service_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "FIRST_PAUSE", 0.0)
    pause = api.retries()["wait"]

    class State:
        attempt_number = 1

        class outcome:
            @staticmethod
            def exception() -> Exception:
                return MakewayError("busy", status=503, numbers={"retry_after": 3})

    assert pause(State) == 3.0
