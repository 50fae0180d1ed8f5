"""Amazon EC2 for tests: moto's server, behind a layer with what moto lacks, and with what goes wrong in clouds.

The layer adds client tokens with both of their errors, stock, quotas, boot times, lists that are late, old, empty or
without their last page, errors of every kind, and answers that never come. It is the same to callers as
`MemoryProvider` where tests say what happens, so that both can stand behind the same histories.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import BytesIO
from typing import Any
from urllib.parse import parse_qsl, urlencode
from xml.etree import ElementTree

import pytest
from makeway_quota.autoscale.deployment import Deployment, MachineType
from makeway_quota.autoscale.instances import InstanceState
from makeway_quota.autoscale.providers.memory import MemoryInstance
from moto.ec2.models import ec2_backends
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

SPACE = "http://ec2.amazonaws.com/doc/2016-11-15/"
IMAGE = "ami-12c6146b"
"""One that moto has"""
REGION = "eu-central-1"
ZONES = (f"{REGION}a", f"{REGION}b")
EURO = 1_000_000
AWS_TYPE = MachineType(
    "g2", "gpu", "g5.12xlarge", gpus=2, cpu=16_000, memory=65_536, zones=ZONES, price=3 * EURO, max_machines=5,
    machine_image=IMAGE,
)  # fmt: skip
AWS = Deployment("cloud", "aws", (AWS_TYPE,), hourly_budget=30 * EURO, currency="USD", settings={"region": REGION})
CODES = {"pending": 0, "running": 16, "shutting-down": 32, "terminated": 48, "stopping": 64, "stopped": 80}
Answer = tuple[int, bytes]


class Hangup(Exception):
    """The connection is closed without an answer."""


@dataclass(slots=True)
class Ec2Cloud:
    """The layer, with what it is told to do wrong.

    `stock_out` has instance types with zones and markets. `busy`, `lost_before` and `lost_after` count calls that are
    throttled, and launches without an answer that are not done, and done. `delay`: seconds until an instance is listed;
    `stale`: the age of lists; `boot`: seconds for which an instance is pending; `end_delay`: for which it shuts down;
    `forgets`: after which a terminated instance is not listed. `errors`: the next answers of an action, as status and
    code. `hang`: seconds for which every call waits.
    """

    clock: Callable[[], float] = time.time
    instances: dict[str, MemoryInstance] = field(default_factory=dict)
    stock_out: set[tuple[str, str, str]] = field(default_factory=set)
    quota: int | None = None
    errors: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    busy: int = 0
    lost_before: int = 0
    lost_after: int = 0
    denied: bool = False
    ignores_tokens: bool = False
    delay: float = 0.0
    stale: float = 0.0
    boot: float = 0.0
    hang: float = 0.0
    partial: bool = False
    empty: bool = False
    forgets: float = 3600.0
    end_delay: float = 0.0
    consoles: dict[str, str] = field(default_factory=dict)
    launches: int = 0
    """calls that came so far as to be answered or done"""
    calls: list[dict[str, str]] = field(default_factory=list)
    """the parameters of every call"""
    on_launch: Callable[[MemoryInstance, str], None] | None = None
    """is called with each new instance and its user data, in base64"""
    _moto: Any = None
    _lock: Any = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        """Answer one request, as WSGI."""
        if "/moto-api/" in environ["PATH_INFO"]:
            return self._moto(environ, start_response)
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        parameters = dict(parse_qsl(body.decode(), keep_blank_values=True))
        time.sleep(self.hang)
        try:
            with self._lock:
                self.calls.append(parameters)
                status, answer = self._answer(parameters["Action"], parameters, environ)
        except Hangup:
            with suppress(OSError):
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            return []
        start_response(f"{status} -", [("Content-Type", "text/xml"), ("Content-Length", str(len(answer)))])
        return [answer]

    # ── What tests ask and tell ─────────────────────────────────────────────

    def running(self) -> dict[str, MemoryInstance]:
        """Return the instances that cost money now, by id."""
        now = self.clock()
        return {one.id: one for one in self.instances.values() if one.state(now) != "terminated"}

    def interrupt(self, instance: str, *, stop: bool = False) -> None:
        """End an instance as EC2 does with spot machines; `stop`: it is stopped, and not deleted."""
        if stop:
            self.instances[instance].stopped_at = self.clock()
        else:
            self.instances[instance].ended_at = self.clock()

    def called(self, action: str) -> list[dict[str, str]]:
        """Return the calls of one action."""
        return [one for one in self.calls if one["Action"] == action]

    # ── Answers ─────────────────────────────────────────────────────────────

    def _answer(self, action: str, parameters: dict[str, str], environ: dict[str, Any]) -> Answer:
        if self.denied:
            return _error(403, "UnauthorizedOperation", "You are not authorized to perform this operation.")
        if self.errors.get(action):
            status, code = self.errors[action].pop(0)
            return _error(status, code, f"{action} fails with {code}")
        if self.busy:
            self.busy -= 1
            return _error(503, "RequestLimitExceeded", "Request limit exceeded.")
        known = {
            "RunInstances": self._run,
            "DescribeInstances": self._describe,
            "TerminateInstances": self._terminate,
            "GetConsoleOutput": self._console,
        }
        if action not in known:
            return self._forward(parameters, environ)
        return known[action](parameters, environ)

    def _run(self, parameters: dict[str, str], environ: dict[str, Any]) -> Answer:
        if parameters.get("DryRun") == "true":
            return self._forward(parameters, environ)
        if self.lost_before:
            self.lost_before -= 1
            raise Hangup
        self.launches += 1
        token = parameters["ClientToken"]
        wanted = urlencode(sorted(parameters.items()))
        known = None if self.ignores_tokens else next((i for i in self.instances.values() if i.token == token), None)
        if known is not None:
            return self._repeated(known, wanted, environ)
        refused = self._refused(parameters)
        if refused is not None:
            return refused
        status, answer = self._forward(parameters, environ)
        if status != 200:
            return status, answer
        made = self._made(parameters, wanted, answer)
        self.instances[made.id] = made
        if self.on_launch is not None:
            self.on_launch(made, parameters.get("UserData", ""))
        if self.lost_after:
            self.lost_after -= 1
            raise Hangup
        return status, answer

    def _repeated(self, known: MemoryInstance, wanted: str, environ: dict[str, Any]) -> Answer:
        if known.request != wanted:
            return _error(400, "IdempotentParameterMismatch", "The client token was used with other parameters.")
        if known.state(self.clock()) == "terminated":
            return _error(400, "IdempotentInstanceTerminated", "The instance of this client token was terminated.")
        status, answer = self._forward(
            {"Action": "DescribeInstances", "Version": "2016-11-15", "InstanceId.1": known.id}, environ
        )
        [reservation] = ElementTree.fromstring(answer).iterfind(".//{*}reservationSet/{*}item")
        reservation.tag = f"{{{SPACE}}}RunInstancesResponse"
        return status, ElementTree.tostring(reservation)

    def _refused(self, parameters: dict[str, str]) -> Answer | None:
        kind, zone = parameters["InstanceType"], parameters.get("Placement.AvailabilityZone", "")
        market = "spot" if parameters.get("InstanceMarketOptions.MarketType") == "spot" else "on_demand"
        if (kind, zone, market) in self.stock_out:
            return _error(500, "InsufficientInstanceCapacity", f"We do not have sufficient {kind} capacity in {zone}.")
        if self.quota is not None and len(self.running()) >= self.quota:
            return _error(400, "VcpuLimitExceeded", "You have requested more vCPU capacity than your limit allows.")
        return None

    def _made(self, parameters: dict[str, str], wanted: str, answer: bytes) -> MemoryInstance:
        now = self.clock()
        tags = {
            parameters[name]: parameters[name.removesuffix("Key") + "Value"]
            for name in parameters
            if re.fullmatch(r"TagSpecification\.1\.Tag\.\d+\.Key", name)
        }
        [id] = re.findall(rb"<instanceId>(.*?)</instanceId>", answer)
        machine, deployment = tags.get("makeway:machine", ""), tags.get("makeway:deployment", "")
        return MemoryInstance(
            id.decode(), parameters["ClientToken"], machine, deployment, wanted, None, now, now + self.delay
        )

    def _describe(self, parameters: dict[str, str], environ: dict[str, Any]) -> Answer:
        if parameters.get("NextToken") == "lost":
            return _error(503, "Unavailable", "The server is overloaded.")
        tokens = self._take_token_filter(parameters)
        status, answer = self._forward(parameters, environ)
        if status != 200:
            return status, answer
        root = ElementTree.fromstring(answer)
        at = self.clock() - self.stale
        reservations = root.find("{*}reservationSet")
        if reservations is None:
            return status, answer
        for reservation in list(reservations):
            known = self.instances.get(reservation.findtext(".//{*}instanceId") or "")
            if known is None or not self._shown(known, at) or (tokens is not None and known.token not in tokens):
                reservations.remove(reservation)
            else:
                _set_state(reservation, "instanceState", self._state(known, at))
                for element in reservation.iterfind(".//{*}launchTime"):
                    element.text = datetime.fromtimestamp(known.launched_at, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        if self.partial:
            for reservation in list(reservations)[1::2]:
                reservations.remove(reservation)
            for token in root.findall("{*}nextToken"):
                root.remove(token)
            ElementTree.SubElement(root, f"{{{SPACE}}}nextToken").text = "lost"
        return status, ElementTree.tostring(root)

    def _take_token_filter(self, parameters: dict[str, str]) -> set[str] | None:
        """Remove a filter by client token, which moto does not know, and return its values."""
        for name in list(parameters):
            if parameters[name] == "client-token" and name.endswith(".Name"):
                prefix = name.removesuffix("Name")
                result = [key for key in parameters if key.startswith(prefix)]
                return {parameters.pop(key) for key in result} - {"client-token"}
        return None

    def _shown(self, one: MemoryInstance, at: float) -> bool:
        forgotten = one.ended_at is not None and at >= one.ended_at + self.forgets
        return one.visible_at <= at and not forgotten and not self.empty

    def _state(self, one: MemoryInstance, at: float) -> str:
        state: InstanceState = one.state(at)
        if state == "running" and one.ended_at is not None and self.end_delay:
            return "shutting-down"
        return "pending" if state == "running" and at < one.launched_at + self.boot else state

    def _terminate(self, parameters: dict[str, str], environ: dict[str, Any]) -> Answer:
        id, now = parameters["InstanceId.1"], self.clock()
        known = self.instances.get(id)
        if known is None or (known.ended_at is not None and now >= known.ended_at + self.forgets):
            return _error(400, "InvalidInstanceID.NotFound", f"The instance ID '{id}' does not exist")
        if parameters.get("DryRun") == "true":
            return _error(412, "DryRunOperation", "Request would have succeeded, but DryRun flag is set.")
        before = self._state(known, now)
        status, answer = self._forward(parameters, environ)
        if known.ended_at is None:
            known.ended_at = now + self.end_delay
        root = ElementTree.fromstring(answer)
        _set_state(root, "previousState", before)
        _set_state(root, "currentState", self._state(known, now) if self.end_delay else "shutting-down")
        return status, ElementTree.tostring(root)

    def _console(self, parameters: dict[str, str], environ: dict[str, Any]) -> Answer:
        id = parameters["InstanceId"]
        if id not in self.instances:
            return _error(400, "InvalidInstanceID.NotFound", f"The instance ID '{id}' does not exist")
        text = self.consoles.get(id, "")
        inner = f"<instanceId>{id}</instanceId><output>{text}</output>"
        return 200, f'<GetConsoleOutputResponse xmlns="{SPACE}">{inner}</GetConsoleOutputResponse>'.encode()

    def _forward(self, parameters: dict[str, str], environ: dict[str, Any]) -> Answer:
        """Return what moto answers."""
        body, statuses = urlencode(parameters).encode(), []
        inner = environ | {"wsgi.input": BytesIO(body), "CONTENT_LENGTH": str(len(body))}

        def start(status: str, headers: Any, *rest: Any) -> None:
            statuses.append(int(status.split()[0]))

        answer = b"".join(self._moto(inner, start))
        return statuses[0], answer


def _error(status: int, code: str, message: str) -> Answer:
    inner = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return status, f"<Response><Errors>{inner}</Errors><RequestID>1</RequestID></Response>".encode()


def _set_state(element: ElementTree.Element, name: str, state: str) -> None:
    for result in element.iterfind(f".//{{*}}{name}"):
        for part, value in (("code", str(CODES[state])), ("name", state)):
            inner = result.find(f"{{*}}{part}")
            assert inner is not None
            inner.text = value


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        """Write nothing."""


def set_environment(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Set what the AWS SDK needs to reach a cloud, and nothing else of its kind."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    values = {
        "AWS_ENDPOINT_URL_EC2": address,
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "very-secret",
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)


@contextmanager
def served(cloud: Ec2Cloud) -> Iterator[str]:
    """Serve a cloud without instances; yield its address."""
    ec2_backends.reset()
    server = make_server("127.0.0.1", 0, cloud, threaded=True, request_handler=_Quiet)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
