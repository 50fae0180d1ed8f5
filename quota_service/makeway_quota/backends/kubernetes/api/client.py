"""Send requests to one cluster's API server, in plain dictionaries; streams are lines of JSON.

Used by the informers and by whatever creates and deletes pods. An answer that is an error is raised as
`ApiStatusError`, with the API server's words; no answer at all is an `ApiUnreachable`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import orjson

from .connection import Connection

Object = dict[str, Any]
T = TypeVar("T")

REQUEST_SECONDS = 30.0
MAX_RETRY_AFTER = 60.0
"""Seconds after which the API server is asked again, however long a proxy in front of it says to wait"""
TOKEN_SECONDS = 60.0
"""How long a token is used before its file is read again."""
UNAUTHORIZED = 401
GONE = 410
SILENT = "the Kubernetes API server does not answer"
UNREACHABLE = "the Kubernetes API server cannot be reached"
OTHER_PORT = (
    "where it listens at another port than 443 and 6443, an administrator has to name that in the chart's "
    "networkPolicy.apiServer.ports"
)
"""What may be wrong where it never answered a pod."""


class ApiStatusError(Exception):
    """The API server refused a request; `reason` is its one word for why, such as AlreadyExists."""

    def __init__(self, status: int, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(f"the Kubernetes API server refused the request ({status} {reason}): {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after = retry_after
        """seconds after which the API server wants to be asked again, where it says so"""


class ApiUnreachable(Exception):
    """The API server could not be reached, or did not answer in time."""


async def run_all(requests: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run requests concurrently and return their results; the first failure cancels the others and is raised.

    A TaskGroup would do, but before Python 3.13 one that failed leaves its task marked as cancelled: a timeout around
    it then ends the task instead of raising TimeoutError.
    """
    tasks = [asyncio.ensure_future(request) for request in requests]
    if not tasks:
        return []
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class ApiClient:
    """A client of one cluster's API server, with one set of credentials."""

    date = ""
    """The time of the newest answer by the clock of the API server, as HTTP writes it"""

    def __init__(
        self,
        connection: Connection,
        request_seconds: float = REQUEST_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.connection = connection
        self.requests = 0
        """requests that were sent, watches included"""
        self.bytes_read = 0
        """of answers and watches, as they arrive decompressed"""
        self._seconds = request_seconds
        self._clock = clock
        self._token = connection.token
        self._token_read_at = -TOKEN_SECONDS
        self._timeouts: set[asyncio.Timeout] = set()
        """of the requests under way, but for streams"""
        limits = httpx2.Limits(max_connections=50, max_keepalive_connections=20)
        self._http = httpx2.AsyncClient(
            base_url=connection.server,
            verify=connection.context,
            timeout=request_seconds,
            trust_env=False,
            limits=limits,
        )

    def abort_requests(self) -> None:
        """Make the requests under way fail with ApiUnreachable, when a later one has got no answer."""
        timeouts, self._timeouts = self._timeouts, set()
        for timeout in timeouts:
            timeout.reschedule(0.0)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Object:
        """Return an object, or one page of a list."""
        return await self._send("GET", path, query=query)

    async def create(self, path: str, body: Object) -> Object:
        """Create an object in the collection at this path and return it as it was stored."""
        return await self._send("POST", path, body)

    async def replace(self, path: str, body: Object) -> Object:
        """Replace an object at the body's resourceVersion (409 if it has changed) and return it as it was stored."""
        return await self._send("PUT", path, body)

    async def delete(self, path: str, *, uid: str = "", grace: int | None = None) -> bool:
        """Delete an object; with `uid` only that very one. Return whether there was such an object."""
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid:
            body["preconditions"] = {"uid": uid}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        try:
            await self._send("DELETE", path, body)
        except ApiStatusError as refusal:
            if refusal.status == 404 or (uid and refusal.status == 409):
                return False
            raise
        return True

    @asynccontextmanager
    async def stream(self, path: str, query: Mapping[str, str], silence: float) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a stream and yield its lines; ApiUnreachable when nothing arrives for `silence` seconds."""
        timeout = httpx2.Timeout(self._seconds, read=silence)
        self.requests += 1
        try:
            async with self._http.stream(
                "GET", path, params=dict(query), headers=self._headers(), timeout=timeout
            ) as answer:
                if answer.status_code >= 400:
                    raise self._refusal(answer, await answer.aread())
                yield self._lines(answer)
        except httpx2.HTTPError as error:
            raise ApiUnreachable(_reason_of(error)) from error

    async def _lines(self, answer: httpx2.Response) -> AsyncIterator[bytes]:
        rest = b""
        async for chunk in answer.aiter_bytes():
            self.bytes_read += len(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if line:
                    yield line

    async def _send(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        query: Mapping[str, str] | None = None,
    ) -> Object:
        self.requests += 1
        headers = self._headers() | ({"Content-Type": "application/json"} if body is not None else {})
        content = None if body is None else orjson.dumps(body)
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                self._timeouts.add(timeout)
                answer = await self._http.request(method, path, params=query, content=content, headers=headers)
        except (httpx2.HTTPError, TimeoutError) as error:
            raise ApiUnreachable(_reason_of(error)) from error
        finally:
            self._timeouts.discard(timeout)
        self.bytes_read += len(answer.content)
        self.date = answer.headers.get("Date", "")
        if answer.status_code >= 400:
            raise self._refusal(answer, answer.content)
        try:
            result = orjson.loads(answer.content)
        except ValueError:
            result = None
        if not isinstance(result, dict):
            raise ApiUnreachable("the Kubernetes API server answered what is not JSON: is there a proxy in between?")
        return result

    def _refusal(self, answer: httpx2.Response, content: bytes) -> ApiStatusError:
        """Return the refusal that an answer is, with what to do about credentials that are not accepted."""
        result = refusal_of(answer.status_code, content, answer.headers.get("Retry-After"))
        if result.status != UNAUTHORIZED:
            return result
        return ApiStatusError(
            result.status, result.reason, f"{result.message}; {self.connection.renewal}", result.retry_after
        )

    def _headers(self) -> dict[str, str]:
        if (file := self.connection.token_file) is not None and self._clock() - self._token_read_at >= TOKEN_SECONDS:
            self._token = _token(file) or self._token
            self._token_read_at = self._clock()
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}


def refusal_of(status: int, content: bytes, retry_after: str | None = None) -> ApiStatusError:
    """Return the refusal that an answer is: a Status of Kubernetes, or whatever a proxy in between wrote."""
    seconds = min(float(retry_after), MAX_RETRY_AFTER) if retry_after and retry_after.isdecimal() else None
    try:
        answer = orjson.loads(content)
        return ApiStatusError(status, str(answer.get("reason") or ""), str(answer.get("message") or ""), seconds)
    except (ValueError, AttributeError):
        return ApiStatusError(status, "", content[:300].decode(errors="replace").strip(), seconds)


def _token(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _reason_of(error: Exception) -> str:
    if isinstance(error, httpx2.TimeoutException | TimeoutError):
        return SILENT
    return f"{UNREACHABLE}: {error or type(error).__name__}"
