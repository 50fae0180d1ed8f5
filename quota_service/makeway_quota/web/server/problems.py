"""Answer failures: problem+json to programs, a page to people, never a traceback."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from makeway_api.errors import MakewayError
from makeway_api.models import Problem
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from .headers import add_headers

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"

ELSEWHERE = frozenset({"database_unavailable", "outcome_unknown"})
"""Codes of refusals after which the connection is closed: the next one may lead to a replica that has its database"""

ErrorPage = Callable[[Request, Problem], Awaitable[Response]]


def answer(problem: Problem, headers: dict[str, str] | None = None) -> Response:
    """Return a problem as a response; text that is no valid Unicode is replaced."""
    try:
        body = problem.model_dump_json().encode("utf-8")
    except (ValueError, UnicodeError):
        plain = Problem(title=problem.title, status=problem.status, code=problem.code, detail=_clean(problem.detail))
        body = plain.model_dump_json().encode("utf-8")
    return Response(body, status_code=problem.status, media_type=MEDIA_TYPE, headers=headers)


def json_response(model: BaseModel, status: int = 200) -> Response:
    """Return a model of the API as a response; FastAPI would validate and convert it once more."""
    return Response(model.model_dump_json(), status_code=status, media_type="application/json")


def json_list_response(models: Sequence[BaseModel]) -> Response:
    """Return a list of models as a response; call it in a thread of the requests where the list may be long."""
    body = b"[%s]" % b",".join(model.model_dump_json().encode() for model in models)
    return Response(body, media_type="application/json")


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI entries of the refusals that a route may answer, with those that any may."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    every = sorted({400, 401, 403, 422, 429, 503, *statuses})
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in every}


def install(app: FastAPI, is_page: Callable[[Request], bool], page: ErrorPage) -> None:
    """Turn every exception into an answer: a page for browsers, problem+json elsewhere."""

    async def say(request: Request, problem: Problem, headers: dict[str, str] | None = None) -> Response:
        if not is_page(request):
            return answer(problem, headers)
        response = await page(request, problem)
        response.headers.update(headers or {})
        return response

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, MakewayError)
        headers = {"Connection": "close"} if error.code in ELSEWHERE else {}
        if wait := error.numbers.get("retry_after"):
            headers["Retry-After"] = str(wait)
        return await say(request, error.problem(), headers)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return await say(request, of_validation(error.errors()))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return await say(request, of_status(error, request), dict(error.headers or {}))

    async def unexpected(request: Request, error: Exception) -> Response:
        number = secrets.token_hex(4)
        log.error("error %s at %s %s", number, request.method, request.url.path, exc_info=error)
        detail = f"Something went wrong inside Makeway. The administrators find it in the service's log as {number}."
        problem = Problem(title="Internal error", status=500, code="internal", detail=detail, numbers={"id": number})
        response = await say(request, problem)
        add_headers(request.scope, response.raw_headers)
        return response

    app.add_exception_handler(MakewayError, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)


def of_status(error: HTTPException, request: Request) -> Problem:
    """Return the problem for a refusal of the framework itself."""
    status = HTTPStatus(error.status_code)
    sentences = {
        404: f"There is nothing at {_clean(request.url.path)}.",
        405: f"{request.method} is not possible at {_clean(request.url.path)}.",
        400: "The request could not be read: the body must be JSON in UTF-8.",
    }
    detail = sentences.get(status.value) or str(error.detail) or status.phrase
    code = status.phrase.lower().replace(" ", "_").replace("-", "_")
    return Problem(title=status.phrase, status=status.value, code=code, detail=detail)


def of_validation(issues: Sequence[Any]) -> Problem:
    """Return a problem with a sentence for each wrong field; what was sent is never repeated."""
    errors = [{"field": _field(issue), "message": _sentence(issue)} for issue in issues[:50]]
    detail = " ".join(error["message"] for error in errors[:3])
    if len(issues) > 3:
        detail += f" ({len(issues) - 3} more.)"
    return Problem(title="Invalid request", status=422, code="invalid", detail=detail, errors=errors)


def _field(issue: Any) -> str:
    return _clean(".".join(str(part) for part in issue.get("loc", ())[1:])[:200])


def _sentence(issue: Any) -> str:
    where, field = str((issue.get("loc") or ("request",))[0]), _field(issue)
    what = _clean(str(issue.get("msg", "is not valid")))[:300]
    if issue.get("type") == "json_invalid":
        return f"The body is not valid JSON: {what}."
    if not field:
        return f"The {where}: {what}."
    place = {"query": " in the query", "path": " in the path", "header": " in the headers"}.get(where, "")
    return f"`{field}`{place}: {what}."


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")
