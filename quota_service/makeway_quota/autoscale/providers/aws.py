"""Launch, list and end instances of Amazon EC2, on demand and on the spot market (extra `aws`).

Each instance has its tags from the call that launches it. A launch is called once, as a repeated call of the SDK would
hide a stock-out; the loop repeats it with the same token. Credentials are those of the deployment, or else of the
service's environment: variables, a profile, or the role of its machine.
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
from ..provider import AnswerLost, Denied, InvalidLaunch, JoinData, ProviderError
from .aws_errors import as_provider_errors, code_of
from .aws_launch import DEPLOYMENT_TAG, INSTALLATION_TAG, MACHINE_TAG, launch_parameters, read_request

log = logging.getLogger("makeway.machines")

CONNECT_SECONDS = 5.0
LAUNCH_SECONDS = 45.0
"""For which the answer to a launch is waited for; with the connection less than any `request_timeout`"""
READ_SECONDS = 20.0
READ_TRIES = 3
PAGE = 500
"""Instances of one page of a list"""
LIST_SECONDS = 60.0
"""After which no more pages are read, and the list is not complete"""
NOT_THERE = frozenset({"InvalidInstanceID.NotFound", "InvalidInstanceID.Malformed"})
STATES: Mapping[str, InstanceState] = {
    "pending": "pending",
    "running": "running",
    "shutting-down": "stopping",
    "stopping": "stopping",
    "stopped": "stopped",
    "terminated": "terminated",
}


KEYS = ("access_key_id", "secret_access_key", "session_token")
"""What a credential may have"""


class AwsProvider:
    """The instances of one deployment in its region. Calls end within seconds, with an answer or without."""

    def __init__(self, deployment: Deployment, installation: str, secrets: Mapping[str, str] | None = None) -> None:
        """`secrets`: access_key_id, secret_access_key and session_token; without any, those of the environment."""
        self._deployment, self._installation = deployment, installation
        self._secrets = dict(secrets or {})
        self._session: Any = None
        self._clients: dict[tuple[str, bool], Any] = {}
        self._devices: dict[str, str] = {}
        self._lock = threading.Lock()  # sessions of the SDK are for one thread at a time

    @property
    def region(self) -> str:
        """Return the region of the deployment."""
        return self._deployment.settings["region"]

    def check(self) -> None:
        """Raise a ProviderError that tells what is not allowed or not there; launches and ends nothing."""
        listed = self.list(self._deployment.name, 0.0)
        problems = [problem for machine_type in self._deployment.types for problem in self._dry_launch(machine_type)]
        alive = next((one.id for one in listed.instances if one.state in ("pending", "running")), None)
        if alive is not None:
            problems += _dry("TerminateInstances", lambda: self._end(alive, dry=True))
        if problems:
            raise type(problems[0])("; ".join(dict.fromkeys(map(str, problems))))

    def list(self, deployment: str, now: float) -> InstanceList:
        """Return the instances with the tags of a deployment; not complete where a page could not be read."""
        tags = {INSTALLATION_TAG: self._installation, DEPLOYMENT_TAG: deployment}
        filters = [{"Name": f"tag:{key}", "Values": [value]} for key, value in tags.items()]
        give_up = time.monotonic() + LIST_SECONDS
        result: list[Instance] = []
        with as_provider_errors("DescribeInstances"):
            pages = (
                self._client(self.region)
                .get_paginator("describe_instances")
                .paginate(Filters=filters, PaginationConfig={"PageSize": PAGE})
            )
        pages, read = iter(pages), 0
        while True:
            try:
                with as_provider_errors("DescribeInstances"):
                    page = next(pages, None)
            except ProviderError as error:
                if not read:
                    raise
                log.warning("The list of instances of %s is not complete: %s", deployment, error)
                return InstanceList(now, tuple(result), complete=False)
            if page is None:
                return InstanceList(now, tuple(result))
            result += map(_instance, _instances(page))
            read += 1
            if time.monotonic() > give_up:
                return InstanceList(now, tuple(result), complete=not page.get("NextToken"))

    def launch(self, request: str, token: str, join: JoinData | None = None) -> Instance:
        """Launch an instance; the same token with the same request and join data returns the same instance."""
        wanted = read_request(request)
        region = wanted["settings"]["region"]
        parameters = self._parameters(wanted, token, join)
        with as_provider_errors("RunInstances"):
            try:
                answer = self._client(region, launching=True).run_instances(**parameters)
            except ClientError as error:
                if code_of(error) not in ("IdempotentParameterMismatch", "IdempotentInstanceTerminated"):
                    raise
                return self._launched_before(wanted, token, code_of(error))
        return _instance(answer["Instances"][0])

    def terminate(self, instance: str) -> bool:
        """End an instance for good. False if there is no such instance, or none any more; may be repeated."""
        with as_provider_errors("TerminateInstances"):
            try:
                answer = self._end(instance)
            except ClientError as error:
                if code_of(error) in NOT_THERE:
                    return False
                raise
        states = [one["PreviousState"]["Name"] for one in answer.get("TerminatingInstances", ())]
        if not states:
            raise AnswerLost("TerminateInstances: the answer names no instance")
        return bool(states[0] != "terminated")

    def console(self, instance: str) -> str:
        """Return the newest output of the console of an instance, "" where there is none."""
        client = self._client(self.region)
        with as_provider_errors("GetConsoleOutput"):
            try:
                try:
                    answer = client.get_console_output(InstanceId=instance, Latest=True)
                except ClientError as error:
                    if code_of(error) != "UnsupportedOperation":  # only newer machines show it while they run
                        raise
                    answer = client.get_console_output(InstanceId=instance)
            except ClientError as error:
                if code_of(error) in NOT_THERE:
                    return ""
                raise
        return str(answer.get("Output") or "")

    # ── Calls ───────────────────────────────────────────────────────────────

    def _client(self, region: str, *, launching: bool = False) -> Any:
        """Return the client of a region. Those that launch call once, the others again after a failure."""
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
                if self._session is None:  # its description of EC2 takes 20 MB and half a second
                    if unknown := sorted(self._secrets.keys() - set(KEYS)):
                        message = f"AWS knows no {', '.join(unknown)} in a credential: it has {', '.join(KEYS)}"
                        raise Denied(message)
                    keys = {f"aws_{name}": value for name, value in self._secrets.items() if value}
                    self._session = boto3.session.Session(**keys)
                self._clients[key] = self._session.client("ec2", config=config)
            return self._clients[key]

    def _parameters(self, wanted: dict[str, Any], token: str, join: JoinData | None) -> dict[str, Any]:
        device = self._root_device(wanted["settings"]["region"], wanted["machine_image"]) if wanted.get("disk") else ""
        return launch_parameters(wanted, token, join, self._installation, device)

    def _root_device(self, region: str, image: str) -> str:
        """Return what an AMI calls its first disk, which never changes."""
        if image not in self._devices:
            with as_provider_errors("DescribeImages"):
                answer = self._client(region).describe_images(ImageIds=[image])
            devices = [one.get("RootDeviceName") for one in answer.get("Images", ())]
            if not devices or not devices[0]:
                raise InvalidLaunch(f"DescribeImages: {image} has no first disk")
            self._devices[image] = devices[0]
        return self._devices[image]

    def _launched_before(self, wanted: dict[str, Any], token: str, code: str) -> Instance:
        """Return the instance of a token that EC2 knows with other bytes, as from another release, or that has ended.

        One that is not listed any more has ended, too; one that is not listed yet may exist.
        """
        filters = [{"Name": "client-token", "Values": [token]}]
        answer = self._client(wanted["settings"]["region"]).describe_instances(Filters=filters)
        for result in _instances(answer):
            return _instance(result)
        if code == "IdempotentInstanceTerminated":
            return Instance("", wanted["machine"], wanted["deployment"], "terminated")
        raise AnswerLost(f"RunInstances: {code}: an instance with this token is not listed")

    def _end(self, instance: str, *, dry: bool = False) -> Any:
        return self._client(self.region).terminate_instances(InstanceIds=[instance], DryRun=dry)

    def _dry_launch(self, machine_type: MachineType) -> Iterator[ProviderError]:
        """Yield what EC2 refuses of a machine type, in each of its zones and markets."""
        for zone in machine_type.zones:
            for market in machine_type.markets():
                request = self._deployment.request(machine_type, zone, market, machine_type.price_in(market), "check")

                def call(request: str = request) -> Any:
                    parameters = self._parameters(read_request(request), "check", None)
                    return self._client(self.region).run_instances(**parameters, DryRun=True)

                yield from _dry("RunInstances", call, f"{machine_type.name}: ")


def _dry(action: str, call: Callable[[], Any], about: str = "") -> Iterator[ProviderError]:
    """Yield why a call would fail that is not made."""
    try:
        with as_provider_errors(action):
            try:
                call()
            except ClientError as error:
                if code_of(error) != "DryRunOperation":
                    raise
    except ProviderError as error:
        yield type(error)(f"{about}{error}")


def _instances(answer: Any) -> Iterator[Any]:
    for reservation in answer.get("Reservations", ()):
        yield from reservation.get("Instances", ())


def _instance(record: Any) -> Instance:
    tags = {tag["Key"]: tag["Value"] for tag in record.get("Tags", ())}
    launched = record.get("LaunchTime")
    return Instance(
        record["InstanceId"],
        tags.get(MACHINE_TAG, ""),
        tags.get(DEPLOYMENT_TAG, ""),
        STATES.get(record.get("State", {}).get("Name", ""), "running"),
        None if launched is None else launched.timestamp(),
    )
