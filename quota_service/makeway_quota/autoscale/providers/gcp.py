"""Launch, list and end instances of Google Compute Engine, at the standard price and as spot machines (extra `gcp`).

Each instance has its labels from the call that launches it. A launch begins an operation, in which a stock-out shows
only after seconds: the call waits for it. The loop repeats a launch with the same request id and the same name.
Credentials are the deployment's key of a service account, or else those that Google's library finds in the service's
environment: a file, or the service account of its machine or pod.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, TypeVar

import google.auth
from google.api_core.client_options import ClientOptions
from google.api_core.timeout import ConstantTimeout
from google.cloud import compute_v1
from google.oauth2 import service_account
from makeway_api.quantities import gpus
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from ..deployment import Deployment, MachineType
from ..instances import Instance, InstanceList, InstanceState
from ..provider import CallOutcomeUnknown, Denied, InvalidLaunch, JoinData, ProviderError, QuotaReached, Throttled
from .gcp_errors import NameTaken, NoSuchInstance, as_provider_errors, failure_of
from .gcp_launch import (
    DEPLOYMENT_LABEL,
    MACHINE_LABEL,
    SCOPES,
    instance_name,
    instance_resource,
    labels_of,
    parse_request,
    request_id,
)

log = logging.getLogger("makeway.machines")

Answer = TypeVar("Answer")

CONNECT_SECONDS = 5.0
READ_SECONDS = 20.0
"""How long one call waits for its answer"""
LAUNCH_SECONDS = 60.0
"""How long a launch waits for its operation; with its calls, less than any `request_timeout`"""
POLL_SECONDS = 1.0
READ_TRIES = 3
PAGE = 500
"""Instances of one page of a list"""
LIST_SECONDS = 60.0
"""How long pages of one list are read; without the remaining ones, it is not complete"""
ENDPOINT = "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE"
"""The variable with another address of Compute Engine, as gcloud has it"""
ID = re.compile(r"([a-z][a-z0-9-]{0,62})/([a-z]([-a-z0-9]{0,61}[a-z0-9])?)")
STATES: Mapping[str, InstanceState] = {
    "PENDING": "pending",
    "PROVISIONING": "pending",
    "STAGING": "pending",
    "RUNNING": "running",
    "REPAIRING": "running",
    "PENDING_STOP": "stopping",
    "STOPPING": "stopping",
    "SUSPENDING": "stopping",
    "DEPROVISIONING": "stopping",
    "STOPPED": "stopped",
    "SUSPENDED": "stopped",
    "TERMINATED": "stopped",  # so Compute Engine calls a machine that was stopped: one that was deleted is not listed
}
NO_WARNING = ("", "NO_RESULTS_ON_PAGE")
NEEDED_KEYS = ("type", "client_email", "private_key", "token_uri")
KEYS = frozenset(
    {
        *NEEDED_KEYS,
        "auth_provider_x509_cert_url",
        "auth_uri",
        "client_id",
        "client_x509_cert_url",
        "private_key_id",
        "project_id",
        "universe_domain",
    }
)
"""What a credential may have: a key of a service account, as Google's console writes it"""


