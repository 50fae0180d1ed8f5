"""How to talk to the quota service: one client for notebooks (`Client`), one for the Hub (`AsyncClient`).

Both have the same methods, named like the routes; the async one returns awaitables. Every error is a MakewayError
with a sentence for people: a refusal of the service as it said it, or Unreachable.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

import httpx2

from . import API_PREFIX
from .errors import MakewayError, Unreachable
from .models import Event
from .routes import TIMEOUT, Call, Routes, raise_for

T = TypeVar("T")


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


class Client(Routes[Any]):
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

    def _do(self, call: Call[T]) -> T:
        try:
            response = self.http.request(
                call.method, call.path, params=call.params, content=call.content, timeout=call.timeout
            )
        except httpx2.TransportError as error:
            raise Unreachable(self.url, _why(error)) from error
        raise_for(response)
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
                    raise_for(response)
                reader = EventReader()
                for line in response.iter_lines():
                    if event := reader.line(line):
                        yield event
        except httpx2.TransportError as error:
            raise Unreachable(self.url, _why(error)) from error


class AsyncClient(Routes[Awaitable[Any]]):
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

    async def _do(self, call: Call[T]) -> T:
        try:
            response = await self.http.request(
                call.method, call.path, params=call.params, content=call.content, timeout=call.timeout
            )
        except httpx2.TransportError as error:
            raise Unreachable(self.url, _why(error)) from error
        raise_for(response)
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
                    raise_for(response)
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
