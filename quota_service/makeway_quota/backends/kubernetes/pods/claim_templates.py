"""Read the ResourceClaimTemplates of profiles (DRA), and find why pods with them would not get their profile's GPUs.

Called by the backend before it makes pods of jobs and before notebooks are queued, by the check of a policy document,
and by `doctor`. The GPUs that the plan counts are those of the DeviceClass of the pool's resource: the claims of a pod
have to request exactly these. Only the last two ask for devices of a driver: no node may have them at the moment.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from makeway_api.quantities import count, listed

from ....engine.snapshot import GPU, Profile
from ....policy import Document
from ....policy.pod_template import claim_templates_of
from ..api.client import ApiClient, ApiStatusError, Object
from ..cluster.dra_devices import (
    CLASSES,
    GROUP,
    IMPLICIT_RESOURCE_PREFIX,
    SLICES,
    DeviceClass,
    newest_slices,
    project_class,
    project_slice,
)
from ..cluster.nodes import NodeSelector

KEPT_SECONDS = 60.0
"""How long templates that fit are not read again: a change of one is refused by Kubernetes, but not its replacement."""
REFUSED_SECONDS = 5.0
"""How long those that do not fit are not read again, however many ask for them"""
MAX_KEPT = 256
"""Answers of that kind, whose oldest is dropped"""
NOT_FOUND = 404
UNREADABLE = (401, 403)
"""The answers where the account may not look: then pods are made, and Kubernetes says what is wrong"""

Offered = dict[tuple[str, bool], bool]
"""Whether a driver offers devices of a class, by its name, and whether those count that the pool does not"""


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """Whole devices of a class that a claim requests."""

    device_class: str
    count: int


def project_template(item: Object) -> tuple[DeviceRequest, ...]:
    """Return the devices that a ResourceClaimTemplate requests; ValueError where their number depends on the node."""
    result = []
    for request in (((item.get("spec") or {}).get("spec") or {}).get("devices") or {}).get("requests") or ():
        name, exactly = request.get("name"), request.get("exactly")
        if not isinstance(exactly, dict):
            raise ValueError(f"its request {name} has alternatives (firstAvailable); name one DeviceClass (exactly)")
        if exactly.get("adminAccess"):
            continue  # holds nothing
        if (exactly.get("allocationMode") or "ExactCount") != "ExactCount":
            raise ValueError(f"its request {name} is for all devices of a node; set a count")
        if exactly.get("selectors"):
            raise ValueError(f"its request {name} has selectors of its own; write them into a DeviceClass")
        if exactly.get("capacity"):
            raise ValueError(f"its request {name} is for a part of a device; only whole devices are counted")
        result.append(DeviceRequest(str(exactly.get("deviceClassName") or ""), int(exactly.get("count") or 1)))
    return tuple(result)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What was found of the templates of a pod, until when; without a problem, also the classes that they request."""

    until: float
    problem: str
    classes: tuple[DeviceClass, ...] = ()


def count_problem(requests: Iterable[DeviceRequest], gpus: int, resource: str, classes: Sequence[DeviceClass]) -> str:
    """Return why the requests of a pod's claims are not the `gpus` whole GPUs of a pool's resource; "" where they are.

    Requests of other classes, such as network cards, are the template's own affair.
    """
    own = [one for one in classes if resource in one.resources]
    if not own:
        if resource.startswith(IMPLICIT_RESOURCE_PREFIX):
            return f"there is no DeviceClass {resource.removeprefix(IMPLICIT_RESOURCE_PREFIX)}: install its driver"
        return f"the resource of the pool, {resource}, is of no DeviceClass, so that claims cannot request its GPUs"
    names, by_class = {one.name for one in own}, Counter[str]()
    for one in requests:
        by_class[one.device_class] += one.count
    if sum(by_class[name] for name in names) == gpus:
        return ""
    asked = listed(f"{many} of {name}" for name, many in sorted(by_class.items()) if many) or "no device"
    wanted = f"{count(gpus, 'device')} of the DeviceClass {listed(sorted(names))}"
    return f"its claims request {asked}, and the profile has {count(gpus, 'GPU')}: they have to request {wanted}"


