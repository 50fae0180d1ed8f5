"""How to talk to the quota service: one client for notebooks (`Client`), one for the Hub (`AsyncClient`).

Both have the same methods, named like the routes; the async one returns awaitables. Every error is a MakewayError
with a sentence for people: a refusal of the service as it said it, or Unreachable.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx2
from pydantic import TypeAdapter, ValidationError

from . import API_PREFIX
from .errors import MakewayError, Unreachable
from .models import (
    Decision,
    DryRun,
    Event,
    Job,
    JobAsk,
    JobPage,
    LogChunk,
    Me,
    OfferTable,
    Policy,
    PolicyAsk,
    PolicyCheck,
    PolicyVersion,
    Pool,
    Preview,
    Problem,
    Profile,
    Session,
    SessionAsk,
    Usage,
)

T = TypeVar("T")
J = TypeVar("J")

TIMEOUT = 20.0
"""Seconds for one answer; a long poll adds its own wait."""


class _Call(Generic[T]):
    """One request and how to read its answer."""

    def __init__(
        self,
        method: str,
        path: str,
        read: Callable[[httpx2.Response], T],
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        wait: float = 0,
    ) -> None:
        self.method = method
        self.path = path
        self.read = read
        self.params = {k: v for k, v in (params or {}).items() if v is not None}
        self.content = None if body is None else _dump(body)
        self.timeout = TIMEOUT + wait


def _dump(body: Any) -> bytes:
    if hasattr(body, "model_dump_json"):
        return body.model_dump_json(exclude_unset=True).encode()  # type: ignore[no-any-return]
    return json.dumps(body).encode()


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def _as(kind: Any) -> Callable[[httpx2.Response], Any]:
    def read(response: httpx2.Response) -> Any:
        adapter = _ADAPTERS.get(kind)
        if adapter is None:
            adapter = _ADAPTERS[kind] = TypeAdapter(kind)
        return adapter.validate_json(response.content)

    return read


def _nothing(_: httpx2.Response) -> None:
    return None


def _raise_for(response: httpx2.Response) -> None:
    if response.is_success:
        return
    try:
        raise MakewayError.of(Problem.model_validate_json(response.content))
    except ValidationError:
        status = response.status_code
        what = (
            "the service is starting or its proxy cannot reach it" if status in (502, 503, 504) else "no reason given"
        )
        raise MakewayError(
            f"The quota service answered {status} ({what}).",
            code="unreachable" if status >= 502 else "error",
            status=status,
        ) from None


class _Routes(Generic[J]):
    """The routes, once; `J` says nothing here, the two clients type them for their users."""

    def _do(self, call: _Call[Any]) -> Any:
        raise NotImplementedError

    def me(self) -> Any:
        """Who I am → Me."""
        return self._do(_Call("GET", "/me", _as(Me)))

    def pools(self) -> Any:
        """Every pool with its nodes and devices → list[Pool]."""
        return self._do(_Call("GET", "/pools", _as(list[Pool])))

    def profiles(self) -> Any:
        """The profiles that I may use → list[Profile]."""
        return self._do(_Call("GET", "/profiles", _as(list[Profile])))

    def policies(self) -> Any:
        """The policies of my teams → list[Policy]."""
        return self._do(_Call("GET", "/policies", _as(list[Policy])))

    def offers(self, user: str | None = None, kind: str | None = None) -> Any:
        """What can I have now, from whom, and why not → OfferTable."""
        return self._do(_Call("GET", "/offers", _as(OfferTable), params={"user": user, "kind": kind}))

    def ask_session(self, ask: SessionAsk) -> Any:
        """Ask for a lease → Session (scope `reserve`)."""
        return self._do(_Call("POST", "/sessions", _as(Session), body=ask))

    def sessions(self, all: bool = False) -> Any:
        """My sessions → list[Session]."""
        return self._do(_Call("GET", "/sessions", _as(list[Session]), params={"all": "1" if all else None}))

    def session(self, id: str, wait: float | None = None, version: int | None = None) -> Any:
        """One session; with `wait`, as soon as it is newer than `version` → Session."""
        params = {"wait": wait, "version": version}
        return self._do(_Call("GET", f"/sessions/{_q(id)}", _as(Session), params=params, wait=wait or 0))

    def session_started(self, id: str) -> Any:
        """The notebook server of this lease is up → Session."""
        return self._do(_Call("POST", f"/sessions/{_q(id)}/started", _as(Session)))

    def renew(self, id: str) -> Any:
        """Keep the lease → Session; an ended one is a MakewayError with status 410."""
        return self._do(_Call("POST", f"/sessions/{_q(id)}/renew", _as(Session)))

    def release(self, id: str) -> Any:
        """Give the lease back; again is fine."""
        return self._do(_Call("DELETE", f"/sessions/{_q(id)}", _nothing))

    def submit(self, ask: JobAsk) -> Any:
        """Submit a training job → Job."""
        return self._do(_Call("POST", "/jobs", _as(Job), body=ask))

    def dry_run(self, ask: JobAsk) -> Any:
        """What submitting would do → DryRun."""
        return self._do(_Call("POST", "/jobs", _as(DryRun), body=ask.model_copy(update={"dry_run": True})))

    def jobs(
        self,
        team: str | None = None,
        state: str | None = None,
        mine: bool = False,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Any:
        """Jobs that I may see, newest first → JobPage."""
        params = {"team": team, "state": state, "mine": "1" if mine else None, "limit": limit, "cursor": cursor}
        return self._do(_Call("GET", "/jobs", _as(JobPage), params=params))

    def job(self, id: str, wait: float | None = None, version: int | None = None) -> Any:
        """One job; with `wait`, as soon as it is newer than `version` → Job."""
        params = {"wait": wait, "version": version}
        return self._do(_Call("GET", f"/jobs/{_q(id)}", _as(Job), params=params, wait=wait or 0))

    def cancel(self, id: str) -> Any:
        """Cancel a job → Job."""
        return self._do(_Call("POST", f"/jobs/{_q(id)}/cancel", _as(Job)))

    def resume(self, id: str) -> Any:
        """Put an ended job back into the queue, from its checkpoint → Job."""
        return self._do(_Call("POST", f"/jobs/{_q(id)}/resume", _as(Job)))

    def clone(self, id: str, n: int = 1, overrides: Mapping[str, Any] | None = None) -> Any:
        """Submit n copies, changed by `overrides` → list[Job]."""
        body = {"n": n, "overrides": dict(overrides or {})}
        return self._do(_Call("POST", f"/jobs/{_q(id)}/clone", _as(list[Job]), body=body))

    def preempt_test(self, id: str) -> Any:
        """Rehearse a preemption of my own job → Job."""
        return self._do(_Call("POST", f"/jobs/{_q(id)}/preempt-test", _as(Job)))

    def job_events(self, id: str) -> Any:
        """Everything that was decided about a job, oldest first → list[Decision]."""
        return self._do(_Call("GET", f"/jobs/{_q(id)}/events", _as(list[Decision])))

    def logs(
        self,
        id: str,
        attempt: int | None = None,
        offset: int | None = None,
        limit: int | None = None,
        wait: float | None = None,
    ) -> Any:
        """Part of a job's log; a negative offset counts from the end → LogChunk."""
        params = {"attempt": attempt, "offset": offset, "limit": limit, "wait": wait}
        return self._do(_Call("GET", f"/jobs/{_q(id)}/logs", _as(LogChunk), params=params, wait=wait or 0))

    def result(self, id: str) -> Any:
        """The bytes that the job left as its result → bytes."""
        return self._do(_Call("GET", f"/jobs/{_q(id)}/result", lambda r: r.content))

    def error(self, id: str) -> Any:
        """The exception that ended the job → dict with type, message, traceback."""
        return self._do(_Call("GET", f"/jobs/{_q(id)}/error", lambda r: r.json()))

    def usage(self) -> Any:
        """Who uses what now → Usage."""
        return self._do(_Call("GET", "/usage", _as(Usage)))

    def decisions(
        self,
        workload: str | None = None,
        team: str | None = None,
        limit: int | None = None,
        before: int | None = None,
    ) -> Any:
        """The decision log, newest first → list[Decision]."""
        params = {"workload": workload, "team": team, "limit": limit, "before": before}
        return self._do(_Call("GET", "/decisions", _as(list[Decision]), params=params))

    def policy(self) -> Any:
        """The policy document in force → PolicyVersion."""
        return self._do(_Call("GET", "/policy", _as(PolicyVersion)))

    def policy_history(self) -> Any:
        """Every version, newest first → list[PolicyVersion]."""
        return self._do(_Call("GET", "/policy/history", _as(list[PolicyVersion])))

    def policy_version(self, version: int) -> Any:
        """One version with its document → PolicyVersion."""
        return self._do(_Call("GET", f"/policy/versions/{version}", _as(PolicyVersion)))

    def policy_validate(self, document: str) -> Any:
        """What is wrong with a document, and what it would change → PolicyCheck."""
        return self._do(_Call("POST", "/policy/validate", _as(PolicyCheck), body=PolicyAsk(document=document)))

    def policy_preview(self, document: str) -> Any:
        """What would start, leave and wait → Preview."""
        return self._do(_Call("POST", "/policy/preview", _as(Preview), body=PolicyAsk(document=document)))

    def policy_apply(self, document: str, comment: str = "", base: int | None = None) -> Any:
        """Put a document into force → PolicyVersion."""
        ask = PolicyAsk(document=document, comment=comment, base=base)
        return self._do(_Call("PUT", "/policy", _as(PolicyVersion), body=ask))


