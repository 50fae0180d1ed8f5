"""Workers that are no processes of the service: one token opens one worker of one attempt, and nothing else."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from makeway_api.models import FileIn
from makeway_quota.backends.base import LOST_AFTER
from makeway_quota.control.workers import tokens as attempt_tokens
from makeway_quota.control.workers.channel import STALE_SECONDS, worker_of
from makeway_quota.control.workers.tokens import AttemptTokens
from makeway_quota.services.jobs.attempts import MIN_LOG
from makeway_quota.services.limits.output_rates import BURST, RATE, RESULT_BURST, RESULT_RATE, OutputRates
from web.portal import API, Portal, portal

INSTANCE = {"instance": "launcher-1"}
HELD = 60
"""The longest that a request is held, in seconds."""
PROMPT = 20
"""Longer than an answer takes on a busy machine, and well before a held request ends by itself."""
MIB = 2**20


class Worker:
    """A launcher as the service sees it."""

    def __init__(self, web: Portal, job: str, attempt: int = 1, number: int = 0, token: str | None = None) -> None:
        self.key = (job, attempt, number)
        self.channel = web.run.service.components.channel
        path, first = self.channel.credentials(*self.key)
        self.path = f"/services/makeway/{path}"
        self.http = web.as_(None, headers={"Authorization": f"Bearer {token or first}"})

    async def post(self, what: str, json: Any = None, **more: Any) -> httpx2.Response:
        return await self.http.post(f"{self.path}/{what}", json=json, **more)

    async def get(self, what: str, **params: Any) -> httpx2.Response:
        return await self.http.get(f"{self.path}/{what}", params=params)

    async def claim(self) -> dict[str, Any]:
        answer = await self.post("claim", INSTANCE)
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    async def send(self, kind: str, offset: int, data: bytes, **params: Any) -> httpx2.Response:
        return await self.http.post(f"{self.path}/outputs/{kind}", params={"offset": offset, **params}, content=data)


async def promptly(asked: Awaitable[httpx2.Response]) -> httpx2.Response:
    """Return the answer to a request that is held no longer than it must be; fail where it comes by the deadline."""
    async with asyncio.timeout(PROMPT):
        return await asked


def code(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


@pytest.fixture
async def worker(web: Portal) -> Worker:
    data = base64.b64encode(b"print(1)").decode()
    job = await web.running_job(files=[FileIn(path="train.py", data=data, executable=True)], env={"SECRET": "1"})
    return Worker(web, job)


async def test_a_claim_returns_everything_that_a_launcher_starts(worker: Worker) -> None:
    start = await worker.claim()
    assert (start["workload"], start["attempt"], start["worker"], start["gang"]) == (*worker.key, 1)
    assert start["env"] == {"SECRET": "1"}
    assert start["gpus"] == 3
    assert start["lost_after"] == LOST_AFTER
    [file] = start["files"]
    assert file == {"path": "train.py", "executable": True, "digest": hashlib.sha256(b"print(1)").hexdigest()}
    content = await worker.get(f"files/{file['digest']}")
    assert content.content == b"print(1)"
    assert code(await worker.get(f"files/{'0' * 64}")) == (404, "not_found")
    assert (await worker.post("claim", INSTANCE)).status_code == 200
    assert code(await worker.post("claim", {"instance": "launcher-2"})) == (409, "claimed")


async def test_a_held_request_returns_the_notice_as_soon_as_it_is_written(web: Portal, worker: Worker) -> None:
    await worker.claim()
    web.backend.ignoring.add(worker.key[0])
    assert (await worker.get("orders")).json() == {"known": "", "notice": None, "stop": False, "failed": None}
    held = asyncio.create_task(worker.get("orders", known="", wait=HELD))
    await asyncio.sleep(0)
    await web.run.client("ana").preempt_test(worker.key[0])
    orders = (await promptly(held)).json()
    assert orders["notice"]["preempt_test"] is True
    assert orders["notice"]["deadline"] > orders["notice"]["at"]
    again = await promptly(worker.get("orders", known="", wait=HELD))
    assert again.json() == orders, "one who does not know it is told at once"


async def test_a_cancelled_job_is_stopped_and_a_worker_that_is_over_is_told(web: Portal, worker: Worker) -> None:
    await worker.claim()
    web.backend.ignoring.add(worker.key[0])
    held = asyncio.create_task(worker.get("orders", known="", wait=HELD))
    await web.run.client("ana").cancel(worker.key[0])
    answer = await promptly(held)
    assert answer.status_code == 410 or answer.json()["stop"] is True
    await web.run.job(worker.key[0], "cancelled")
    for again in (
        worker.post("claim", INSTANCE),
        worker.get("orders"),
        worker.get("files/" + "0" * 64),
        worker.post("report", {}),
        worker.send("log", 0, b"late"),
    ):
        assert code(await again) == (410, "attempt_ended")


async def test_a_replica_without_its_database_tells_no_worker_what_to_do(worker: Worker) -> None:
    await worker.claim()
    worker.channel.on_change(lambda: None)
    worker.channel._read_at -= STALE_SECONDS
    for asked in (worker.post("claim", INSTANCE), worker.get("orders"), worker.post("report", {})):
        answer = await asked
        assert code(answer) == (503, "database_unavailable")
        assert answer.headers["retry-after"] == "1"
        assert answer.headers["connection"] == "close", "the next connection may lead to another replica"
    await worker.channel.refresh()
    again = await worker.get("orders")
    assert again.status_code == 200
    assert "connection" not in again.headers


async def test_a_held_request_ends_with_its_attempt(web: Portal, worker: Worker) -> None:
    await worker.claim()
    held = asyncio.create_task(worker.get("orders", known="", wait=HELD))
    await asyncio.sleep(0)
    web.backend.finish(worker.key[0])
    assert code(await promptly(held)) == (410, "attempt_ended")


async def test_the_tokens_of_others_open_nothing(web: Portal, worker: Worker) -> None:
    job, _, _ = worker.key
    other = await web.running_job("other", owner="bo", profile="gpu1")
    wrong = [
        Worker(web, job, token=web.run.service.components.channel.tokens.token((job, 2, 0))),
        Worker(web, job, token=web.run.service.components.channel.tokens.token((job, 1, 1))),
        Worker(web, job, token=web.run.service.components.channel.tokens.token((other, 1, 0))),
        Worker(web, job, token=AttemptTokens(b"another secret!!").token((job, 1, 0))),
        Worker(web, job, token="ana"),
        Worker(web, job, token="root"),
        Worker(web, job, token="spawner"),
        Worker(web, job, token="x" * 5000),
    ]
    for stranded in wrong:
        for answer in (
            await stranded.post("claim", INSTANCE),
            await stranded.get("orders"),
            await stranded.get("files/" + "0" * 64),
            await stranded.post("report", {}),
            await stranded.send("log", 0, b"x"),
            await stranded.send("result", 0, b"x"),
        ):
            assert code(answer) == (401, "unauthorized")
    person = web.as_("ana")
    for method, what in (("POST", "claim"), ("GET", "orders"), ("POST", "report"), ("POST", "outputs/log?offset=0")):
        assert code(await person.request(method, f"{worker.path}/{what}", json=INSTANCE)) == (401, "unauthorized")
    browser = await web.browser("ana")
    assert (await browser.get(f"{worker.path}/orders", headers={"Accept": "application/json"})).status_code == 401


async def test_the_token_of_a_worker_opens_nothing_else(web: Portal, worker: Worker) -> None:
    for path in ("me", "jobs", f"jobs/{worker.key[0]}", f"jobs/{worker.key[0]}/logs", "usage", "events", "policy"):
        assert (await worker.http.get(f"{API}/{path}")).status_code == 401, path
    for path in ("jobs", "sessions", f"jobs/{worker.key[0]}/cancel"):
        assert (await worker.http.post(f"{API}/{path}", json={})).status_code == 401, path


async def test_an_expired_token_is_only_renewed(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    await worker.claim()
    assert (await worker.post("report", {})).json()["token"] is None
    monkeypatch.setattr(attempt_tokens, "TOKEN_SECONDS", -1.0)
    for answer in (
        await worker.get("orders"),
        await worker.get("files/" + "0" * 64),
        await worker.send("log", 0, b"x"),
    ):
        assert code(answer) == (401, "token_expired")
    assert (await worker.claim())["token"], "a machine may take long to be ready"
    renewed = (await worker.post("report", {})).json()["token"]
    monkeypatch.undo()
    worker.http.headers["Authorization"] = f"Bearer {renewed}"
    assert (await worker.send("log", 0, b"x")).json() == {"end": 1}
    monkeypatch.setattr(attempt_tokens, "RENEWAL_SECONDS", -1.0)
    assert code(await worker.post("report", {})) == (401, "unauthorized")


async def test_an_unavailable_service_that_ended_the_work_is_known(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await worker.claim()
    for unheard, just_back, unavailable in ((False, True, False), (True, False, False), (True, True, True)):
        monkeypatch.setattr(worker.channel, "lost_after", 1e9 if just_back else -1.0)
        end = {"exit_code": 75, "ended_at": 1.0, "acknowledged": True, "unheard": unheard}
        assert (await worker.post("report", {"noticed": True, "exit": end})).status_code == 200
        await worker.channel.refresh()
        assert worker.channel.worker_statuses()[worker.key[:2]][0].service_unavailable is unavailable


def test_a_report_that_an_earlier_release_stored_is_read() -> None:
    assert worker_of({"exit": {"exit_code": 75, "ended_at": 1.0, "service_away": True}}).service_unavailable


async def test_a_worker_that_was_not_claimed_reports_nothing(worker: Worker) -> None:
    assert code(await worker.post("report", {"step": 1})) == (409, "not_claimed")
    assert code(await Worker.post(worker, "report", {"step": "many"})) == (422, "invalid")


async def test_a_worker_beyond_the_attempts_own_is_refused(web: Portal, worker: Worker) -> None:
    second = Worker(web, worker.key[0], number=1)
    assert code(await second.post("claim", INSTANCE)) == (404, "not_found")


async def test_output_is_appended_once_and_has_limits(worker: Worker) -> None:
    await worker.claim()
    assert (await worker.send("log", 0, b"one ")).json() == {"end": 4}
    assert (await worker.send("log", 0, b"one two")).json() == {"end": 7}
    missing = await worker.send("log", 20, b"x")
    assert code(missing) == (409, "out_of_place")
    assert missing.json()["numbers"]["expected"] == 7
    assert (await worker.send("log", 20, b"x", dropped=True)).json() == {"end": 21}
    assert code(await worker.send("log", 21, b"x" * (MIB + 1))) == (413, "too_large")
    assert (await worker.send("error", 0, b"e" * MIB)).json() == {"end": MIB}
    assert code(await worker.send("error", MIB, b"e")) == (413, "too_large")
    assert code(await worker.send("notes", 0, b"x")) == (422, "invalid")
    assert code(await worker.send("log", -1, b"x")) == (422, "invalid")
    large = {"exit": {"exit_code": 0, "ended_at": 1.0, "message": "m" * 5000}}
    assert code(await worker.post("report", large)) == (422, "invalid")


async def test_a_result_beyond_the_services_limit_is_refused(tmp_path: Path) -> None:
    async with portal(tmp_path, MAKEWAY_MAX_RESULT_MB="1") as web:
        worker = Worker(web, await web.running_job(profile="gpu1"))
        await worker.claim()
        assert (await worker.send("result", 0, b"r" * 900_000)).json() == {"end": 900_000}
        assert code(await worker.send("result", 900_000, b"r" * 200_000)) == (413, "too_large")
        assert not web.run.service.components.store.outputs.has(*worker.key[:2], "result"), "a part is not the whole"


async def test_a_flood_of_log_is_slowed_down_and_hinders_no_other_worker(web: Portal, worker: Worker) -> None:
    web.run.service.services.attempts._rates = OutputRates(clock=lambda: 0.0)  # a slow machine sends no flood
    await worker.claim()
    offset, answer = 0, await worker.send("log", 0, b"")
    while answer.status_code == 200:
        assert offset <= BURST
        answer = await worker.send("log", offset, b"f" * MIB)
        offset += MIB
    assert code(answer) == (429, "too_fast")
    assert int(answer.headers["retry-after"]) >= 1
    other = Worker(web, await web.running_job("other", profile="gpu1"))
    await other.claim()
    assert (await other.send("log", 0, b"x" * MIB)).status_code == 200


async def test_logs_of_members_do_not_pass_the_quota_of_their_team_at_the_same_moment(tmp_path: Path) -> None:
    """Of each only as much is kept then as tells why a job failed, however recently the sums were read."""
    async with portal(tmp_path, MAKEWAY_MAX_KEPT_TEAM_MB="6", MAKEWAY_MAX_KEPT_SHARE_PERCENT="100") as web:
        workers = [Worker(web, await web.running_job(f"j{at}", profile="gpu1")) for at in range(3)]
        for worker in workers:
            await worker.claim()
            await worker.send("log", 0, b"x")  # the sums are known from now on
        store, beside = web.run.service.components.store, len(workers) * MIN_LOG

        async def flood(worker: Worker) -> None:
            for part in range(5):
                answer = await worker.send("log", 1 + part * (MIB - 1), b"l" * (MIB - 1))
                assert answer.json() == {"end": 1 + (part + 1) * (MIB - 1)}
                assert (await asyncio.to_thread(store.accounts.of, "ana", "rnd"))[1] <= 6_000_000 + beside

        await asyncio.gather(*map(flood, workers))
        [kept] = [line for line in store.accounts.list_lines("ana") if line.kind == "logs"]
        await asyncio.to_thread(store.accounts.recount, "ana")
        assert kept in store.accounts.list_lines("ana")


async def test_a_flood_of_results_is_slowed_down(web: Portal, worker: Worker) -> None:
    web.run.service.services.attempts._result_rates = OutputRates(RESULT_RATE, RESULT_BURST, lambda: 0.0)
    await worker.claim()
    sent, answer = 0, await worker.send("result", 0, b"")
    while answer.status_code == 200:
        assert sent <= RESULT_BURST
        answer = await worker.send("result", 0, b"f" * MIB)  # known from the second time on
        sent += MIB
    assert code(answer) == (429, "too_fast")
    assert (await worker.post("report", {"step": 1})).status_code == 200, "what it reports has a rate of its own"


async def test_many_workers_are_told_to_send_reports_and_logs_less_often(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await worker.claim()
    for workers, heartbeat, pace in ((1, 10.0, 1.0), (300, 10.0, 1.0), (3_000, 15.0, 10.0), (100_000, 60.0, 30.0)):
        monkeypatch.setattr(type(worker.channel), "workers", workers)
        receipt = (await worker.post("report", {})).json()
        assert (receipt["heartbeat"], receipt["pace"]) == (heartbeat, pace)


def test_room_for_a_log_comes_back_with_time() -> None:
    now = 0.0
    rates = OutputRates(clock=lambda: now)
    assert rates.take("w", BURST) == 0
    assert rates.take("w", RATE) == 1.0
    now = 1.0
    assert rates.take("w", RATE) == 0
    assert rates.take("w", 1) > 0
    assert rates.take("v", BURST) == 0


@asynccontextmanager
async def slow_output(worker: Worker) -> AsyncIterator[None]:
    """Send a piece of log whose body arrives in part, and in whole at the end of the block."""
    go, sent = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"begin"
        sent.set()
        await go.wait()

    held = asyncio.create_task(worker.http.post(f"{worker.path}/outputs/log?offset=0", content=slow()))
    await sent.wait()
    yield
    go.set()
    assert (await held).status_code == 200


async def test_one_worker_has_one_name_however_its_address_is_written(tmp_path: Path) -> None:
    async with portal(tmp_path, max_worker_outputs=2, max_bodies_per_worker=1) as web:
        worker = Worker(web, await web.running_job(profile="gpu1"))
        await worker.claim()
        async with slow_output(worker):
            again = f"{worker.path.removesuffix('/1/0')}/0000001/000/outputs/log?offset=0"
            assert code(await worker.http.post(again, content=b"x")) == (503, "busy")


async def test_bodies_of_workers_have_places_of_their_own(tmp_path: Path) -> None:
    async with portal(tmp_path, max_bodies=2, max_worker_outputs=1, max_bodies_per_worker=1) as web:
        worker = Worker(web, await web.running_job(profile="gpu1"))
        await worker.claim()
        async with slow_output(worker):
            second = await worker.send("log", 0, b"x")
            assert code(second) == (503, "busy")
            assert (await worker.post("report", {})).status_code == 200
            assert (
                await web.as_("ana").post(f"{API}/jobs", json={"command": ["x"], "dry_run": True})
            ).status_code == 200
