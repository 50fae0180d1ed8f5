"""Call the quota service: `Client` for notebooks, `AsyncClient` for the Hub.

Both have the same methods, named like the routes; the async one returns awaitables. Every error is a MakewayError
with a sentence for users: a refusal in the service's own words, or Unreachable. Submissions that got no answer are
repeated: their Idempotency-Key makes sure that each is carried out once.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

import httpx2
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_after_delay,
    wait_random_exponential,
)

from . import API_PREFIX
from .errors import MakewayError, Unreachable
from .models import Event
from .routes import TIMEOUT, Call, Routes, raise_for

T = TypeVar("T")
H = TypeVar("H")

STREAM_TIMEOUT = httpx2.Timeout(TIMEOUT, read=32)
"""Of the live stream, whose server sends a comment at least every 15 seconds: two of them are missed."""
AWAY = frozenset({502, 503, 504})
"""The statuses of a service, or of a proxy before it, that can do the same request later; also of no connection."""

ATTEMPTS = 5
RETRY_SECONDS = 30.0
"""Seconds after which no further attempt is made."""

FIRST_PAUSE, MAX_PAUSE = 0.5, 4.0
"""Seconds; random below these bounds, so that a thousand kernels do not return at once to a service that restarts."""


def retries() -> dict[str, Any]:
    """Return the settings for tenacity: repeat while the service is unavailable, then raise its last answer."""
    return {
        "retry": retry_if_exception(lambda error: isinstance(error, MakewayError) and error.status in AWAY),
        "wait": _pause,
        "stop": stop_after_attempt(ATTEMPTS) | stop_after_delay(RETRY_SECONDS),
        "reraise": True,
    }


def _pause(state: RetryCallState) -> float:
    """Return the seconds before the next attempt: random and growing, at least what Retry-After asked for."""
    error = state.outcome.exception() if state.outcome else None
    asked = error.numbers.get("retry_after", 0) if isinstance(error, MakewayError) else 0
    minimum = min(float(asked), MAX_PAUSE) if isinstance(asked, int | float) else 0.0
    return minimum + wait_random_exponential(multiplier=FIRST_PAUSE, max=MAX_PAUSE)(state)


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


def _http(kind: Callable[..., H], url: str, token: str, given: dict[str, Any]) -> H:
    """Return an HTTP client of the service. A proxy of the environment gets no token in clear.

    An http address is reached directly, because it is that of the portal's own network; an https one as the environment
    says, through a proxy by CONNECT alone.
    """
    settings = {"trust_env": url.startswith("https:"), "timeout": TIMEOUT, **given}
    try:
        return kind(base_url=url + API_PREFIX, headers=_headers(token), **settings)
    except (
        ImportError,
        ValueError,
        httpx2.InvalidURL,
    ) as error:  # an unknown kind of proxy, or one for which a package is missing
        raise MakewayError(
            f"The proxy that HTTPS_PROXY or ALL_PROXY names cannot be used ({error}). Correct it, or add the host of "
            f"{url} to NO_PROXY.",
            code="not_configured",
        ) from error


def _headers(token: str) -> dict[str, str]:
    return {"Authorization": f"token {token}", "Accept": "application/json", "Content-Type": "application/json"}


class Client(Routes[Any]):
    """The service's routes as blocking calls; safe to use from several threads."""

    def __init__(self, url: str | None = None, token: str | None = None, **http: Any) -> None:
        self.url, self.token = _where(url, token)
        self.http = _http(httpx2.Client, self.url, self.token, http)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self.http.close()

    def _do(self, call: Call[T]) -> T:
        return Retrying(**retries())(self._send, call) if call.headers else self._send(call)

    def _send(self, call: Call[T]) -> T:
        try:
            response = self.http.request(
                call.method,
                call.path,
                params=call.params,
                content=call.content,
                headers=call.headers,
                timeout=call.timeout,
            )
        except httpx2.TransportError as error:
            raise Unreachable(self.url, _why(error)) from error
        raise_for(response)
        return call.read(response)

    def events(self, after: int | None = None) -> Iterator[Event]:
        """Yield the events of the live stream until the connection ends; resume behind the event `after`."""
        try:
            with self.http.sse("/events", headers=_resume(after), timeout=STREAM_TIMEOUT) as stream:
                if not stream.response.is_success:
                    stream.response.read()
                    raise_for(stream.response)
                for message in stream:
                    if message.data:  # not a mere `retry:`
                        yield Event.model_validate_json(message.data)
        except httpx2.TransportError as error:
            raise Unreachable(self.url, _why(error)) from error


class AsyncClient(Routes[Awaitable[Any]]):
    """The service's routes as awaitables."""

    def __init__(self, url: str | None = None, token: str | None = None, **http: Any) -> None:
        self.url, self.token = _where(url, token)
        self.http = _http(httpx2.AsyncClient, self.url, self.token, http)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self.http.aclose()

    async def _do(self, call: Call[T]) -> T:
        return await (AsyncRetrying(**retries())(self._send, call) if call.headers else self._send(call))

    async def _send(self, call: Call[T]) -> T:
        try:
            response = await self.http.request(
                call.method,
                call.path,
                params=call.params,
                content=call.content,
                headers=call.headers,
                timeout=call.timeout,
            )
        except httpx2.TransportError as error:
            raise Unreachable(self.url, _why(error)) from error
        raise_for(response)
        return call.read(response)

    async def events(self, after: int | None = None, opened: Callable[[], None] | None = None) -> AsyncIterator[Event]:
        """Yield the events of the live stream until the connection ends; resume behind the event `after`.

        `opened` is called once the stream is open: from then on no event is missed.
        """
        try:
            async with self.http.sse("/events", headers=_resume(after), timeout=STREAM_TIMEOUT) as stream:
                if not stream.response.is_success:
                    await stream.response.aread()
                    raise_for(stream.response)
                if opened is not None:
                    opened()
                async for message in stream:
                    if message.data:  # not a mere `retry:`
                        yield Event.model_validate_json(message.data)
        except httpx2.TransportError as error:
            raise Unreachable(self.url, _why(error)) from error


def _resume(after: int | None) -> dict[str, str]:
    return {} if after is None else {"Last-Event-ID": str(after)}


def _why(error: Exception) -> str:
    if isinstance(error, httpx2.TimeoutException):
        return "no answer in time"
    return str(error) or type(error).__name__
