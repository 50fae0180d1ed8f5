"""A whole service inside the test: real store, real engine, real processes as jobs, the real API in front."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from makeway_api.client import AsyncClient
from makeway_api.models import Job, JobRequest, Session, SessionRequest
from makeway_quota.application import Application
from makeway_quota.backends.base import Backend
from makeway_quota.backends.local.backend import LocalBackend
from makeway_quota.control.hub.client import HubApi
from makeway_quota.services import Caller
from makeway_quota.settings import load
from makeway_quota.web.app import create_app
from makeway_quota.web.login.auth import TokenAuth
from makeway_quota.web.settings import WebSettings

URL = "http://makeway.test/services/makeway"
READ = frozenset({"custom:makeway:read", "custom:makeway:submit"})
PEOPLE = {
    "ana": Caller("ana", groups=frozenset({"rnd"}), scopes=READ),
    "bo": Caller("bo", groups=frozenset({"devops"}), scopes=READ),
    "lea": Caller("lea", groups=frozenset({"rnd", "devops"}), scopes=READ),
    "guest": Caller("guest", scopes=READ),
    "root": Caller("root", admin=True, scopes=READ | {"custom:makeway:admin", "custom:makeway:manage"}),
    "spawner": Caller("spawner", scopes=READ | {"custom:makeway:reserve"}, kind="service"),
}
SAMPLE = Path(__file__).parents[1] / "hub_config" / "policy.yaml"


def python(code: str) -> list[str]:
    """The command of a job that runs some Python."""
    return [sys.executable, "-c", code]


IDLE = python("import time; time.sleep(600)")
"""A job that runs until it is cancelled, and ends at once on a notice."""


@dataclass(slots=True)
class Running:
    """A service that decides, and one client for each person."""

    service: Application
    auth: TokenAuth
    app: Any
    clients: dict[str, AsyncClient] = field(default_factory=dict)

    def client(self, person: str) -> AsyncClient:
        """That person's client; tokens are names here."""
        if person not in self.clients:
            transport = httpx2.ASGITransport(app=self.app, raise_app_exceptions=True)
            self.clients[person] = AsyncClient(URL, person, transport=transport)
        return self.clients[person]

    async def submit(self, person: str, name: str = "", command: list[str] | None = None, **ask: Any) -> Job:
        """Submit a job that idles unless told otherwise."""
        job: Job = await self.client(person).submit(JobRequest(name=name, command=command or IDLE, **ask))
        return job

    async def session(self, person: str, profile: str, team: str | None, server: str = "", **ask: Any) -> Session:
        """Request a session as the Hub's spawner would."""
        wanted = SessionRequest(user=person, server=server, profile=profile, team=team, **ask)
        session: Session = await self.client("spawner").request_session(wanted)
        return session

    async def until(self, found: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
        """Wait until an (async) question is answered with something true, looking after every change."""
        feed = self.service.services.feed
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            mark = feed.mark()
            answer = found()
            answer = await answer if asyncio.iscoroutine(answer) else answer
            if answer:
                return answer
            remaining = deadline - asyncio.get_running_loop().time()
            if remaining <= 0:
                raise TimeoutError(f"waited {seconds:g} s in vain: {what}")
            await feed.changed(mark, min(remaining, 0.5))

    async def job(self, id: str, *states: str, seconds: float = 60.0) -> Job:
        """Wait until a job is in one of the states (or has been decided about at all)."""

        async def there() -> Job | None:
            job: Job = await self.client("root").job(id)
            return job if job.state.value in states or (not states and job.reason) else None

        result: Job = await self.until(there, f"{id} becomes {' or '.join(states)}", seconds)
        return result

    async def granted(self, id: str, seconds: float = 80.0) -> Session:
        """Wait until a session has its GPUs or is refused."""

        async def there() -> Session | None:
            session: Session = await self.client("spawner").session(id)
            return session if session.phase not in ("admission", "reclaim", "node") else None

        result: Session = await self.until(there, f"{id} is granted", seconds)
        return result

    async def states(self, team: str | None = None) -> dict[str, str]:
        """Every job's state by name."""
        page = await self.client("root").jobs(team=team, limit=1000)
        return {job.name: job.state.value for job in page.jobs}

    async def converged(self) -> None:
        """Wait until the loop has nothing left to change."""
        loop = self.service.loop
        while await loop.cycle():
            pass

    async def used(self) -> dict[str, float]:
        """GPUs in use by team, and `idle`."""
        usage = await self.client("root").usage()
        return {team.team: team.used for team in usage.teams} | {"idle": usage.free}


@asynccontextmanager
async def running(
    state_dir: Path,
    policy: str | None = None,
    *,
    gpus: int = 10,
    nodes: int = 1,
    backend: Backend | None = None,
    hub: HubApi | None = None,
    people: Mapping[str, Caller] = PEOPLE,
    **settings: Any,
) -> AsyncIterator[Running]:
    """Start a service on virtual GPUs; everything that runs is stopped at the end."""
    state_dir.mkdir(parents=True, exist_ok=True)
    file = SAMPLE
    if policy is not None:
        file = state_dir / "seed.yaml"
        file.write_text(policy, encoding="utf-8")
    environ = {"MAKEWAY_STATE_DIR": str(state_dir), "MAKEWAY_POLICY_FILE": str(file), "MAKEWAY_URL": URL}
    config = load(environ=environ | {key: str(value) for key, value in settings.items()})
    local = backend or LocalBackend(config.state_dir, virtual_gpus=gpus, virtual_nodes=nodes, tick=0.2)
    service = await Application.open(config, local, hub)
    await service.start()
    auth = TokenAuth(people)
    app = create_app(service.services, WebSettings(secret=b"test" * 8), auth)
    run = Running(service, auth, app)
    try:
        yield run
    finally:
        app.state.streams.close()
        for client in run.clients.values():
            await client.close()
        await run.service.stop(stop_jobs=True)
