"""A local backend with real processes, and short words to order jobs from it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from makeway_quota.backends.base import AttemptStatus, Phase, StartOrder
from makeway_quota.backends.local.backend import LocalBackend
from makeway_quota.values import File, Notice, Place

OVER = (Phase.EXITED, Phase.LOST)


class Workshop:
    """One backend and its state directory; `again` is the service after a restart."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root = root
        self.options: dict[str, Any] = {"virtual_gpus": 8, "virtual_nodes": 2, "tick": 0.2, **options}
        self.changed = asyncio.Event()
        self.backend = self._new()

    def _new(self) -> LocalBackend:
        backend = LocalBackend(self.root, **self.options)
        backend.on_change(self.changed.set)
        return backend

    async def again(self) -> None:
        """Close the backend without stopping any job, as a restart does, and open a new one."""
        await self.backend.close(stop_jobs=False)
        self.backend = self._new()
        await self.backend.open()

    def order(
        self,
        workload: str,
        *command: str,
        attempt: int = 1,
        env: Mapping[str, str] | None = None,
        grace: float = 5.0,
        files: Mapping[str, str] | None = None,
        gpus: int = 1,
        node: str = "virtual-1",
        workers: int = 1,
        **more: Any,
    ) -> StartOrder:
        """Write an order; `files` maps paths to text."""
        made = tuple(File(path, text.encode()) for path, text in (files or {}).items())
        place = Place(node, tuple(range(gpus)), (1000,) * gpus)
        more = {"name": workload, "owner": "ana", "team": "rnd", "profile": "1gpu", **more}
        return StartOrder(
            workload=workload,
            attempt=attempt,
            command=command,
            env=env or {},
            workers=(place,) * workers,
            grace=grace,
            files=lambda: made,
            **more,
        )

    async def run(self, workload: str, *command: str, **more: Any) -> None:
        """Order a job and start it."""
        await self.backend.start(self.order(workload, *command, **more))

    async def python(self, workload: str, code: str, **more: Any) -> None:
        """Start a job that runs some Python."""
        await self.run(workload, sys.executable, "-c", code, **more)

    async def seen(self, workload: str, attempt: int = 1) -> AttemptStatus | None:
        """What the backend reports about an attempt."""
        result = [a for a in (await self.backend.observe()).attempts if (a.workload, a.attempt) == (workload, attempt)]
        assert len(result) <= 1
        return result[0] if result else None

    async def until(
        self, workload: str, fits: Callable[[AttemptStatus], Any], attempt: int = 1, seconds: float = 45.0
    ) -> AttemptStatus:
        """Wait until an attempt is as wanted."""
        ends = time.monotonic() + seconds
        while True:
            self.changed.clear()
            seen = await self.seen(workload, attempt)
            if seen is not None and fits(seen):
                return seen
            remaining = ends - time.monotonic()
            if remaining <= 0:
                raise TimeoutError(f"waited {seconds:g} s in vain; {workload} is {seen}\n{self.log(workload, attempt)}")
            try:
                async with asyncio.timeout(min(remaining, 0.25)):
                    await self.changed.wait()
            except TimeoutError:
                continue

    async def running(self, workload: str, attempt: int = 1, says: str = "") -> AttemptStatus:
        """Wait until it runs and has said something."""
        return await self.until(
            workload, lambda seen: seen.phase is Phase.RUNNING and says in self.log(workload, attempt), attempt
        )

    async def over(self, workload: str, attempt: int = 1, seconds: float = 45.0) -> AttemptStatus:
        """Wait until it ended."""
        return await self.until(workload, lambda seen: seen.phase in OVER, attempt, seconds)

    async def ask(self, workload: str, attempt: int = 1, grace: float = 5.0, **more: Any) -> Notice:
        """Notify an attempt to make way."""
        now = time.time()
        message: dict[str, Any] = {"by_team": "devops", "by_owner": "bo", "by_workload": "s-1", **more}
        notice = Notice(reason="devops wants its GPU back", at=now, deadline=now + grace, **message)
        await self.backend.notice(workload, attempt, notice)
        return notice

    def path(self, workload: str, *parts: str) -> Path:
        """Return the path of a file of a job."""
        return self.root.joinpath("jobs", workload, *parts)

    async def file(self, workload: str, *parts: str) -> Path:
        """Wait until a file of a job is there."""
        path = self.path(workload, *parts)
        async with asyncio.timeout(60):
            while not path.exists():  # noqa: ASYNC110 - it is another process that makes it
                await asyncio.sleep(0.01)
        return path

    def log(self, workload: str, attempt: int = 1) -> str:
        """All of a short log."""
        file = self.path(workload, f"attempt-{attempt}", "log")
        return file.read_text(errors="replace") if file.exists() else ""

    def read(self, workload: str, name: str, attempt: int = 1) -> dict[str, Any]:
        """A JSON file of an attempt."""
        result: dict[str, Any] = json.loads(self.path(workload, f"attempt-{attempt}", name).read_text())
        return result

    def launcher(self, workload: str, attempt: int = 1) -> int:
        """The pid of an attempt's launcher."""
        return int(self.read(workload, "launcher.json", attempt)["pid"])

    def processes(self, workload: str) -> list[int]:
        """Every process that carries the job's mark."""
        mark = f"MAKEWAY_JOB_DIR={self.path(workload).resolve()}".encode()
        return [pid for pid in _pids() if mark in _environ(pid)]


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
