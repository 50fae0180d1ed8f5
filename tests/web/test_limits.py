"""Requests that are refused: no login, too large, too slow, not JSON, NUL, nonsense in addresses; never a 500."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from makeway_quota.settings import load
from makeway_quota.web.login.auth import Authenticator, TokenAuth
from makeway_quota.web.requests.limits import Limits
from makeway_quota.web.settings import WebSettings
from web.portal import API, EVIL, PEOPLE, PREFIX, Portal, portal, serving

JSON = {"Content-Type": "application/json"}


def refused(answer: httpx2.Response, status: int, *words: str) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == status
    for word in words:
        assert word in problem["detail"]
    assert "Traceback" not in answer.text


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[Portal]:
    async with portal(tmp_path, job_bytes=3 * 2**20, body_bytes=2**20) as made:
        yield made


async def test_a_body_that_is_too_large_names_its_limit(small: Portal) -> None:
    ana = small.as_("ana")
    body = json.dumps({"command": ["true"], "source": "x" * 4 * 2**20}).encode()
    refused(await ana.post(f"{API}/jobs", content=body, headers=JSON), 413, "3 MiB", "shared storage")
    fits = json.dumps({"command": ["true"], "profile": "gpu1", "source": "x" * 2 * 2**20}).encode()
    assert (await ana.post(f"{API}/jobs", content=fits, headers=JSON)).status_code == 201
    refused(await ana.post(f"{API}/jobs/j-1/clone", content=fits, headers=JSON), 413, "1 MiB")

    refused(await small.as_(None).post(f"{API}/jobs", content=fits, headers=JSON), 413, "1 MiB")

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 2**20

    refused(await ana.post(f"{API}/jobs", content=endless(), headers=JSON), 413)
    lying = {"Content-Length": "9" * 30} | JSON
    refused(await ana.post(f"{API}/jobs", content=b"{}", headers=lying), 413)


@pytest.mark.parametrize(
    ("token", "path", "sent", "heard"),
    [
        (True, "jobs", 40, 40),
        (True, "jobs", 600, 2**9),
        (True, "jobs/j-1/clone", 40, 40),
        (False, "jobs", 10, 10),
        (False, "jobs", 40, 2**4),
    ],
)
async def test_a_sender_of_too_much_may_finish_before_the_answer(token: bool, path: str, sent: int, heard: int) -> None:
    """A proxy that still sends when the connection closes answers 503 itself, and our sentence is lost."""
    settings = WebSettings(secret=b"x" * 32, job_bytes=3 * 2**20, body_bytes=2**20)
    told: list[dict[str, Any]] = []
    left = sent

    async def receive() -> dict[str, Any]:
        nonlocal left
        assert not told, "the answer comes last"
        left -= 1
        return {"type": "http.request", "body": b" " * 2**20, "more_body": left > 0}

    async def send(message: Any) -> None:
        told.append(message)

    async def app(*_: Any) -> None:
        raise AssertionError("the app is not called")

    headers = [(b"content-length", str(sent * 2**20).encode())]
    headers += [(b"authorization", b"token ana")] if token else []
    scope = {"type": "http", "method": "POST", "path": f"{settings.api}/{path}", "headers": headers}
    await Limits(app, settings, Authenticator(settings, TokenAuth(PEOPLE)))(scope, receive, send)
    assert told[0]["status"] == 413
    assert sent - left == pytest.approx(heard, abs=1)


NO_JOBS = [
    b"", b"{", b"[]", b"null", b"3", b'"x"', b"\xff\xfe", b'{"command": "\xff"}', b"{" * 100_000,
    b'{"command": ["true"], "time_limit": ' + b"9" * 5000 + b"}", b'{"command": ["true"], "time_limit": 1e999}',
    b'{"command": ["true"], "time_limit": NaN}', b'{"command": ["true"], "name": "\\ud800"}',
    b'{"command": ["true"], "name": "a\\u0000b"}', b'{"command": ["true"], "\\ud800": 1}',
    b'{"command": [], "workers": -1}', b'{"command": ["true"], "env": {"a": 1}}',
    b'{"command": ["true"], "files": [{"path": "", "data": ""}]}',
]  # fmt: skip


async def test_a_body_that_is_no_job(web: Portal) -> None:
    for body in NO_JOBS:
        answer = await web.as_("ana").post(f"{API}/jobs", content=body, headers=JSON)
        assert answer.status_code in (400, 422), (body, answer.text)
        refused(answer, answer.status_code)
    assert (await web.as_("ana").get(f"{API}/jobs")).json()["jobs"] == []


async def test_each_wrong_field_is_named_and_nothing_is_repeated(web: Portal) -> None:
    body = {"command": ["true"], "workers": 0, "time_limit": "soon", EVIL: 1}
    answer = await web.as_("ana").post(f"{API}/jobs", json=body)
    refused(answer, 422, "`workers`", "`time_limit`")
    assert {error["field"] for error in answer.json()["errors"]} == {"workers", "time_limit", EVIL}
    assert "soon" not in answer.json()["detail"]


async def test_backslashes_that_are_no_nul_pass(web: Portal) -> None:
    body = b'{"command": ["true"], "profile": "gpu1", "source": "print(\\"\\\\u0000\\")"}'
    assert (await web.as_("ana").post(f"{API}/jobs", content=body, headers=JSON)).status_code == 201


async def test_other_content_types_are_refused(web: Portal) -> None:
    ana = web.as_("ana")
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "é"):
        headers = {"Content-Type": kind.encode()}
        refused(await ana.post(f"{API}/jobs", content=b"{}", headers=headers), 415, "application/json")


NONSENSE = [
    "jobs/%00", "jobs/j%2F..%2F..", "jobs/" + "j" * 500, "jobs/%F0%28%8C%28", "jobs/ ", "jobs/j-1;drop",
    "jobs?limit=0", "jobs?limit=1001", "jobs?limit=x", "jobs?state=%27", "jobs?team=" + "x" * 64, "jobs?cursor=%00",
    "jobs?cursor=nonsense", "jobs/j-1?wait=61", "jobs/j-1?wait=-1", "jobs/j-1?wait=nan", "jobs/j-1?wait=inf",
    "jobs/j-1?version=99999999999999999999", "jobs/j-1/logs?offset=99999999999999999999",
    "jobs/j-1/logs?attempt=0", "decisions?before=99999999999999999999", "jobs?state=x",
    "policy/versions/0", "policy/versions/99999999999", "policy/versions/x", "events?after=-1",
]  # fmt: skip


async def test_nonsense_in_addresses_is_refused(web: Portal) -> None:
    for path in NONSENSE:
        answer = await web.as_("root").get(f"{API}/{path}")
        assert answer.status_code in (400, 403, 404, 422), (path, answer.text)
        refused(answer, answer.status_code)


async def test_methods_and_addresses_that_do_not_exist(web: Portal) -> None:
    root = web.as_("root")
    wrong = await root.patch(f"{API}/jobs")
    refused(wrong, 405, "PATCH")
    assert wrong.headers["allow"]
    refused(await root.get(f"{API}/nothing"), 404, "/nothing")
    refused(await root.get("/elsewhere"), 404)
    refused(await root.get(f"{API}/jobs/"), 404)
    refused(await root.get(f"{PREFIX}static/../app.py"), 404)
    refused(await root.get(f"{PREFIX}static/%2e%2e/app.py"), 404)
    refused(await root.get(f"{PREFIX}static/hub/components/jquery/dist/jquery.min.js"), 404)


async def test_an_internal_error_is_answered_without_its_traceback(
    web: Portal, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(caller: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(web.services.usage, "usage", broken)
    transport = httpx2.ASGITransport(app=web.app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://hub.test") as client:
        answer = await client.get(f"{API}/usage", headers={"Authorization": "token ana"})
    refused(answer, 500, "service's log")
    assert "secret" not in answer.text


# -- before the login --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "mib"), [({"Authorization": "nonsense"}, 40), ({"Authorization": "token nonsense"}, 40), ({}, 10)]
)
async def test_a_body_without_a_login_takes_no_memory(web: Portal, headers: dict[str, str], mib: int) -> None:
    """Measured over a real socket: many MiB are sent, and the peak of what Python allocates stays below 1 MB."""
    async with serving(web.app) as address, httpx2.AsyncClient() as client:
        url = f"{address}{API}/jobs"
        assert (await client.post(url, content=b"{}", headers=headers | JSON)).status_code == 401  # imports, caches
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        answer = await client.post(url, content=small_parts(16 * mib), headers=headers | JSON)
        peak = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
    refused(answer, 401)
    assert peak < 1_000_000


def small_parts(many: int) -> AsyncIterator[bytes]:
    part = b" " * 2**16

    async def made() -> AsyncIterator[bytes]:
        for _ in range(many):
            yield part

    return made()


async def test_the_login_is_checked_before_the_body_is_read(web: Portal) -> None:
    settings = WebSettings(prefix=PREFIX, secret=b"x" * 32)
    limits = Limits(never, settings, Authenticator(settings, TokenAuth(PEOPLE)))
    told: list[Any] = []
    read: list[str] = []

    async def receive() -> dict[str, Any]:
        read.append("body")
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        told.append(message)

    await limits(asked(settings, b"token nonsense"), receive, send)
    assert told[0]["status"] == 401


async def never(*_: Any) -> None:
    raise AssertionError("the app is not called")


def asked(settings: WebSettings, token: bytes) -> dict[str, Any]:
    headers = [(b"authorization", token), (b"content-type", b"application/json")]
    return {"type": "http", "method": "POST", "path": f"{settings.api}/jobs", "headers": headers}


@pytest.mark.parametrize(("silence", "whole"), [(0.05, 30.0), (30.0, 0.05)])
async def test_a_body_that_does_not_arrive_is_a_timeout(silence: float, whole: float) -> None:
    settings = WebSettings(secret=b"x" * 32, body_silence=silence, body_seconds=whole)
    limits = Limits(never, settings, Authenticator(settings, TokenAuth(PEOPLE)))
    told: list[Any] = []

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        told.append(message)

    await limits(asked(settings, b"token ana"), receive, send)
    assert told[0]["status"] == 408
    assert b"did not arrive in time" in told[1]["body"]


async def test_bodies_beyond_the_limit_get_retry_after() -> None:
    settings = WebSettings(secret=b"x" * 32, max_bodies=1)
    told: list[Any] = []
    arriving = asyncio.Event()

    async def slow() -> dict[str, Any]:
        arriving.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        told.append(message)

    limits = Limits(never, settings, Authenticator(settings, TokenAuth(PEOPLE)))
    first = asyncio.create_task(limits(asked(settings, b"token ana"), slow, send))
    await arriving.wait()
    await limits(asked(settings, b"token bo"), receive, send)
    assert told[0]["status"] == 503
    assert (b"retry-after", b"2") in told[0]["headers"]
    first.cancel()


async def test_slow_uploads_of_some_callers_keep_no_other_out() -> None:
    """Ana and bo hold all that people may have; the spawner's request comes in, and eve's after one of them ends."""
    settings = WebSettings(secret=b"x" * 32, max_bodies=6, max_bodies_per_caller=2, bodies_for_spawner=2)
    handed_on: list[str] = []
    told: list[tuple[str, int]] = []
    arriving = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        handed_on.append(dict(scope["headers"])[b"authorization"].decode())

    limits = Limits(app, settings, Authenticator(settings, TokenAuth(PEOPLE)))

    async def upload(person: str, *, slow: bool) -> None:
        async def receive() -> dict[str, Any]:
            if slow:
                arriving.set()
                await asyncio.Event().wait()
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                told.append((person, message["status"]))

        await limits(asked(settings, b"token " + person.encode()), receive, send)

    slow = []
    for person in ("ana", "ana", "bo", "bo"):
        arriving.clear()
        slow.append(asyncio.create_task(upload(person, slow=True)))
        await asyncio.wait_for(arriving.wait(), 30)
    await upload("ana", slow=False)
    await upload("eve", slow=False)
    assert told == [("ana", 503), ("eve", 503)]
    assert handed_on == []
    for _ in range(3):
        await upload("spawner", slow=False)
    assert handed_on == ["token spawner"] * 3
    slow[0].cancel()
    await asyncio.wait({slow[0]})
    await upload("ana", slow=False)
    assert handed_on[3:] == ["token ana"]
    for task in slow:
        task.cancel()
    await asyncio.wait(slow)
    assert limits._arriving.total == 0


async def test_a_body_that_ends_early_is_not_processed() -> None:
    settings = WebSettings(secret=b"x" * 32)
    messages = [{"type": "http.request", "body": b"{}", "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    limits = Limits(never, settings, Authenticator(settings, TokenAuth(PEOPLE)))
    await limits(asked(settings, b"token ana"), receive, never)
    assert messages == []


async def test_large_bodies_are_processed_a_few_at_a_time() -> None:
    settings = WebSettings(secret=b"x" * 32, max_large_bodies=2)
    at_once: list[int] = []
    running = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal running
        running += 1
        at_once.append(running)
        assert len((await receive())["body"]) == 3 * 2**20
        await asyncio.sleep(0.01)
        running -= 1

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b" " * 3 * 2**20, "more_body": False}

    async def send(message: Any) -> None:
        raise AssertionError("nothing is refused")

    limits = Limits(app, settings, Authenticator(settings, TokenAuth(PEOPLE)))
    await asyncio.gather(*(limits(asked(settings, b"token ana"), receive, send) for _ in range(8)))
    assert len(at_once) == 8
    assert max(at_once) == 2


async def test_large_bodies_that_wait_are_bounded_in_all_and_per_caller() -> None:
    settings = WebSettings(
        secret=b"x" * 32,
        job_bytes=2**24,
        max_large_bodies=1,
        max_waiting_bytes=3 * 2**24,
        max_waiting_bytes_per_caller=2 * 2**24,
    )
    free, both = asyncio.Event(), asyncio.Event()
    sent: list[tuple[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await free.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def ask(person: str) -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b" " * 2**24, "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                sent.append((person, message))
                if len(sent) == 2:
                    both.set()

        await limits(asked(settings, b"token " + person.encode()), receive, send)

    limits = Limits(app, settings, Authenticator(settings, TokenAuth(PEOPLE)))
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for person in ("ana", "ana", "ana", "bo", "bo"):
            group.create_task(ask(person))
        await both.wait()
        assert [(person, message["status"]) for person, message in sent] == [("ana", 503), ("bo", 503)]
        assert all((b"retry-after", b"5") in message["headers"] for _, message in sent)
        free.set()
    assert [message["status"] for _, message in sent[2:]] == [200, 200, 200]
    assert limits._waiting.total == 0


async def test_large_bodies_of_other_requests_do_not_hold_up_submissions() -> None:
    settings = WebSettings(secret=b"x" * 32, max_large_bodies=1)
    free, submitted = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await free.wait() if scope["path"].endswith("/preview") else submitted.set()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b" " * (2**20 + 1), "more_body": False}

    limits = Limits(app, settings, Authenticator(settings, TokenAuth(PEOPLE)))
    job = asked(settings, b"token ana")
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(limits({**job, "path": f"{settings.api}/policy/preview"}, receive, never))
        group.create_task(limits(job, receive, never))
        await submitted.wait()
        free.set()


async def test_the_largest_files_fit_into_a_request(tmp_path: Path) -> None:
    """Files travel as base64: 51 MB of them are 68 MB of JSON, more than the 64 MiB of before."""
    config = load(environ={"MAKEWAY_MAX_FILES_MB": "51", "MAKEWAY_STATE_DIR": str(tmp_path)})
    async with portal(tmp_path / "p", MAKEWAY_MAX_FILES_MB=51, job_bytes=WebSettings.of(config).job_bytes) as web:
        file = {"path": "data.bin", "data": base64.b64encode(bytes(51_000_000)).decode()}
        ask = {"command": ["true"], "profile": "gpu1", "files": [file]}
        answer = await web.as_("ana").post(f"{API}/jobs", json=ask, timeout=60)
        assert answer.status_code == 201, answer.text[:300]
        assert len(web.services.context.store.files(answer.json()["id"])[0].data) == 51_000_000


@pytest.mark.parametrize("megabytes", [1, 48, 49, 50, 1000])
def test_the_limit_of_a_request_follows_that_of_its_files(megabytes: int, tmp_path: Path) -> None:
    config = load(environ={"MAKEWAY_MAX_FILES_MB": str(megabytes), "MAKEWAY_STATE_DIR": str(tmp_path)})
    text = 4 * ((config.max_files_bytes + 2) // 3)
    assert WebSettings.of(config).job_bytes >= text + 10_000_000, "base64, and the largest source"
