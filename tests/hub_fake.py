"""A small HTTP server that answers as the Hub's REST API does, and hangs, fails or stops slowly on request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import parse_qs, unquote, urlsplit


class FakeHub:
    """Servers by user; `stopping` are those whose stop was accepted with 202 and has not ended."""

    def __init__(self, page_limit: int = 200) -> None:
        self.page_limit = page_limit
        self.servers: dict[str, set[str]] = {}
        self.groups: dict[str, set[str]] = {}
        self.made: dict[str, str] = {}
        """when each user was made"""
        self.slow: set[tuple[str, str]] = set()
        """servers whose stop is answered with 202, and which go on until `end`"""
        self.users_made = 0
        self.stopping: set[tuple[str, str]] = set()
        self.hangs = False
        self.status: int | None = None
        """answer everything with this error"""
        self.requests: list[str] = []
        self.changed = asyncio.Event()
        self.url = ""

    def start(self, user: str, server: str = "") -> None:
        """A server runs."""
        self.servers.setdefault(user, set()).add(server)

    def add(self, user: str, *groups: str) -> None:
        """A user is made, with an identity that no other has."""
        self.servers.setdefault(user, set())
        self.groups[user] = set(groups)
        self.users_made += 1
        self.made[user] = f"2026-01-01T00:00:00.{self.users_made:06}Z"

    def join(self, user: str, group: str) -> None:
        """A user comes into a group."""
        self.groups.setdefault(user, set()).add(group)

    def leave(self, user: str, group: str) -> None:
        """A user leaves a group."""
        self.groups.setdefault(user, set()).discard(group)

    def delete(self, user: str) -> None:
        """A user is deleted."""
        for known in (self.servers, self.groups, self.made):
            known.pop(user, None)  # type: ignore[attr-defined]

    def rename(self, old: str, new: str) -> None:
        """A user is renamed."""
        for known in (self.servers, self.groups, self.made):
            known[new] = known.pop(old)  # type: ignore[index, attr-defined]

    def end(self, user: str, server: str = "") -> None:
        """A server has ended."""
        self.servers[user].discard(server)
        self.stopping.discard((user, server))

    def count(self, beginning: str) -> int:
        """How many requests began like this."""
        return sum(line.startswith(beginning) for line in self.requests)

    async def until(self, count: int, beginning: str) -> None:
        """Wait until so many requests began like this."""
        async with asyncio.timeout(60):
            while self.count(beginning) < count:
                self.changed.clear()
                await self.changed.wait()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        try:
            while line := (await reader.readline()).decode():
                method, target, _ = line.split(" ", 2)
                headers = {}
                while header := (await reader.readline()).decode().strip():
                    name, _, value = header.partition(":")
                    headers[name.lower()] = value.strip()
                self.requests.append(f"{method} {target}")
                self.changed.set()
                if self.hangs:
                    await asyncio.sleep(3600)
                status, body = self.result(method, target, "pagination" in headers.get("accept", ""))
                data = json.dumps(body).encode() if body is not None else b""
                writer.write(f"HTTP/1.1 {status} x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
                await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    def result(self, method: str, target: str, paged: bool) -> tuple[int, object]:
        """What the Hub would answer."""
        if self.status is not None:
            return self.status, {"message": "as ordered"}
        url = urlsplit(target)
        parts = [unquote(part) for part in url.path.split("/")[3:]]
        if method == "GET" and parts == ["users"]:
            return 200, self.page({name: value[0] for name, value in parse_qs(url.query).items()}, paged)
        user = parts[1]
        if parts[0] != "users" or user not in self.servers:
            return 404, {"message": "no such user"}
        if method == "GET":
            return 200, self.model(user)
        server = parts[3] if len(parts) > 3 else ""
        if server not in self.servers[user]:
            return 404, {"message": "no such server"}
        if (user, server) in self.slow:
            self.stopping.add((user, server))
            return 202, None
        self.end(user, server)
        return 204, None

    def model(self, user: str) -> dict[str, object]:
        """One user, as the Hub shows them."""
        servers = {name: {"name": name} for name in sorted(self.servers[user])}
        groups = sorted(self.groups.get(user, ()))
        return {"name": user, "groups": groups, "admin": False, "servers": servers, "created": self.made.get(user)}

    def page(self, query: dict[str, str], paged: bool) -> object:
        """One page of the users, or of the active ones: never more than `page_limit`, whatever was asked for."""
        offset, limit = int(query.get("offset", 0)), min(int(query.get("limit", 50)), self.page_limit)
        active = [user for user in sorted(self.servers) if self.servers[user] or query.get("state") != "active"]
        items = [self.model(user) for user in active[offset : offset + limit]]
        if not paged:
            return items
        following = {"offset": offset + limit, "limit": limit, "url": "…"} if offset + limit < len(active) else None
        pages = {"offset": offset, "limit": limit, "total": len(active), "next": following}
        return {"items": items, "_pagination": pages}


@asynccontextmanager
async def fake_hub(page_limit: int = 200) -> AsyncIterator[FakeHub]:
    """Serve a Hub on a free port."""
    hub = FakeHub(page_limit)
    connections: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        await hub.answer(reader, writer)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    hub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hub/api"
    try:
        yield hub
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
