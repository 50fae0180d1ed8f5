"""Read the ResourceClaimTemplates of profiles (DRA), and find why pods with them would not get their profile's GPUs.

Called by the backend before it makes pods of jobs and before notebooks are queued, by the check of a policy document,
and by `doctor`. The GPUs that the plan
counts are those of the DeviceClass of the pool's resource: the claims of a pod have to request exactly these.
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
from ....policy.pod_template import claims_of
from ..api.client import ApiClient, ApiRefusal, Object
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
NOT_FOUND = 404
UNREADABLE = (401, 403)
"""The answers where the account may not look: then pods are made, and Kubernetes says what is wrong"""


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """Whole devices of a class that a claim requests."""

    device_class: str
    count: int


def project_template(item: Object) -> tuple[DeviceRequest, ...]:
    """Return the devices that a ResourceClaimTemplate requests; ValueError where their number depends on the node."""
    found = []
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
        found.append(DeviceRequest(str(exactly.get("deviceClassName") or ""), int(exactly.get("count") or 1)))
    return tuple(found)


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
        self._fitting: dict[tuple[str, str, tuple[str, ...], int], float] = {}
        """until when templates that fit are not read again"""

    async def problem(
        self,
        template: Mapping[str, Any],
        gpus: int,
        resource: str,
        namespace: str,
        offered: dict[str, bool] | None = None,
    ) -> str:
        """Return why a pod of this pod template would not get its GPUs in a namespace; "" where it would.

        `gpus` are those of one pod, `resource` is that of the pool; `offered` keeps which classes have devices, for the
        caller's next questions. Also "" where the account may not look. ApiRefusal and ApiUnreachable as the client
        raises them.
        """
        names = tuple(sorted(set(claims_of(template).values())))
        key = namespace, resource, names, gpus
        if not names or not gpus or self._fitting.get(key, 0.0) > self._monotonic():
            return ""
        try:
            if not (
                found := await self._problem(template, gpus, resource, namespace, {} if offered is None else offered)
            ):
                self._fitting = {one: until for one, until in self._fitting.items() if until > self._monotonic()}
                self._fitting[key] = self._monotonic() + KEPT_SECONDS
        except ApiRefusal as refusal:
            if refusal.status in UNREADABLE:
                return ""
            raise
        return found

    async def _problem(
        self, template: Mapping[str, Any], gpus: int, resource: str, namespace: str, offered: dict[str, bool]
    ) -> str:
        requests: list[DeviceRequest] = []
        for name in claims_of(template).values():
            try:
                item = await self._client.get(f"{GROUP}/namespaces/{namespace}/resourceclaimtemplates/{name}")
                requests += project_template(item)
            except ApiRefusal as refusal:
                if refusal.status != NOT_FOUND:
                    raise
                return f"there is no ResourceClaimTemplate {name} in the namespace {namespace} (version v1)"
            except ValueError as error:
                return f"the ResourceClaimTemplate {name} in the namespace {namespace} cannot be counted: {error}"
        classes = [project_class(item) for item in (await self._client.get(CLASSES)).get("items") or ()]
        if why := count_problem(requests, gpus, resource, classes):
            return why
        by_name = {one.name: one for one in classes}
        for name in dict.fromkeys(one.device_class for one in requests):
            if name not in by_name:
                return f"its claims request devices of the DeviceClass {name}, which is not there: install its driver"
            if by_name[name].understood and not await self._is_offered(by_name[name], offered):
                return _no_driver(name)
        return ""

    async def missing_driver(self, resource: str, offered: dict[str, bool]) -> str:
        """Return that no driver offers devices of a resource's class; "" where one does, or that cannot be read."""
        try:
            items = (await self._client.get(CLASSES)).get("items") or ()
        except ApiRefusal as refusal:
            if refusal.status in (*UNREADABLE, NOT_FOUND):
                return ""
            raise
        classes = [one for one in map(project_class, items) if resource in one.resources]
        name = classes[0].name if classes else ""
        if classes and not any(one.understood for one in classes):
            return f"Makeway cannot evaluate the selectors of the DeviceClass {name}, and counts none of its devices"
        for one in classes:
            if one.understood and await self._is_offered(one, offered):
                return ""
        return _no_driver(name) if classes else ""

    async def _is_offered(self, device_class: DeviceClass, offered: dict[str, bool]) -> bool:
        """Whether some node has a device of a class whose selectors are understood, or that cannot be read."""
        if device_class.name not in offered:
            offered[device_class.name] = await self._read_offered(device_class)
        return offered[device_class.name]

    async def _read_offered(self, device_class: DeviceClass) -> bool:
        query = {"fieldSelector": f"spec.driver={device_class.driver}"} if device_class.driver else None
        try:
            items = (await self._client.get(SLICES, query)).get("items") or ()
        except ApiRefusal as refusal:
            if refusal.status in (*UNREADABLE, NOT_FOUND):
                return True
            raise
        newest = newest_slices(filter(None, map(project_slice, items)))
        return any(device_class.selects(one.driver, found) for one in newest for _, found in one.devices)

    async def notebook_problem(
        self, document: Document, profile: Profile, selectors: Sequence[NodeSelector], namespace: str
    ) -> str:
        """Return why no pod of a profile would get its GPUs, in whichever of its pools; "" where it would in one."""
        template, found = document.profile_facts[profile.name].pod, ""
        if not claims_of(template):
            return ""
        served = [one for one in selectors if not profile.pools or one.pool in profile.pools]
        for resource in dict.fromkeys(one.resource for one in served):
            why = await self.problem(template, profile.gpus // GPU, resource, namespace)
            if not why:
                return ""
            found = found or why
        return found

    async def profile_problems(
        self, document: Document, selectors: Sequence[NodeSelector], namespaces: Mapping[str, str]
    ) -> list[tuple[str, str]]:
        """Return the profiles of a document whose pods would not get their GPUs, each with the reason, in its order.

        `namespaces` has that of the pods of each kind of workload, "job" and "session".
        """
        found: list[tuple[str, str]] = []
        drivers, offered = dict[str, str](), dict[str, bool]()
        for profile in document.profiles:
            facts = document.profile_facts[profile.name]
            pools = [one for one in selectors if not profile.pools or one.pool in profile.pools]
            if not claims_of(facts.pod) or not pools:
                continue
            for resource in dict.fromkeys(one.resource for one in pools):
                for space in _spaces(facts.kinds, namespaces):
                    if why := await self.problem(facts.pod, profile.gpus // GPU, resource, space, offered):
                        found.append((profile.name, why))
                if resource not in drivers:
                    drivers[resource] = await self.missing_driver(resource, offered)
                if why := drivers[resource]:
                    found.append((profile.name, why))
        return list(dict.fromkeys(found))


def _no_driver(name: str) -> str:
    return f"no driver offers devices of the DeviceClass {name}: install it on the nodes, or see its log"


def _spaces(kinds: Iterable[str], namespaces: Mapping[str, str]) -> Iterator[str]:
    """Return the namespaces of the pods of these kinds, each once."""
    return iter(dict.fromkeys(namespaces[kind] for kind in kinds if kind in namespaces))
