"""Workers elsewhere: launchers that know nothing of the service but an address and a token."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from makeway_quota.backends.base import BackendError, Key, NodeStatus, StartOrder
from makeway_quota.backends.remote.backend import RemoteBackend
from makeway_quota.backends.remote.worker_hosts import WorkerHosts

LAUNCHER = Path(__file__).parents[1] / "widgets" / "makeway" / "launcher"


class Processes(RemoteBackend):
    """Runs each worker as a process with a folder of its own; only checkpoints are shared, as on a volume.

    What runs is found again by the processes' own files, as a cluster's API would show it to another replica.
    """

    def __init__(self, root: Path, address: str, *, gpus: int = 4, lost_after: float = 120.0, **more: float) -> None:
        super().__init__(lost_after=lost_after, **more)
        self.root = root
        self.address = address
        self.down: set[Key] = set()
        """attempts whose machines are to look gone"""
        self.published: list[tuple[Key, str, str]] = []
        """what was shown beside the machines: attempt, code and sentence"""
        self._nodes = {"far-1": NodeStatus("far-1", "gpu", tuple(range(gpus)), virtual=True)}
        self._running: dict[Path, subprocess.Popen[bytes]] = {}

    async def nodes(self) -> Mapping[str, NodeStatus]:
        return self._nodes

    async def start(self, order: StartOrder) -> None:
        if order.command == ("never",):
            raise BackendError("This is never started.")
        for number in range(len(order.workers)):
            self._start(order, number)

    def _start(self, order: StartOrder, number: int) -> None:
        home = self.root / f"{order.workload}-{order.attempt}-{number}"
        if home.exists():
            return
        home.mkdir(parents=True)
        checkpoints = self.root / "volume" / order.workload if self.durable_checkpoints else home / "checkpoints"
        checkpoints.mkdir(parents=True, exist_ok=True)
        path, token = self.channel.credentials(order.workload, order.attempt, number)
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(LAUNCHER.parents[1]),
            "MAKEWAY_ATTEMPT_URL": f"{self.address}/{path}",
            "MAKEWAY_ATTEMPT_TOKEN": token,
            "MAKEWAY_JOB_DIR": str(home),
            "MAKEWAY_CHECKPOINT_DIR": str(checkpoints),
            "MAKEWAY_WORKER_ENV": json.dumps({"RANK": str(number), "WORLD_SIZE": str(len(order.workers))}),
        }
        command = [sys.executable, "-S", str(LAUNCHER), "--remote"]
        process = subprocess.Popen(command, env=env, cwd=home, start_new_session=True)
        (home / "pid").write_text(f"{process.pid} {len(order.workers)}")
        self._running[home] = process

    def publish_event(self, key: Key, code: str, message: str) -> None:
        self.published.append((key, code, message))

    async def hosts(self) -> Mapping[Key, WorkerHosts]:
        result: dict[Key, WorkerHosts] = {}
        for file in sorted(self.root.glob("*/pid")):
            workload, attempt, _ = file.parent.name.rsplit("-", 2)
            try:
                pid, size = map(int, file.read_text().split())
            except FileNotFoundError:  # removed meanwhile
                continue
            key = workload, int(attempt)
            present = self._alive(file.parent, pid) and key not in self.down
            result[key] = WorkerHosts(size, present=present or (key in result and result[key].present))
        return result

    def _alive(self, home: Path, pid: int) -> bool:
        if (process := self._running.get(home)) is not None:
            return process.poll() is None
        return _is_launcher(pid)

    async def remove(self, workload: str, attempt: int) -> None:
        for file in self.root.glob(f"{workload}-{attempt}-*/pid"):
            await asyncio.to_thread(self._kill, file)

    def _kill(self, file: Path) -> None:
        """Kill a launcher as the end of a container does, and everything that it started with it."""
        try:
            pid = int(file.read_text().split()[0])
        except FileNotFoundError:  # the service removes it at the same time as the end of the test
            return
        process = self._running.pop(file.parent, None)
        if process is not None:
            process.kill()
            process.wait(30)
        elif _is_launcher(pid):
            os.kill(pid, signal.SIGKILL)
        file.unlink(missing_ok=True)

    def launcher(self, workload: str, attempt: int = 1, worker: int = 0) -> subprocess.Popen[bytes]:
        """Return the process of a launcher."""
        return self._running[self.root / f"{workload}-{attempt}-{worker}"]

    async def finished(self) -> None:
        """Kill what is left, at the end of a test."""
        for file in self.root.glob("*/pid"):
            await asyncio.to_thread(self._kill, file)


def _is_launcher(pid: int) -> bool:
    """Whether a launcher runs under this pid; another process may have it by now."""
    try:
        return str(LAUNCHER).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
