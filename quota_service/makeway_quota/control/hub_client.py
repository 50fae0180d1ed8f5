"""What the service asks the Hub: who is in which group, which servers run, and to stop one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from urllib.parse import quote

import httpx2


class HubUnreachable(Exception):
    """The Hub does not answer, so nothing is known."""


@dataclass(frozen=True, slots=True)
class HubUser:
    """A person as the Hub knows them."""

    name: str
    groups: tuple[str, ...]
    admin: bool


class HubApi:
    """The Hub's REST API with the service's own token; group answers are kept for a few seconds."""

    def __init__(self, url: str, token: str, *, keep_seconds: float = 5.0) -> None:
        self._http = httpx2.AsyncClient(
            base_url=url.rstrip("/"), headers={"Authorization": f"token {token}"}, timeout=10.0
        )
        self._keep = keep_seconds
        self._users: dict[str, tuple[float, HubUser | None]] = {}

    async def close(self) -> None:
        """Let go of the connections."""
        await self._http.aclose()

    async def user(self, name: str) -> HubUser | None:
        """Tell a user's groups, or None where the Hub knows nobody by that name; HubUnreachable otherwise."""
        kept = self._users.get(name)
        if kept and kept[0] > time.monotonic():
            return kept[1]
        answer = await self._get(f"/users/{quote(name, safe='')}")
        user = None
        if isinstance(answer, dict):
            user = HubUser(answer["name"], tuple(sorted(answer.get("groups") or ())), bool(answer.get("admin")))
        if len(self._users) > 10_000:
            self._users.clear()
        self._users[name] = (time.monotonic() + self._keep, user)
        return user

    async def active_servers(self) -> set[tuple[str, str]]:
        """Every (user, server name) that is up, starting or stopping; HubUnreachable when nobody can say."""
        found: set[tuple[str, str]] = set()
        offset = 0
        while True:
            page = await self._get("/users", params={"state": "active", "offset": offset, "limit": 200})
            users = page if isinstance(page, list) else []
            for user in users:
                found.update((user["name"], name) for name in (user.get("servers") or {}))
            if len(users) < 50:
                return found
            offset += len(users)

    async def stop_server(self, user: str, server: str) -> None:
        """Ask the Hub to stop a server; one that is not there is fine, HubUnreachable where it is not stopped."""
        path = f"/users/{quote(user, safe='')}/servers/{quote(server, safe='')}" if server else None
        path = path or f"/users/{quote(user, safe='')}/server"
        try:
            response = await self._http.delete(path)
        except httpx2.TransportError as error:
            raise HubUnreachable(str(error)) from error
        if not response.is_success and response.status_code != 404:
            raise HubUnreachable(f"the Hub answered {response.status_code}")

    async def _get(self, path: str, params: dict[str, object] | None = None) -> dict | list | None:  # type: ignore[type-arg]
        try:
            response = await self._http.get(path, params=params)  # type: ignore[arg-type]
        except httpx2.TransportError as error:
            raise HubUnreachable(str(error) or type(error).__name__) from error
        if response.status_code == 404:
            return None
        if not response.is_success:
            raise HubUnreachable(f"the Hub answered {response.status_code}")
        try:
            return response.json()  # type: ignore[no-any-return]
        except ValueError as error:
            raise HubUnreachable("what answered at the Hub's address is not the Hub") from error
