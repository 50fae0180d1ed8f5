"""The web of a whole running service, spoken to as raw HTTP: with tokens, as a browser would, or as an outsider."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import uvicorn
from makeway_quota.backends.base import NodeStatus
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.services import Caller
from makeway_quota.web.app import create_app
from makeway_quota.web.login.auth import SCOPE, TokenAuth
from makeway_quota.web.server.http_server import server_config
from makeway_quota.web.settings import WebSettings
from running import Running, running

PREFIX = "/services/makeway/"
API = PREFIX + "api/v1"
SECRET = b"a secret of thirty-two bytes ..."
EVIL = "<script>alert(1)</script> \"'&"


def caller(name: str, *scopes: str, groups: tuple[str, ...] = ()) -> Caller:
    """A user with these scopes and groups; the scope admin makes an administrator."""
    held = frozenset(f"{SCOPE}{scope}" for scope in scopes)
    return Caller(name=name, admin="admin" in scopes, groups=frozenset(groups), scopes=held)


PEOPLE = {
    person.name: person
    for person in (
        caller("ana", "read", "submit", groups=("rnd",)),
        caller("eve", "read", "submit", groups=("rnd",)),
        caller("bo", "read", "submit", groups=("devops",)),
        caller("lone", "read", "submit"),
        caller("eye", "read", groups=("rnd",)),
        caller("lead", "read", "manage!group=rnd", groups=("rnd",)),
        caller("blind", groups=("rnd",)),
        caller("root", "read", "submit", "manage", "admin"),
        caller("spawner", "read", "reserve"),
    )
}
"""Tokens are names."""


class Portal:
    """The app and the service below it."""

    def __init__(self, run: Running, backend: MemoryBackend, **settings: Any) -> None:
        self.run = run
        self.backend = backend
        self.services = run.service.services
        self.app = create_app(self.services, WebSettings(prefix=PREFIX, secret=SECRET, **settings), TokenAuth(PEOPLE))
        self.clients: list[httpx2.AsyncClient] = []

    def as_(self, name: str | None, **options: Any) -> httpx2.AsyncClient:
        """A program with a person's token; None is an outsider."""
        headers = {"Authorization": f"token {name}"} if name else {}
        headers |= options.pop("headers", {})
        transport = httpx2.ASGITransport(app=self.app, raise_app_exceptions=True)
        client = httpx2.AsyncClient(transport=transport, base_url="http://hub.test", headers=headers, **options)
        self.clients.append(client)
        return client

    async def browser(self, name: str) -> httpx2.AsyncClient:
        """A browser in which this person has logged in, going from page to page."""
        browser = self.as_(None, headers={"Accept": "text/html", "Sec-Fetch-Mode": "navigate"}, follow_redirects=True)
        await browser.get(f"{PREFIX}?login_token={name}")
        return browser

    async def running_job(self, name: str = "train", owner: str = "ana", profile: str = "gpu3", **ask: Any) -> str:
        """A job that runs; answers its id."""
        job = await self.run.submit(owner, name, profile=profile, **ask)
        await self.run.job(job.id, "running")
        return job.id

    async def close(self) -> None:
        """End streams and clients."""
        self.app.state.streams.close()
        for client in self.clients:
            await client.aclose()


@asynccontextmanager
async def portal(state: Path, **settings: Any) -> AsyncIterator[Portal]:
    """Start a service on ten virtual GPUs with the sample policy, and its web; nothing is executed."""
    node = NodeStatus("virtual-1", "gpu", tuple(range(10)), model="virtual GPU", virtual=True)
    backend = MemoryBackend([node], real_time=True)
    environ = {name: settings.pop(name) for name in list(settings) if name.startswith("MAKEWAY_")}
    async with running(state, backend=backend, people=PEOPLE, **environ) as run:
        made = Portal(run, backend, **settings)
        try:
            yield made
        finally:
            await made.close()


class Server(uvicorn.Server):
    """Uvicorn in this process, which says when it has a port and leaves the signals alone."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


@asynccontextmanager
async def listening(server: Server) -> AsyncIterator[int]:
    """Run a server until the end of the block; gives its port."""
    task = asyncio.create_task(server._serve())
    await server.ready.wait()
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 30)


@asynccontextmanager
async def serving(app: Any, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """Serve an app behind a real socket of this machine; gives its address."""
    config = server_config(app, host=host, port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=2)
    async with listening(Server(config)) as port:
        yield f"http://{host}:{port}"
        if hasattr(app.state, "streams"):
            app.state.streams.close()
