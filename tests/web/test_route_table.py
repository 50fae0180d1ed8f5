"""The route of a request is found without comparing it with each route, and is the one that FastAPI would find."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import APIRouter
from fastapi.routing import APIRoute
from makeway_quota.web import api, pages
from makeway_quota.web.requests.route_table import RouteTable
from starlette.routing import Match
from web.portal import API, PREFIX, Portal


def scope(path: str, method: str = "GET", **more: Any) -> dict[str, Any]:
    return {"type": "http", "method": method, "path": path, "headers": [], "root_path": ""} | more


def router(*paths: str) -> APIRouter:
    routes = APIRouter()
    for path in paths:
        routes.add_api_route(path, lambda: None, name=path)
    return routes


def found(table: RouteTable, path: str, method: str = "GET") -> tuple[str, dict[str, str]] | None:
    match, child = table.matches(scope(path, method))
    if match is Match.NONE:
        return None
    assert match is Match.FULL
    return child["makeway.route"].name, child["path_params"]


def test_a_name_goes_before_a_parameter_and_every_way_is_tried() -> None:
    table = RouteTable()
    table.add("/api", [router("/jobs", "/jobs/{id}", "/jobs/all", "/jobs/all/logs", "/jobs/{id}/files/{name}", "/")])
    assert found(table, "/api/jobs") == ("/jobs", {})
    assert found(table, "/api/jobs/all") == ("/jobs/all", {})
    assert found(table, "/api/jobs/j-1") == ("/jobs/{id}", {"id": "j-1"})
    assert found(table, "/api/jobs/all/files/x") == ("/jobs/{id}/files/{name}", {"id": "all", "name": "x"})
    assert found(table, "/api/") == ("/", {})
    for path in ("/api", "/api/jobs/", "/api/jobs//files/x", "/api/jobs/j-1/files", "/jobs", "/api/jobs/j-1/files/x/y"):
        assert found(table, path) is None, path
    assert found(table, "/api/jobs", "POST") is None


def test_what_is_not_a_plain_request_goes_on_to_fastapi() -> None:
    table = RouteTable()
    table.add("", [router("/jobs", "/files/{path:path}")])
    assert table.matches(scope("/jobs", type="websocket")) == (Match.NONE, {})
    assert table.matches(scope("/jobs", root_path="/below")) == (Match.NONE, {})
    assert found(table, "/files/a") is None, "a parameter that may hold slashes"


def every_route() -> list[tuple[str, APIRoute]]:
    below = [(API, api.ROUTERS), (PREFIX.rstrip("/"), pages.ROUTERS)]
    return [
        (prefix + route.path, route)
        for prefix, routers in below
        for router in routers
        for route in router.routes
        if isinstance(route, APIRoute)
    ]


async def test_every_route_is_found_as_fastapi_finds_it(web: Portal) -> None:
    table = web.app.router.routes[0]
    assert isinstance(table, RouteTable)
    seen = every_route()
    assert len(seen) > 40
    for path, route in seen:
        address = path.replace("{", "").replace("}", "")
        for method in route.methods or ():
            _, child = table.matches(scope(address, method))
            assert child["makeway.route"] is route
            expected, theirs = route.matches(scope(address.removeprefix(path.removesuffix(route.path)), method))
            assert expected is Match.FULL
            assert child["path_params"] == theirs["path_params"]


async def test_a_request_is_compared_with_no_other_route(web: Portal, monkeypatch: pytest.MonkeyPatch) -> None:
    def compared(*_: object) -> None:
        raise AssertionError("the request was compared with the pattern of a route")

    monkeypatch.setattr(APIRoute, "matches", compared)
    ana = web.as_("ana")
    assert (await ana.get(f"{API}/retention")).status_code == 403
    assert (await ana.get(f"{API}/jobs/j-1")).status_code == 404
    assert (await ana.get(f"{PREFIX}live/panel")).status_code == 200


async def test_other_methods_and_paths_are_refused_as_before(web: Portal) -> None:
    root = web.as_("root")
    wrong = await root.delete(f"{API}/jobs/j-1")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET")
    assert (await root.get(f"{API}/jobs/j-1/nothing")).status_code == 404
    assert "paths" in (await root.get(f"{API}/openapi.json")).json()