class GcpProvider:
    """The instances of one deployment in its project. Calls end within seconds, with an answer or without."""

    def __init__(self, deployment: Deployment, installation: str, secrets: Mapping[str, str] | None = None) -> None:
        """`secrets`: the key of a service account; without any, the credentials of the environment."""
        self._deployment, self._installation = deployment, installation
        self._secrets = dict(secrets or {})
        self._credentials: Any = None
        self._clients: dict[Any, Any] = {}
        self._lock = threading.Lock()

    @property
    def project(self) -> str:
        """Return the project of the deployment."""
        return self._deployment.settings["project"]

    def check(self) -> None:
        """Raise a ProviderError that tells what is not allowed or not there; launches and ends nothing."""
        self.list(self._deployment.name, 0.0)
        problems = [problem for machine_type in self._deployment.types for problem in self._missing(machine_type)]
        if problems:
            raise type(problems[0])("; ".join(dict.fromkeys(map(str, problems))))

    def list(self, deployment: str, now: float) -> InstanceList:
        """Return the instances with the labels of a deployment; not complete where a zone or a page is missing."""
        labels = labels_of(self._installation, deployment)
        request = compute_v1.AggregatedListInstancesRequest(
            project=self.project,
            filter=" AND ".join(f'(labels.{key} = "{value}")' for key, value in labels.items()),
            max_results=PAGE,
            return_partial_success=True,
        )
        client = self._client(compute_v1.InstancesClient)
        give_up = time.monotonic() + LIST_SECONDS
        result: list[Instance] = []
        complete, read = True, 0
        while True:
            try:
                page = self._repeated("instances.aggregatedList", lambda: _page(client, request))
            except ProviderError as error:
                if not read:
                    raise
                log.warning("The list of instances of %s is not complete: %s", deployment, error)
                return InstanceList(now, tuple(result), complete=False)
            read += 1
            for scope in page.items.values():
                result += map(_instance, scope.instances)
                complete = complete and scope.warning.code in NO_WARNING
            complete = complete and not page.unreachables and page.warning.code in NO_WARNING
            if not page.next_page_token:
                return InstanceList(now, tuple(result), complete=complete)
            if time.monotonic() > give_up:
                return InstanceList(now, tuple(result), complete=False)
            request.page_token = page.next_page_token

    def launch(self, request: str, token: str, join: JoinData | None = None) -> Instance:
        """Launch an instance; the same token with the same request and join data returns the same instance."""
        wanted = parse_request(request)
        project, zone = wanted["settings"]["project"], wanted["zone"]
        insert = compute_v1.InsertInstanceRequest(
            project=project,
            zone=zone,
            request_id=request_id(self._installation, token),
            instance_resource=instance_resource(wanted, join, self._installation),
        )
        client = self._client(compute_v1.InstancesClient)
        give_up = time.monotonic() + LAUNCH_SECONDS
        try:
            with as_provider_errors("instances.insert"):
                operation = client.insert_unary(insert, **_call_options())
            failure = self._failure(project, zone, operation, give_up)
        except NameTaken as taken:
            return self._launched_before(wanted, taken)
        if isinstance(failure, NameTaken):
            return self._launched_before(wanted, failure)
        if isinstance(failure, Throttled):  # its request id is spent: only another machine can be launched
            failure = QuotaReached(str(failure))
        if failure is not None:
            failure.instance = f"{zone}/{instance_name(self._installation, wanted['machine'])}"
            raise failure
        made = self._get_instance(wanted)
        if made is None:  # taken back or ended meanwhile
            name = instance_name(self._installation, wanted["machine"])
            return Instance(f"{zone}/{name}", wanted["machine"], wanted["deployment"], "terminated")
        return _instance(made)

    def terminate(self, instance: str) -> bool:
        """End an instance for good. False if there is no such instance, or none any more; may be repeated."""
        if not (named := ID.fullmatch(instance)):
            return False
        request = compute_v1.DeleteInstanceRequest(project=self.project, zone=named[1], instance=named[2])
        client = self._client(compute_v1.InstancesClient)
        try:
            self._repeated("instances.delete", lambda: client.delete_unary(request, **_call_options()))
        except NoSuchInstance:
            return False
        return True

    def console(self, instance: str) -> str:
        """Return the newest output of the console of an instance, "" where there is none."""
        if not (named := ID.fullmatch(instance)):
            return ""
        request = compute_v1.GetSerialPortOutputInstanceRequest(
            project=self.project, zone=named[1], instance=named[2], port=1
        )
        client = self._client(compute_v1.InstancesClient)
        try:
            answer = self._repeated(
                "instances.getSerialPortOutput",
                lambda: client.get_serial_port_output(request, **_call_options()),
            )
        except NoSuchInstance:
            return ""
        return str(answer.contents or "")

    # ── Calls ───────────────────────────────────────────────────────────────

    def _client(self, kind: Callable[..., Any]) -> Any:
        """Return the client of one kind of resources."""
        with self._lock:
            if kind not in self._clients:
                if self._credentials is None:
                    self._credentials = _credentials(self._secrets)
                options = ClientOptions(api_endpoint=os.environ.get(ENDPOINT, "").rstrip("/") or None)
                with as_provider_errors("credentials"):
                    self._clients[kind] = kind(credentials=self._credentials, client_options=options, transport="rest")
            return self._clients[kind]

    def _repeated(self, action: str, call: Callable[[], Answer]) -> Answer:
        """Return the answer of a call that may be repeated: it is, after a failure that may pass."""

        def once() -> Answer:
            with as_provider_errors(action):
                return call()

        tries = Retrying(
            stop=stop_after_attempt(READ_TRIES),
            wait=wait_random_exponential(multiplier=0.5, max=2.0),
            retry=retry_if_exception_type((CallOutcomeUnknown, Throttled)),
            reraise=True,
        )
        return tries(once)

    def _failure(self, project: str, zone: str, operation: Any, give_up: float) -> ProviderError | None:
        """Return why the operation of a launch failed, None if it has not; CallOutcomeUnknown while it goes on."""
        client = self._client(compute_v1.ZoneOperationsClient)
        request = compute_v1.GetZoneOperationRequest(project=project, zone=zone, operation=operation.name)
        problem = ""
        while operation.status != compute_v1.Operation.Status.DONE:
            if time.monotonic() > give_up:
                raise CallOutcomeUnknown(f"instances.insert: the operation {operation.name} goes on{problem}")
            time.sleep(POLL_SECONDS)
            try:
                with as_provider_errors("zoneOperations.get"):
                    operation = client.get(request, **_call_options())
            except ProviderError as error:  # the launch itself goes on
                problem = f": {error}"
        return failure_of(operation, "instances.insert")

    def _get_instance(self, wanted: dict[str, Any]) -> Any:
        """Return the instance of a machine as Compute Engine has it, None without one."""
        request = compute_v1.GetInstanceRequest(
            project=wanted["settings"]["project"],
            zone=wanted["zone"],
            instance=instance_name(self._installation, wanted["machine"]),
        )
        client = self._client(compute_v1.InstancesClient)
        try:
            with as_provider_errors("instances.get"):  # once, as a launch has to end in time
                return client.get(request, **_call_options())
        except NoSuchInstance:
            return None
        except ProviderError as error:  # it was launched
            raise CallOutcomeUnknown(str(error)) from error

    def _launched_before(self, wanted: dict[str, Any], taken: NameTaken) -> Instance:
        """Return the instance that has the name of a machine, as after a call whose request id is forgotten."""
        known = self._get_instance(wanted)
        if known is None:
            raise taken
        labels = labels_of(self._installation, wanted["deployment"]) | {MACHINE_LABEL: wanted["machine"]}
        if any(known.labels.get(key) != value for key, value in labels.items()):
            raise InvalidLaunch(f"instances.insert: {known.name} exists, and is not of this deployment") from taken
        return _instance(known)

    def _missing(self, machine_type: MachineType) -> Iterator[ProviderError]:
        """Yield what a machine type names that is not there, or not allowed to be read, in each of its zones."""
        calls: list[tuple[str, Callable[[], Any]]] = [("images.get", lambda: self._image(machine_type.machine_image))]
        for zone in machine_type.zones:
            calls.append(("machineTypes.get", lambda zone=zone: self._machine_type(machine_type, zone)))  # type: ignore[misc]
            if machine_type.accelerator:
                calls.append(("acceleratorTypes.get", lambda zone=zone: self._accelerator(machine_type, zone)))  # type: ignore[misc]
        for action, call in calls:
            try:
                self._repeated(action, call)
            except ProviderError as error:
                yield type(error)(f"{machine_type.name}: {error}")

    def _image(self, path: str) -> None:
        _, project, _, _, *rest = path.split("/")
        client = self._client(compute_v1.ImagesClient)
        if rest[0] == "family":
            client.get_from_family(
                compute_v1.GetFromFamilyImageRequest(project=project, family=rest[1]), **_call_options()
            )
        else:
            client.get(compute_v1.GetImageRequest(project=project, image=rest[0]), **_call_options())

    def _machine_type(self, machine_type: MachineType, zone: str) -> None:
        request = compute_v1.GetMachineTypeRequest(
            project=self.project, zone=zone, machine_type=machine_type.instance_type
        )
        found = self._client(compute_v1.MachineTypesClient).get(request, **_call_options())
        own = sum(one.guest_accelerator_count for one in found.accelerators)
        if own and own != machine_type.gpus:
            problem = f"{machine_type.instance_type} has {gpus(own)}, and the document says {machine_type.gpus}"
            raise InvalidLaunch(f"machineTypes.get: {problem}")

    def _accelerator(self, machine_type: MachineType, zone: str) -> None:
        request = compute_v1.GetAcceleratorTypeRequest(
            project=self.project, zone=zone, accelerator_type=machine_type.accelerator
        )
        self._client(compute_v1.AcceleratorTypesClient).get(request, **_call_options())


