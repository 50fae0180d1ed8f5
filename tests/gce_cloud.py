"""Google Compute Engine for tests: a server of its REST interface, to which Google's own library talks.

No emulator of Compute Engine exists. This one has the answers that the library's descriptions and public reports show:
operations that end later, request ids, aggregated lists of all zones with unreachable ones, labels, errors with their
reasons. It checks what it is sent: the signature of the credentials, ids, names, labels, and what a spot machine or one
with GPUs needs. Tests tell it what goes wrong, with the names that `MemoryProvider` has.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.auth import jwt
from makeway_quota.autoscale.deployment import Deployment, MachineType
from makeway_quota.autoscale.providers import gcp
from makeway_quota.autoscale.providers.memory import MemoryInstance
from werkzeug.serving import WSGIRequestHandler, make_server

PROJECT = "gpu-machines-1"
ZONES = ("europe-west4-a", "europe-west4-b")
MORE_ZONES = ("europe-west1-b", "us-central1-a")
"""Zones in which no deployment of the tests has machines"""
IMAGE = "projects/debian-cloud/global/images/family/debian-12"
EURO = 1_000_000
GCP_TYPE = MachineType(
    "g2", "gpu", "g2-standard-24", gpus=2, cpu=24_000, memory=98_304, zones=ZONES, price=3 * EURO, max_machines=5,
    machine_image=IMAGE,
)  # fmt: skip
GCP = Deployment("cloud", "gcp", (GCP_TYPE,), hourly_budget=30 * EURO, settings={"project": PROJECT})
ACCOUNT = f"makeway@{PROJECT}.iam.gserviceaccount.com"
NAME = r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?"
LABEL = re.compile(r"[a-z0-9_-]{0,63}")
BASE = rf"/compute/v1/projects/(?P<project>{NAME})"
ROUTES = {
    "instances.insert": ("POST", rf"{BASE}/zones/(?P<zone>{NAME})/instances"),
    "instances.get": ("GET", rf"{BASE}/zones/(?P<zone>{NAME})/instances/(?P<name>{NAME})"),
    "instances.delete": ("DELETE", rf"{BASE}/zones/(?P<zone>{NAME})/instances/(?P<name>{NAME})"),
    "instances.getSerialPortOutput": ("GET", rf"{BASE}/zones/(?P<zone>{NAME})/instances/(?P<name>{NAME})/serialPort"),
    "instances.aggregatedList": ("GET", rf"{BASE}/aggregated/instances"),
    "zoneOperations.get": ("GET", rf"{BASE}/zones/(?P<zone>{NAME})/operations/(?P<name>[a-z0-9-]+)"),
    "machineTypes.get": ("GET", rf"{BASE}/zones/(?P<zone>{NAME})/machineTypes/(?P<name>{NAME})"),
    "acceleratorTypes.get": ("GET", rf"{BASE}/zones/(?P<zone>{NAME})/acceleratorTypes/(?P<name>{NAME})"),
    "images.getFromFamily": ("GET", rf"{BASE}/global/images/family/(?P<name>{NAME})"),
    "images.get": ("GET", rf"{BASE}/global/images/(?P<name>{NAME})"),
}
Answer = tuple[int, dict[str, Any]]


class Hangup(Exception):
    """The connection is closed without an answer."""


@dataclass(slots=True)
class Call:
    """One request, as Compute Engine gets it."""

    action: str
    parts: dict[str, str]
    query: dict[str, str]
    body: dict[str, Any]


@dataclass(slots=True)
class Operation:
    """An operation, which is done after it was asked for so many times. `code`: with what it fails then."""

    name: str
    zone: str
    target: str
    kind: str
    polls: int
    request_id: str = ""
    code: str = ""
    started_at: float = 0.0


@dataclass(slots=True)
class GceCloud:
    """The server, with what it is told to do wrong.

    `stock_out` has machine types with zones and markets. `busy`, `lost_before` and `lost_after` count calls that are
    throttled, and launches without an answer that are not done, and done. `delay`: seconds until an instance is listed;
    `stale`: the age of lists; `boot`: seconds for which an instance is staging; `end_delay`: for which it is being
    deleted. `slow`: how often an operation is asked for until it is done. `errors`: the next answers of a call, as
    status and reason; `failures`: the codes with which the next operations fail. `unreachable`: zones that no list has.
    `hang`: seconds for which every call waits. `missing`: machine types that no zone has.
    """

    clock: Callable[[], float] = time.time
    instances: dict[str, MemoryInstance] = field(default_factory=dict)
    """by zone and name; what failed or was deleted long ago is not among them"""
    stock_out: set[tuple[str, str, str]] = field(default_factory=set)
    quota: int | None = None
    errors: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    unreachable: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    busy: int = 0
    lost_before: int = 0
    lost_after: int = 0
    denied: bool = False
    ignores_tokens: bool = False
    delay: float = 0.0
    stale: float = 0.0
    boot: float = 0.0
    slow: int = 1
    hang: float = 0.0
    partial: bool = False
    empty: bool = False
    end_delay: float = 0.0
    page: int = 500
    consoles: dict[str, str] = field(default_factory=dict)
    launches: int = 0
    """calls that came so far as to be answered or done"""
    calls: list[Call] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """what was wrong with requests that the real one would not take"""
    on_launch: Callable[[MemoryInstance, str], None] | None = None
    """is called with each new instance and its startup script"""
    _resources: dict[str, dict[str, Any]] = field(default_factory=dict)
    _provisioning: dict[str, MemoryInstance] = field(default_factory=dict)
    """what is listed while its operation goes on, and fails"""
    _deleting: set[str] = field(default_factory=set)
    _operations: dict[str, Operation] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.RLock)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        """Answer one request, as WSGI."""
        text = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        time.sleep(self.hang)
        try:
            with self._lock:
                status, answer = self._answer(environ, json.loads(text or b"{}"))
        except Hangup:
            with suppress(OSError):
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            return []
        written = json.dumps(answer).encode()
        start_response(f"{status} -", [("Content-Type", "application/json"), ("Content-Length", str(len(written)))])
        return [written]

    # ── What tests ask and tell ─────────────────────────────────────────────

    def running(self) -> dict[str, MemoryInstance]:
        """Return the instances that cost money now, by id."""
        now = self.clock()
        return {one.id: one for one in self.instances.values() if one.state(now) != "terminated"}

    def interrupt(self, instance: str, *, stop: bool = False) -> None:
        """Delete an instance as Google does with spot machines; `stop`: it is stopped, and not deleted."""
        if stop:
            self.instances[instance].stopped_at = self.clock()
        else:
            self.instances[instance].ended_at = self.clock()

    def called(self, action: str) -> list[Call]:
        """Return the calls of one action."""
        return [one for one in self.calls if one.action == action]

    # ── Answers ─────────────────────────────────────────────────────────────

    def _answer(self, environ: dict[str, Any], body: dict[str, Any]) -> Answer:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        routes = [(one, re.fullmatch(pattern, path)) for one, (verb, pattern) in ROUTES.items() if verb == method]
        action, parts = next(((one, found.groupdict()) for one, found in routes if found), ("", {}))
        if not action:
            return self._wrong(404, f"there is no {method} {path}")
        call = Call(action, parts, dict(parse_qsl(environ.get("QUERY_STRING", ""))), body)
        self.calls.append(call)
        if not _signed(environ.get("HTTP_AUTHORIZATION", "")):
            return _error(401, "authError", "Request had invalid authentication credentials.")
        if self.denied:
            message = f"Required 'compute.{action}' permission for 'projects/{PROJECT}'"
            return _error(403, "forbidden", message)
        if self.errors.get(action):
            status, reason = self.errors[action].pop(0)
            return _error(status, reason, f"{action} fails with {reason}")
        if self.busy:
            self.busy -= 1
            message = "Quota exceeded for quota metric 'Queries' and limit 'Queries per minute'."
            return _error(403, "rateLimitExceeded", message, "usageLimits")
        if call.parts["project"] not in (PROJECT, "debian-cloud"):
            return _missing(f"projects/{call.parts['project']}")
        known: dict[str, Callable[[Call], Answer]] = {
            "instances.insert": self._insert,
            "instances.get": self._get,
            "instances.delete": self._delete,
            "instances.getSerialPortOutput": self._console,
            "instances.aggregatedList": self._list,
            "zoneOperations.get": self._operation,
        }
        return known.get(action, self._catalogue)(call)

    def _wrong(self, status: int, message: str) -> Answer:
        """Return the answer to a request that is wrong in itself, and remember it."""
        self.refused.append(message)
        return _error(status, "invalid", message)

    def _insert(self, call: Call) -> Answer:
        if self.lost_before:
            self.lost_before -= 1
            raise Hangup
        self.launches += 1
        try:
            request_id, zone, body = call.query["requestId"], call.parts["zone"], call.body
            check_insert(request_id, zone, body)
        except (AssertionError, KeyError, ValueError) as error:
            return self._wrong(400, f"Invalid value: {error!r}")
        before = None if self.ignores_tokens else self._with_request_id(request_id)
        if before is not None:  # the second request is ignored
            return 200, self._shown_operation(before)
        id = f"{zone}/{body['name']}"
        if self._here(id) is not None:
            path = f"projects/{PROJECT}/zones/{zone}/instances/{body['name']}"
            return _error(409, "alreadyExists", f"The resource '{path}' already exists")
        kind = body["machineType"].rpartition("/")[2]
        if kind in self.missing:
            message = f"Machine type with name '{kind}' does not exist in zone '{zone}'."
            return _error(400, "invalid", f"Invalid value for field 'resource.machineType': '{kind}'. {message}")
        operation = self._begin("insert", id, request_id, self._fails(kind, zone, body))
        made = self._made(id, request_id, body)
        self._resources[id] = body
        (self._provisioning if operation.code else self.instances)[id] = made
        if not operation.code and self.on_launch is not None:
            self.on_launch(made, _script(body))
        if self.lost_after:
            self.lost_after -= 1
            raise Hangup
        return 200, self._shown_operation(operation)

    def _fails(self, kind: str, zone: str, body: dict[str, Any]) -> str:
        """Return the code with which the operation of a launch will fail, "" for none."""
        if self.failures:
            return self.failures.pop(0)
        market = "spot" if body["scheduling"]["provisioningModel"] == "SPOT" else "on_demand"
        if (kind, zone, market) in self.stock_out:
            return "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"
        return "QUOTA_EXCEEDED" if self.quota is not None and len(self.running()) >= self.quota else ""

    def _made(self, id: str, request_id: str, body: dict[str, Any]) -> MemoryInstance:
        now, labels = self.clock(), body.get("labels", {})
        machine, deployment = labels.get("makeway-machine", ""), labels.get("makeway-deployment", "")
        text = json.dumps(body, sort_keys=True)
        return MemoryInstance(id, request_id, machine, deployment, text, None, now, now + self.delay)

    def _begin(self, kind: str, target: str, request_id: str = "", code: str = "") -> Operation:
        name = f"operation-{len(self._operations):013}-{uuid.uuid4().hex[:13]}"
        zone = target.partition("/")[0]
        made = Operation(name, zone, target, kind, self.slow, request_id, code, self.clock())
        self._operations[name] = made
        return made

    def _with_request_id(self, request_id: str) -> Operation | None:
        return next((one for one in self._operations.values() if one.request_id == request_id), None)

    def _here(self, id: str) -> MemoryInstance | None:
        """Return an instance that exists now, also one that only seems to while its operation goes on."""
        one = self._provisioning.get(id) or self.instances.get(id)
        return None if one is None or one.state(self.clock()) == "terminated" else one

    def _operation(self, call: Call) -> Answer:
        known = self._operations.get(call.parts["name"])
        if known is None or known.zone != call.parts["zone"]:
            return _missing(f"projects/{PROJECT}/zones/{call.parts['zone']}/operations/{call.parts['name']}")
        known.polls = max(0, known.polls - 1)
        if not known.polls and known.code:
            self._provisioning.pop(known.target, None)
        return 200, self._shown_operation(known)

    def _shown_operation(self, one: Operation) -> dict[str, Any]:
        zone, name = one.target.split("/")
        result: dict[str, Any] = {
            "kind": "compute#operation",
            "id": str(abs(hash(one.name))),
            "name": one.name,
            "zone": f"https://www.googleapis.com/compute/v1/projects/{PROJECT}/zones/{zone}",
            "clientOperationId": one.request_id,
            "operationType": one.kind,
            "targetLink": f"https://www.googleapis.com/compute/v1/projects/{PROJECT}/zones/{zone}/instances/{name}",
            "status": "RUNNING" if one.polls else "DONE",
            "user": ACCOUNT,
            "progress": 0 if one.polls else 100,
            "insertTime": _time(one.started_at),
        }
        if not one.polls and one.code:
            result["error"] = {"errors": [{"code": one.code, "message": _operation_message(one, zone)}]}
            result |= {"httpErrorStatusCode": 503, "httpErrorMessage": "SERVICE UNAVAILABLE"}
        return result

    def _get(self, call: Call) -> Answer:
        id = f"{call.parts['zone']}/{call.parts['name']}"
        one = self._here(id)
        return (200, self._resource(one, self.clock())) if one else _missing(_path(id))

    def _delete(self, call: Call) -> Answer:
        id = f"{call.parts['zone']}/{call.parts['name']}"
        if self._here(id) is None:
            return _missing(_path(id))
        one = self.instances.get(id)
        self._provisioning.pop(id, None)
        if one is not None and id not in self._deleting:
            self._deleting.add(id)
            one.ended_at = min(one.ended_at or self.clock() + self.end_delay, self.clock() + self.end_delay)
        return 200, self._shown_operation(self._begin("delete", id))

    def _console(self, call: Call) -> Answer:
        id = f"{call.parts['zone']}/{call.parts['name']}"
        if self._here(id) is None:
            return _missing(_path(id))
        text = self.consoles.get(id, "")
        return 200, {"kind": "compute#serialPortOutput", "contents": text, "start": "0", "next": str(len(text))}

    def _list(self, call: Call) -> Answer:
        wanted = dict(re.findall(r'labels\.([a-z-]+) = "([^"]*)"', call.query["filter"]))
        if self.unreachable and call.query.get("returnPartialSuccess") != "true":
            return _error(503, "backendError", f"zones are unreachable: {sorted(self.unreachable)}")
        if call.query.get("pageToken") == "lost":
            return _error(503, "backendError", "Internal error. Please try again or contact Google Support.")
        at = self.clock() - self.stale
        shown = [
            one
            for one in [*self.instances.values(), *self._provisioning.values()]
            if one.visible_at <= at
            and one.state(at) != "terminated"
            and wanted.items() <= self._resources[one.id].get("labels", {}).items()
            and one.id.partition("/")[0] not in self.unreachable
        ]
        shown = [] if self.empty else shown[::2] if self.partial else shown
        first = int(call.query.get("pageToken") or 0)
        last = first + min(self.page, int(call.query.get("maxResults", 500)))
        result: dict[str, Any] = {"kind": "compute#instanceAggregatedList", "id": f"projects/{PROJECT}", "items": {}}
        for zone in (*ZONES, *MORE_ZONES):
            here = [self._resource(one, at) for one in shown[first:last] if one.id.startswith(f"{zone}/")]
            nothing = {"code": "NO_RESULTS_ON_PAGE", "message": f"There are no results for scope 'zones/{zone}'"}
            if zone in self.unreachable:
                nothing = {"code": "UNREACHABLE", "message": f"The scope 'zones/{zone}' is unreachable"}
            result["items"][f"zones/{zone}"] = {"instances": here} if here else {"warning": nothing}
        if self.unreachable:
            result["unreachables"] = [f"projects/{PROJECT}/zones/{zone}" for zone in sorted(self.unreachable)]
        if self.partial:
            result["nextPageToken"] = "lost"
        elif last < len(shown):
            result["nextPageToken"] = str(last)
        return 200, result

    def _resource(self, one: MemoryInstance, at: float) -> dict[str, Any]:
        """Return an instance as Compute Engine shows it."""
        zone = one.id.partition("/")[0]
        added = {
            "kind": "compute#instance",
            "id": str(abs(hash(one.token))),
            "creationTimestamp": _time(one.launched_at),
            "zone": f"https://www.googleapis.com/compute/v1/projects/{PROJECT}/zones/{zone}",
            "status": self._status(one, at),
        }
        return self._resources[one.id] | added

    def _status(self, one: MemoryInstance, at: float) -> str:
        if one.id in self._provisioning:
            return "PROVISIONING"
        if one.id in self._deleting:
            return "STOPPING"
        if one.state(at) == "stopped":
            return "TERMINATED"
        return "STAGING" if at < one.launched_at + self.boot else "RUNNING"

    def _catalogue(self, call: Call) -> Answer:
        """Return a machine type, a type of GPUs, or an image."""
        name, zone = call.parts["name"], call.parts.get("zone", "")
        if name in self.missing or (zone and zone not in (*ZONES, *MORE_ZONES)):
            kind = call.action.partition(".")[0]
            return _missing(f"projects/{call.parts['project']}/{f'zones/{zone}/' if zone else 'global/'}{kind}/{name}")
        result: dict[str, Any] = {"name": name}
        if call.action == "machineTypes.get" and name.startswith("g2-"):
            gpus = {"g2-standard-24": 2, "g2-standard-48": 4}.get(name, 1)
            result["accelerators"] = [{"guestAcceleratorType": "nvidia-l4", "guestAcceleratorCount": gpus}]
        return 200, result


def check_insert(request_id: str, zone: str, body: dict[str, Any]) -> None:
    """Raise AssertionError, KeyError or ValueError for what Compute Engine would not take."""
    assert uuid.UUID(request_id).int, "the zero UUID is not supported"
    assert re.fullmatch(NAME, body["name"]), body["name"]
    for labels in (body.get("labels", {}), body["disks"][0]["initializeParams"].get("labels", {})):
        for key, value in labels.items():
            assert re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", key), key
            assert LABEL.fullmatch(value), value
    kind = body["machineType"]
    assert re.fullmatch(rf"(projects/{NAME}/)?zones/{zone}/machineTypes/{NAME}", kind), kind
    assert [disk["boot"] for disk in body["disks"]] == [True]
    assert body["disks"][0]["initializeParams"]["sourceImage"].startswith("projects/")
    assert len(body["networkInterfaces"]) == 1
    scheduling = body["scheduling"]
    with_gpus = bool(body.get("guestAccelerators")) or kind.rpartition("/")[2].startswith(("g2-", "a2-", "a3-"))
    spot = scheduling["provisioningModel"] == "SPOT"
    assert scheduling["onHostMaintenance"] == "TERMINATE" or not (spot or with_gpus), "cannot be migrated"
    assert not (spot and scheduling.get("automaticRestart", True)), "a spot machine is not restarted"
    limited = "maxRunDuration" in scheduling
    assert "instanceTerminationAction" not in scheduling or spot or limited, "has nothing that terminates it"
    assert not limited or "instanceTerminationAction" in scheduling


def _script(body: dict[str, Any]) -> str:
    items = body.get("metadata", {}).get("items", ())
    return next((str(one["value"]) for one in items if one["key"] == "startup-script"), "")


def _operation_message(one: Operation, zone: str) -> str:
    if one.code.startswith("ZONE_RESOURCE_POOL_EXHAUSTED"):
        return f"The zone 'projects/{PROJECT}/zones/{zone}' does not have enough resources available."
    return f"The operation fails with {one.code}"


def _path(id: str) -> str:
    zone, name = id.split("/")
    return f"projects/{PROJECT}/zones/{zone}/instances/{name}"


def _missing(path: str) -> Answer:
    return _error(404, "notFound", f"The resource '{path}' was not found")


def _error(status: int, reason: str, message: str, domain: str = "global") -> Answer:
    inner = {"message": message, "domain": domain, "reason": reason}
    return status, {"error": {"code": status, "message": message, "errors": [inner]}}


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "-00:00"


# ── Credentials ─────────────────────────────────────────────────────────────


@cache
def key() -> rsa.RSAPrivateKey:
    """Return the private key of the service account of the tests."""
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def account_key(other: bool = False) -> dict[str, str]:
    """Return the key of the service account, as Google's console writes it; `other`: one that is not known there."""
    made = rsa.generate_private_key(public_exponent=65537, key_size=2048) if other else key()
    text = made.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    return {
        "type": "service_account",
        "project_id": PROJECT,
        "private_key_id": "0123456789abcdef",
        "private_key": text,
        "client_email": ACCOUNT,
        "client_id": "1234567890",
        "auth_uri": "https://accounts.google.com/o/oauth2/auth",
        "token_uri": "http://127.0.0.1:9/token",
        "auth_provider_x509_cert_url": "https://www.googleapis.com/oauth2/v1/certs",
        "client_x509_cert_url": f"https://www.googleapis.com/robot/v1/metadata/x509/{ACCOUNT}",
        "universe_domain": "googleapis.com",
    }


