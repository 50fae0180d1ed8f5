"""Refuse requests before they cost anything: without a login, too large, too slow, not JSON, or with NUL.

The caller is looked up before the body is read. Bodies above 1 MiB wait on disk until one of a few is processed; what
waits there is bounded, in all and per caller.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from tempfile import SpooledTemporaryFile
from typing import Any

from fastapi import Request
from makeway_api.errors import MakewayError
from makeway_api.models import Problem

from ...services import Caller
from ..login.auth import Authenticator, login_first
from ..server.connections import note_login
from ..server.problems import answer
from ..server.waiting_bodies import ArrivingBodies, TooManyBodies, TooManyBytes, WaitingBodies, WaitingBody
from ..settings import WebSettings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
CheckToken = Callable[[str, tuple[str, int, int]], object]
CheckAgent = Callable[[str, str], str]

MAX_DRAINED = 2**29
MAX_DRAINED_WITHOUT_LOGIN = 2**24
DRAIN_SECONDS = 30.0
"""So many bytes, for so long, are read and dropped after a refusal: a proxy answers 503 itself where a connection
closes before it has sent everything."""
IN_MEMORY = 2**20
"""Bytes of a body that are kept in memory while it arrives"""
BODY = "makeway.body"
"""Key of the whole body in the scope of a request, for routes that do not read it as a stream"""
_ESCAPED_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_NUMBER = re.compile(r"[0-9]{1,7}")
_READS = frozenset({"GET", "HEAD", "OPTIONS"})


class Refused(Exception):
    """A request is refused with this problem; `unread` if its body was not read to the end."""

    def __init__(self, problem: Problem, *, unread: bool = False) -> None:
        super().__init__(problem.detail)
        self.problem = problem
        self.unread = unread


class Gone(Exception):
    """The connection ended before the body was complete; a part of it is never processed."""


def _no_workers(token: str, worker: tuple[str, int, int]) -> None:
    raise login_first()


def _no_agents(token: str, machine: str) -> str:
    raise login_first()


class Limits:
    """ASGI middleware: authenticates, reads a body up to its limit, checks it, then hands it on whole."""

    def __init__(
        self,
        app: App,
        settings: WebSettings,
        authenticator: Authenticator,
        check_token: CheckToken = _no_workers,
        check_agent: CheckAgent = _no_agents,
    ) -> None:
        """`check_token` raises MakewayError for a token that does not open this worker.

        `check_agent` does so for one that does not open this machine, and returns its name; "" where it is to join.
        """
        self.app = app
        self.settings = settings
        self._check_token = check_token
        self._check_agent = check_agent
        self._authenticator = authenticator
        per_worker = settings.max_bodies_per_worker
        self._arriving_of_workers = {
            "worker": ArrivingBodies(settings.max_worker_reports, per_worker, 0),
            "output": ArrivingBodies(settings.max_worker_outputs, per_worker, 0),
            "agent": ArrivingBodies(settings.max_agent_reports, per_worker, 0),
        }
        self._arriving = ArrivingBodies(
            settings.max_bodies, settings.max_bodies_per_caller, settings.bodies_for_spawner
        )
        self._waiting = WaitingBodies(
            max(settings.max_waiting_bytes, settings.job_bytes),
            max(settings.max_waiting_bytes_per_caller, settings.job_bytes),
        )
        self._large_jobs = asyncio.Semaphore(settings.max_large_bodies)
        self._large_others = asyncio.Semaphore(settings.max_large_bodies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        known = False
        try:
            _check_path(scope)
            if scope["method"] in _READS or not scope["path"].startswith(self.settings.prefix):
                await self.app(scope, receive, send)
                return
            limit = self._limit(scope)
            _check_length(scope, limit)
            caller = self._check_own_token(scope) or await self._check_login(scope)
            known = True
            spool = SpooledTemporaryFile[bytes](max_size=min(limit, IN_MEMORY))
            with spool as body, self._waiting.of(caller.name) as waiting:
                await self._receive(caller, body, waiting, receive, limit)
                await self._process(scope, body, receive, send)
        except Gone:
            return
        except Refused as refused:
            if refused.unread:
                await _drain(receive, MAX_DRAINED if known or _has_token(scope) else MAX_DRAINED_WITHOUT_LOGIN)
            await _refuse(refused, scope, receive, send)

    def _limit(self, scope: Scope) -> int:
        """Return the largest body: submissions come from programs with a token, all others are small."""
        if self._is_worker(scope):
            return self.settings.worker_bytes
        if self._is_agent(scope):
            return self.settings.agent_bytes
        return self.settings.job_bytes if self._is_job(scope) else self.settings.body_bytes

    def _is_output(self, scope: Scope) -> bool:
        """Whether a body is bytes of a worker's output."""
        return self._is_worker(scope) and "/outputs/" in scope["path"]

    def _is_worker(self, scope: Scope) -> bool:
        return bool(scope["path"].startswith(f"{self.settings.api}/attempts/"))

    def _is_agent(self, scope: Scope) -> bool:
        return bool(scope["path"].startswith(f"{self.settings.api}/agents/"))

    def _check_own_token(self, scope: Scope) -> Caller | None:
        """Return a worker or an agent as a caller, by the token that Makeway gave it; None for all others."""
        if self._is_worker(scope):
            return self._check_worker(scope)
        return self._check_machine(scope) if self._is_agent(scope) else None

    def _check_machine(self, scope: Scope) -> Caller:
        """Return the agent of a machine as a caller; its token must be good for the address, and may have expired."""
        name = scope["path"].removeprefix(f"{self.settings.api}/agents/").split("/")[0]
        kind, _, token = _header(scope, b"authorization").partition(" ")
        try:
            if kind.lower() != "bearer":
                raise login_first()
            machine = self._check_agent(token.strip(), "" if name == "join" else name)
            note_login(scope)
        except MakewayError as error:
            raise Refused(error.problem(), unread=True) from None
        return Caller(machine, kind="agent")

    def _check_worker(self, scope: Scope) -> Caller:
        """Return a worker as a caller; its token must be good for the address, and may have expired."""
        names = scope["path"].removeprefix(f"{self.settings.api}/attempts/").split("/")[:3]
        kind, _, token = _header(scope, b"authorization").partition(" ")
        try:
            if kind.lower() != "bearer" or len(names) < 3 or not all(map(_NUMBER.fullmatch, names[1:])):
                raise login_first()
            key = names[0], int(names[1]), int(names[2])
            self._check_token(token.strip(), key)
            note_login(scope)
        except MakewayError as error:
            raise Refused(error.problem(), unread=True) from None
        return Caller("/".join(map(str, key)), kind="output" if self._is_output(scope) else "worker")

    def _is_job(self, scope: Scope) -> bool:
        return scope["path"] == f"{self.settings.api}/jobs" and _has_token(scope)

    async def _check_login(self, scope: Scope) -> Caller:
        try:
            caller = await self._authenticator.caller(Request(scope))
            if caller is None:
                raise login_first()
        except MakewayError as error:
            raise Refused(error.problem(), unread=True) from None
        return caller

    async def _receive(
        self, caller: Caller, body: SpooledTemporaryFile[bytes], waiting: WaitingBody, receive: Receive, limit: int
    ) -> None:
        """Read the whole body into `body`; Gone if the connection ends before."""
        try:
            arriving = self._arriving_of_workers.get(caller.kind, self._arriving)
            with arriving.of(caller.name, caller.holds("reserve")):
                await self._read(body, waiting, receive, limit)
        except TooManyBodies:
            detail = "Too many requests are being received, of yours or of all: try again in a moment."
            raise Refused(_busy(detail, 2), unread=True) from None
        except TooManyBytes:
            detail = "Too many large requests wait to be processed, of yours or of all: send this one again later."
            raise Refused(_busy(detail, 5), unread=True) from None
        except TimeoutError:
            detail = "The request did not arrive in time: send it again over a faster connection, or send less."
            raise Refused(Problem(title="Timeout", status=408, code="timeout", detail=detail)) from None

    async def _read(
        self, body: SpooledTemporaryFile[bytes], waiting: WaitingBody, receive: Receive, limit: int
    ) -> None:
        size, more, settings, now = 0, True, self.settings, asyncio.get_running_loop().time
        end = now() + settings.body_seconds
        async with asyncio.timeout(min(settings.body_silence, settings.body_seconds)) as limited:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                part = message.get("body", b"")
                size += len(part)
                if size > limit:
                    raise Refused(_too_large(limit), unread=True)
                if size > IN_MEMORY:
                    waiting.grow_to(size)
                body.write(part)
                if more := message.get("more_body", False):
                    limited.reschedule(min(now() + settings.body_silence, end))

    async def _process(self, scope: Scope, body: SpooledTemporaryFile[bytes], receive: Receive, send: Send) -> None:
        if body.tell() <= IN_MEMORY:
            await self._hand_on(scope, _content(body), receive, send)
            return
        async with self._large_jobs if self._is_job(scope) else self._large_others:
            await self._hand_on(scope, _content(body), receive, send)

    async def _hand_on(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        if body and scope["path"].startswith(self.settings.api) and not self._is_output(scope):
            kind = _header(scope, b"content-type").partition(";")[0].strip().lower()
            _check_json(kind, body)
        scope[BODY] = body
        try:
            await self.app(scope, _replay(body, receive), send)
        finally:
            del scope[BODY]  # uvicorn keeps the scope until the next request of the connection


def _content(body: SpooledTemporaryFile[bytes]) -> bytes:
    body.seek(0)
    return body.read()


def _check_path(scope: Scope) -> None:
    raw = scope.get("raw_path") or b""
    if b"%00" in raw or b"%00" in scope.get("query_string", b"") or "\0" in scope["path"]:
        detail = "The address contains the character NUL (%00), which no name can hold."
        raise Refused(Problem(title="Bad request", status=400, code="bad_request", detail=detail))


def _check_length(scope: Scope, limit: int) -> None:
    length = _header(scope, b"content-length")
    if length.isascii() and length.isdigit() and (len(length) > 15 or int(length) > limit):
        raise Refused(_too_large(limit), unread=True)


def _check_json(kind: str, body: bytes) -> None:
    if kind != "application/json" and not kind.endswith("+json"):
        detail = "Send the body as JSON, with the header Content-Type: application/json."
        raise Refused(Problem(title="Unsupported media type", status=415, code="unsupported_media_type", detail=detail))
    if b"\0" in body or (b"\\u0000" in body and _ESCAPED_NUL.search(body)):
        detail = "The body contains the character NUL (\\u0000), which no field can hold."
        raise Refused(Problem(title="Invalid request", status=422, code="invalid", detail=detail))


def _busy(detail: str, retry_after: int) -> Problem:
    return Problem(title="Busy", status=503, code="busy", detail=detail, numbers={"retry_after": retry_after})


def _too_large(limit: int) -> Problem:
    size = f"{limit // 2**20} MiB" if limit >= 2**20 else f"{limit} bytes"
    detail = (
        f"The request is larger than the {size} that are accepted here. Put large files on the shared storage "
        "and submit their paths."
    )
    return Problem(title="Too large", status=413, code="too_large", detail=detail, numbers={"limit_bytes": limit})


async def _refuse(refused: Refused, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer; a body that was not read to its end is dropped with its connection."""
    headers = {"Connection": "close"} if refused.unread or refused.problem.status in (408, 413) else {}
    if wait := refused.problem.numbers.get("retry_after"):
        headers["Retry-After"] = str(wait)
    await answer(refused.problem, headers or None)(scope, receive, send)


async def _drain(receive: Receive, remaining: int) -> None:
    """Read up to `remaining` bytes and drop them, so that the answer reaches the sender."""
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            while remaining > 0:
                message = await receive()
                remaining -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return


def _replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _has_token(scope: Scope) -> bool:
    return bool(_header(scope, b"authorization"))


def _header(scope: Scope, name: bytes) -> str:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return ""