class ClaimTemplates:
    """The claim templates of one cluster, as the account of the service may read them."""

    def __init__(self, client: ApiClient, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._monotonic = monotonic
        self._kept: dict[tuple[str, str, tuple[str, ...], int], _Answer] = {}

    async def problem(self, template: Mapping[str, Any], gpus: int, resource: str, namespace: str) -> str:
        """Return why a pod of this pod template would get its GPUs on no node, whatever nodes there are; "" else.

        `gpus` are those of one pod, `resource` is that of the pool. Also "" where the account may not look.
        ApiStatusError and ApiUnreachable as the client raises them.
        """
        return (await self._answer(template, gpus, resource, namespace)).problem

    async def _answer(self, template: Mapping[str, Any], gpus: int, resource: str, namespace: str) -> _Answer:
        names = tuple(sorted(claim_templates_of(template).values()))
        key = namespace, resource, names, gpus
        if not names or not gpus:
            return _Answer(0.0, "")
        if (kept := self._kept.get(key)) is not None and kept.until > self._monotonic():
            return kept
        try:
            problem, classes = await self._read(names, gpus, resource, namespace)
        except ApiStatusError as refusal:
            if refusal.status in UNREADABLE:
                return _Answer(0.0, "")
            raise
        now = self._monotonic()
        answer = _Answer(now + (REFUSED_SECONDS if problem else KEPT_SECONDS), problem, classes)
        valid = [(one, item) for one, item in self._kept.items() if item.until > now and one != key]
        self._kept = dict([*valid[1 - MAX_KEPT :], (key, answer)])
        return answer

    async def _read(
        self, names: Iterable[str], gpus: int, resource: str, namespace: str
    ) -> tuple[str, tuple[DeviceClass, ...]]:
        """Return what is wrong with templates, whatever nodes there are, or else the classes that they request."""
        requests: list[DeviceRequest] = []
        for name in names:
            try:
                item = await self._client.get(f"{GROUP}/namespaces/{namespace}/resourceclaimtemplates/{name}")
                requests += project_template(item)
            except ApiStatusError as refusal:
                if refusal.status != NOT_FOUND:
                    raise
                return f"there is no ResourceClaimTemplate {name} in the namespace {namespace} (version v1)", ()
            except ValueError as error:
                return f"the ResourceClaimTemplate {name} in the namespace {namespace} cannot be counted: {error}", ()
        classes = [project_class(item) for item in (await self._client.get(CLASSES)).get("items") or ()]
        if why := count_problem(requests, gpus, resource, classes):
            return why, ()
        by_name, requested = {one.name: one for one in classes}, dict.fromkeys(one.device_class for one in requests)
        for name in requested:
            if name not in by_name:
                why = f"its claims request devices of the DeviceClass {name}, which is not there: install its driver"
                return why, ()
        return "", tuple(by_name[name] for name in requested)

    async def missing_driver(self, resource: str, offered: Offered) -> str:
        """Return that no driver offers devices of a resource's class; "" where one does, or that cannot be read."""
        try:
            items = (await self._client.get(CLASSES)).get("items") or ()
        except ApiStatusError as refusal:
            if refusal.status in (*UNREADABLE, NOT_FOUND):
                return ""
            raise
        classes = [one for one in map(project_class, items) if resource in one.resources]
        name = classes[0].name if classes else ""
        if classes and not any(one.understood for one in classes):
            return f"Makeway cannot evaluate the selectors of the DeviceClass {name}, and counts none of its devices"
        for one in classes:
            if one.understood and await self._is_offered(one, offered, uncounted=False):
                return ""
        return _no_driver(name) if classes else ""

    async def _missing_drivers(self, classes: Iterable[DeviceClass], resource: str, offered: Offered) -> list[str]:
        """Return that no driver offers devices of these classes, other than that of the pool's own resource."""
        others = [one for one in classes if one.understood and resource not in one.resources]
        return [_no_driver(one.name) for one in others if not await self._is_offered(one, offered, uncounted=True)]

    async def _is_offered(self, device_class: DeviceClass, offered: Offered, *, uncounted: bool) -> bool:
        """Whether some node has a device of a class whose selectors are understood, or that cannot be read."""
        key = device_class.name, uncounted
        if key not in offered:
            offered[key] = await self._read_offered(device_class, uncounted=uncounted)
        return offered[key]

    async def _read_offered(self, device_class: DeviceClass, *, uncounted: bool) -> bool:
        query = {"fieldSelector": f"spec.driver={device_class.driver}"} if device_class.driver else None
        try:
            items = (await self._client.get(SLICES, query)).get("items") or ()
        except ApiStatusError as refusal:
            if refusal.status in (*UNREADABLE, NOT_FOUND):
                return True
            raise
        newest = newest_slices(filter(None, (project_slice(one, uncounted=uncounted) for one in items)))
        return any(device_class.selects(one.driver, attributes) for one in newest for _, attributes in one.devices)

    async def notebook_problem(
        self, document: Document, profile: Profile, selectors: Sequence[NodeSelector], namespace: str
    ) -> str:
        """Return why no pod of a profile would get its GPUs, in whichever of its pools; "" where it would in one."""
        template, result = document.profile_facts[profile.name].pod, ""
        if not claim_templates_of(template):
            return ""
        served = [one for one in selectors if not profile.pools or one.pool in profile.pools]
        for resource in dict.fromkeys(one.resource for one in served):
            why = await self.problem(template, profile.gpus // GPU, resource, namespace)
            if not why:
                return ""
            result = result or why
        return result

    async def profile_problems(
        self, document: Document, selectors: Sequence[NodeSelector], namespaces: Mapping[str, str]
    ) -> list[tuple[str, str]]:
        """Return the profiles of a document whose pods would not get their GPUs, each with the reason, in its order.

        `namespaces` has that of the pods of each kind of workload, "job" and "session".
        """
        result: list[tuple[str, str]] = []
        drivers, offered = dict[str, str](), Offered()
        for profile in document.profiles:
            facts = document.profile_facts[profile.name]
            pools = [one for one in selectors if not profile.pools or one.pool in profile.pools]
            if not claim_templates_of(facts.pod) or not pools:
                continue
            for resource in dict.fromkeys(one.resource for one in pools):
                for space in _spaces(facts.kinds, namespaces):
                    answer = await self._answer(facts.pod, profile.gpus // GPU, resource, space)
                    if answer.problem:
                        result.append((profile.name, answer.problem))
                    drivers_of = await self._missing_drivers(answer.classes, resource, offered)
                    result += ((profile.name, why) for why in drivers_of)
                if resource not in drivers:
                    drivers[resource] = await self.missing_driver(resource, offered)
                if why := drivers[resource]:
                    result.append((profile.name, why))
        return list(dict.fromkeys(result))


def _no_driver(name: str) -> str:
    return f"no driver offers devices of the DeviceClass {name}: install it on the nodes, or see its log"


def _spaces(kinds: Iterable[str], namespaces: Mapping[str, str]) -> Iterator[str]:
    """Return the namespaces of the pods of these kinds, each once."""
    return iter(dict.fromkeys(namespaces[kind] for kind in kinds if kind in namespaces))