def _signed(authorization: str) -> bool:
    """Whether a request has a token that the service account has signed."""
    public = (
        key().public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    try:
        claims = jwt.decode(authorization.removeprefix("Bearer "), certs=public)  # type: ignore[no-untyped-call]
    except Exception:
        return False
    return bool(claims["iss"] == ACCOUNT and "cloud-platform" in claims.get("scope", ""))


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        """Write nothing."""


def set_environment(monkeypatch: pytest.MonkeyPatch, address: str, folder: Path) -> None:
    """Set what Google's library needs to reach a cloud, and nothing else of its kind; operations are soon done."""
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "CLOUDSDK_", "GCLOUD_"))]:
        monkeypatch.delenv(name)
    path = folder / "service-account.json"
    path.write_text(json.dumps(account_key()))
    values = {"GOOGLE_APPLICATION_CREDENTIALS": str(path), "NO_GCE_CHECK": "true", gcp.ENDPOINT: address}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(gcp, "POLL_SECONDS", 0.001)


@contextmanager
def served(cloud: GceCloud) -> Iterator[str]:
    """Serve a cloud; yield its address. At the end no request may have been one that Compute Engine would not take."""
    server = make_server("127.0.0.1", 0, cloud, threaded=True, request_handler=_Quiet)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert not cloud.refused, cloud.refused
