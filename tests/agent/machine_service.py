"""A service for agents: the agent protocol over real HTTP, and so much of the attempt protocol as launchers need."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from makeway_quota.agent_program import agent_program

from kube_cluster.certificates import Authority

MACHINE = "m-1"
JOIN_TOKEN = "m-1.secret-of-the-join"
HOLD_SECONDS = 2.0


class MachineService(ThreadingHTTPServer):
    """The service; the test says what is ordered, and what goes wrong."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.scheme, self.host = "http", "127.0.0.1"
        self.joins: list[dict[str, Any]] = []
        self.boot = ""
        self.join_answer: dict[str, Any] = {}
        self.reports: list[dict[str, Any]] = []
        self.reported_at: list[float] = []
        self.token = "token-0"
        self.next_token: str | None = None
        self.report_seconds: Any = 0.2
        self.orders: dict[str, Any] = {"revision": "0", "drain": False, "stop": False, "attempts": []}
        self.changed = threading.Condition()
        self.silent = threading.Event()
        """requests are taken and not answered"""
        self.lost = {"join": 0, "report": 0, "orders": 0}
        """requests that are done, and not answered"""
        self.replies: dict[str, list[tuple[int, Any]]] = {}
        """answers to give the agent first, by the last word of the path; launchers ask for orders and report, too"""
        self.claims: list[tuple[str, str]] = []
        """the workers that were claimed, each with its token"""
        self.commands: dict[str, list[str]] = {}
        """what the workers of a job execute"""
        self.credentials: dict[str, str] = {}
        """the files of credentials that they get"""
        self.ended_attempts: set[str] = set()
        self.worker_reports: list[tuple[str, dict[str, Any]]] = []
        self.logs: dict[str, bytes] = {}
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host}:{self.server_port}/prefix"

    def encrypt(self, authority: Authority, named: str = "localhost") -> None:
        """Speak TLS from now on, as a host of this name; each connection greets in its own thread."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*authority.server_certificate("server", named, [named]))
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.scheme, self.host = "https", "localhost"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Write no trace of a client that has ended."""

    def order(self, *attempts: dict[str, Any], drain: bool = False, stop: bool = False) -> None:
        """Make these the workers that the machine has to run."""
        with self.changed:
            revision = str(int(self.orders["revision"]) + 1)
            self.orders = {"revision": revision, "drain": drain, "stop": stop, "attempts": list(attempts)}
            self.changed.notify_all()

    def worker(self, job: str = "j-1", attempt: int = 1, worker: int = 0, **more: Any) -> dict[str, Any]:
        """Return an order for one worker."""
        path = f"{job}/{attempt}/{worker}"
        return {
            "job": job,
            "attempt": attempt,
            "worker": worker,
            "url": f"{self.url}/api/v1/attempts/{path}",
            "token": f"token of {path}",
            "image": None,
            "devices": [0],
            "cpu_only": False,
            "env": {"RANK": str(worker)},
            "checkpoints": None,
            **more,
        }

    def newest(self) -> dict[str, Any]:
        """Return the newest report of the machine."""
        return self.reports[-1] if self.reports else {}

    def states(self) -> dict[tuple[str, int, int], str]:
        """Return the states of the workers in the newest report."""
        return {(one["job"], one["attempt"], one["worker"]): one["state"] for one in self.newest().get("attempts", ())}


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: MachineService

    def log_message(self, *_: Any) -> None:
        """Write nothing."""

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _answer(self, body: bytes) -> None:
        service, parts = self.server, urlsplit(self.path)
        words = parts.path.split("/")
        query = {key: values[0] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        service.requests.append(parts.path)
        while service.silent.is_set():
            time.sleep(0.02)
            if self.connection.fileno() < 0:
                return
        if "attempts" not in words and service.replies.get(words[-1]):
            self._send(*service.replies[words[-1]].pop(0))
            return
        if words[-1] == "agent.pyz":
            self._send(200, agent_program())
            return
        if "agents" in words:
            status, answer = self._agent(words[-1], body, query)
        else:
            status, answer = self._attempt("/".join(words[5:8]), words[8], body, query)
        if service.lost.get(words[-1], 0):
            service.lost[words[-1]] -= 1
            self.close_connection = True
            return
        self._send(status, answer)

    def _agent(self, what: str, body: bytes, query: dict[str, str]) -> tuple[int, Any]:
        service, bearer = self.server, self.headers["Authorization"].removeprefix("Bearer ")
        if what == "join":
            if bearer != JOIN_TOKEN:
                return problem(401, "unauthorized")
            facts = json.loads(body)
            if service.boot not in ("", facts["boot"]):
                return problem(409, "joined")
            service.boot = facts["boot"]
            service.joins.append(facts)
            service.token = f"token-{len(service.joins)}"
            answer = {"report_seconds": 0.2, "init_script": "", "cpu_only": False, "image": None, "orphan_after": 60.0}
            return 200, {"token": service.token, **answer, **service.join_answer}
        if bearer != service.token:
            return problem(401, "unauthorized")
        if what == "report":
            service.reports.append(json.loads(body))
            service.reported_at.append(time.monotonic())
            renewed, service.next_token = service.next_token, None
            service.token = renewed or service.token
            return 200, {"token": renewed, "report_seconds": service.report_seconds}
        with service.changed:
            wait = min(HOLD_SECONDS, float(query["wait"]))
            service.changed.wait_for(lambda: service.orders["revision"] != query["known"], wait)
            return 200, service.orders

    def _attempt(self, path: str, what: str, body: bytes, query: dict[str, str]) -> tuple[int, Any]:
        service = self.server
        job, attempt, worker = path.split("/")
        if job in service.ended_attempts:
            return problem(410, "attempt_ended")
        if what == "claim":
            service.claims.append((path, self.headers["Authorization"]))
            start = _start(job, int(attempt), int(worker), service.commands.get(job, ["sleep", "1000"]))
            return 200, {**start, "credentials": service.credentials}
        if what == "report":
            service.worker_reports.append((path, json.loads(body)))
            return 200, {"heartbeat": 0.2, "pace": 0.1, "token": None}
        if what == "orders":
            time.sleep(0.2)
            return 200, {"known": "1", "notice": None, "stop": False}
        if self.path.split("/")[-1].startswith("log"):
            service.logs[path] = service.logs.get(path, b"")[: int(query["offset"])] + body
        return 200, {"end": int(query["offset"]) + len(body)}

    def _send(self, status: int, answer: Any) -> None:
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def answering() -> Iterator[MachineService]:
    """Run a service in a thread, and end it, also if it was made silent."""
    with MachineService() as server:
        thread = threading.Thread(target=lambda: server.serve_forever(0.02), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.silent.clear()
            server.shutdown()
            thread.join()


def problem(status: int, code: str) -> tuple[int, dict[str, Any]]:
    """Return an error as the service answers it."""
    return status, {"status": status, "code": code, "detail": f"it is {code}"}


def _start(job: str, attempt: int, worker: int, command: list[str]) -> dict[str, Any]:
    return {
        "workload": job,
        "attempt": attempt,
        "worker": worker,
        "gang": 1,
        "name": job,
        "team": "rnd",
        "profile": "gpu1",
        "gpus": 1.0,
        "command": command,
        "env": {},
        "files": [],
        "grace": 2,
        "signal": "SIGTERM",
        "time_limit": None,
        "log_limit": 100_000,
        "step": None,
        "saved_at": None,
        "heartbeat": 0.2,
        "lost_after": 120.0,
        "token": f"second token of {job}/{attempt}/{worker}",
    }
