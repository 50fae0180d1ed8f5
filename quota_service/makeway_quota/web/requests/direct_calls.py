"""Read the parameters of valid requests without FastAPI, which still answers invalid ones.

FastAPI resolves dependencies and parameters again for each request, which takes longer than most endpoints. Parameter
readers, made once for each route, cover the kinds that the API uses: dependencies that are coroutines of the request,
single values in path, query and headers, and one JSON model as the body. A request that does not fit exactly is left
to FastAPI, which words every refusal, and so is a route whose signature has anything else (a page takes the request
itself, with its form).
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from fastapi import Request, Response, params
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json

from .limits import BODY

SINGLE = frozenset({str, int, float, bool, NoneType})
"""Types of parameters that a request has once, as a text"""
JSON = "application/json"
Dependency = Callable[[Request], Awaitable[Any]]


class LeaveToFastAPI(Exception):
    """The request is not exactly as the parameter readers expect it: FastAPI reads it again, and answers."""


@dataclass(frozen=True, slots=True)
class ParameterReader:
    """A parameter in the path, the query or a header: where it is, under which name, and what it has to be."""

    where: type[params.Param]
    alias: str
    adapter: TypeAdapter[Any]
    default: Any
    """`inspect.Parameter.empty`: the request has to have it"""

    def of(self, request: Request) -> Any:
        """Return the value that a request has, or the default; LeaveToFastAPI where it is missing or not valid."""
        text: str | None
        if self.where is params.Path:
            text = request.path_params.get(self.alias)
        elif self.where is params.Header:
            text = request.headers.get(self.alias)
        else:
            text = request.query_params.get(self.alias) if request.scope["query_string"] else None
        if text is not None:
            return self.adapter.validate_python(text)
        if self.default is inspect.Parameter.empty:
            raise LeaveToFastAPI
        return self.default


class DirectCall:
    """The parameter readers of one endpoint, by name and kind."""

    def __init__(self, endpoint: Callable[..., Awaitable[Response]]) -> None:
        self.endpoint = endpoint
        self.dependencies: dict[str, Dependency] = {}
        self.values: dict[str, ParameterReader] = {}
        self.body: tuple[str, TypeAdapter[Any]] | None = None

    async def answer(self, request: Request) -> Response | None:
        """Return the answer of the endpoint, None where FastAPI has to look at the request; raises what it raises."""
        try:
            arguments = {name: value.of(request) for name, value in self.values.items()}
            if self.body is not None:
                name, adapter = self.body
                arguments[name] = adapter.validate_python(_json(request), from_attributes=True)
        except (LeaveToFastAPI, ValidationError):
            return None
        for name, dependency in self.dependencies.items():
            arguments[name] = await dependency(request)
        return await self.endpoint(**arguments)


def direct_call(route: APIRoute) -> DirectCall | None:
    """Return the parameter readers of a route; None where FastAPI has to call its endpoint."""
    hints = get_type_hints(route.endpoint, include_extras=True)
    answers = hints.pop("return", None)
    if not (isinstance(answers, type) and issubclass(answers, Response)):
        return None  # FastAPI makes a response of what it returns
    if route.dependencies or not inspect.iscoroutinefunction(route.endpoint):
        return None
    call = DirectCall(route.endpoint)
    signature = inspect.signature(route.endpoint)
    for name, parameter in signature.parameters.items():
        if not _add(call, route, name, hints[name], parameter.default):
            return None
    return call


def _add(call: DirectCall, route: APIRoute, name: str, hint: Any, default: Any) -> bool:
    """Add the reader of one parameter; return whether its kind is known."""
    kind, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    mark = marks[0] if len(marks) == 1 else None
    if isinstance(mark, params.Depends) and _is_plain(mark):
        call.dependencies[name] = mark.dependency  # type: ignore[assignment]
    elif not marks and isinstance(kind, type) and issubclass(kind, BaseModel) and call.body is None:
        call.body = name, TypeAdapter(kind)
    elif (value := _value(route, name, kind, mark, default)) is not None:
        call.values[name] = value
    else:
        return False
    return True


def _is_plain(mark: params.Depends) -> bool:
    """Whether a dependency is a coroutine that takes the request and nothing else."""
    if not inspect.iscoroutinefunction(mark.dependency):
        return False
    hints = get_type_hints(mark.dependency)
    hints.pop("return", None)
    return [*hints.values()] == [Request] and len(inspect.signature(mark.dependency).parameters) == 1


def _value(route: APIRoute, name: str, kind: Any, mark: Any, default: Any) -> ParameterReader | None:
    """Return the reader of a parameter that is one text in the request; None where it is something else."""
    types = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if mark is None:
        mark = params.Path() if f"{{{name}}}" in route.path else params.Query()
    if not SINGLE.issuperset(types) or not isinstance(mark, params.Path | params.Query | params.Header):
        return None
    if isinstance(mark, params.Header) and mark.alias is None:
        return None  # FastAPI makes its name from the parameter's
    return ParameterReader(type(mark), mark.alias or name, TypeAdapter(Annotated[kind, mark]), default)


def _json(request: Request) -> Any:
    """Return the body as plain values; LeaveToFastAPI where it is not JSON in UTF-8."""
    if request.headers.get("content-type", "").partition(";")[0] != JSON:
        raise LeaveToFastAPI
    try:
        return from_json(request.scope[BODY])
    except (KeyError, ValueError):
        raise LeaveToFastAPI from None
