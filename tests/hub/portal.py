"""The whole portal for a test: `make run`'s process with a state directory and ports of its own."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2
from makeway_api.client import Client
from makeway_hub.state import State, free_port

PATIENCE = 90.0
SERVICE = "/services/makeway"
CONFIG = """\
from makeway_hub.configure import configure
c = get_config()
configure(c)
c.JupyterHub.services = [*c.JupyterHub.services, {{"name": "tests", "api_token": "{token}"}}]
scopes = ["admin:users", "tokens", "servers", "admin:servers", "admin:groups", "custom:makeway:admin"]
scopes += ["custom:makeway:read", "access:services!service=makeway"]
c.JupyterHub.load_roles = [*c.JupyterHub.load_roles, {{"name": "tests", "scopes": scopes, "services": ["tests"]}}]
{more}
"""


def until(true: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """Wait until something holds and give it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = true()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError(f"never within {seconds:g} s: {what}")


class Portal:
    """Start it, kill it, start it again; `more` is added to the Hub's configuration."""

    def __init__(self, root: Path, more: str = "", wrap: Sequence[str] = (), **env: str) -> None:
        self.root = root
        self.wrap = list(wrap)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.state = State(root / "var")
        self.token = secrets.token_hex(16)
        self.output = root / "output"
        self.process: subprocess.Popen[bytes] | None = None
        self._sessions: list[httpx2.Client] = []
        (root / "hub.py").write_text(CONFIG.format(token=self.token, more=more))
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("MAKEWAY_", "JUPYTERHUB_"))}
        keep = {k: v for k, v in os.environ.items() if k == "MAKEWAY_NODE_MODULES"}
        self.env = (
            clean
            | keep
            | {
                "PORT": str(self.port),
                "MAKEWAY_STATE_DIR": str(self.state.root),
                "MAKEWAY_HUB_CONFIG": str(root / "hub.py"),
                "MAKEWAY_STOP_GRACE": "1",
                **env,
            }
        )

    # -- the process -------------------------------------------------------------------------------------------

    def launch(self) -> subprocess.Popen[bytes]:
        """Run `make run`'s process without waiting for anything."""
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*self.wrap, sys.executable, "-m", "makeway_hub.embedded"],
                env=self.env,
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return self.process

    def start(self) -> Portal:
        """Start and wait for the announcement."""
        process = self.launch()

        def ready() -> bool:
            assert process.poll() is None, self.said
            return "Makeway is ready" in self.said

        until(ready, "the portal is ready")
        return self

    def stop(self) -> str:
        """Stop with Ctrl-C and give what it said."""
        while self._sessions:
            self._sessions.pop().close()
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.said

    @property
    def said(self) -> str:
        """What the terminal shows."""
        return self.output.read_text()

    @property
    def log(self) -> str:
        """The Hub's log."""
        return (self.state.logs / "hub.log").read_text(errors="replace")

    @property
    def hub_pid(self) -> int:
        """The Hub's process."""
        return int((self.state.root / "hub.pid").read_text())

    # -- as a program ------------------------------------------------------------------------------------------

    def hub(self, method: str, path: str, **more: Any) -> httpx2.Response:
        """Call the Hub's API as an administrator."""
        headers = {"Authorization": f"token {self.token}"}
        return httpx2.request(method, f"{self.url}/hub/api{path}", headers=headers, timeout=60, **more)

    def user_token(self, name: str) -> str:
        """Make a token of a user with all that user's rights."""
        self.hub("POST", f"/users/{name}")
        answer = self.hub("POST", f"/users/{name}/tokens", json={"note": "test"})
        return str(answer.json()["token"])

    def client(self, token: str | None = None) -> Client:
        """Talk to the quota service through the proxy."""
        return Client(self.url + SERVICE, token or self.token)

    def server(self, user: str, name: str = "") -> dict[str, Any] | None:
        """Tell what the Hub knows about a server."""
        model = self.hub("GET", f"/users/{user}").json()
        found: dict[str, Any] | None = model.get("servers", {}).get(name)
        return found

    def start_server(self, user: str, wait: bool = True, **options: Any) -> httpx2.Response:
        """Start a user's server through the API."""
        self.hub("POST", f"/users/{user}")
        answer = self.hub("POST", f"/users/{user}/server", json=options)
        if wait and answer.is_success:
            until(lambda: (self.server(user) or {}).get("ready"), f"{user}'s server is ready")
        return answer

    def live_sessions(self) -> list[Any]:
        """Give the leases that somebody holds."""
        with self.client() as client:
            return [s for s in client.sessions(all=True) if not s.state.ended]

    # -- as a browser without scripts --------------------------------------------------------------------------

    def browser(self, user: str, password: str | None = None) -> httpx2.Client:
        """Log in, with the sample users' password unless told otherwise."""
        session = httpx2.Client(base_url=self.url, follow_redirects=True, timeout=60)
        self._sessions.append(session)
        session.get("/hub/login")
        answer = session.post(
            "/hub/login",
            params={"_xsrf": session.cookies["_xsrf"]},
            data={"username": user, "password": password or self.state.password()},
        )
        assert answer.status_code < 400, f"{user} may not log in: {answer.status_code}"
        return session

    def pick(self, session: httpx2.Client, path: str = "/hub/spawn", **form: str) -> httpx2.Response:
        """Post the picker's form as the page does."""
        page = session.get(path)
        action = re.search(r'id="spawn_form"[^>]*action="([^"]+)"', page.text)
        assert action, page.text
        return session.post(action[1].replace("&amp;", "&"), data=form)
