"""Serve HTTP/1.1 with httptools and uvloop, with bounds on the head of a request, which httptools does not have.

`main` and the tests make their uvicorn with `server_config`, so that both speak the same HTTP.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.events import TimerHandle
from collections.abc import Callable, Coroutine, Sequence
from http import HTTPStatus
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import httptools
import uvicorn
from makeway_api.models import Problem
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from .connections import CONNECTION, Connections
from .headers import SECURITY_HEADERS
from .problems import answer

T = TypeVar("T")

_connections: WeakKeyDictionary[ServerState, Connections] = WeakKeyDictionary()

HEAD_BYTES = 64 * 2**10
"""Largest head of a request: its address and header fields; the trailers of a chunked body may be as large again"""
HEAD_FIELDS = 200
"""Most header fields of a request"""
HEAD_SECONDS = 20.0
"""Longest time that the head of a request, or the rest of a body after its answer, may take to arrive"""
STALL_SECONDS = 60.0
"""Longest time that a reader takes nothing of an answer that waits for it"""
STALL_CHECKS = 12
"""Looks at such a reader within that time; after the first one its connection counts as idle"""
MAX_PIPELINED = 8
"""Most requests of one connection that wait for the answer to an earlier one"""
KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than any client keeps one, so that none closes under a request"""
SWITCH_SECONDS = 0.0005
"""Seconds that a thread waits for a busy one before Python takes the interpreter from it, instead of 5 ms: a cycle of
the control loop changes threads at each write and plan, and would wait that long each time beside requests"""
RETRY_SECONDS = 5
"""Seconds after which a request may come again for which there was no place"""
LINGER = 2.0
"""Seconds for which input is dropped after a refusal: a connection closed before would lose the answer on its way"""


class _Refused(Exception):
    """The request is refused with this problem before the app sees it."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem


class _Flow(FlowControl):
    """Flow control that leaves reading paused while requests of the connection wait for the answer to another."""

    def __init__(
        self, transport: asyncio.Transport, waiting: Callable[[], bool], answer_waits: Callable[[bool], None]
    ) -> None:
        super().__init__(transport)
        self._waiting = waiting
        self._answer_waits = answer_waits

    def pause_writing(self) -> None:
        super().pause_writing()
        self._answer_waits(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._answer_waits(False)

    def resume_reading(self) -> None:
        if not self._waiting():
            super().resume_reading()


class BoundedHttp(HttpToolsProtocol):
    """One connection. A head beyond the bounds is answered with 431, a slow one with 408, one that is no HTTP with 400.

    A request that is refused while others are answered or wait gets no answer: the connection closes after theirs.

    httptools collects a header field of any length before it reports it. What it holds back is counted as the bytes
    that were fed to it without a word from it.
    """

    head_seconds = HEAD_SECONDS
    stall_seconds = STALL_SECONDS
    max_connections: int | None = None
    """None: what the limit of open files allows"""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, lambda: bool(self.pipeline) and not self._refused, self._answer_waits)
        self._under_way: RequestResponseCycle | None = None
        self._in_head = False
        self._head_complete = False
        self._refused = False
        self._bytes = self._fields = self._reported = 0
        self._silent = True
        self._timer: TimerHandle | None = None
        self._start_timer()
        self.address = str(self.client[0]) if self.client else ""
        self.requests = 0
        self.logged_in = False
        self.idle_since: float | None = self.loop.time()
        self._stall: TimerHandle | None = None
        self._taken_at, self._untaken = 0.0, 0
        self._own_app = self.app
        authenticator = getattr(getattr(self.config.app, "state", None), "authenticator", None)
        tokens = getattr(authenticator, "spawner_tokens", None)
        self._all = _connections.setdefault(self.server_state, Connections(self.max_connections, tokens))
        self._all.opened(self)

    def drop(self) -> None:
        """Close the connection at once, without an answer."""
        self._refused = True
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.closed(self)
        self._stop_timer()
        self._unset_keepalive_if_required()
        if self._under_way is not None and self._under_way is not self.cycle:  # uvicorn tells the newest only
            self._under_way.disconnected = True
            self._under_way.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unset_keepalive_if_required()
        self._silent, self._reported = True, 0
        try:
            self.parser.feed_data(data)
            self._bytes += len(data) if self._silent else self._reported
            if self._bytes > HEAD_BYTES:
                raise _Refused(_too_large())
        except httptools.HttpParserUpgrade:
            self._answer_without_upgrade()
        except (httptools.HttpParserError, _Refused) as error:
            cause = error if isinstance(error, _Refused) else error.__context__
            self._refuse(cause.problem if isinstance(cause, _Refused) else _not_http())
        else:
            self._watch()

    # -- what the parser reports -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _Refused(_not_http())  # others wait: the connection closes after their answers
        super().on_message_begin()
        self._in_head, self._head_complete = True, False
        self._start_count()
        self._stop_timer()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        self._count(len(name) + len(value) + 4)
        if not self._head_complete:  # a trailer is no header: it must not pass for a login
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._head_complete = False, True
        self.idle_since = None
        self.requests += 1
        self._start_count()
        self._stop_timer()
        if self.parser.should_upgrade() and _has_body(self.headers):
            raise _Refused(_no_upgrade())  # httptools leaves the body out
        self.scope[CONNECTION] = self  # type: ignore[literal-required]
        self.app = self._own_app if self._all.admits(self, self.url, self.headers) else _crowded
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        self._start_count()

    def on_chunk_complete(self) -> None:
        self._start_count()

    def on_body(self, body: bytes) -> None:
        self._start_count()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._start_count()
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline and not self._answering():
            self.idle_since = self.loop.time()
        if self.cycle.more_body and not self.transport.is_closing():
            self._start_timer()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._under_way = cycle
        super()._start_asgi_task(cycle, app)
        self.flow.resume_reading()

    # -- bounds ----------------------------------------------------------------------------------------------------

    def _start_count(self) -> None:
        self._silent = False
        self._bytes = self._fields = self._reported = 0

    def _count(self, size: int) -> None:
        """Count what the parser reports of a head, before the app sees anything of it."""
        self._reported += size
        if self._bytes + self._reported > HEAD_BYTES or self._fields > HEAD_FIELDS:
            raise _Refused(_too_large())

    def _watch(self) -> None:
        """Have a time limit on what is to come: the rest of a head, or the next request."""
        if self.transport.is_closing():
            return
        if self._in_head:
            if self._timer is None:
                self._start_timer()
        elif self._timer is None and self.cycle is not None and self.cycle.response_complete:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.head_seconds, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self._answering():  # the next request on this connection is slow: first comes the answer to this one
            self._start_timer()
        elif self._in_head:
            self._refuse(_slow())
        else:
            self.transport.close()

    def _answer_waits(self, waits: bool) -> None:
        """Watch whether the reader takes of an answer that waits for it; `waits`: whether it does now."""
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        if waits:
            self._taken_at, self._untaken = self.loop.time(), self.transport.get_write_buffer_size()
            self._stall = self.loop.call_later(self.stall_seconds / STALL_CHECKS, self._check_reader)
        elif self._answering():
            self.idle_since = None

    def _check_reader(self) -> None:
        """Count a connection whose reader takes nothing as idle, and close it after a while."""
        now, untaken = self.loop.time(), self.transport.get_write_buffer_size()
        if untaken < self._untaken:
            self._taken_at, self.idle_since = now, None
        elif now - self._taken_at >= self.stall_seconds:
            self.drop()
            return
        else:
            self.idle_since = self._taken_at
        self._untaken = untaken
        self._stall = self.loop.call_later(self.stall_seconds / STALL_CHECKS, self._check_reader)

    # -- refusals --------------------------------------------------------------------------------------------------

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _answer_without_upgrade(self) -> None:
        """Answer as HTTP/1.1, then close: what follows may be of another protocol."""
        self._refused = True
        self.cycle.keep_alive = False

    def _refuse(self, problem: Problem) -> None:
        """Answer with a problem and close; answers under way or waiting are finished instead."""
        self._refused = True
        self._stop_timer()
        if self.pipeline:
            if self.cycle.more_body:
                self.pipeline.popleft()  # the newest, which is the broken one
            last = self.pipeline[0][0] if self.pipeline else self._under_way
            if last is not None:
                last.keep_alive = False
            self.flow.resume_reading()  # what follows is dropped
            return
        if self._answering():
            self.cycle.keep_alive = False
            if self.cycle.response_started or not self.cycle.more_body:
                return
            self.cycle.disconnected = True  # its body is broken: the app is told that the connection is gone
            self.cycle.message_event.set()
        self.transport.write(_response(problem))
        self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(LINGER, self.transport.close)


def server_config(app: Any, **options: Any) -> uvicorn.Config:
    """Return the set-up of uvicorn for an app; `options` are further ones of uvicorn."""
    fixed: dict[str, Any] = {"http": BoundedHttp, "ws": "none", "timeout_keep_alive": KEEP_ALIVE}
    quiet = {"log_level": "warning", "access_log": False, "proxy_headers": False, "server_header": False}
    return uvicorn.Config(app, **(fixed | quiet | options))


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as `asyncio.run` does, with uvloop where it is installed, and quick changes between threads."""
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        from uvloop import new_event_loop
    except ImportError:  # it is made for CPython on Unix
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


