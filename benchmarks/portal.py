"""A whole portal of its own for one benchmark: Hub, proxy, service and jobs, in a directory that goes with it."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx2
from makeway_api.client import Client
from makeway_hub.state import State, free_port

PATIENCE = 120.0
ADMIN = "makeway-benchmarks"

POLICY = """\
version: 1
settings: {{sessions_per_user: 1000}}
pools:
  - {{name: gpu, nodes: {{local: {{gpus: all}}}}, profiles: [gpu1]}}
profiles:
  - {{name: gpu1, title: 1 GPU, gpus: 1, pools: [gpu], grace: 30}}
policies:
  - {{name: rnd, title: R&D, groups: [rnd], quotas: [{{reserved: {half}}}]}}
  - {{name: devops, title: DevOps, groups: [devops], quotas: [{{reserved: {half}}}]}}
"""

HUB = """\
from makeway_hub.configure import configure
c = get_config()
configure(c)
c.JupyterHub.services = [*c.JupyterHub.services, {{"name": "{admin}", "api_token": "{token}"}}]
scopes = ["admin:users", "tokens", "servers", "admin:servers"]
c.JupyterHub.load_roles = [*c.JupyterHub.load_roles, {{"name": "{admin}", "scopes": scopes, "services": ["{admin}"]}}]
"""


def timed(call: Callable[[], object]) -> float:
    """Do something and answer how many seconds it took."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


class Portal:
    """Runs from `with Portal(gpus=10) as portal:` until the end of the block; two teams reserve half each."""

    def __init__(
        self,
        gpus: int,
        *,
        policy: str | None = None,
        command: Sequence[str] = (sys.executable, "-m", "makeway_hub.embedded"),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.gpus = gpus
        self._policy = policy or POLICY.format(half=gpus // 2)
        self._command = list(command)
        self._environ = dict(environ or {})
        self.port, self.service_port = free_port(), free_port()
        self.token = secrets.token_hex(16)
        self.url = f"http://127.0.0.1:{self.port}/services/makeway"
        self._folder = tempfile.TemporaryDirectory(prefix="makeway-bench-", ignore_cleanup_errors=True)
        self.root = Path(self._folder.name)
        self.state = State(self.root / "var")
        self._clients: dict[str, Client] = {}

    def __enter__(self) -> Portal:
        (self.root / "policy.yaml").write_text(self._policy)
        (self.root / "hub.py").write_text(HUB.format(admin=ADMIN, token=self.token))
        self.start()
        self.hub = httpx2.Client(
            base_url=f"http://127.0.0.1:{self.port}/hub/api",
            headers={"Authorization": f"token {self.token}"},
            timeout=60,
        )
        return self

    def start(self) -> None:
        """Start the portal, again if need be, and wait until it says that it is ready."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKEWAY_", "JUPYTERHUB_"))}
        env |= {
            "PORT": str(self.port),
            "MAKEWAY_SERVICE_PORT": str(self.service_port),
            "MAKEWAY_STATE_DIR": str(self.state.root),
            "MAKEWAY_POLICY_FILE": str(self.root / "policy.yaml"),
            "MAKEWAY_HUB_CONFIG": str(self.root / "hub.py"),
            "MAKEWAY_VIRTUAL_GPUS": str(self.gpus),
        } | self._environ
        self._output = (self.root / "output").open("wb")
        self._process = subprocess.Popen(
            self._command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )
        self._wait_until_ready()

    def wait_until_dead(self) -> None:
        """Wait until the portal has noticed that its Hub was killed, and ended."""
        self._process.wait(PATIENCE)
        self._output.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hub.close()
        for client in self._clients.values():
            client.close()
        os.killpg(self._process.pid, signal.SIGINT)  # as Ctrl-C does: make and what it started
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._output.close()
        self._folder.cleanup()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while "Makeway is ready" not in (said := (self.root / "output").read_text()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                raise RuntimeError(f"The portal did not start:\n{said}")
            time.sleep(0.1)

    def spawner(self) -> Client:
        """The client that the Hub's spawner uses, straight to the service."""
        if "" not in self._clients:
            url = f"http://127.0.0.1:{self.service_port}/services/makeway"
            self._clients[""] = Client(url, self.state.secret("spawner_token"))
        return self._clients[""]

    def user(self, name: str) -> Client:
        """A user's client, through the proxy, as in a notebook."""
        if name not in self._clients:
            self._clients[name] = Client(self.url, self.user_token(name))
        return self._clients[name]

    def user_token(self, name: str) -> str:
        """A new token of a user."""
        answer = self.hub.post(f"/users/{name}/tokens", json={"note": "benchmarks"})
        answer.raise_for_status()
        return str(answer.json()["token"])

    def start_server(self, user: str, options: dict[str, Any]) -> None:
        """Click: start the user's notebook server."""
        self.hub.post(f"/users/{user}/server", json=options).raise_for_status()

    def stop_server(self, user: str) -> None:
        """Stop it, and wait until it is gone."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            server = self.hub.get(f"/users/{user}").json().get("servers", {}).get("")
            if server is None:
                return
            if not server.get("pending"):
                self.hub.delete(f"/users/{user}/server")
            time.sleep(0.1)
        raise RuntimeError(f"The server of {user} did not stop.")

    def service_pid(self) -> int:
        """The process of the quota service."""
        return self._pid(b"makeway_quota.main")

    def hub_pid(self) -> int:
        """The process of JupyterHub."""
        return self._pid(b"jupyterhub")

    def _pid(self, word: bytes) -> int:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    command = (entry / "cmdline").read_bytes().split(b"\0")
                    mine = f"MAKEWAY_STATE_DIR={self.state.root}".encode() in (entry / "environ").read_bytes()
                except OSError:
                    continue
                if word in command and mine:
                    return int(entry.name)
        raise RuntimeError(f"{word.decode()} is not running.")
