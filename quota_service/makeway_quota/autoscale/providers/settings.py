"""Check what the document of a deployment says to its provider: the settings, and the fields that only clouds have.

Called when a document is read, so that nothing is refused by a cloud that can be seen to be wrong before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ...policy.issues import Loc, Problem, did_you_mean, quote
from ..deployment import Deployment, MachineType


class Setting(NamedTuple):
    """A key of `settings` that a provider knows."""

    name: str
    help: str
    required: bool = False


SETTINGS: Mapping[str, Sequence[Setting]] = {
    "aws": (
        Setting("region", "Region of all of its machines, such as eu-central-1", required=True),
        Setting(
            "instance_profile",
            "Name of an IAM instance profile. Whatever runs on a machine has its rights; better none",
        ),
        Setting("key_pair", "Name of the key pair whose owner may log in by SSH"),
    )
}
"""The settings of each provider; others than these take any"""
CLOUD_FIELDS = ("machine_image", "disk", "subnets", "security_groups")
REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d{1,2}")
INSTANCE = re.compile(r"[a-z][a-z0-9-]*\.[a-z0-9-]+")
ID = r"-[0-9a-f]{4,32}"
MIN_REQUEST = 60.0
"""Seconds for which a launch has to be waited for: an answer may take 50"""
MAX_DISK = 64 * 2**20
"""MiB of a disk, at most"""


def provider_problems(deployment: Deployment, places: Sequence[Loc]) -> Iterator[Problem]:
    """Yield what the provider of a deployment cannot do. `places`: where each machine type is in the document."""
    kinds = list(zip(places, deployment.types, strict=True))
    if deployment.provider != "aws":
        for loc, kind in kinds:
            for name in CLOUD_FIELDS:
                if getattr(kind, name):
                    yield (*loc, name), f"the provider {deployment.provider} has no {name}; remove it"
        return
    yield from _settings(deployment)
    for loc, kind in kinds:
        yield from _type(deployment, loc, kind)


def _settings(deployment: Deployment) -> Iterator[Problem]:
    known = [one.name for one in SETTINGS[deployment.provider]]
    for name, value in deployment.settings.items():
        if name not in known:
            message = f"{quote(name)} is no setting of {deployment.provider}; {did_you_mean(name, known)}"
            yield ("settings", name), message
        elif not value.strip():
            yield ("settings", name), f"{name} is empty; give it a value, or remove it"
    if deployment.request_timeout < MIN_REQUEST:
        yield ("request_timeout",), f"an answer of AWS may take 50 seconds; make it {MIN_REQUEST:.0f} or more"
    region = deployment.settings.get("region")
    if region is None:
        yield ("settings",), "the region is missing; give one, such as {region: eu-central-1}"
    elif region.strip() and not REGION.fullmatch(region):
        yield ("settings", "region"), f"{quote(region)} is not a region; write one such as eu-central-1"


def _type(deployment: Deployment, loc: Loc, kind: MachineType) -> Iterator[Problem]:
    if not INSTANCE.fullmatch(kind.instance):
        yield (*loc, "instance"), f"{quote(kind.instance)} is not an instance type; write one such as g5.2xlarge"
    if not kind.machine_image:
        yield loc, f"the machine type {quote(kind.name)} has no machine_image; name an AMI, such as ami-0abc"
    else:
        yield from _ids((*loc, "machine_image"), "ami", [kind.machine_image])
    yield from _ids((*loc, "subnets"), "subnet", kind.subnets.values())
    yield from _ids((*loc, "security_groups"), "sg", kind.security_groups)
    if kind.disk > MAX_DISK:
        yield (*loc, "disk"), "a disk has at most 64Ti; make it smaller"
    region = deployment.settings.get("region", "")
    for zone in kind.zones:
        if zone and REGION.fullmatch(region) and not zone.startswith(region):
            message = f"{quote(zone)} is not a zone of {region}; write one such as {region}a"
            yield (*loc, "zones"), message
    for zone in kind.subnets:
        if zone not in kind.zones:
            yield (*loc, "subnets"), f"the zone {quote(zone)} of a subnet is not in zones; add it there"
    if kind.market != "on_demand" and deployment.currency != "USD":
        message = "the highest price of a spot machine is told to AWS in US dollars; set currency: USD, or on_demand"
        yield (*loc, "market"), message


def _ids(loc: Loc, prefix: str, values: Iterable[str]) -> Iterator[Problem]:
    for value in values:
        if not re.fullmatch(prefix + ID, value):
            yield loc, f"{quote(value)} is not an id; write one such as {prefix}-0123456789abcdef0"
