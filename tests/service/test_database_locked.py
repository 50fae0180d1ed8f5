"""A lock of the database that another process holds: requests are answered soon, work goes on, and nothing is lost."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx2
import pytest
from makeway_quota.store.database import database
from running import IDLE, URL, python, running

BUSY = 2.0
LOCKED = 6.0
"""Seconds for which the lock is held"""
SOON = 2 * BUSY + 2
"""Seconds in which each request is answered, also on a busy machine"""


@pytest.mark.slow
@pytest.mark.covers("N07")
async def test_requests_are_answered_while_another_process_holds_a_lock_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_SECONDS", BUSY)
    async with running(tmp_path) as run:
        stays = await run.submit("ana", "stays", profile="gpu1")
        ends = await run.submit("ana", "ends", python("import time; time.sleep(3)"), profile="gpu1")
        for job in (stays, ends):
            await run.job(job.id, "running")
        answers: dict[str, list[tuple[float, httpx2.Response]]] = defaultdict(list)
        transport = httpx2.ASGITransport(app=run.app, raise_app_exceptions=True)
        async with httpx2.AsyncClient(base_url=URL, transport=transport, timeout=60) as http:

            async def ask(kind: str, request: Callable[[], Awaitable[httpx2.Response]]) -> None:
                began = time.monotonic()
                answer = await request()
                answers[kind].append((time.monotonic() - began, answer))

            asked = {"Authorization": "token ana"}
            body = {"command": IDLE, "profile": "gpu1", "name": "new"}
            kinds: dict[str, Callable[[], Awaitable[httpx2.Response]]] = {
                "submit": lambda: http.post("/api/v1/jobs", json=body, headers=asked),
                "cancel": lambda: http.post(f"/api/v1/jobs/{stays.id}/cancel", headers=asked),
                "list": lambda: http.get("/api/v1/jobs", headers=asked),
                "readyz": lambda: http.get("/readyz"),
            }
            other = sqlite3.connect(next(tmp_path.rglob("*.sqlite")), isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            async with asyncio.TaskGroup() as requests:
                until = time.monotonic() + LOCKED
                while time.monotonic() < until:
                    for kind, request in kinds.items():
                        requests.create_task(ask(kind, request))
                    await asyncio.sleep(0.2)
            other.execute("ROLLBACK")
            other.close()
            for kind in ("submit", "cancel"):
                for took, answer in answers[kind]:
                    assert answer.status_code == 503, (kind, answer.text)
                    assert answer.json()["code"] == "database_unavailable"
                    assert int(answer.headers["retry-after"]) >= 1
                    assert took < SOON, f"{kind} was answered after {took:.1f} s"
            assert {answer.status_code for _, answer in answers["list"]} == {200}
            assert max(took for took, _ in answers["list"]) < SOON
            assert max(took for took, _ in answers["readyz"]) < BUSY + 1
            assert {answer.json()["checks"]["database"] for _, answer in answers["readyz"]} == {
                "writes",
                "cannot be written",
            }
            await run.job(ends.id, "succeeded", seconds=15)
            assert (await run.job(stays.id, "running")).attempt == 1
            assert (await http.get("/readyz")).status_code == 200
            assert (await kinds["submit"]()).status_code == 201
        assert [job.name for job in (await run.client("ana").jobs()).jobs] == ["new", "ends", "stays"], (
            "what was answered with 503 was not written"
        )
