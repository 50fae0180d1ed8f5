"""Endpoints are called without FastAPI where a request is as expected; everything else is answered as by FastAPI."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Body, Depends, Header, Query, Request, Response
from fastapi.routing import APIRoute
from makeway_quota.web import api
from makeway_quota.web.dependencies import Key, ServicesDep
from makeway_quota.web.requests.direct_calls import DirectCall, direct_call
from makeway_quota.web.requests.route_table import RouteTable
from pydantic import BaseModel
from web.portal import API, Portal

JOB = {"profile": "gpu1", "command": ["python", "train.py"]}
REQUESTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("GET", "/jobs", {}),
    ("GET", "/jobs?limit=1&mine=true&state=live&unknown=1", {}),
    ("GET", "/jobs?limit=0&mine=perhaps&state=Live", {}),
    ("GET", "/jobs?limit=1&limit=x", {}),
    ("GET", "/jobs?limit=", {}),
    ("GET", "/jobs?team=" + "t" * 64, {}),
    ("GET", "/jobs/-", {}),
    ("GET", "/jobs/j-0", {}),
    ("GET", "/jobs/j-0?wait=nan", {}),
    ("GET", "/sessions?all=1", {}),
    ("GET", "/decisions?before=-1", {}),
    ("GET", "/offers/live", {}),
    ("GET", "/usage", {"headers": {"Authorization": "token nonsense"}}),
    ("POST", "/jobs", {"json": JOB | {"workers": 0, "more": 1}}),
    ("POST", "/jobs", {"json": {"command": "python"}}),
    ("POST", "/jobs", {"json": JOB | {"time_limit": 1e30}}),
    ("POST", "/jobs", {"json": [JOB]}),
    ("POST", "/jobs", {"json": JOB | {"profile": "nothing"}}),
    ("POST", "/jobs", {"json": JOB, "headers": {"Idempotency-Key": "two words"}}),
    ("POST", "/jobs", {"content": b""}),
    ("POST", "/jobs", {"content": b"{"}),
    ("POST", "/jobs", {"content": b'{"command": ["\\ud800"]}'}),
    ("POST", "/jobs", {"content": b"\xff\xfe{"}),
    ("POST", "/jobs", {"content": b'{"workers": ' + b"9" * 5000 + b"}"}),
    ("POST", "/jobs", {"content": b"[" * 5000}),
    ("POST", "/sessions", {"json": {"user": "ana", "profile": "gpu1"}}),
)


async def answers(web: Portal, user: str) -> list[tuple[int, str, bytes]]:
    client = web.as_(user)
    result = []
    for method, path, more in REQUESTS:
        headers = {"Content-Type": "application/json", **more.get("headers", {})}
        answer = await client.request(method, API + path, **(more | {"headers": headers}))
        result.append((answer.status_code, answer.headers["content-type"], answer.content))
    return result


@pytest.mark.parametrize("user", ["ana", "root"])
async def test_refusals_and_lists_are_those_of_fastapi(web: Portal, user: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directly = await answers(web, user)
    assert {status for status, _, _ in directly} >= {200, 401, 404, 422}
    table = web.app.router.routes[0]
    assert isinstance(table, RouteTable)

    async def not_at_all(self: DirectCall, request: Request) -> None:
        return None

    monkeypatch.setattr(DirectCall, "answer", not_at_all)
    by_fastapi = await answers(web, user)
    for request, ours, theirs in zip(REQUESTS, directly, by_fastapi, strict=True):
        assert ours == theirs, request


async def test_a_job_is_submitted_without_fastapi(web: Portal, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = next(r for r in api.jobs.router.routes if isinstance(r, APIRoute) and r.operation_id == "submit")

    async def called(*_: object) -> None:
        raise AssertionError("FastAPI was called")

    monkeypatch.setattr(submit, "app", called)
    ana = web.as_("ana")
    again = {"Idempotency-Key": "one"}
    first = await ana.post(f"{API}/jobs", json=JOB, headers=again)
    assert (first.status_code, first.json()["command"]) == (201, JOB["command"])
    assert (await ana.post(f"{API}/jobs", json=JOB, headers=again)).json()["id"] == first.json()["id"]
    assert (await web.as_("root").get(f"{API}/jobs/{first.json()['id']}")).status_code == 200


@pytest.mark.parametrize(
    "operation", ["submit", "job", "jobs", "job_logs", "request_session", "session", "renew_session"]
)
def test_the_routes_that_are_called_often_have_a_plan(operation: str) -> None:
    [route] = (
        route
        for router in api.ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute) and route.operation_id == operation
    )
    assert direct_call(route) is not None


class Sent(BaseModel):
    n: int


async def unnamed(x: Annotated[str | None, Header()] = None) -> Response: ...  # type: ignore[empty-body]
async def page(request: Request) -> Response: ...  # type: ignore[empty-body]
async def many(x: Annotated[list[str], Query()]) -> Response: ...  # type: ignore[empty-body]
async def model(x: Sent) -> Sent:
    return x


async def two(x: Sent, y: Sent) -> Response: ...  # type: ignore[empty-body]
async def embedded(x: Annotated[Sent, Body(embed=True)]) -> Response: ...  # type: ignore[empty-body]
async def nested(services: ServicesDep, key: Key = None) -> str:
    return ""


async def below(x: Annotated[str, Depends(nested)]) -> Response: ...  # type: ignore[empty-body]
def plain(x: int = 0) -> Response: ...  # type: ignore[empty-body]


@pytest.mark.parametrize("endpoint", [unnamed, page, many, model, two, embedded, below, plain])
def test_other_signatures_are_left_to_fastapi(endpoint: Any) -> None:
    router = APIRouter()
    router.add_api_route("/x", endpoint, methods=["POST"], response_model=None)
    [route] = router.routes
    assert isinstance(route, APIRoute)
    assert direct_call(route) is None


def test_a_route_with_dependencies_of_its_own_is_left_to_fastapi() -> None:
    async def check(request: Request) -> None: ...
    async def endpoint(x: int = 0) -> Response: ...  # type: ignore[empty-body]

    router = APIRouter()
    router.add_api_route("/x", endpoint, dependencies=[Depends(check)])
    router.add_api_route("/y", endpoint)
    with_check, without = (route for route in router.routes if isinstance(route, APIRoute))
    assert direct_call(with_check) is None
    assert direct_call(without) is not None
