"""Read users, groups and servers from the Hub's REST API, and stop servers.

Every call ends within `CALL_SECONDS`, however slowly the Hub answers. The scheduling cycle never waits for one:
`control/hub/servers.py` calls it from tasks of its own.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx2

from ...backends.untrusted import UnreadableJson, read_value

CALL_SECONDS = 10.0
"""The longest that one request may take, from its first byte to its last."""

PAGE = 200
MAX_ANSWER = 64 * 2**20
"""Bytes of one answer: a page of users with their servers has some hundred kilobytes"""
PAGINATION = "application/jupyterhub-pagination+json"


class HubUnreachable(Exception):
    """The Hub does not answer, or answers with an error: its servers are unknown."""


class HubUnreadable(HubUnreachable):
    """The Hub answers with something that cannot be read; what it says about others may be readable."""


@dataclass(frozen=True, slots=True)
class HubUser:
    """A user as the Hub knows them."""

    name: str
    groups: tuple[str, ...]
    admin: bool = False
    identity: str = ""
    """When the Hub made this user, to the microsecond, as text: it stays when they are renamed ("": not told)."""

    @classmethod
    def of(cls, model: dict[str, Any]) -> HubUser:
        """Return the user of a model of the Hub's API."""
        groups = tuple(sorted(map(str, model.get("groups") or ())))
        return cls(str(model["name"]), groups, bool(model.get("admin")), str(model.get("created") or ""))


class HubApi:
    """The Hub's REST API with the service's own token; group answers are cached for a few seconds."""

    def __init__(self, url: str, token: str, *, keep_seconds: float = 5.0, timeout: float = CALL_SECONDS) -> None:
        self._http = httpx2.AsyncClient(
            base_url=url.rstrip("/"),
            headers={"Authorization": f"token {token}"},
            timeout=timeout,
            trust_env=False,  # no proxy of the environment sees the token
            verify=ssl.create_default_context() if url.startswith("https:") else True,  # it reads SSL_CERT_FILE
        )
        self._timeout = timeout
        self._keep = keep_seconds
        self._users: dict[str, tuple[float, HubUser | None]] = {}

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def user(self, name: str, *, fresh: bool = False) -> HubUser | None:
        """Return a user with their groups, None where the Hub has no such user; HubUnreachable otherwise.

        `fresh`: never from the cache.
        """
        kept = self._users.get(name)
        if kept and kept[0] > time.monotonic() and not fresh:
            return kept[1]
        answer = await self._get(f"/users/{quote(name, safe='')}")
        user = None
        if answer is not None:
            with _known_form("user"):
                user = HubUser.of(answer)
        if len(self._users) > 10_000:
            self._users.clear()
        self._users[name] = (time.monotonic() + self._keep, user)
        return user

    async def servers_of(self, name: str) -> frozenset[str]:
        """Return the names of a user's servers that are up, starting or stopping; never from the cache."""
        answer = await self._get(f"/users/{quote(name, safe='')}")
        if answer is None:
            return frozenset()
        with _known_form("user"):
            return frozenset(map(str, answer.get("servers") or ()))

    async def active_servers(self) -> set[tuple[str, str]]:
        """Return every (user, server name) that is up, starting or stopping, from all pages of the Hub's list.

        A user may be missing where the list changes between two pages: ask `servers_of` before concluding from that.
        """
        result: set[tuple[str, str]] = set()
        async for user in self._list({"state": "active"}):
            with _known_form("list of users"):
                result.update((str(user["name"]), str(name)) for name in (user.get("servers") or {}))
        return result

    async def all_users(self) -> list[HubUser]:
        """Return all users, from all pages of the Hub's list, one of which may be missing as in `active_servers`."""
        models = [user async for user in self._list({})]
        with _known_form("list of users"):
            return [HubUser.of(model) for model in models]

    async def has_service(self, name: str) -> bool:
        """Whether the Hub has a service of this name; False where this service may not know."""
        response = await self._request("GET", f"/services/{quote(name, safe='')}")
        if response.status_code >= 500:
            raise HubUnreachable(f"the Hub answered {response.status_code}")
        return response.is_success

    async def _list(self, params: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the models of the users in the Hub's list; HubUnreachable for one that has another form."""
        offset, limit = 0, PAGE
        while True:
            page = await self._get("/users", {**params, "offset": offset, "limit": limit}, PAGINATION)
            with _known_form("list of users"):
                users, following = _page(page, offset)
            for user in users:
                yield user
            if following is None or following[0] <= offset:
                return
            offset, limit = following

    async def stop_server(self, user: str, server: str) -> None:
        """Request the stop of a server, which may go on for a while (202); HubUnreachable where the Hub refuses."""
        path = f"/users/{quote(user, safe='')}/server"
        if server:
            path += f"s/{quote(server, safe='')}"
        response = await self._request("DELETE", path)
        if not response.is_success and response.status_code != 404:
            raise HubUnreachable(f"the Hub answered {response.status_code}")

    async def _get(self, path: str, params: dict[str, Any] | None = None, accept: str = "application/json") -> Any:
        """Return the answer's JSON, None for 404."""
        response = await self._request("GET", path, params=params, headers={"Accept": accept})
        if response.status_code == 404:
            return None
        if not response.is_success:
            raise HubUnreachable(f"the Hub answered {response.status_code}")
        try:  # in a thread, as it has all of a stack for what people gave their servers as options
            return await asyncio.to_thread(read_value, response.content, MAX_ANSWER)
        except UnreadableJson as error:
            raise HubUnreadable(f"the Hub's answer cannot be read: {error}. Is it the Hub's API?") from error

    async def _request(self, method: str, path: str, **more: Any) -> httpx2.Response:
        try:
            async with asyncio.timeout(self._timeout):
                return await self._http.request(method, path, **more)
        except (TimeoutError, httpx2.TimeoutException) as error:
            raise HubUnreachable(f"no answer within {self._timeout:g} s") from error
        except (httpx2.RequestError, httpx2.InvalidURL) as error:
            raise HubUnreachable(str(error) or type(error).__name__) from error


@contextmanager
def _known_form(what: str) -> Iterator[None]:
    """Turn the errors of reading an answer that has another form than the Hub's into HubUnreachable."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise HubUnreadable(f"the Hub's {what} has a form that this service does not know") from error


def _page(answer: Any, offset: int) -> tuple[list[dict[str, Any]], tuple[int, int] | None]:
    """Return one page's users, and the next page's (offset, limit); None after the last.

    Hubs before 2.0 answer with a bare list: there the next page begins after it, and an empty one ends the list.
    """
    if isinstance(answer, list):
        return answer, (offset + len(answer), PAGE) if answer else None
    if not isinstance(answer, dict) or not isinstance(answer.get("items"), list):
        raise HubUnreadable("the Hub's list of users has a form that this service does not know")
    following = (answer.get("_pagination") or {}).get("next")
    return answer["items"], (int(following["offset"]), int(following["limit"])) if following else None