def _has_body(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0 ")) for name, value in headers
    )


def _response(problem: Problem) -> bytes:
    made = answer(problem, {"Connection": "close", "Cache-Control": "no-store"})
    lines = [f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}".encode()]
    lines += [name + b": " + value for name, value in (*made.raw_headers, *SECURITY_HEADERS)]
    return b"\r\n".join((*lines, b"", bytes(made.body)))


async def _crowded(scope: Any, receive: Any, send: Any) -> None:
    """Answer a request for which there is no place: all connections that anyone may use are busy."""
    detail = "The service answers as many requests as it has places for: try again in a moment."
    problem = Problem(title="Busy", status=503, code="busy", detail=detail, numbers={"retry_after": RETRY_SECONDS})
    headers = {"Connection": "close", "Retry-After": str(RETRY_SECONDS), "Cache-Control": "no-store"}
    await answer(problem, headers)(scope, receive, send)


def _too_large() -> Problem:
    detail = (
        f"The head of the request (its address and header fields) is larger than {HEAD_BYTES // 2**10} KiB "
        f"or has more than {HEAD_FIELDS} fields: delete cookies of this site, or send less."
    )
    numbers = {"limit_bytes": HEAD_BYTES, "limit_fields": HEAD_FIELDS}
    return Problem(title="Head too large", status=431, code="head_too_large", detail=detail, numbers=numbers)


def _slow() -> Problem:
    detail = f"The head of the request did not arrive within {HEAD_SECONDS:.0f} s: send it again."
    return Problem(title="Timeout", status=408, code="timeout", detail=detail)


def _not_http() -> Problem:
    detail = "The request could not be read: it is not valid HTTP/1.1."
    return Problem(title="Bad request", status=400, code="bad_request", detail=detail)


def _no_upgrade() -> Problem:
    detail = "A request with a body cannot change the protocol: send it as HTTP/1.1 without the header Upgrade."
    return Problem(title="Bad request", status=400, code="bad_request", detail=detail)
