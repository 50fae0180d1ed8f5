"""Several replicas of the service on one database and one backend, in this process or in their own.

The backend is a memory backend that is served over a socket, as a cluster's API would be: every replica has a backend
object of its own, and all of them show the same attempts. It records which replica ordered what, in which term.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from makeway_api.client import AsyncClient
from makeway_quota.application import Application
from makeway_quota.backends.base import Backend, BackendError, NodeStatus, Observation, StartOrder
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.settings import load
from makeway_quota.values import Notice
from running import SAMPLE, URL

ORDERS = ("start", "notice", "kill", "forget", "purge")
LEADER_SECONDS = 5.0
"""The deadline of a leader: on a machine that runs other tests beside, an answer may take seconds."""


@dataclass(frozen=True, slots=True)
class Order:
    """One order, as it reached the backend."""

    at: float
    replica: str
    term: int | None
    verb: str
    workload: str
    attempt: int


def no_files() -> tuple[()]:
    """Return nothing: a socket carries no functions."""
    return ()


class RemoteBackend(Backend):
    """One replica's view of a shared backend."""

    name = "remote"
    shared = True
    durable_checkpoints = True

    def __init__(self, path: str, replica: str) -> None:
        self._path = path
        self._replica = replica
        self.term: Callable[[], int | None] = lambda: None
        self._wake: Callable[[], None] = lambda: None
        self._watching: asyncio.Task[None] | None = None

    def on_change(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    async def open(self) -> None:
        self._watching = asyncio.create_task(self._watch())

    async def close(self, *, stop_jobs: bool) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def observe(self, since: int | None = None) -> Observation:
        seen: Observation = await self._call("observe", since)
        return seen

    async def start(self, order: StartOrder) -> None:
        await self._call("start", replace(order, files=no_files))

    async def notice(self, workload: str, attempt: int, notice: Notice) -> None:
        await self._call("notice", workload, attempt, notice)

    async def kill(self, workload: str, attempt: int) -> None:
        await self._call("kill", workload, attempt)

    async def forget(self, workload: str, attempt: int) -> None:
        await self._call("forget", workload, attempt)

    async def purge(self, workload: str, team: str) -> bool:
        return bool(await self._call("purge", workload, team))

    async def log(self, workload: str, attempt: int, offset: int, size: int) -> tuple[bytes, int]:
        result: tuple[bytes, int] = await self._call("log", workload, attempt, offset, size)
        return result

    async def log_gap(self, workload: str, attempt: int) -> tuple[int, int] | None:
        return None

    async def result(self, workload: str, attempt: int) -> bytes | None:
        return None

    async def error(self, workload: str, attempt: int) -> bytes | None:
        return None

    async def _call(self, verb: str, *args: object) -> Any:
        reader, writer = await asyncio.open_unix_connection(self._path, limit=2**24)
        try:
            writer.write(pickle.dumps((self._replica, self.term(), verb, args)))
            writer.write_eof()
            ok, answer = pickle.loads(await reader.read())
        finally:
            writer.close()
        if not ok:
            raise BackendError(answer)
        return answer

    async def _watch(self) -> None:
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_unix_connection(self._path)
                try:
                    writer.write(pickle.dumps((self._replica, None, "watch", ())))
                    writer.write_eof()
                    while await reader.read(1024):
                        self._wake()
                finally:
                    writer.close()
            await asyncio.sleep(0.2)


class SharedBackend:
    """The backend that all replicas work on, and the record of their orders."""

    def __init__(self, memory: MemoryBackend, path: str) -> None:
        self.memory = memory
        self.path = path
        self.orders: list[Order] = []
        self.breaches: list[str] = []
        self._watchers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        memory.on_change(self._changed)

    def _changed(self) -> None:
        for writer in self._watchers:
            writer.write(b".")

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, or keep a watch open."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            replica, term, verb, args = pickle.loads(await reader.read())
            if verb == "watch":
                self._watchers.add(writer)
                await asyncio.Event().wait()
            if verb in ORDERS:
                self._record(replica, term, verb, args)
            try:
                answer = (True, await getattr(self.memory, verb)(*args))
            except BackendError as error:
                answer = (False, str(error))
            writer.write(pickle.dumps(answer))
            await writer.drain()
        except (OSError, EOFError, pickle.UnpicklingError, asyncio.CancelledError):
            pass  # a replica was killed in mid-sentence
        finally:
            self._watchers.discard(writer)
            writer.close()

    def _record(self, replica: str, term: int | None, verb: str, args: tuple[Any, ...]) -> None:
        workload, attempt = (args[0].workload, args[0].attempt) if verb == "start" else (args[0], args[1])
        order = Order(time.monotonic(), replica, term, verb, workload, attempt)
        newest = max((item.term or 0 for item in self.orders), default=0)
        if term is None or term < newest:
            self.breaches.append(f"an order of a deposed leader, term {newest} has acted: {order}")
        if verb == "kill":
            self.breaches.append(f"no job was to be killed: {order}")
        if verb == "start" and (workload, attempt) in self.memory.forgotten:
            self.breaches.append(f"a second start of an attempt that is over: {order}")
        if verb == "start" and any(
            key[0] == workload
            and key != (workload, attempt)
            and item.status.phase in ("starting", "running", "stopping")
            for key, item in self.memory.attempts.items()
        ):
            self.breaches.append(f"two attempts of one job run: {order}")
        self.orders.append(order)

    def actors(self) -> set[str]:
        """Return the replicas that have given orders."""
        return {order.replica for order in self.orders}

    async def close(self) -> None:
        """End every connection."""
        await self.memory.close(stop_jobs=False)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def seconds_of(order: StartOrder) -> float | None:
    """Return how long a job runs: its name ends in the seconds, else it runs until it is told."""
    _, _, last = order.name.rpartition(" ")
    try:
        return float(last)
    except ValueError:
        return None


@asynccontextmanager
async def shared_backend(folder: Path) -> AsyncIterator[SharedBackend]:
    """Serve ten virtual GPUs on a socket in this folder."""
    node = NodeStatus("local", "", tuple(range(10)), virtual=True)
    memory = MemoryBackend([node], lasts=seconds_of, leaves_after=0.1, real_time=True)
    shared = SharedBackend(memory, str(folder / "backend"))
    server = await asyncio.start_unix_server(shared.answer, shared.path, limit=2**24)
    try:
        yield shared
    finally:
        server.close()
        await shared.close()


def settings(folder: Path, url: str, **more: object) -> dict[str, str]:
    """Return the environment of a replica."""
    environ = {
        "MAKEWAY_STATE_DIR": str(folder),
        "MAKEWAY_DB_URL": url,
        "MAKEWAY_POLICY_FILE": str(SAMPLE),
        "MAKEWAY_URL": URL,
        "MAKEWAY_LEADER_SECONDS": f"{LEADER_SECONDS:g}",
        "MAKEWAY_TICK_SECONDS": "0.5",
    }
    return environ | {key: str(value) for key, value in more.items()}


async def opened(backend: SharedBackend, url: str, replica: str, folder: Path, **more: object) -> Application:
    """Open and start a replica in this process."""
    own = RemoteBackend(backend.path, replica)
    service = await Application.open(load(environ=settings(folder / replica, url, **more)), own)
    own.term = lambda: service.loop.term
    await service.start()
    return service


@dataclass(slots=True)
class Replica:
    """A replica in a process of its own."""

    name: str
    folder: Path
    backend: str
    environ: dict[str, str]
    script: str = "replica_process.py"
    process: subprocess.Popen[bytes] | None = None
    clients: dict[str, AsyncClient] = field(default_factory=dict)

    async def start(self) -> None:
        """Start the process and wait until it listens."""
        self.folder.mkdir(exist_ok=True)
        port = self.folder / "port"
        port.unlink(missing_ok=True)
        script = Path(__file__).with_name(self.script)
        command = [sys.executable, str(script), self.backend, self.name, str(port)]
        self.process = await asyncio.to_thread(self._spawn, command)
        async with asyncio.timeout(60):
            while not port.exists():
                assert self.process.poll() is None, self.log()
                await asyncio.sleep(0.05)
        await self._close_clients()
        url = f"http://127.0.0.1:{port.read_text()}/services/makeway"
        self.clients = {person: AsyncClient(url, person) for person in ("ana", "bo", "root")}

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        with open(self.folder / "log", "ab") as log:
            return subprocess.Popen(command, env={**os.environ, **self.environ}, stdout=log, stderr=log)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        assert self.process is not None
        self.process.send_signal(number)

    async def kill(self) -> None:
        """Kill the process and start it again."""
        assert self.process is not None
        self.process.kill()
        await asyncio.to_thread(self.process.wait)
        await self.start()

    def log(self) -> str:
        """Return what the process has logged."""
        return (self.folder / "log").read_text(errors="replace")[-8000:]

    async def close(self) -> None:
        """End the process."""
        await self._close_clients()
        if self.process is not None:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)

    async def _close_clients(self) -> None:
        for client in self.clients.values():
            await client.close()
        self.clients = {}
