"""A service with a large memory cluster and its API in one process, for the benchmarks of requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2
from fastapi import FastAPI
from makeway_quota.application import Application
from makeway_quota.backends.base import NodeStatus
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.services import Caller
from makeway_quota.settings import load
from makeway_quota.store.records import NewWorkload
from makeway_quota.web.app import create_app
from makeway_quota.web.login.auth import TokenAuth
from makeway_quota.web.settings import WebSettings

PREFIX = "/services/makeway/"
API = f"{PREFIX}api/v1"
DEVICES = 8
"""on a node"""
TEAMS = 50
USERS = 10
"""in each team"""
ADMINISTRATORS = 100
SECRET = b"a secret of the benchmark"


def policy(nodes: int, teams: int = TEAMS) -> str:
    """Write the document: one pool, four profiles, and teams that reserve half of the pool together."""
    item = nodes * DEVICES // teams // 2
    profiles = "\n".join(
        f"  - {{name: gpu{size}, title: {size} GPU, gpus: {size}, pools: [gpu], grace: 30}}" for size in (1, 2, 4, 8)
    )
    policies = "\n".join(
        f"  - {{name: team{at:02}, title: Team {at}, groups: [team{at:02}], quotas: [{{reserved: {item}}}]}}"
        for at in range(teams)
    )
    return (
        "version: 1\npools:\n  - {name: gpu, profiles: [gpu1, gpu2, gpu4, gpu8]}\n"
        f"profiles:\n{profiles}\npolicies:\n{policies}\n"
    )


def people(teams: int = TEAMS) -> dict[str, Caller]:
    """Make the users of every team and administrators; tokens are names."""
    scopes = frozenset({"custom:makeway:read", "custom:makeway:submit"})
    result = {
        f"user{team:02}-{at}": Caller(f"user{team:02}-{at}", groups=frozenset({f"team{team:02}"}), scopes=scopes)
        for team in range(teams)
        for at in range(USERS)
    }
    names = ("root", *(f"root{at:02}" for at in range(ADMINISTRATORS)))
    return result | {name: Caller(name, admin=True, scopes=scopes | {"custom:makeway:admin"}) for name in names}


def jobs(running: int, pending: int, size: int, teams: int = TEAMS) -> list[NewWorkload]:
    """List jobs of `size` GPUs; as many as fit will run, the others wait."""
    return [
        NewWorkload(
            id=f"j-{at:06x}",
            kind="job",
            team=f"team{at % teams:02}",
            profile=f"gpu{size}",
            owner=f"user{at % teams:02}-{at // teams % USERS}",
            name=f"train-{at}",
            gpus=size * 1000,
            workers=1,
            command=("python", "train.py", f"--seed={at}"),
        )
        for at in range(running + pending)
    ]


@asynccontextmanager
async def large_service(
    nodes: int, running: int, pending: int, size: int
) -> AsyncIterator[tuple[Application, FastAPI, httpx2.AsyncClient]]:
    """Start a service whose loop runs and whose jobs all have their first decision."""
    with TemporaryDirectory(prefix="makeway-requests-") as folder:
        state = Path(folder)
        (state / "policy.yaml").write_text(policy(nodes), encoding="utf-8")
        environ = {
            "MAKEWAY_STATE_DIR": folder,
            "MAKEWAY_POLICY_FILE": str(state / "policy.yaml"),
            "MAKEWAY_MAX_PENDING_JOBS": "0",
            "MAKEWAY_MAX_SUBMISSIONS_PER_MINUTE": "0",
        }
        seen = [NodeStatus(f"n{at:05}", "gpu", tuple(range(DEVICES)), model="H100") for at in range(nodes)]
        service = await Application.open(load(environ=environ), MemoryBackend(seen, real_time=True))
        now = service.components.clock()
        for at in range(0, running + pending, 2000):
            new = jobs(running, pending, size)[at : at + 2000]
            service.components.store.add_workloads([(item, (), None) for item in new], now=now + at * 1e-3)
        await service.start()
        app = create_app(service.services, WebSettings(secret=SECRET), TokenAuth(people()))
        transport = httpx2.ASGITransport(app=app)
        client = httpx2.AsyncClient(transport=transport, base_url="http://bench.test", timeout=120)
        try:
            yield service, app, client
        finally:
            app.state.streams.close()
            await client.aclose()
            await service.stop(stop_jobs=False)
