"""Machines for tests: rows as a deployment would have them, and small agents that start real launchers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
from elsewhere import LAUNCHER
from makeway_quota.application import Application
from makeway_quota.autoscale.machine import Machine
from makeway_quota.autoscale.step import MachineChanges

API = "/services/makeway/api/v1"
BOOT = "boot-0000001"


def requested(name: str, *, gpus: int = 2, pool: str = "cloud", **request: Any) -> Machine:
    """Return the row of a machine that boots."""
    now = time.time()
    options = {"init_script": "", "image": None, "cpu_only": False, "orphan_after": 900.0, "cpu": 0, "memory": 0}
    return Machine(
        id=name,
        deployment="fleet",
        pool=pool,
        type="small",
        zone="",
        market="on_demand",
        price=1_000_000,
        gpus=gpus,
        request=json.dumps({**options, **request}),
        requested_at=now,
        state_since=now,
        state="booting",
        launch_calls=1,
        launched_at=now,
    )


def add(service: Application, machine: Machine) -> None:
    """Write the row of a new machine, as the leader would."""
    term = service.components.leader.term
    assert term is not None
    assert service.components.store.machines.commit(machine.deployment, term, MachineChanges(launched=(machine,)))


def change(service: Application, name: str, **fields: Any) -> Machine:
    """Change the row of a machine, as the leader's step would, and wake the loop as it would."""
    store, term = service.components.store, service.components.leader.term
    assert term is not None
    row = store.machines.machine(name)
    assert row is not None
    changed = replace(row, state_since=time.time(), **fields)
    assert store.machines.commit(row.deployment, term, MachineChanges(changed=(changed,)))
    service.loop.wake()
    return changed


def ready(service: Application, name: str) -> None:
    """Make a machine ready whose agent has joined."""
    report = service.components.store.machine_reports.of(name)
    assert report is not None
    change(service, name, state="ready", boot=report.boot, ready_at=time.time(), heard_at=time.time())


def join_token(service: Application, name: str) -> str:
    assert service.components.machines is not None
    return service.components.machines.tokens.join_token(name)


