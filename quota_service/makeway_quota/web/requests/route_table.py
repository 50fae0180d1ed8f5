"""Find the route of a request by its path in a few look-ups, however many routes there are.

FastAPI compares a request with the pattern of each route in turn, once for every router that one is included in. The
table stands before them and knows the same routes by the segments of their paths. What it does not know (another
method, a path that does not exist, static files) goes on to FastAPI, which also writes the OpenAPI document.
Endpoints with a direct call are called before FastAPI's own middlewares, which would do nothing for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute, APIRouter
from makeway_api.errors import MakewayError
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from .direct_calls import DirectCall, direct_call

ROUTE = "makeway.route"
"""Key of the route in the scope of a request, from the match to the call"""


class Entry(NamedTuple):
    """A route, the names of the parameters in its path in order, and how to call its endpoint without FastAPI."""

    route: APIRoute
    names: tuple[str, ...]
    direct: DirectCall | None


@dataclass(slots=True)
class _Segment:
    """A place in the tree of paths: what may follow it by name, what by any name, and the routes that end here."""

    named: dict[str, _Segment] = field(default_factory=dict)
    any: _Segment | None = None
    routes: dict[str, Entry] = field(default_factory=dict)
    """by method"""


class RouteTable(BaseRoute):
    """The routes of some routers, by method and path. A name goes before a parameter at the same place of a path."""

    def __init__(self) -> None:
        self._root = _Segment()

    def add(self, prefix: str, routers: Iterable[APIRouter]) -> None:
        """Add the routes of routers below a prefix. Parameters are whole segments; others are left to FastAPI."""
        for router in routers:
            for route in router.routes:
                if isinstance(route, APIRoute):
                    self._add(prefix + route.path, route)

    def _add(self, path: str, route: APIRoute) -> None:
        place, names = self._root, []
        for part in path.split("/")[1:]:
            if part.startswith("{") and part.endswith("}") and ":" not in part:
                names.append(part[1:-1])
                place.any = place = place.any or _Segment()
            elif "{" in part:
                return
            else:
                place = place.named.setdefault(part, _Segment())
        entry = Entry(route, tuple(names), direct_call(route))
        for method in route.methods or ():
            place.routes.setdefault(method, entry)

    def find(self, scope: Scope) -> tuple[Entry, dict[str, str]] | None:
        """Return the entry of a request and the parameters in its path; None if the table has no such route."""
        if scope["type"] != "http" or scope.get("root_path"):
            return None
        values: list[str] = []
        entry = _find(self._root, scope["path"].split("/"), 1, scope["method"], values)
        return None if entry is None else (entry, dict(zip(entry.names, values, strict=True)))

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return a full match, or none: whether a path has another method is for FastAPI to answer."""
        result = self.find(scope)
        if result is None:
            return Match.NONE, {}
        entry, parameters = result
        return Match.FULL, {"endpoint": entry.route.endpoint, "path_params": parameters, ROUTE: entry.route}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the route that `matches` found, by FastAPI."""
        route: APIRoute = scope[ROUTE]
        scope["route"] = route
        await route.app(scope, receive, send)


class DirectRoutes:
    """ASGI middleware: answers by the direct call of a route, where it has one and the request fits."""

    def __init__(self, app: ASGIApp, table: RouteTable) -> None:
        self.app = app
        self._table = table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = None
        route = self._table.find(scope)
        if route is not None and (call := route[0].direct) is not None:
            request = Request({**scope, "endpoint": call.endpoint, "path_params": route[1]}, receive)
            try:
                response = await call.answer(request)
            except (MakewayError, HTTPException) as error:
                response = await _refusal(request, error)
        await (response or self.app)(scope, receive, send)


async def _refusal(request: Request, error: Exception) -> Response:
    """Return the answer that the app has for an error of an endpoint."""
    app: FastAPI = request.app
    handlers = app.exception_handlers
    handler: Any = next(handlers[kind] for kind in type(error).__mro__ if kind in handlers)
    response: Response = await handler(request, error)
    return response


def _find(place: _Segment, parts: list[str], at: int, method: str, values: list[str]) -> Entry | None:
    """Return the route of a path from its segment `at` on; `values` are those of its parameters."""
    if at == len(parts):
        return place.routes.get(method)
    part = parts[at]
    if (named := place.named.get(part)) is not None:
        result = _find(named, parts, at + 1, method, values)
        if result is not None:
            return result
    if place.any is None or not part:
        return None
    values.append(part)
    result = _find(place.any, parts, at + 1, method, values)
    if result is None:
        values.pop()
    return result
