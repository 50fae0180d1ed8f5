"""Many valid and invalid requests made from the API's own description: none is answered 500."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from web.portal import API, PEOPLE, caller, portal, serving

REQUESTS = int(os.environ.get("REQUESTS", "5"))
"""How many valid and as many invalid requests each route gets; `make requests` sets 100."""

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
ALL = caller("fuzz", "read", "submit", "manage", "admin", "reserve", groups=("rnd", "devops"))


class Served(threading.Thread):
    """A portal with a loop, a thread and a socket of its own, as schemathesis calls it from outside."""

    def __init__(self, state: Path) -> None:
        super().__init__(daemon=True)
        self.state = state
        self.url: Future[str] = Future()
        self.jobs: list[str] = []
        self.end: asyncio.Event
        self.loop: asyncio.AbstractEventLoop

    def run(self) -> None:
        asyncio.run(self.serve())

    async def serve(self) -> None:
        self.loop, self.end = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with portal(self.state) as web:
                self.jobs = [await web.running_job(profile="gpu1"), await web.running_job(profile="gpu2")]
                async with serving(web.app) as address:
                    self.url.set_result(address)
                    await self.end.wait()
        except BaseException as error:
            if not self.url.done():
                self.url.set_exception(error)
            raise


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setitem(PEOPLE, "fuzz", ALL)
    thread = Served(tmp_path)
    thread.start()
    thread.url.result(30)
    yield thread
    thread.loop.call_soon_threadsafe(thread.end.set)
    thread.join(30)


class Guns:
    """Sends requests and counts them."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.url = served.url.result()
        self.sent = 0

    def at_all(self, each: int) -> int:
        """Send `each` valid and as many invalid requests to every operation; answers how many there were."""
        document = httpx2.get(f"{self.url}{API}/openapi.json", timeout=60).json()
        for result in schemathesis.openapi.from_dict(document).get_all_operations():
            operation: Any = result.ok()
            if operation.definition.raw["operationId"] == "events":
                continue  # a stream has no end; test_stream.py is about it
            for mode in GenerationMode:
                self.at_one(operation, mode, each)
        return self.sent

    def at_one(self, operation: Any, mode: GenerationMode, each: int) -> None:
        rules = {"deadline": None, "database": None, "phases": [Phase.generate]}

        @seed(20260101)
        @settings(max_examples=each, suppress_health_check=list(HealthCheck), **rules)
        @given(case=operation.as_strategy(generation_mode=mode))
        def one(case: Case) -> None:
            self.sent += 1
            if mode is GenerationMode.POSITIVE and "id" in (case.path_parameters or {}) and self.sent % 2:
                case.path_parameters["id"] = self.served.jobs[self.sent // 2 % 2]
            if "wait" in (case.query or {}):
                case.query["wait"] = 0.01
            answer = case.call(base_url=self.url, headers={"Authorization": "token fuzz"}, timeout=30)
            case.validate_response(answer, checks=CHECKS)

        one()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_requests_and_no_500(served: Served) -> None:
    assert Guns(served).at_all(REQUESTS) >= 50 * REQUESTS


def test_a_few_requests_to_each_route_and_no_500(served: Served) -> None:
    assert Guns(served).at_all(2) >= 60