class Agent:
    """The agent of one machine: it joins, reports, and runs what it is ordered to, as a small kubelet would."""

    def __init__(self, address: str, name: str, token: str, root: Path, gpus: int = 2, boot: str = BOOT) -> None:
        self.address, self.name, self.root, self.gpus, self.boot = address, name, root, gpus, boot
        self.http = httpx2.AsyncClient(base_url=address, timeout=60)
        self.join_token = token
        self.token = ""
        self.launchers: dict[tuple[str, int, int], subprocess.Popen[bytes]] = {}
        self.devices: dict[tuple[str, int, int], list[int]] = {}
        self.starts: list[tuple[str, int, int]] = []
        self.wanted: set[tuple[str, int, int]] = set()
        self.joined: dict[str, Any] = {}
        self.orders: dict[str, Any] = {}
        self.stopped_by = ""
        self.silent = False
        """neither reports nor asks, as if the network were cut"""
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()

    def _as(self, token: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {token}"}

    async def join(self) -> httpx2.Response:
        body = {
            "machine": self.name,
            "boot": self.boot,
            "gpus": self.gpus,
            "cpu": 4000,
            "memory": 8000,
            "virtual": True,
        }
        answer = await self.http.post(f"{API}/agents/join", json=body, headers=self._as(self.join_token))
        if answer.status_code == 200:
            self.joined = answer.json()
            self.token = self.joined["token"]
        return answer

    async def report(self, **more: Any) -> httpx2.Response:
        attempts = []
        for key, process in self.launchers.items():
            code = process.poll()
            state = {"state": "running"} if code is None else {"state": "exited", "exit_code": code}
            named = dict(zip(("job", "attempt", "worker"), key, strict=True))
            attempts.append({**named, **state, "devices": self.devices[key]})
        body = {"boot": self.boot, "gpus": self.gpus, "virtual": True, "attempts": attempts}
        body |= {"init": {"exit_code": 0, "output": ""}, **more}
        answer = await self.http.post(f"{API}/agents/{self.name}/report", json=body, headers=self._as(self.token))
        if answer.status_code == 200:
            self.token = answer.json()["token"] or self.token
        return answer

    async def ask(self, known: str = "", wait: float = 0) -> httpx2.Response:
        params = {"known": known, "wait": str(wait)}
        return await self.http.get(f"{API}/agents/{self.name}/orders", params=params, headers=self._as(self.token))

    def work(self) -> None:
        """Report and follow orders until `close`."""
        self._tasks = [asyncio.create_task(item()) for item in (self._report, self._follow, self._watch)]

    async def _report(self) -> None:
        while not self.stopped_by:
            if not self.silent:
                answer = await self._quietly(self.report)
                if answer is not None and answer.status_code == 410:
                    self._stop("report")
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await self._changed.wait()

    async def _follow(self) -> None:
        while not self.stopped_by:
            known = self.orders.get("revision", "")
            answer = None if self.silent else await self._quietly(partial(self.ask, known, 25))
            if answer is None or answer.status_code not in (200, 410):
                await asyncio.sleep(0.1)
                continue
            if self.silent:
                continue
            self.orders = answer.json() if answer.status_code == 200 else {"stop": True, "attempts": []}
            if self.orders["stop"]:
                self._stop("orders")
            self._obey()

    async def _quietly(self, ask: Callable[[], Any]) -> httpx2.Response | None:
        try:
            answer: httpx2.Response = await ask()
        except (httpx2.HTTPError, OSError):
            return None
        return answer

    async def _watch(self) -> None:
        """Report at once when a launcher ends."""
        ended: set[tuple[str, int, int]] = set()
        while True:
            now = {key for key, process in self.launchers.items() if process.poll() is not None}
            for key in now - self.wanted:
                del self.launchers[key]
            if now != ended:
                self._changed.set()
            ended = now & self.launchers.keys()
            await asyncio.sleep(0.05)

    def _obey(self) -> None:
        orders = {(o["job"], o["attempt"], o["worker"]): o for o in self.orders["attempts"]}
        self.wanted = set(orders)
        for key, order in orders.items():
            if key not in self.launchers:
                self._start(key, order)
        for key, process in self.launchers.items():
            if key not in orders and process.poll() is None:
                process.terminate()
        self._changed.set()

    def _start(self, key: tuple[str, int, int], order: dict[str, Any]) -> None:
        home = self.root / "-".join(map(str, key))
        home.mkdir(parents=True)
        checkpoints = Path(order["checkpoints"] or home / "checkpoints")
        checkpoints.mkdir(parents=True, exist_ok=True)
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(LAUNCHER.parents[1]),
            "MAKEWAY_ATTEMPT_URL": order["url"],
            "MAKEWAY_ATTEMPT_TOKEN": order["token"],
            "MAKEWAY_JOB_DIR": str(home),
            "MAKEWAY_CHECKPOINT_DIR": str(checkpoints),
            "MAKEWAY_WORKER_ENV": json.dumps(order["env"]),
        }
        command = [sys.executable, "-S", str(LAUNCHER), "--remote"]
        self.launchers[key] = subprocess.Popen(command, env=env, cwd=home, start_new_session=True)
        self.devices[key] = order["devices"]
        self.starts.append(key)

    def _stop(self, cause: str) -> None:
        self.stopped_by = self.stopped_by or cause
        for process in self.launchers.values():
            if process.poll() is None:
                process.terminate()

    def vanish(self) -> None:
        """End everything at once, as a machine whose power is cut."""
        self.silent = True
        for process in self.launchers.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """End what is left."""
        self.vanish()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self.launchers.values():
            await asyncio.to_thread(process.wait, 30)
        await self.http.aclose()
