"""Launch machines by the cluster's own autoscaler: the provider `kubernetes` of deployments.

Its methods block, and are called in threads: each makes its requests in an event loop of its own. All state is in the
cluster, in one ConfigMap for each machine, so that any replica goes on with it. A deployment asks for nodes by
placeholders, or by ProvisioningRequests.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, TypeVar

from makeway_api.pods import INSTANCE, KIND, MANAGED_BY, MANAGER
from makeway_api.quantities import listed

from ....autoscale.instances import Instance, InstanceList
from ....autoscale.provider import (
    CallOutcomeUnknown,
    Denied,
    InvalidLaunch,
    JoinData,
    ProviderError,
    QuotaReached,
    StockOut,
    Throttled,
)
from ..api.access_reviews import denied_verbs
from ..api.client import ApiClient, ApiStatusError, ApiUnreachable, Object
from ..cluster.nodes import ClusterNode, NodeSelector, project_node
from ..cluster.pod_requests import ENDED, MACHINE
from ..pods.manifest import PodSettings
from .objects import DEPLOYMENT, ScaleUp, keeper, names_of, offers, placeholder, record, refusal, scale_up_of
from .provisioning_requests import (
    CRD,
    REQUEST_RIGHTS,
    answer_of,
    class_of,
    consumption,
    is_revoked,
    provisioning_request,
    requests_path,
    template,
)

T = TypeVar("T")
log = logging.getLogger("makeway.machines")

DECISION_SECONDS = 15.0
"""How long a launch waits for what the autoscaler says, which looks every ten seconds; later, lists say it"""
POLL_SECONDS = 1.0
UNFINISHED_SECONDS = 120.0
"""Seconds after which a record without its placeholder is of a launch that broke off"""


@dataclass(frozen=True, slots=True)
class _Listing:
    """What one list read: the records of all deployments, pods of machines by name, and busy workers by node.

    `requests`: the ProvisioningRequests by name; None where they cannot be read.
    """

    records: tuple[Object, ...]
    pods: Mapping[str, Object]
    requests: Mapping[str, Object] | None
    busy: Mapping[str, int]


class KubernetesProvider:
    """The cluster as a provider. `selector` returns the node selector of a pool as the policy in force has it."""

    def __init__(
        self,
        new_client: Callable[[], ApiClient],
        settings: PodSettings,
        selector: Callable[[str], NodeSelector | None],
        priority: str = "",
        decision_seconds: float = DECISION_SECONDS,
        provisioning_class: str = "",
    ) -> None:
        """`priority`: the class of placeholders, below that of all work.

        `provisioning_class`: that of the deployment's ProvisioningRequests; "" for placeholders alone.
        """
        self._new_client, self._settings, self._selector = new_client, settings, selector
        self._priority, self._decision_seconds = priority, decision_seconds
        self._provisioning_class = provisioning_class
        space = f"/api/v1/namespaces/{settings.namespace}"
        self._records, self._pods, self._events = f"{space}/configmaps", f"{space}/pods", f"{space}/events"
        self._templates, self._requests = f"{space}/podtemplates", requests_path(settings.namespace)

    # -- the protocol

    def check(self) -> None:
        """Raise Denied where the service's account lacks a right in the namespace of jobs, also one to write.

        InvalidLaunch where the deployment asks by ProvisioningRequests, and the cluster has no such kind.
        """
        own_labels = {"labelSelector": f"{KIND}=machine,{INSTANCE}={self._settings.instance}", "limit": "1"}

        async def read(client: ApiClient) -> None:
            for path in (self._records, self._pods, self._events):
                await client.get(path, {"limit": "1"} if path == self._events else own_labels)
            if self._provisioning_class:
                await self._check_requests(client)

        self._run(read)

    async def _check_requests(self, client: ApiClient) -> None:
        space, denied = self._settings.namespace, []
        for group, resource, verbs in REQUEST_RIGHTS:
            missing = await denied_verbs(client, group, resource, verbs, space)
            denied += [f"{', '.join(missing)} {resource}"] if missing else []
        if denied:
            raise Denied(
                f"the account of the service may not {listed(denied)} in the namespace {space}; "
                "the chart gives these rights by clusterAutoscaler.provisioningRequests"
            )
        try:
            await client.get(self._requests, {"limit": "1"})
        except ApiStatusError as error:
            raise _launch_error(error) from error

    def list(self, deployment: str, now: float) -> InstanceList:
        """Return the machines of a deployment; a placeholder that was bound makes way for work here."""

        async def read(client: ApiClient) -> InstanceList:
            cluster = await self._read(client, deployment)
            machine_of_node = _machine_of_nodes(cluster)
            own_records = [one for one in cluster.records if one["metadata"]["labels"].get(DEPLOYMENT) == deployment]
            await self._delete_strays(client, cluster, deployment, now)
            own_records = [one for one in own_records if not self._is_launching(cluster, one, now)]
            result = [await self._instance_or_none(client, cluster, one, machine_of_node, now) for one in own_records]
            complete = None not in result
            return InstanceList(now, tuple(one for one in result if one is not None), complete=complete)

        return self._run(read)

    def launch(self, request: str, token: str, join: JoinData | None = None) -> Instance:
        """Create the placeholder, and wait a while for what the autoscaler says of it; nothing joins by an agent."""
        requested = json.loads(request)
        selector = self._selector(str(requested.get("pool", "")))
        if selector is None:
            raise InvalidLaunch(f"the policy has no pool {requested.get('pool')!r} with labels of nodes")

        async def create(client: ApiClient) -> Instance:
            return await self._launched(client, request, requested, selector)

        return self._run(create)

    def terminate(self, instance: str) -> bool:
        """Delete what keeps the node; the cluster removes it when it likes. False where there is no such machine."""

        async def end(client: ApiClient) -> bool:
            try:
                result = await client.get(f"{self._records}/{instance}")
            except ApiStatusError as error:
                if error.status == 404:
                    return False
                raise
            if not result["data"]["ended"]:
                result["data"]["ended"] = "true"
                await client.replace(f"{self._records}/{instance}", result)
            placed = await self._delete_objects(client, result)
            if not placed and not result["data"]["node"]:
                await client.delete(f"{self._records}/{instance}")
            return True

        return self._run(end)

    def console(self, instance: str) -> str:
        """Return what the scheduler and the autoscaler say of the placeholder, and of a ProvisioningRequest."""
        pod = f"{instance}-place"

        async def read(client: ApiClient) -> str:
            events = [*await self._events_of(client, instance), *await self._events_of(client, pod)]
            lines = (f"{one.get('reason')}: {one.get('message')}" for one in events)
            return "\n".join(dict.fromkeys(lines))

        return self._run(read)

    # -- a launch

    async def _launched(
        self, client: ApiClient, request: str, requested: Mapping[str, Any], selector: NodeSelector
    ) -> Instance:
        machine, deployment = str(requested["machine"]), str(requested["deployment"])
        names = names_of(machine)
        stored = await _created(client, self._records, record(self._settings, request))
        if stored["data"]["request"] != request:
            raise CallOutcomeUnknown(f"{names.record} is the record of another request")
        if stored["data"]["ended"]:
            return Instance(names.record, machine, deployment, "terminated")
        if not stored["data"]["node"]:
            try:
                await self._ask(client, stored, requested, selector)
            except ApiStatusError as error:
                if 400 <= error.status < 500:  # certainly not created: of others the record is the trace
                    with suppress(ApiStatusError):  # what may not be deleted goes with the record
                        await self._delete_objects(client, stored)
                    await client.delete(f"{self._records}/{names.record}")
                raise _launch_error(error) from error
            await self._wait(client, stored)
        return Instance(names.record, machine, deployment)

    async def _ask(
        self, client: ApiClient, stored: Object, requested: Mapping[str, Any], selector: NodeSelector
    ) -> None:
        """Create what the autoscaler adds a node for: the placeholder, or a ProvisioningRequest of its shape."""
        wanted_class = class_of(stored)
        marks = consumption(str(requested["machine"]), wanted_class)
        pod = placeholder(self._settings, requested, selector, self._priority, marks)
        if not wanted_class:
            await _created(client, self._pods, pod)
            return
        await _created(client, self._templates, template(pod, stored))
        await _created(client, self._requests, provisioning_request(requested, stored))

    async def _wait(self, client: ApiClient, stored: Object) -> None:
        """Wait until the placeholder is bound, or the autoscaler has said what it does; StockOut if it adds no node."""
        until = time.monotonic() + self._decision_seconds
        while time.monotonic() < until:
            try:
                answer = await self._answer(client, stored)
            except ApiStatusError as error:
                if error.status == 404:  # a list has shown the refusal before, and it was ended for that
                    return
                raise
            if answer is not None and answer.coming:
                if class_of(stored):
                    await self._consume(client, stored)
                return
            if answer is not None and not await self._delete_objects(client, stored):
                await client.delete(f"{self._records}/{stored['metadata']['name']}")
                result = StockOut(refusal(answer))
                result.instance = names_of(
                    str(stored["metadata"]["labels"][MACHINE])
                ).record  # a list may have shown it
                raise result
            await asyncio.sleep(min(POLL_SECONDS, self._decision_seconds / 5))

    async def _answer(self, client: ApiClient, stored: Object) -> ScaleUp | None:
        """Return what became of what was asked for; None where nothing is known yet."""
        names = names_of(str(stored["metadata"]["labels"][MACHINE]))
        if class_of(stored):
            return answer_of(await client.get(f"{self._requests}/{names.record}"))
        pod = await client.get(f"{self._pods}/{names.placeholder}")
        if pod["spec"].get("nodeName"):
            return ScaleUp(True, "")
        return scale_up_of(await self._events_of(client, names.placeholder, pod["metadata"]["uid"]))

    # -- a list

    async def _read(self, client: ApiClient, deployment: str) -> _Listing:
        """Read the records before the pods: a record without a pod may be of a launch that is under way."""
        own_labels = f"{MANAGED_BY}={MANAGER},{INSTANCE}={self._settings.instance}"
        machines = f"{own_labels},{KIND}=machine"
        records = await _items(client, self._records, {"labelSelector": machines})
        pods = await _items(client, self._pods, {"labelSelector": machines})
        jobs = await _items(client, self._pods, {"labelSelector": f"{own_labels},{KIND}=job"})
        running = (one for one in jobs if (one.get("status") or {}).get("phase") not in ENDED)
        busy = Counter(str(one["spec"]["nodeName"]) for one in running if one["spec"].get("nodeName"))
        asked = any(class_of(one) for one in records if one["metadata"]["labels"].get(DEPLOYMENT) == deployment)
        requests = await self._read_requests(client, machines) if asked else {}
        return _Listing(tuple(records), _by_name(pods), requests, busy)

    async def _read_requests(self, client: ApiClient, machines: str) -> Mapping[str, Object] | None:
        """Return the ProvisioningRequests; None without the right to read them, or where the cluster has none."""
        try:
            return _by_name(await _items(client, self._requests, {"labelSelector": machines}))
        except ApiStatusError as error:
            if error.status not in (403, 404):
                raise
            log.warning("ProvisioningRequests cannot be read, so nothing is known of those that wait: %s", error)
            return None

    def _is_launching(self, cluster: _Listing, stored: Object, now: float) -> bool:
        """Whether the launch of a machine still waits: its call answers, and leaves nothing where none is added."""
        data = stored.get("data") or {}
        pod = cluster.pods.get(names_of(str(stored["metadata"]["labels"].get(MACHINE))).placeholder) or {}
        undecided = not (data.get("ended") or data.get("node") or (pod.get("spec") or {}).get("nodeName"))
        return undecided and abs(now - (_created_at(stored) or 0.0)) < self._decision_seconds

    async def _delete_strays(self, client: ApiClient, cluster: _Listing, deployment: str, now: float) -> None:
        """Delete pods whose record is gone, as of a launch that went on after its end; a node would come for ever."""
        known = {one["metadata"]["labels"].get(MACHINE) for one in cluster.records}
        for name, pod in cluster.pods.items():
            labels = pod["metadata"]["labels"]
            stray = labels.get(DEPLOYMENT) == deployment and labels.get(MACHINE) not in known
            if stray and now - (_created_at(pod) or now) > UNFINISHED_SECONDS:
                log.warning("The pod %s of a machine without a record is deleted", name)
                await client.delete(f"{self._pods}/{name}")

    async def _instance_or_none(
        self, client: ApiClient, cluster: _Listing, stored: Object, machine_of_node: Mapping[str, str], now: float
    ) -> Instance | None:
        """Return one machine; None where it is not known or that fails, as it holds up no other one."""
        try:
            return await self._instance(client, cluster, stored, machine_of_node, now)
        except ApiStatusError as error:
            why = str(error)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"its record is damaged: {type(error).__name__} {error}"
        log.warning("%s cannot be brought up to date: %s", stored["metadata"]["name"], why)
        return None

    async def _instance(
        self, client: ApiClient, cluster: _Listing, stored: Object, machine_of_node: Mapping[str, str], now: float
    ) -> Instance | None:
        """Return one machine, and bring its objects to what it is now; None where it is not known."""
        labels = stored["metadata"]["labels"]
        machine = str(labels[MACHINE])
        names = names_of(machine)
        result = Instance(names.record, machine, str(labels[DEPLOYMENT]), "pending", _created_at(stored))
        pod = cluster.pods.get(names.placeholder)
        node = stored["data"]["node"] or ((pod or {}).get("spec") or {}).get("nodeName") or ""
        if not node:
            return await self._unbound(client, cluster, stored, result, now)
        known = await self._node(client, node)
        if known is None or machine_of_node.get(node, machine) != machine:
            await self._delete_objects(client, stored)
            await client.delete(f"{self._records}/{names.record}")
            return replace(result, state="terminated")
        if stored["data"]["ended"]:
            return replace(result, state="stopping")
        return await self._bound(client, cluster, stored, known, result)

    async def _unbound(
        self, client: ApiClient, cluster: _Listing, stored: Object, result: Instance, now: float
    ) -> Instance | None:
        """Return a machine without a node: one that was ended, or broke off, is over. None where it is not known."""
        by_request, pod = bool(class_of(stored)), cluster.pods.get(names_of(result.machine).placeholder)
        if by_request and cluster.requests is None and not stored["data"]["ended"]:
            return None
        asked = (cluster.requests or {}).get(result.id) if by_request else pod
        broken_off = asked is None and now - (result.launched_at or now) > UNFINISHED_SECONDS
        if stored["data"]["ended"] or broken_off:
            if not await self._delete_objects(client, stored):
                await client.delete(f"{self._records}/{result.id}")
            return replace(result, state="terminated")
        if asked is None:
            return replace(result, queued=by_request)
        if by_request:
            answer = answer_of(asked, consumed=pod is not None)
        else:
            answer = await self._answer(client, stored)
        if answer is not None and not answer.coming:
            return replace(result, refused=refusal(answer))
        if by_request and answer is not None and pod is None:
            await self._consume(client, stored)
        return replace(result, queued=by_request and answer is None)

    async def _consume(self, client: ApiClient, stored: Object) -> None:
        """Create the placeholder once its request is provisioned; a pod that came earlier would be ignored."""
        requested = json.loads(stored["data"]["request"])
        selector = self._selector(str(requested.get("pool", "")))
        if selector is not None:
            marks = consumption(str(requested["machine"]), class_of(stored))
            await _created(client, self._pods, placeholder(self._settings, requested, selector, self._priority, marks))

    async def _bound(
        self, client: ApiClient, cluster: _Listing, stored: Object, node: ClusterNode, result: Instance
    ) -> Instance:
        """Return a machine on its node: ready once the node has the GPUs, and nothing of ours holds them."""
        requested, names = json.loads(stored["data"]["request"]), names_of(result.machine)
        revoked = node.leaving or is_revoked((cluster.requests or {}).get(names.record))
        result = replace(result, revoked=revoked)
        if not stored["data"]["node"]:
            stored["data"]["node"] = node.name
            await client.replace(f"{self._records}/{names.record}", stored)
        if names.keeper not in cluster.pods:
            await _created(client, self._pods, keeper(self._settings, requested, node.name, self._priority))
        selector = self._selector(str(requested.get("pool", "")))
        gpus = int(requested["gpus"])
        if selector is None or not offers(node, selector.resource, gpus):
            return result
        if names.placeholder in cluster.pods:
            await client.delete(f"{self._pods}/{names.placeholder}")
        offered = node.allocatable.get(selector.resource, 0) if gpus else 0
        return replace(result, state="running", node=node.name, gpus=offered, attempts=cluster.busy.get(node.name, 0))

    # -- requests

    async def _node(self, client: ApiClient, name: str) -> ClusterNode | None:
        result = await client.get("/api/v1/nodes", {"fieldSelector": f"metadata.name={name}"})
        return next((project_node(one) for one in result.get("items") or ()), None)

    async def _events_of(self, client: ApiClient, pod: str, uid: str = "") -> Sequence[Object]:
        about = f"involvedObject.name={pod}" + (f",involvedObject.uid={uid}" if uid else "")
        with suppress(ApiStatusError):  # without the right to read events the time-outs of machines hold
            return await _items(client, self._events, {"fieldSelector": about})
        return ()

    async def _delete_objects(self, client: ApiClient, stored: Object) -> bool:
        """Delete all of a machine but its record; return whether the placeholder has got a node meanwhile.

        The request goes first, so that no node is added for it any more. Without the right to delete it, it goes with
        the record, as the pods are deleted all the same.
        """
        names = names_of(str(stored["metadata"]["labels"][MACHINE]))
        for path in (self._requests, self._templates) if class_of(stored) else ():
            try:
                await client.delete(f"{path}/{names.record}")
            except ApiStatusError as error:
                if error.status not in (403, 404):
                    raise
                log.warning("%s is left to the cluster, which removes it with its record: %s", names.record, error)
        await client.delete(f"{self._pods}/{names.keeper}")
        await client.delete(f"{self._pods}/{names.placeholder}")
        try:
            remaining = await client.get(f"{self._pods}/{names.placeholder}")
        except ApiStatusError as error:
            if error.status != 404:
                raise
            return False
        return bool((remaining.get("spec") or {}).get("nodeName"))

    def _run(self, work: Callable[[ApiClient], Coroutine[Any, Any, T]]) -> T:
        async def run() -> T:
            client = self._new_client()
            try:
                return await work(client)
            finally:
                await client.close()

        try:
            return asyncio.run(run())
        except ApiUnreachable as error:
            raise CallOutcomeUnknown(str(error)) from error
        except ApiStatusError as error:
            raise _error(error) from error


def _machine_of_nodes(cluster: _Listing) -> dict[str, str]:
    """Return the machine of each node: the newest of those that have it, as one that was ended may be on it, too."""
    result: dict[str, tuple[bool, str, str]] = {}
    for one in cluster.records:
        data = one.get("data") or {}
        machine = str(one["metadata"]["labels"].get(MACHINE, ""))
        pod = cluster.pods.get(names_of(machine).placeholder) or {}
        node = data.get("node") or (pod.get("spec") or {}).get("nodeName")
        if node:
            key = (not data.get("ended"), str(one["metadata"].get("creationTimestamp") or ""), machine)
            result[node] = max(key, result.get(node, key))
    return {node: machine for node, (_, _, machine) in result.items()}


async def _items(client: ApiClient, path: str, query: Mapping[str, str]) -> list[Object]:
    result = await client.get(path, query)
    return list(result.get("items") or ())


async def _created(client: ApiClient, path: str, body: Object) -> Object:
    """Create an object, or return the one that is there by its name."""
    try:
        return await client.create(path, body)
    except ApiStatusError as error:
        if error.reason != "AlreadyExists":
            raise
        return await client.get(f"{path}/{body['metadata']['name']}")


def _by_name(objects: Sequence[Object]) -> dict[str, Object]:
    return {one["metadata"]["name"]: one for one in objects}


def _created_at(stored: Object) -> float | None:
    text = stored["metadata"].get("creationTimestamp")
    return datetime.fromisoformat(text).timestamp() if text else None


def _error(error: ApiStatusError) -> ProviderError:
    """Return what a refusal of the API server is to those who size; of others nothing is known to be done."""
    if error.status in (401, 403):
        return Denied(f"{error}; the chart gives the rights by clusterAutoscaler.enabled and .provisioningRequests")
    if error.status in (409, 429):
        return Throttled(str(error))
    return CallOutcomeUnknown(str(error))


def _launch_error(error: ApiStatusError) -> ProviderError:
    """Return the refusal of what was asked for, which was certainly not created."""
    if error.status == 404:
        return InvalidLaunch(f"the cluster has no {CRD}: install them, or set provisioning: placeholder ({error})")
    if "exceeded quota" in error.message:
        return QuotaReached(str(error))
    if error.status == 403 and "cannot create resource" not in error.message:  # an admission policy
        return InvalidLaunch(str(error))
    return InvalidLaunch(str(error)) if error.status in (400, 422) else _error(error)
