"""Count the devices that drivers offer by dynamic resource allocation (DRA), and those that claims hold.

A pool's resource may be that of a DeviceClass: the extended resource that the class names, or
`deviceclass.resource.kubernetes.io/CLASS`. Pods request it as they do that of a device plugin, and the scheduler makes
the claim.
Pure: no requests. Counted are devices of one node each, by classes whose selectors compare the driver and attributes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from sys import intern
from typing import NamedTuple

from ..api.client import Object

GROUP = "/apis/resource.k8s.io/v1"
SLICES, CLASSES, CLAIMS = f"{GROUP}/resourceslices", f"{GROUP}/deviceclasses", f"{GROUP}/resourceclaims"
IMPLICIT_RESOURCE_PREFIX = "deviceclass.resource.kubernetes.io/"
"""Before the name of a class, the extended resource that each class has"""
EXTENDED_RESOURCE_CLAIM = "resource.kubernetes.io/extended-resource-claim"
"""The annotation of claims that the scheduler made of a pod's extended resources, which count by the pod's requests"""
REPELLING_EFFECTS = ("NoSchedule", "NoExecute")
_DRIVER = re.compile(r"""device\.driver\s*==\s*(["'])(?P<driver>[^"']+)\1""")
_ATTRIBUTE = re.compile(
    r"""device\.attributes\[(["'])(?P<domain>[^"']+)\1\]\.(?P<name>\w+)\s*==\s*"""
    r"""(?:(["'])(?P<text>[^"']*)\4|(?P<word>true|false|-?\d+))"""
)

Attribute = tuple[str, str]
"""The domain and the name."""


class DeviceId(NamedTuple):
    """What tells a device from all others."""

    driver: str
    pool: str
    name: str


@dataclass(frozen=True, slots=True)
class DeviceSlice:
    """What is kept of a ResourceSlice; `node` "" where its devices are not of one node."""

    driver: str
    pool: str
    generation: int
    node: str
    devices: tuple[tuple[str, Mapping[Attribute, str]], ...]
    """The names and attributes of the devices that can be allocated whole"""


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """What is kept of a DeviceClass. `driver` "" and `attributes` say which devices it selects."""

    name: str
    resources: tuple[str, ...]
    driver: str = ""
    attributes: tuple[tuple[Attribute, str], ...] = ()
    understood: bool = True
    """whether its selectors only compare the driver and attributes"""

    def selects(self, driver: str, attributes: Mapping[Attribute, str]) -> bool:
        """Whether a device is of the class; none is of one that is not understood."""
        if not self.understood or (self.driver and self.driver != driver):
            return False
        return all(attributes.get(name) == value for name, value in self.attributes)


@dataclass(frozen=True, slots=True)
class Claim:
    """What is kept of a claim that has devices; `pods` may use them, as `namespace/name`."""

    devices: tuple[DeviceId, ...]
    pods: tuple[str, ...]


def project_slice(item: Object) -> DeviceSlice | None:
    """Return what is kept of a ResourceSlice; None without devices.

    Devices that share counters with others are left out, as one of them takes some of the others; so are tainted ones.
    """
    spec = item.get("spec") or {}
    pool, driver = spec.get("pool") or {}, str(spec.get("driver") or "")
    devices = [
        (intern(str(one.get("name") or at)), _attributes(driver, one.get("attributes") or {}))
        for at, one in enumerate(spec.get("devices") or ())
        if not one.get("consumesCounters")
        and not any(taint.get("effect") in REPELLING_EFFECTS for taint in one.get("taints") or ())
    ]
    if not devices:
        return None
    generation, name = int(pool.get("generation") or 0), str(pool.get("name") or "")
    return DeviceSlice(intern(driver), intern(name), generation, str(spec.get("nodeName") or ""), tuple(devices))


def _attributes(driver: str, attributes: Mapping[str, Object]) -> Mapping[Attribute, str]:
    """Return attributes as text; one without a domain has that of its driver."""
    found = {}
    for key, value in attributes.items():
        domain, _, name = key.rpartition("/")
        found[domain or driver, name] = next((_text(each) for each in value.values()), "")
    return found


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def project_class(item: Object) -> DeviceClass:
    """Return what is kept of a DeviceClass."""
    name, spec = str(item["metadata"]["name"]), item.get("spec") or {}
    named = spec.get("extendedResourceName")
    resources = (*((str(named),) if named else ()), f"{IMPLICIT_RESOURCE_PREFIX}{name}")
    driver, attributes = "", dict[Attribute, str]()
    for selector in spec.get("selectors") or ():
        expression = str((selector.get("cel") or {}).get("expression") or "")
        for part in expression.split("&&"):
            text = part.strip()
            if (found := _DRIVER.fullmatch(text)) is not None and driver in ("", found["driver"]):
                driver = found["driver"]
            elif (found := _ATTRIBUTE.fullmatch(text)) is not None:
                attributes[found["domain"], found["name"]] = found["text"] if found["word"] is None else found["word"]
            else:
                return DeviceClass(name, resources, understood=False)
    return DeviceClass(name, resources, driver, tuple(sorted(attributes.items())))


def project_claim(item: Object) -> Claim | None:
    """Return the devices of a claim; None where it has none, or where the pod's requests say the same."""
    status = item.get("status") or {}
    results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or ()
    devices = tuple(
        DeviceId(str(one["driver"]), str(one["pool"]), str(one["device"]))
        for one in results
        if not one.get("adminAccess")
    )
    metadata = item["metadata"]
    if not devices or (metadata.get("annotations") or {}).get(EXTENDED_RESOURCE_CLAIM) == "true":
        return None
    pods = [one["name"] for one in status.get("reservedFor") or () if one.get("resource") == "pods"]
    return Claim(devices, tuple(f"{metadata.get('namespace', '')}/{name}" for name in pods))


@dataclass(slots=True)
class DraDevices:
    """The devices of each node by the resource that pools call them, and the claims that hold some of them."""

    offered: dict[str, dict[str, int]] = field(default_factory=dict)
    """Node and resource to the number of devices"""
    claims: dict[str, list[tuple[str, tuple[str, ...]]]] = field(default_factory=dict)
    """Node to each device that a claim holds: its resource, and the pods that may use it"""

    def foreign(self, node: str, ours: Mapping[str, str]) -> dict[str, int]:
        """Return what claims of others hold on a node, by resource; `ours` are the workloads of pods, by key."""
        found: dict[str, int] = {}
        for resource, pods in self.claims.get(node, ()):
            if not pods or not all(ours.get(pod) for pod in pods):
                found[resource] = found.get(resource, 0) + 1
        return found

    def differs(self, other: DraDevices) -> set[str]:
        """Return the nodes that are not as in another count."""
        kept = (self.offered, other.offered), (self.claims, other.claims)
        return {name for one, two in kept for name in one.keys() | two.keys() if one.get(name) != two.get(name)}


def newest_slices(slices: Iterable[DeviceSlice]) -> Iterator[DeviceSlice]:
    """Return the slices of the newest generation of each of a driver's pools: what counts while it replaces them."""
    slices, newest = tuple(slices), dict[tuple[str, str], int]()
    for one in slices:
        newest[one.driver, one.pool] = max(newest.get((one.driver, one.pool), 0), one.generation)
    return (one for one in slices if one.generation == newest[one.driver, one.pool])


def count_devices(
    slices: Iterable[DeviceSlice], classes: Iterable[DeviceClass], claims: Iterable[Claim], resources: Sequence[str]
) -> DraDevices:
    """Count the devices of each node by these resources, each once: by the first whose class selects it.

    Those that are not of one node do not count.
    """
    found = DraDevices()
    by_resource = {resource: one for one in classes for resource in one.resources}
    wanted = [(resource, by_resource[resource]) for resource in resources if resource in by_resource]
    known: dict[DeviceId, tuple[str, str]] = {}
    for one in newest_slices(slices):
        if not one.node:
            continue
        for name, attributes in one.devices:
            resource = next((name for name, each in wanted if each.selects(one.driver, attributes)), None)
            device = DeviceId(one.driver, one.pool, name)
            if resource is not None and device not in known:
                known[device] = one.node, resource
                here = found.offered.setdefault(one.node, {})
                here[resource] = here.get(resource, 0) + 1
    for claim in claims:
        for device in claim.devices:
            if device in known:
                node, resource = known[device]
                found.claims.setdefault(node, []).append((resource, claim.pods))
    for each in found.claims.values():
        each.sort()
    return found