def _q(part: str) -> str:
    return quote(str(part), safe="")


def _where(url: str | None, token: str | None) -> tuple[str, str]:
    url = url or os.environ.get("MAKEWAY_URL", "")
    token = token or os.environ.get("MAKEWAY_TOKEN") or os.environ.get("JUPYTERHUB_API_TOKEN", "")
    if not url:
        raise MakewayError(
            "This is not a Makeway notebook: set MAKEWAY_URL to the address of the quota service "
            "(https://HUB/services/makeway) and MAKEWAY_TOKEN to a token from the Hub's token page.",
            code="not_configured",
        )
    return url.rstrip("/"), token


def _headers(token: str) -> dict[str, str]:
    return {"Authorization": f"token {token}", "Accept": "application/json", "Content-Type": "application/json"}


class Client(_Routes[Any]):
    """The service as plain calls; safe to use from several threads."""

    def __init__(self, url: str | None = None, token: str | None = None, **http: Any) -> None:
        self.url, self.token = _where(url, token)
        self.http = httpx2.Client(base_url=self.url + API_PREFIX, headers=_headers(self.token), timeout=TIMEOUT, **http)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connections."""
        self.http.close()

    def _do(self, call: _Call[T]) -> T:
        try:
            response = self.http.request(
                call.method, call.path, params=call.params, content=call.content, timeout=call.timeout
            )
        except httpx2.TransportError as error:
            raise Unreachable(self.url, _why(error)) from error
        _raise_for(response)
        return call.read(response)

    def events(self, after: int | None = None) -> Iterator[Event]:
        """Follow the live stream until the connection ends; pass the last id to go on where it stopped."""
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": str(after)} if after is not None else {})
        try:
            with self.http.stream(
                "GET", "/events", headers=headers, timeout=httpx2.Timeout(TIMEOUT, read=60)
            ) as response:
                if not response.is_success:
                    response.read()
                    _raise_for(response)
                reader = EventReader()
                for line in response.iter_lines():
                    if event := reader.line(line):
                        yield event
        except httpx2.TransportError as error:
            raise Unreachable(self.url, _why(error)) from error


class AsyncClient(_Routes[Awaitable[Any]]):
    """The service as awaitables."""

    def __init__(self, url: str | None = None, token: str | None = None, **http: Any) -> None:
        self.url, self.token = _where(url, token)
        self.http = httpx2.AsyncClient(
            base_url=self.url + API_PREFIX, headers=_headers(self.token), timeout=TIMEOUT, **http
        )

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Let go of the connections."""
        await self.http.aclose()

    async def _do(self, call: _Call[T]) -> T:
        try:
            response = await self.http.request(
                call.method, call.path, params=call.params, content=call.content, timeout=call.timeout
            )
        except httpx2.TransportError as error:
            raise Unreachable(self.url, _why(error)) from error
        _raise_for(response)
        return call.read(response)

    async def events(self, after: int | None = None, opened: Callable[[], None] | None = None) -> AsyncIterator[Event]:
        """Follow the live stream until the connection ends; pass the last id to go on where it stopped.

        `opened` is called once the stream is there: from then on nothing is missed.
        """
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": str(after)} if after is not None else {})
        timeout = httpx2.Timeout(TIMEOUT, read=60)
        try:
            async with self.http.stream("GET", "/events", headers=headers, timeout=timeout) as response:
                if not response.is_success:
                    await response.aread()
                    _raise_for(response)
                if opened is not None:
                    opened()
                reader = EventReader()
                async for line in response.aiter_lines():
                    if event := reader.line(line):
                        yield event
        except httpx2.TransportError as error:
            raise Unreachable(self.url, _why(error)) from error


class EventReader:
    """Lines of a text/event-stream in, events out. Each message's data is a whole Event as JSON."""

    def __init__(self) -> None:
        self._data: list[str] = []

    def line(self, line: str) -> Event | None:
        """Take one line; answer the event that it completes."""
        if line.startswith("data:"):
            self._data.append(line[5:].lstrip(" "))
        elif not line and self._data:
            text, self._data = "\n".join(self._data), []
            return Event.model_validate_json(text)
        return None


def _why(error: Exception) -> str:
    if isinstance(error, httpx2.TimeoutException):
        return "no answer in time"
    return str(error) or type(error).__name__
