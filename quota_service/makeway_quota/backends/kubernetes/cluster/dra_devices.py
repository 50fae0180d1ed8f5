"""Count the devices that drivers offer by dynamic resource allocation (DRA), and those that claims hold.

A pool's resource may be that of a DeviceClass: the extended resource that the class names, or
`deviceclass.resource.kubernetes.io/CLASS`. Pods request it as they do that of a device plugin, and the scheduler makes
the claim. Or pods name a ResourceClaimTemplate, and the claim that Kubernetes generates for each counts with its pod.
Pure: no requests. Counted are devices of one node each, by classes whose selectors compare the driver and attributes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from sys import intern
from typing import NamedTuple, TypeVar

from ..api.client import Object

GROUP = "/apis/resource.k8s.io/v1"
SLICES, CLASSES, CLAIMS = f"{GROUP}/resourceslices", f"{GROUP}/deviceclasses", f"{GROUP}/resourceclaims"
IMPLICIT_RESOURCE_PREFIX = "deviceclass.resource.kubernetes.io/"
"""Before the name of a class, the extended resource that each class has"""
EXTENDED_RESOURCE_CLAIM = "resource.kubernetes.io/extended-resource-claim"
"""The annotation of claims that the scheduler made of a pod's extended resources, which count by the pod's requests."""
GENERATED_CLAIM = "resource.kubernetes.io/pod-claim-name"
"""The annotation of claims that were generated for one pod by its template. They count with that pod, from when it is
on its node; all others count by themselves, also where pods of ours use them."""
REPELLING_EFFECTS = ("NoSchedule", "NoExecute")
_DRIVER = re.compile(r"""device\.driver\s*==\s*(["'])(?P<driver>[^"']+)\1""")
_ATTRIBUTE = re.compile(
    r"""device\.attributes\[(["'])(?P<domain>[^"']+)\1\]\.(?P<name>\w+)\s*==\s*"""
    r"""(?:(["'])(?P<text>[^"']*)\4|(?P<word>true|false|-?\d+))"""
)

Attribute = tuple[str, str]
"""The domain and the name."""
PoolId = tuple[str, str]
"""The driver, and the name of its pool."""
K = TypeVar("K")


class DeviceId(NamedTuple):
    """What tells a device from all others."""

    driver: str
    pool: str
    name: str


@dataclass(frozen=True, slots=True)
class HeldDevices:
    """What is kept of a ResourceClaim: the devices that it holds."""

    devices: frozenset[DeviceId]
    generated: bool = False
    """for one pod, which names it in its status"""


NOTHING_HELD = HeldDevices(frozenset())


@dataclass(frozen=True, slots=True)
class DeviceSlice:
    """What is kept of a ResourceSlice; `node` "" where its devices are not of one node."""

    driver: str
    pool: str
    generation: int
    node: str
    devices: tuple[tuple[str, Mapping[Attribute, str]], ...]
    """The names and attributes of the devices that can be allocated whole"""

    @property
    def pool_id(self) -> PoolId:
        """What tells the pool from those of other drivers."""
        return self.driver, self.pool


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


def project_slice(
    item: Object, compared: Collection[Attribute] | None = None, *, uncounted: bool = False
) -> DeviceSlice | None:
    """Return what is kept of a ResourceSlice; None without devices. `compared` are the attributes to keep (None: all).

    Devices that share counters with others are left out, as one of them takes some of the others; so are tainted ones.
    With `uncounted` they are there, too, as Kubernetes gives them to claims that request them.
    """
    spec = item.get("spec") or {}
    pool, driver = spec.get("pool") or {}, str(spec.get("driver") or "")
    alike: dict[tuple[tuple[Attribute, str], ...], Mapping[Attribute, str]] = {}
    devices = []
    for at, one in enumerate(spec.get("devices") or ()):
        tainted = any(taint.get("effect") in REPELLING_EFFECTS for taint in one.get("taints") or ())
        if not uncounted and (tainted or one.get("consumesCounters")):
            continue
        attributes = _attributes(driver, one.get("attributes") or {}, compared)
        shared = alike.setdefault(tuple(attributes.items()), attributes)
        devices.append((intern(str(one.get("name") or at)), shared))
    if not devices:
        return None
    generation, name = int(pool.get("generation") or 0), str(pool.get("name") or "")
    return DeviceSlice(
        intern(driver), intern(name), generation, intern(str(spec.get("nodeName") or "")), tuple(devices)
    )


def _attributes(
    driver: str, attributes: Mapping[str, Object], compared: Collection[Attribute] | None
) -> Mapping[Attribute, str]:
    """Return attributes as text; one without a domain has that of its driver."""
    result = {}
    for key, value in attributes.items():
        domain, _, name = key.rpartition("/")
        if compared is None or (domain or driver, name) in compared:
            text = next((_text(item) for item in value.values()), "")
            result[intern(domain or driver), intern(name)] = intern(text)
    return result


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
            if (match := _DRIVER.fullmatch(text)) is not None and driver in ("", match["driver"]):
                driver = match["driver"]
            elif (match := _ATTRIBUTE.fullmatch(text)) is not None:
                attributes[match["domain"], match["name"]] = match["text"] if match["word"] is None else match["word"]
            else:
                return DeviceClass(name, resources, understood=False)
    return DeviceClass(name, resources, driver, tuple(sorted(attributes.items())))


def project_claim(item: Object) -> HeldDevices | None:
    """Return the devices of a claim; None where it has none, or where the pod's requests say the same."""
    status, annotations = item.get("status") or {}, item["metadata"].get("annotations") or {}
    results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or ()
    if annotations.get(EXTENDED_RESOURCE_CLAIM) == "true":
        return None
    used = (one for one in results if not one.get("adminAccess"))
    ids = frozenset(DeviceId(*(intern(str(one[part])) for part in ("driver", "pool", "device"))) for one in used)
    return HeldDevices(ids, GENERATED_CLAIM in annotations) if ids else None


def newest_slices(slices: Iterable[DeviceSlice]) -> Iterator[DeviceSlice]:
    """Return the slices of the newest generation of each of a driver's pools: what counts while it replaces them."""
    slices, newest = tuple(slices), dict[tuple[str, str], int]()
    for one in slices:
        newest[one.driver, one.pool] = max(newest.get((one.driver, one.pool), 0), one.generation)
    return (one for one in slices if one.generation == newest[one.driver, one.pool])


@dataclass(frozen=True, slots=True)
class NodeDevices:
    """The devices of one node by the resources of pools: how many there are, and which of them claims hold."""

    offered: Mapping[str, int]
    held: tuple[HeldDevice, ...] = ()


class HeldDevice(NamedTuple):
    """A device that claims hold: the resource that it counts as, and the keys of the claims."""

    resource: str
    claims: frozenset[str]


class DeviceIndex:
    """Slices and claims by pool and node, so that a change of one costs no more than the nodes that it is about.

    A pool here is a driver's: the devices of a node, as a rule.
    """

    def __init__(self, classes: Iterable[DeviceClass] = ()) -> None:
        self._by_resource = _by_resource(classes)
        self._slices: dict[str, DeviceSlice] = {}
        self._claims: dict[str, HeldDevices] = {}
        self._of_pool: dict[PoolId, set[str]] = {}
        """the keys of slices"""
        self._of_node: dict[str, set[str]] = {}
        """the keys of slices"""
        self._generations: dict[PoolId, Counter[int]] = {}
        """how many slices of each generation a pool has: those of the newest count, while a driver replaces them"""
        self._holders: dict[DeviceId, set[str]] = {}
        """the keys of the claims that hold a device"""

    @property
    def nodes(self) -> Set[str]:
        """The nodes of which there are slices."""
        return self._of_node.keys()

    def knows(self, resource: str) -> bool:
        """Whether a resource is of a class."""
        return resource in self._by_resource

    def set_classes(self, classes: Iterable[DeviceClass]) -> set[str]:
        """Use these classes from now on; return the nodes that this changes."""
        before, self._by_resource = self._by_resource, _by_resource(classes)
        return set() if before == self._by_resource else set(self.nodes)

    def put_slice(self, key: str, value: DeviceSlice | None) -> set[str]:
        """Keep a slice, or drop it; return the nodes that this changes."""
        result: set[str] = set()
        if (before := self._slices.pop(key, None)) is not None:
            _discard(self._of_pool, before.pool_id, key)
            _discard(self._of_node, before.node, key)
            result |= {before.node} | self._count_generation(before, -1)
        if value is not None:
            self._slices[key] = value
            self._of_pool.setdefault(value.pool_id, set()).add(key)
            self._of_node.setdefault(value.node, set()).add(key)
            result |= {value.node} | self._count_generation(value, 1)
        return result - {""}

    def _count_generation(self, changed: DeviceSlice, by: int) -> set[str]:
        """Note that a slice came or went; return the nodes of its pool where another generation is the newest now."""
        generations = self._generations.setdefault(changed.pool_id, Counter())
        before = max(generations, default=None)
        generations[changed.generation] += by
        if not generations[changed.generation]:
            del generations[changed.generation]
        if not generations:
            del self._generations[changed.pool_id]
        if max(generations, default=None) == before:
            return set()
        return {self._slices[key].node for key in self._of_pool.get(changed.pool_id, ())}

    def put_claim(self, key: str, value: HeldDevices | None) -> set[str]:
        """Keep the devices of a claim, or drop it; return the nodes that this changes."""
        before = self._claims.pop(key, NOTHING_HELD)
        now = value or NOTHING_HELD
        for device in before.devices:
            _discard(self._holders, device, key)
        for device in now.devices:
            self._holders.setdefault(device, set()).add(key)
        if now.devices:
            self._claims[key] = now
        changed = before.devices ^ now.devices if before.generated == now.generated else before.devices | now.devices
        return {node for device in changed for node in self._nodes_of(device)}

    def is_generated(self, key: str) -> bool:
        """Whether a claim that holds devices was generated for one pod."""
        return self._claims.get(key, NOTHING_HELD).generated

    def _nodes_of(self, device: DeviceId) -> Iterator[str]:
        for key in self._of_pool.get((device.driver, device.pool), ()):
            one = self._slices[key]
            if one.node and any(name == device.name for name, _ in one.devices):
                yield one.node

    def on(self, node: str, resources: Iterable[str]) -> NodeDevices:
        """Count the devices of a node by these resources, each once: by the first whose class selects it."""
        wanted = [(item, self._by_resource[item]) for item in resources if item in self._by_resource]
        offered, held, known = dict[str, int](), list[HeldDevice](), set[DeviceId]()
        for one in self._newest_of(node) if wanted else ():
            for name, attributes in one.devices:
                device = DeviceId(one.driver, one.pool, name)
                resource = next((item for item, of in wanted if of.selects(one.driver, attributes)), None)
                if resource is None or device in known:
                    continue
                known.add(device)
                offered[resource] = offered.get(resource, 0) + 1
                if device in self._holders:
                    held.append(HeldDevice(resource, frozenset(self._holders[device])))
        return NodeDevices(offered, tuple(held))

    def _newest_of(self, node: str) -> list[DeviceSlice]:
        slices = (self._slices[key] for key in sorted(self._of_node.get(node, ())))
        return [one for one in slices if one.generation == max(self._generations[one.pool_id])]

    def differs(self, other: DeviceIndex) -> set[str]:
        """Return the nodes whose devices, or the claims of these, are not as in another index."""
        nodes = {*self.nodes, *other.nodes}
        if self._by_resource != other._by_resource:
            return nodes - {""}
        return {node for node in nodes if node and self._facts(node) != other._facts(node)}

    def _facts(self, node: str) -> tuple[list[DeviceSlice], dict[DeviceId, dict[str, bool]]]:
        """Return the slices of a node, and the claims that hold its devices: whether each was generated."""
        slices = self._newest_of(node)
        devices = (DeviceId(one.driver, one.pool, name) for one in slices for name, _ in one.devices)
        held = {device: self._holders[device] for device in devices if device in self._holders}
        return slices, {device: {key: self.is_generated(key) for key in keys} for device, keys in held.items()}


def _by_resource(classes: Iterable[DeviceClass]) -> dict[str, DeviceClass]:
    return {resource: one for one in classes for resource in one.resources}


def _discard(index: dict[K, set[str]], name: K, key: str) -> None:
    keys = index[name]
    keys.discard(key)
    if not keys:
        del index[name]


def index_of(
    slices: Mapping[str, DeviceSlice], classes: Iterable[DeviceClass], claims: Mapping[str, HeldDevices]
) -> DeviceIndex:
    """Return an index of these slices and claims, by their keys."""
    result = DeviceIndex(classes)
    for key, one in slices.items():
        result.put_slice(key, one)
    for key, held in claims.items():
        result.put_claim(key, held)
    return result