def _credentials(secrets: Mapping[str, str]) -> Any:
    """Return the credentials of a key, else those of the environment; Denied without any. No message quotes the key."""
    if not secrets:
        with as_provider_errors("credentials"):
            return google.auth.default(scopes=SCOPES)[0]
    if unknown := sorted(secrets.keys() - KEYS):
        raise Denied(f"The credential has {', '.join(unknown)}, which no key of a service account has")
    if missing := [name for name in NEEDED_KEYS if not secrets.get(name)]:
        raise Denied(f"the key of a service account has no {', '.join(missing)}: give the file of its key as it is")
    if secrets["type"] != "service_account":
        raise Denied("the credential is no key of a service account")
    try:
        return service_account.Credentials.from_service_account_info(dict(secrets), scopes=SCOPES)  # type: ignore[no-untyped-call]
    except Exception:
        raise Denied("the private key of the service account cannot be read") from None


def _call_options() -> dict[str, Any]:
    """Return the options of a call that the library does not repeat, and that ends in time."""
    return {"retry": None, "timeout": ConstantTimeout((CONNECT_SECONDS, READ_SECONDS))}  # type: ignore[no-untyped-call]


def _page(client: Any, request: Any) -> Any:
    """Return the page of a list that a request asks for."""
    return next(iter(client.aggregated_list(request, **_call_options()).pages))


def _instance(record: Any) -> Instance:
    launched = None
    if record.creation_timestamp:
        launched = datetime.fromisoformat(record.creation_timestamp).timestamp()
    return Instance(
        f"{record.zone.rpartition('/')[2]}/{record.name}",
        record.labels.get(MACHINE_LABEL, ""),
        record.labels.get(DEPLOYMENT_LABEL, ""),
        STATES.get(record.status, "running"),
        launched,
    )
