"""Run the real service of `running.py` behind a real port, for notebooks, commands and browsers."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import uvicorn
from job_process import VARIABLES, environment, fresh
from makeway import connection
from makeway.checkpointing import folder
from makeway_api.client import Client
from makeway_quota.services.machines.deployments import DeploymentService
from makeway_quota.store.store import Store
from makeway_quota.web.server.http_server import server_config
from running import Running, running


class Portal:
    """A running service in a thread of its own; a user's token is their name."""

    def __init__(self, state: Path) -> None:
        self.url = ""
        self._ready = threading.Event()
        self._trouble: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(state,), name="portal")
        self._thread.start()
        self._ready.wait(30)
        if self._trouble is not None:
            raise self._trouble

    def client(self, name: str) -> Client:
        """Return a client of a user."""
        return Client(self.url, name)

    @property
    def store(self) -> Store:
        """Return the store of the service, which is safe to use from any thread."""
        return self._service.service.components.store

    @property
    def term(self) -> int:
        """Return the term in which the service leads."""
        return self._service.service.components.leader.term or 0

    @property
    def deployments(self) -> DeploymentService:
        """Return the service of deployments."""
        return self._service.service.services.deployments

    def stop(self) -> None:
        """Stop the service and its jobs."""
        self._loop.call_soon_threadsafe(self._end)
        self._thread.join(60)

    def _run(self, state: Path) -> None:
        try:
            asyncio.run(self._serve(state))
        except BaseException as error:
            self._trouble = error
            self._ready.set()

    async def _serve(self, state: Path) -> None:
        self._loop = asyncio.get_running_loop()
        async with running(state, MAKEWAY_TICK_SECONDS="0.5") as run:
            config = server_config(run.app, port=0, timeout_graceful_shutdown=1)
            self._server, self._service = uvicorn.Server(config), run
            serving = asyncio.create_task(self._server.serve())
            while not self._server.started and not serving.done():  # noqa: ASYNC110 (uvicorn has no event for it)
                await asyncio.sleep(0.02)
            port = self._server.servers[0].sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{port}/services/makeway"
            self._ready.set()
            await serving

    def _end(self) -> None:
        self._service.app.state.streams.close()
        self._server.should_exit = True

    _service: Running


@contextmanager
def cleaned(portal: Portal, name: str) -> Iterator[Client]:
    """Yield a client of a user, whose jobs are cancelled afterwards."""
    with portal.client(name) as service:
        try:
            yield service
        finally:
            for job in service.jobs(mine=True, limit=200).jobs:
                if not job.state.ended:
                    job = service.cancel(job.id)
                while not job.state.ended:
                    job = service.job(job.id, wait=5, version=job.version)


@pytest.fixture(scope="session")
def portal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Portal]:
    started = Portal(tmp_path_factory.mktemp("portal"))
    yield started
    started.stop()


@pytest.fixture
def ana(portal: Portal) -> Iterator[Client]:
    """Connect this process as ana's kernel; cancel her jobs afterwards."""
    connection.connect(portal.url, "ana")
    with cleaned(portal, "ana") as service:
        yield service
    connection.disconnect()


@pytest.fixture
def bo(portal: Portal) -> Iterator[Client]:
    """Yield a client of bo; cancel his jobs afterwards."""
    with cleaned(portal, "bo") as service:
        yield service


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return a fresh `makeway.checkpoint` outside of a job, in an empty directory."""
    for name in (*VARIABLES, "MAKEWAY_SIGNAL", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(folder, "_REPORTED", set())
    monkeypatch.chdir(tmp_path)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield fresh()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def job(away: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a fresh `makeway.checkpoint` inside of a job."""
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    return away
