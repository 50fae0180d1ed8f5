"""Launch, list and end instances of Amazon EC2, on demand and on the spot market (extra `aws`).

Instances get their tags in the call that launches them. The SDK does not retry launches, because that would hide a
stock-out; the control loop repeats a launch with the same client token. The credentials are those of the deployment, or
else the SDK's defaults: environment variables, a profile, or the role of the service's own machine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from ..deployment import Deployment, MachineType
from ..instances import Instance, InstanceList, InstanceState
from ..provider import CallOutcomeUnknown, Denied, InvalidLaunch, JoinData, ProviderError
from .aws_errors import as_provider_errors, error_code
from .aws_launch import DEPLOYMENT_TAG, INSTALLATION_TAG, MACHINE_TAG, launch_parameters, parse_request

log = logging.getLogger("makeway.machines")

CONNECT_SECONDS = 5.0
LAUNCH_SECONDS = 45.0
"""Read timeout of a launch; with the connect timeout it is below any `request_timeout` of a deployment"""
READ_SECONDS = 20.0
READ_TRIES = 3
PAGE_SIZE = 500
"""Instances in one page of DescribeInstances"""
LIST_SECONDS = 60.0
"""After this time no more pages are read, and the list is reported as not complete"""
NOT_FOUND_CODES = frozenset({"InvalidInstanceID.NotFound", "InvalidInstanceID.Malformed"})
INSTANCE_STATES: Mapping[str, InstanceState] = {
    "pending": "pending",
    "running": "running",
    "shutting-down": "stopping",
    "stopping": "stopping",
    "stopped": "stopped",
    "terminated": "terminated",
}


CREDENTIAL_KEYS = ("access_key_id", "secret_access_key", "session_token")
"""The values that a credential may have"""


class AwsProvider:
    """The instances of one deployment in its region. Every call has a timeout and then raises CallOutcomeUnknown."""

    def __init__(self, deployment: Deployment, installation: str, secrets: Mapping[str, str] | None = None) -> None:
        """`installation`: the id of this Makeway, a tag of its instances. `secrets`: values by CREDENTIAL_KEYS."""
        self._deployment, self._installation = deployment, installation
        self._secrets = dict(secrets or {})
        self._session: Any = None
        self._clients: dict[tuple[str, bool], Any] = {}
        self._root_devices: dict[str, str] = {}
        self._lock = threading.Lock()  # a session of the SDK is not thread-safe

    @property
    def region(self) -> str:
        """Return the region of the deployment."""
        return self._deployment.settings["region"]

    def check(self) -> None:
        """Check credentials, rights, images and subnets by dry runs; raise a ProviderError with all problems found."""
        listed = self.list(self._deployment.name, 0.0)
        problems = [
            problem for machine_type in self._deployment.types for problem in self._dry_run_launch(machine_type)
        ]
        running = next((item.id for item in listed.instances if item.state in ("pending", "running")), None)
        if running is not None:
            problems += _dry_run("TerminateInstances", lambda: self._terminate(running, dry_run=True))
        if problems:
            raise type(problems[0])("; ".join(dict.fromkeys(map(str, problems))))

    def list(self, deployment: str, now: float) -> InstanceList:
        """Return the instances with the tags of a deployment; the list is not complete if a page could not be read."""
        tags = {INSTALLATION_TAG: self._installation, DEPLOYMENT_TAG: deployment}
        filters = [{"Name": f"tag:{key}", "Values": [value]} for key, value in tags.items()]
        deadline = time.monotonic() + LIST_SECONDS
        result: list[Instance] = []
        with as_provider_errors("DescribeInstances"):
            pages = (
                self._client(self.region)
                .get_paginator("describe_instances")
                .paginate(Filters=filters, PaginationConfig={"PageSize": PAGE_SIZE})
            )
        pages, pages_read = iter(pages), 0
        while True:
            try:
                with as_provider_errors("DescribeInstances"):
                    page = next(pages, None)
            except ProviderError as error:
                if not pages_read:
                    raise
                log.warning("The list of instances of %s is not complete: %s", deployment, error)
                return InstanceList(now, tuple(result), complete=False)
            if page is None:
                return InstanceList(now, tuple(result))
            result += map(_instance, _instances(page))
            pages_read += 1
            if time.monotonic() > deadline:
                return InstanceList(now, tuple(result), complete=not page.get("NextToken"))

    def launch(self, request: str, token: str, join: JoinData | None = None) -> Instance:
        """Launch an instance. Idempotent: the same token, request and join data return the same instance."""
        fields = parse_request(request)
        region = fields["settings"]["region"]
        parameters = self._parameters(fields, token, join)
        with as_provider_errors("RunInstances"):
            try:
                answer = self._client(region, launching=True).run_instances(**parameters)
            except ClientError as error:
                if error_code(error) not in ("IdempotentParameterMismatch", "IdempotentInstanceTerminated"):
                    raise
                return self._find_by_token(fields, token, error_code(error))
        return _instance(answer["Instances"][0])

    def terminate(self, instance: str) -> bool:
        """Terminate an instance; False if it does not exist, or is terminated already. May be repeated."""
        with as_provider_errors("TerminateInstances"):
            try:
                answer = self._terminate(instance)
            except ClientError as error:
                if error_code(error) in NOT_FOUND_CODES:
                    return False
                raise
        states = [change["PreviousState"]["Name"] for change in answer.get("TerminatingInstances", ())]
        if not states:
            raise CallOutcomeUnknown("TerminateInstances: the answer names no instance")
        return bool(states[0] != "terminated")

    def console(self, instance: str) -> str:
        """Return the latest console output of an instance, "" if there is none."""
        client = self._client(self.region)
        with as_provider_errors("GetConsoleOutput"):
            try:
                try:
                    answer = client.get_console_output(InstanceId=instance, Latest=True)
                except ClientError as error:
                    if error_code(error) != "UnsupportedOperation":  # only Nitro instances have the latest output
                        raise
                    answer = client.get_console_output(InstanceId=instance)
            except ClientError as error:
                if error_code(error) in NOT_FOUND_CODES:
                    return ""
                raise
        return str(answer.get("Output") or "")

    # ── Calls ───────────────────────────────────────────────────────────────

    def _client(self, region: str, *, launching: bool = False) -> Any:
        """Return the cached SDK client of a region. `launching`: with the timeout for launches, and without retries."""
        with self._lock:
            key = region, launching
            if key not in self._clients:
                tries = 1 if launching else READ_TRIES
                config = Config(
                    region_name=region,
                    connect_timeout=CONNECT_SECONDS,
                    read_timeout=LAUNCH_SECONDS if launching else READ_SECONDS,
                    retries={"mode": "standard", "total_max_attempts": tries},
                    max_pool_connections=16,
                    user_agent_extra="makeway",
                )
                if self._session is None:  # loading its model of EC2 takes 20 MB and half a second
                    if unknown := sorted(self._secrets.keys() - set(CREDENTIAL_KEYS)):
                        message = (
                            f"AWS knows no {', '.join(unknown)} in a credential: it has {', '.join(CREDENTIAL_KEYS)}"
                        )
                        raise Denied(message)
                    keys = {f"aws_{name}": value for name, value in self._secrets.items() if value}
                    self._session = boto3.session.Session(**keys)
                self._clients[key] = self._session.client("ec2", config=config)
            return self._clients[key]

    def _parameters(self, fields: dict[str, Any], token: str, join: JoinData | None) -> dict[str, Any]:
        device = self._root_device(fields["settings"]["region"], fields["machine_image"]) if fields.get("disk") else ""
        return launch_parameters(fields, token, join, self._installation, device)

    def _root_device(self, region: str, image: str) -> str:
        """Return the device name of an image's root volume, which never changes."""
        if image not in self._root_devices:
            with as_provider_errors("DescribeImages"):
                answer = self._client(region).describe_images(ImageIds=[image])
            devices = [item.get("RootDeviceName") for item in answer.get("Images", ())]
            if not devices or not devices[0]:
                raise InvalidLaunch(f"DescribeImages: {image} has no first disk")
            self._root_devices[image] = devices[0]
        return self._root_devices[image]

    def _find_by_token(self, fields: dict[str, Any], token: str, code: str) -> Instance:
        """Return the instance that an earlier call with this token launched.

        EC2 refuses the token if its instance has ended (IdempotentInstanceTerminated), or if the parameters have
        changed since, as after an upgrade of Makeway. In the first case an instance that is not listed is reported as
        terminated; in the second it may only not be listed yet, so the outcome is unknown.
        """
        filters = [{"Name": "client-token", "Values": [token]}]
        answer = self._client(fields["settings"]["region"]).describe_instances(Filters=filters)
        for record in _instances(answer):
            return _instance(record)
        if code == "IdempotentInstanceTerminated":
            return Instance("", fields["machine"], fields["deployment"], "terminated")
        raise CallOutcomeUnknown(f"RunInstances: {code}: an instance with this token is not listed")

    def _terminate(self, instance: str, *, dry_run: bool = False) -> Any:
        return self._client(self.region).terminate_instances(InstanceIds=[instance], DryRun=dry_run)

    def _dry_run_launch(self, machine_type: MachineType) -> Iterator[ProviderError]:
        """Yield the problems of a dry run of a machine type's launch, in each of its zones and markets."""
        for zone in machine_type.zones:
            for market in machine_type.markets():
                request = self._deployment.request(machine_type, zone, market, machine_type.price_in(market), "check")

                def call(request: str = request) -> Any:
                    parameters = self._parameters(parse_request(request), "check", None)
                    return self._client(self.region).run_instances(**parameters, DryRun=True)

                yield from _dry_run("RunInstances", call, f"{machine_type.name}: ")


def _dry_run(action: str, call: Callable[[], Any], prefix: str = "") -> Iterator[ProviderError]:
    """Yield the error of a call with DryRun, if it has one. `prefix`: of its message."""
    try:
        with as_provider_errors(action):
            try:
                call()
            except ClientError as error:
                if error_code(error) != "DryRunOperation":
                    raise
    except ProviderError as error:
        yield type(error)(f"{prefix}{error}")


def _instances(answer: Any) -> Iterator[Any]:
    """Yield the records of instances in an answer of DescribeInstances."""
    for reservation in answer.get("Reservations", ()):
        yield from reservation.get("Instances", ())


def _instance(record: Any) -> Instance:
    tags = {tag["Key"]: tag["Value"] for tag in record.get("Tags", ())}
    launched = record.get("LaunchTime")
    return Instance(
        record["InstanceId"],
        tags.get(MACHINE_TAG, ""),
        tags.get(DEPLOYMENT_TAG, ""),
        INSTANCE_STATES.get(record.get("State", {}).get("Name", ""), "running"),
        None if launched is None else launched.timestamp(),
    )
