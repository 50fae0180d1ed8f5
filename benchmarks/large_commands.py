"""Attack the service with the largest commands: memory, answers and restarts stay small, whatever state the jobs have.

Each step is a service of its own in a process of its own, on the same database, so that each is a restart as well.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2
from makeway_quota.application import Application
from makeway_quota.backends.base import NodeStatus
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.services.jobs.submission_check import MAX_COMMAND_BYTES
from makeway_quota.settings import load
from makeway_quota.store.records import Change
from makeway_quota.web.app import create_app
from makeway_quota.web.login.auth import TokenAuth
from makeway_quota.web.server.http_server import run
from makeway_quota.web.settings import WebSettings

from .measure import Measured
from .request_load import API, SECRET, people, policy

JOBS = 2000
MEMORY, ANSWER, RESTART = 400.0, 5.0, 10.0
"""MiB, MB and seconds: the goals"""
BEFORE = {"memory": 2150.0, "answer": 400.0, "restart": 17.0}
"""at commit 3a82c28 with 400 jobs of 1 MB: one list, and the time after which a restart was killed for its memory"""


class Attack:
    """One service under attack, and the largest answer that it gave."""

    def __init__(self, service: Application, client: httpx2.AsyncClient) -> None:
        self.service, self._client = service, client
        self.largest = 0

    async def ask(self, method: str, path: str, person: str = "root", body: object = None) -> httpx2.Response:
        """Send one request as a person, and note the size of its answer."""
        headers = {"Authorization": f"token {person}"}
        answer = await self._client.request(method, f"{API}/{path}", headers=headers, json=body)
        self.largest = max(self.largest, len(answer.content))
        return answer

    async def submit(self) -> None:
        """Submit every job, as many as each person may have."""
        taken, command = 0, ["x" * MAX_COMMAND_BYTES]
        for person in (name for name in people() if name != "root"):
            body = {"command": command, "profile": "gpu8"}
            while taken < JOBS:
                answer = await self.ask("POST", "jobs", person, body)
                if answer.status_code != 201:
                    break
                taken += 1
        assert taken == JOBS, f"{taken} jobs were taken"

    async def read_lists(self) -> None:
        """Request everything that has a list, with the largest pages."""
        for page in ("jobs?limit=1000", "decisions?limit=1000", "sessions?all=1", "usage", "pools", "offers"):
            await self.ask("GET", page)
        cursor, seen = "", 0
        while cursor is not None:
            page = (await self.ask("GET", f"jobs?limit=1000{cursor}")).json()
            seen += len(page["jobs"])
            cursor = page["next"] and f"&cursor={page['next']}"
        assert seen >= JOBS, "every job is on a page"
        await self.ask("GET", f"jobs/{page['jobs'][0]['id']}")

    async def end(self) -> None:
        """Cancel every job."""
        store, now = self.service.components.store, self.service.components.clock()
        store.commit([Change(row.id, {"state": "cancelled"}) for row in store.active()], now=now)

    async def resume(self) -> None:
        """Return every job to the queue, past every limit, as an older version allowed it."""
        store, now = self.service.components.store, self.service.components.clock()
        rows, cursor = store.workloads("job", limit=1000)
        while cursor:
            more, cursor = store.workloads("job", limit=1000, cursor=cursor)
            rows += more
        store.commit([Change(row.id, {"state": "pending"}) for row in rows], now=now)


STEPS: dict[str, Callable[[Attack], Awaitable[None]]] = {
    "submitted": Attack.submit,
    "pending": Attack.read_lists,
    "cancelled": Attack.end,
    "listed": Attack.read_lists,
    "resumed": Attack.resume,
    "restarted": Attack.read_lists,
}


async def _step(name: str, folder: Path) -> dict[str, float]:
    """Start a service, do one step, let the loop decide, and return what it took."""
    file = folder / "policy.yaml"
    file.write_text(policy(10), encoding="utf-8")
    environ = {"MAKEWAY_STATE_DIR": str(folder), "MAKEWAY_POLICY_FILE": str(file)}
    limits = {"MAKEWAY_MAX_SUBMISSIONS_PER_MINUTE": "0", "MAKEWAY_KEEP": "1"}
    nodes = [NodeStatus(f"n{at}", "gpu", tuple(range(8)), model="H100") for at in range(10)]
    began = time.perf_counter()
    service = await Application.open(load(environ=environ | limits), MemoryBackend(nodes, real_time=True))
    await service.start()
    app = create_app(service.services, WebSettings(secret=SECRET), TokenAuth(people()))
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://bench.test", timeout=120) as client:
        attack = Attack(service, client)
        while (await attack.ask("GET", "jobs?limit=1")).status_code != 200 or not service.components.world.cycled:
            await service.loop.cycle()
        ready = time.perf_counter() - began
        await STEPS[name](attack)
        await service.loop.cycle()
    app.state.streams.close()
    await service.stop(stop_jobs=False)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"memory": memory, "answer": attack.largest / 1e6, "restart": ready}


def measure() -> list[Measured]:
    """Run the steps one after the other on one database."""
    took: dict[str, list[float]] = {"memory": [], "answer": [], "restart": []}
    with TemporaryDirectory(prefix="makeway-commands-") as folder:
        for name in STEPS:
            command = [sys.executable, "-m", "benchmarks.large_commands", name, folder]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
            for what, value in json.loads(done.stdout).items():
                took[what].append(value)
    note = (
        f"{JOBS:,} jobs, each with the largest command that is taken ({MAX_COMMAND_BYTES // 1024} KiB): "
        + ", ".join(STEPS)
    )
    return [
        Measured("large commands: memory", "MiB", [max(took["memory"])], "3a82c28", BEFORE["memory"], MEMORY, note),
        Measured("large commands: largest answer", "MB", [max(took["answer"])], "3a82c28", BEFORE["answer"], ANSWER),
        Measured("large commands: restart", "s", [max(took["restart"])], "3a82c28", BEFORE["restart"], RESTART),
    ]


if __name__ == "__main__":
    print(json.dumps(run(_step(sys.argv[1], Path(sys.argv[2])))))
