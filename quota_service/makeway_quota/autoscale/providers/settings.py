"""Check what the document of a deployment says to its provider: the settings, and the fields that only clouds have.

Called when a document is read, so that nothing is refused by a cloud that can be seen to be wrong before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ...policy.issues import Loc, Problem, did_you_mean, quote
from ..deployment import ATOMIC, CLUSTER, PLACEHOLDER, REQUEST, Deployment, MachineType


class Setting(NamedTuple):
    """A key of `settings` that a provider knows."""

    name: str
    help: str
    required: bool = False
    default: str = ""
    """What a document without the key means, as it would be written; "" where it cannot be"""


SETTINGS: Mapping[str, Sequence[Setting]] = {
    "aws": (
        Setting("region", "Region of all of its machines, such as eu-central-1", required=True),
        Setting(
            "instance_profile",
            "Name of an IAM instance profile. Whatever runs on a machine has its rights; better none",
        ),
        Setting("key_pair", "Name of the key pair whose owner may log in by SSH"),
    ),
    "gcp": (
        Setting("project", "Id of the project of all of its machines", required=True),
        Setting("network", "Name of the VPC network of zones without a subnet", default="default"),
        Setting("external_ip", "true: each machine gets an address in the internet", default="false"),
        Setting("disk_type", "Type of the first disk, such as hyperdisk-balanced", default="pd-balanced"),
        Setting(
            "service_account",
            "Address of a service account. Whatever runs on a machine has its rights; better none",
        ),
        Setting("max_run_hours", "Hours after which Google deletes a machine, whatever runs there; default: never"),
    ),
    CLUSTER: (
        Setting(
            "provisioning",
            "placeholder: a pod waits for each node; request: a ProvisioningRequest asks for it",
            default=PLACEHOLDER,
        ),
        Setting(
            "provisioning_class",
            "Class of the ProvisioningRequests, such as queued-provisioning.gke.io",
            default=ATOMIC,
        ),
        Setting(
            "provisioning_parameters",
            "Parameters of the ProvisioningRequests, NAME=VALUE with commas between, such as ValidUntilSeconds=600",
        ),
    ),
}
"""The settings of each provider; others than these take any"""
CLOUD_FIELDS = ("machine_image", "disk", "subnets", "security_groups", "accelerator")
REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d{1,2}")
INSTANCE = re.compile(r"[a-z][a-z0-9-]*\.[a-z0-9-]+")
ID = r"-[0-9a-f]{4,32}"
MIN_REQUEST = {"aws": 60.0, "gcp": 120.0}
"""Seconds for which a launch has to be waited for: an answer of AWS may take 50, one of Google 111"""
MAX_RUN_HOURS = 120 * 24
PROJECT = re.compile(r"([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]")
ZONE = re.compile(r"[a-z]+(-[a-z]+)+\d+-[a-z0-9]{1,6}")
TYPE = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)+")
GCP_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
IMAGE = re.compile(r"projects/([a-z0-9.:-]+)/global/images/(family/)?[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
SUBNET = re.compile(r"projects/[a-z0-9.:-]+/regions/[a-z0-9-]+/subnetworks/[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
ACCOUNT = re.compile(r"[a-z0-9][a-z0-9.-]*@[a-z0-9.-]+")
CLASS = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
MAX_CLASS = 253
PARAMETER = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?\s*=\s*[^\s=,]{1,255}")
MAX_DISK = 64 * 2**20
"""MiB of a disk, at most"""


def provider_problems(deployment: Deployment, places: Sequence[Loc], *, stored: bool = False) -> Iterator[Problem]:
    """Yield what the provider of a deployment cannot do. `places`: where each machine type is in the document.

    `stored`: the document was saved before; earlier releases took any settings of a cluster.
    """
    of_types: dict[str, Callable[[Deployment, Loc, MachineType], Iterator[Problem]]] = {
        "aws": _aws_type,
        "gcp": _gcp_type,
    }
    of_type = of_types.get(deployment.provider, _no_cloud_type)
    of_settings: dict[str, Callable[[Deployment], Iterator[Problem]]] = {"aws": _aws, "gcp": _gcp, CLUSTER: _cluster}
    if deployment.provider in SETTINGS:
        yield from _settings(deployment, ignores_unknown=stored and deployment.provider == CLUSTER)
        yield from of_settings[deployment.provider](deployment)
    for loc, machine_type in zip(places, deployment.types, strict=True):
        yield from of_type(deployment, loc, machine_type)


def _no_cloud_type(deployment: Deployment, loc: Loc, machine_type: MachineType) -> Iterator[Problem]:
    for name in CLOUD_FIELDS:
        if getattr(machine_type, name):
            yield (*loc, name), f"the provider {deployment.provider} has no {name}; remove it"


def _settings(deployment: Deployment, *, ignores_unknown: bool) -> Iterator[Problem]:
    known = [one.name for one in SETTINGS[deployment.provider]]
    for name, value in deployment.settings.items():
        if name not in known:
            if ignores_unknown:
                continue
            message = f"{quote(name)} is no setting of {deployment.provider}; {did_you_mean(name, known)}"
            yield ("settings", name), message
        elif not value.strip():
            yield ("settings", name), f"{name} is empty; give it a value, or remove it"
    least = MIN_REQUEST.get(deployment.provider, 0.0)
    if deployment.request_timeout < least:
        cloud, seconds = {"aws": ("AWS", 50), "gcp": ("Google", 111)}[deployment.provider]
        yield ("request_timeout",), f"an answer of {cloud} may take {seconds} seconds; make it {least:.0f} or more"


def _aws(deployment: Deployment) -> Iterator[Problem]:
    region = deployment.settings.get("region")
    if region is None:
        yield ("settings",), "the region is missing; give one, such as {region: eu-central-1}"
    elif region.strip() and not REGION.fullmatch(region):
        yield ("settings", "region"), f"{quote(region)} is not a region; write one such as eu-central-1"


def _gcp(deployment: Deployment) -> Iterator[Problem]:
    settings = deployment.settings
    if "project" not in settings:
        yield ("settings",), "the project is missing; give its id, such as {project: my-project-123}"
    if "." in deployment.name:
        yield ("name",), "the name becomes a label of Google, which has no dots; write a - instead"
    rules = {
        "project": (PROJECT, "the id of a project; write one such as my-project-123"),
        "network": (GCP_NAME, "the name of a network; write one such as default"),
        "external_ip": (re.compile("true|false"), "true or false"),
        "disk_type": (GCP_NAME, "a type of disks; write one such as pd-balanced"),
        "service_account": (ACCOUNT, "a service account; write one such as gpu@my-project-123.iam.gserviceaccount.com"),
        "max_run_hours": (re.compile(r"[1-9]\d{0,3}"), f"a number of hours from 1 to {MAX_RUN_HOURS:,}"),
    }
    for name, (pattern, expected) in rules.items():
        value = settings.get(name, "")
        hours = name == "max_run_hours" and value.isdecimal() and int(value) > MAX_RUN_HOURS
        if value.strip() and (hours or not pattern.fullmatch(value)):
            yield ("settings", name), f"{quote(value)} is not {expected}"


def _cluster(deployment: Deployment) -> Iterator[Problem]:
    settings = deployment.settings
    how = settings.get("provisioning", PLACEHOLDER)
    if how.strip() and how not in (PLACEHOLDER, REQUEST):
        message = f"{quote(how)} is no way to ask for a node; {did_you_mean(how, (PLACEHOLDER, REQUEST))}"
        yield ("settings", "provisioning"), message
    for name in ("provisioning_class", "provisioning_parameters"):
        if name in settings and how == PLACEHOLDER:
            yield ("settings", name), f"{name} has no effect on placeholders; set provisioning: request, or remove it"
    name = settings.get("provisioning_class", "")
    if name.strip() and not (CLASS.fullmatch(name) and len(name) <= MAX_CLASS):
        expected = "write one such as check-capacity.autoscaling.x-k8s.io"
        yield ("settings", "provisioning_class"), f"{quote(name)} is not a class of ProvisioningRequests; {expected}"
    pairs = [one.strip() for one in settings.get("provisioning_parameters", "").split(",")]
    names = [pair.partition("=")[0].strip() for pair in pairs]
    for pair in pairs:
        if pair and (not PARAMETER.fullmatch(pair) or names.count(pair.partition("=")[0].strip()) > 1):
            expected = "write NAME=VALUE, each name once, such as ValidUntilSeconds=600"
            yield ("settings", "provisioning_parameters"), f"{quote(pair)} is not a parameter; {expected}"


def _gcp_type(deployment: Deployment, loc: Loc, machine_type: MachineType) -> Iterator[Problem]:
    if not TYPE.fullmatch(machine_type.instance_type):
        yield (
            (*loc, "instance"),
            f"{quote(machine_type.instance_type)} is not a machine type; write one such as g2-standard-8",
        )
    if not machine_type.machine_image:
        expected = "projects/my-project-123/global/images/family/gpu-machines"
        yield loc, f"the machine type {quote(machine_type.name)} has no machine_image; write one such as {expected}"
    elif not IMAGE.fullmatch(machine_type.machine_image):
        expected = "projects/P/global/images/NAME or projects/P/global/images/family/NAME"
        yield (*loc, "machine_image"), f"{quote(machine_type.machine_image)} is not an image; write {expected}"
    if machine_type.zones == ("",):
        yield loc, f"the machine type {quote(machine_type.name)} has no zones; name them, such as [europe-west4-a]"
    for zone in machine_type.zones:
        if zone and not ZONE.fullmatch(zone):
            yield (*loc, "zones"), f"{quote(zone)} is not a zone; write one such as europe-west4-a"
    yield from _gcp_network(loc, machine_type)
    if machine_type.disk > MAX_DISK:
        yield (*loc, "disk"), "a disk has at most 64Ti; make it smaller"
    if machine_type.accelerator and (not machine_type.instance_type.startswith("n1-") or not machine_type.gpus):
        message = "only N1 types with gpus take an accelerator: remove it, or set gpus"
        yield (*loc, "accelerator"), message
    elif machine_type.accelerator and not GCP_NAME.fullmatch(machine_type.accelerator):
        yield (
            (*loc, "accelerator"),
            f"{quote(machine_type.accelerator)} is not a type of GPUs; write one such as nvidia-tesla-t4",
        )
    elif machine_type.gpus and not machine_type.accelerator and machine_type.instance_type.startswith("n1-"):
        yield (
            loc,
            f"{machine_type.instance_type} has no GPUs of its own; name them with accelerator, such as nvidia-tesla-t4",
        )


def _gcp_network(loc: Loc, machine_type: MachineType) -> Iterator[Problem]:
    for zone, subnet in machine_type.subnets.items():
        if zone not in machine_type.zones:
            yield (*loc, "subnets"), f"the zone {quote(zone)} of a subnet is not in zones; add it there"
        if not (SUBNET if "/" in subnet else GCP_NAME).fullmatch(subnet):
            expected = "its name, or projects/P/regions/R/subnetworks/NAME"
            yield (*loc, "subnets"), f"{quote(subnet)} is not a subnet; write {expected}"
        elif "/" in subnet and subnet.split("/")[3] != zone.rpartition("-")[0]:
            yield (*loc, "subnets"), f"{quote(subnet)} is not in the region of {zone}; name one that is"
    for tag in machine_type.security_groups:
        if not GCP_NAME.fullmatch(tag):
            yield (*loc, "security_groups"), f"{quote(tag)} is not a network tag; write one such as gpu-machines"


def _aws_type(deployment: Deployment, loc: Loc, machine_type: MachineType) -> Iterator[Problem]:
    if not INSTANCE.fullmatch(machine_type.instance_type):
        yield (
            (*loc, "instance"),
            f"{quote(machine_type.instance_type)} is not an instance type; write one such as g5.2xlarge",
        )
    if not machine_type.machine_image:
        yield loc, f"the machine type {quote(machine_type.name)} has no machine_image; name an AMI, such as ami-0abc"
    else:
        yield from _ids((*loc, "machine_image"), "ami", [machine_type.machine_image])
    yield from _ids((*loc, "subnets"), "subnet", machine_type.subnets.values())
    yield from _ids((*loc, "security_groups"), "sg", machine_type.security_groups)
    if machine_type.disk > MAX_DISK:
        yield (*loc, "disk"), "a disk has at most 64Ti; make it smaller"
    region = deployment.settings.get("region", "")
    for zone in machine_type.zones:
        if zone and REGION.fullmatch(region) and not zone.startswith(region):
            message = f"{quote(zone)} is not a zone of {region}; write one such as {region}a"
            yield (*loc, "zones"), message
    if machine_type.accelerator:
        yield (*loc, "accelerator"), "machine types of AWS have their GPUs; remove it"
    for zone in machine_type.subnets:
        if zone not in machine_type.zones:
            yield (*loc, "subnets"), f"the zone {quote(zone)} of a subnet is not in zones; add it there"
    if machine_type.market != "on_demand" and deployment.currency != "USD":
        message = "the highest price of a spot machine is told to AWS in US dollars; set currency: USD, or on_demand"
        yield (*loc, "market"), message


def _ids(loc: Loc, prefix: str, values: Iterable[str]) -> Iterator[Problem]:
    for value in values:
        if not re.fullmatch(prefix + ID, value):
            yield loc, f"{quote(value)} is not an id; write one such as {prefix}-0123456789abcdef0"
