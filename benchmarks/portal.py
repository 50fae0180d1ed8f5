"""A whole portal of its own: Hub, proxy, service and jobs, as `make run` starts them, for benchmarks and for tests."""

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
from typing import Any, Self

import httpx2
from makeway_api.client import Client
from makeway_hub.state_directory import StateDirectory, free_port

TIMEOUT = 120.0
SERVICE = "/services/makeway"
EMBEDDED = (sys.executable, "-m", "makeway_hub.embedded")
SCOPES = ("admin:users", "tokens", "servers", "admin:servers")

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
c.JupyterHub.services = [*c.JupyterHub.services, {{"name": "outside", "api_token": "{token}"}}]
c.JupyterHub.load_roles = [
    *c.JupyterHub.load_roles, {{"name": "outside", "scopes": {scopes}, "services": ["outside"]}}
]
{more}
"""


def timed(call: Callable[[], object]) -> float:
    """Do something and answer how many seconds it took."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def until(true: Callable[[], Any], what: str, seconds: float = TIMEOUT) -> Any:
    """Wait until something holds and give it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = true()
        if value:
            return value
        time.sleep(0.1)
    raise TimeoutError(f"never within {seconds:g} s: {what}")


class Started:
    """The process, with a state directory and a port of its own, and the Hub's API for an administrator.

    It may be killed and started again; `more` is added to the Hub's configuration.
    """

    def __init__(
        self,
        root: Path,
        *,
        command: Sequence[str] = EMBEDDED,
        scopes: Sequence[str] = SCOPES,
        more: str = "",
        env: Mapping[str, str],
    ) -> None:
        self.root = root
        self.command = list(command)
        self.port = free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        self.state = StateDirectory(root / "var")
        self.token = secrets.token_hex(16)
        self.output = root / "output"
        self.process: subprocess.Popen[bytes] | None = None
        (root / "hub.py").write_text(HUB.format(token=self.token, scopes=list(scopes), more=more))
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKEWAY_", "JUPYTERHUB_"))}
        keep = {name: value for name, value in os.environ.items() if name == "MAKEWAY_NODE_MODULES"}
        own = {
            "PORT": str(self.port),
            "MAKEWAY_STATE_DIR": str(self.state.root),
            "MAKEWAY_HUB_CONFIG": str(root / "hub.py"),
        }
        self.env = clean | keep | own | dict(env)

    def launch(self) -> subprocess.Popen[bytes]:
        """Run the process without waiting for anything."""
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                self.command,
                env=self.env,
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return self.process

    def start(self) -> Self:
        """Start, again if need be, and wait for the announcement."""
        process = self.launch()

        def ready() -> bool:
            assert process.poll() is None, self.printed
            return "Makeway is ready" in self.printed

        try:
            until(ready, "the portal is ready")
        except (AssertionError, TimeoutError):
            self.stop()
            raise
        return self

    def stop(self) -> str:
        """Stop with Ctrl-C and give what it said."""
        if self.process and self.process.poll() is None:
            self.send(signal.SIGINT)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.send(signal.SIGKILL)
                self.process.wait()
        return self.printed

    def send(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        assert self.process
        self.process.send_signal(number)

    @property
    def printed(self) -> str:
        """What the terminal shows."""
        return self.output.read_text()

    @property
    def hub_pid(self) -> int:
        """The Hub's process."""
        return int((self.state.root / "hub.pid").read_text())

    def hub(self, method: str, path: str, **more: Any) -> httpx2.Response:
        """Call the Hub's API as an administrator."""
        headers = {"Authorization": f"token {self.token}"}
        return httpx2.request(
            method, f"{self.base}/hub/api{path}", headers=headers, timeout=60, trust_env=False, **more
        )

    def user_token(self, name: str) -> str:
        """Make a token of a user with all that user's rights."""
        self.hub("POST", f"/users/{name}")
        answer = self.hub("POST", f"/users/{name}/tokens", json={"note": "outside"})
        answer.raise_for_status()
        return str(answer.json()["token"])


class Portal(Started):
    """Runs from `with Portal(gpus=10) as portal:` until the end of the block; two teams reserve half each."""

    def __init__(
        self,
        gpus: int,
        *,
        policy: str | None = None,
        command: Sequence[str] = EMBEDDED,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="makeway-bench-", ignore_cleanup_errors=True)
        root = Path(self._folder.name)
        (root / "policy.yaml").write_text(policy or POLICY.format(half=gpus // 2))
        self.service_port = free_port()
        env = {
            "MAKEWAY_SERVICE_PORT": str(self.service_port),
            "MAKEWAY_POLICY_FILE": str(root / "policy.yaml"),
            "MAKEWAY_VIRTUAL_GPUS": str(gpus),
        }
        super().__init__(root, command=command, env=env | dict(environ or {}))
        self.url = self.base + SERVICE
        self._clients: dict[str, Client] = {}

    def __enter__(self) -> Portal:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self._clients.values():
            client.close()
        self.stop()
        self._folder.cleanup()

    def send(self, number: signal.Signals) -> None:
        """Send a signal as the terminal does: to make and all that it started."""
        assert self.process
        os.killpg(self.process.pid, number)

    def wait_until_dead(self) -> None:
        """Wait until the portal has noticed that its Hub was killed, and ended."""
        assert self.process
        self.process.wait(TIMEOUT)

    def spawner(self) -> Client:
        """Return the client that the Hub's spawner uses, straight to the service."""
        if "" not in self._clients:
            url = f"http://127.0.0.1:{self.service_port}/services/makeway"
            self._clients[""] = Client(url, self.state.secret("spawner_token"))
        return self._clients[""]

    def user(self, name: str) -> Client:
        """Return a user's client, through the proxy, as in a notebook."""
        if name not in self._clients:
            self._clients[name] = Client(self.url, self.user_token(name))
        return self._clients[name]

    def start_server(self, user: str, options: dict[str, Any]) -> None:
        """Click: start the user's notebook server."""
        self.hub("POST", f"/users/{user}/server", json=options).raise_for_status()

    def stop_server(self, user: str) -> None:
        """Stop it, and wait until it is gone."""
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            server = self.hub("GET", f"/users/{user}").json().get("servers", {}).get("")
            if server is None:
                return
            if not server.get("pending"):
                self.hub("DELETE", f"/users/{user}/server")
            time.sleep(0.1)
        raise RuntimeError(f"The server of {user} did not stop.")

    def service_pid(self) -> int:
        """Return the process of the quota service."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    command = (entry / "cmdline").read_bytes().split(b"\0")
                    mine = f"MAKEWAY_STATE_DIR={self.state.root}".encode() in (entry / "environ").read_bytes()
                except OSError:
                    continue
                if b"makeway_quota.main" in command and mine:
                    return int(entry.name)
        raise RuntimeError("The quota service is not running.")
