"""Run the whole portal for a test: `make run`'s process with a state directory and ports of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
from makeway_api.client import Client

from benchmarks.portal import EMBEDDED, SCOPES, SERVICE, Started, until

ADMIN = (*SCOPES, "admin:groups", "custom:makeway:admin", "custom:makeway:read", "access:services!service=makeway")


class Portal(Started):
    """A portal that can be started, killed and restarted; `more` is added to the Hub's configuration."""

    def __init__(self, root: Path, more: str = "", wrap: Sequence[str] = (), **env: str) -> None:
        quick = {"MAKEWAY_STOP_GRACE": "1", **env}
        super().__init__(root, command=(*wrap, *EMBEDDED), scopes=ADMIN, more=more, env=quick)
        self.url = self.base
        self._sessions: list[httpx2.Client] = []

    def stop(self) -> str:
        """Stop with Ctrl-C and return the output."""
        while self._sessions:
            self._sessions.pop().close()
        return super().stop()

    @property
    def log(self) -> str:
        """The Hub's log."""
        return (self.state.logs / "hub.log").read_text(errors="replace")

    # -- as a program ------------------------------------------------------------------------------------------

    def client(self, token: str | None = None) -> Client:
        """Return a client of the quota service, through the proxy."""
        return Client(self.url + SERVICE, token or self.token)

    def server(self, user: str, name: str = "") -> dict[str, Any] | None:
        """Return the Hub's model of a server, None if it has none."""
        model = self.hub("GET", f"/users/{user}").json()
        result: dict[str, Any] | None = model.get("servers", {}).get(name)
        return result

    def start_server(self, user: str, wait: bool = True, **options: Any) -> httpx2.Response:
        """Start a user's server through the API; return the answer."""
        self.hub("POST", f"/users/{user}")
        answer = self.hub("POST", f"/users/{user}/server", json=options)
        if wait and answer.is_success:
            until(lambda: (self.server(user) or {}).get("ready"), f"{user}'s server is ready")
        return answer

    def events_of_start(self, user: str) -> list[dict[str, Any]]:
        """Return what the progress of a user's start tells, once it has ended."""
        stream = self.hub("GET", f"/users/{user}/server/progress")
        stream.raise_for_status()
        return [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: ")]

    def live_sessions(self) -> list[Any]:
        """Return the sessions that have not ended."""
        with self.client() as client:
            return [s for s in client.sessions(all=True) if not s.state.ended]

    # -- as a browser without scripts --------------------------------------------------------------------------

    def browser(self, user: str, password: str | None = None) -> httpx2.Client:
        """Return a logged-in session, by default with the sample users' password."""
        session = httpx2.Client(base_url=self.url, follow_redirects=True, timeout=60, trust_env=False)
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
        """Post the picker's form as the page does; return the answer."""
        page = session.get(path)
        action = re.search(r'id="spawn_form"[^>]*action="([^"]+)"', page.text)
        assert action, page.text
        return session.post(action[1].replace("&amp;", "&"), data=form)


__all__ = ["SERVICE", "Portal", "until"]
