"""What is turned away: too large, not JSON, NUL, nonsense in addresses; never a 500, never a traceback."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from makeway_quota.web.limits import Limits
from makeway_quota.web.settings import WebSettings
from web.portal import API, EVIL, PREFIX, Portal, portal

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
        (True, "jobs", 600, 2**9 + 3),
        (True, "jobs/j-1/clone", 40, 40),
        (False, "jobs", 10, 10),
        (False, "jobs", 40, 2**4 + 1),
    ],
)
async def test_who_sends_too_much_may_finish_before_the_answer(token: bool, path: str, sent: int, heard: int) -> None:
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
        raise AssertionError("nobody behind the limits hears of it")

    headers = [(b"authorization", b"token x")] if token else []
    scope = {"type": "http", "method": "POST", "path": f"{settings.api}/{path}", "headers": headers}
    await Limits(app, settings)(scope, receive, send)
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


async def test_nonsense_in_addresses(web: Portal) -> None:
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


async def test_a_bug_is_told_without_its_traceback(web: Portal, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(caller: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(web.services.usage, "usage", broken)
    transport = httpx2.ASGITransport(app=web.app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://hub.test") as client:
        answer = await client.get(f"{API}/usage", headers={"Authorization": "token ana"})
    refused(answer, 500, "service's log")
    assert "secret" not in answer.text
