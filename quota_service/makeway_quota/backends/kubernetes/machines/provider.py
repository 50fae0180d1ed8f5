"""Launch machines by the cluster's own autoscaler: the provider `kubernetes` of deployments.

Its methods block, and are called in threads: each makes its requests in an event loop of its own. All state is in the
cluster, in one ConfigMap for each machine, so that any replica goes on with it.
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

from ....autoscale.instances import Instance, InstanceList
from ....autoscale.provider import (
    AnswerLost,
    Denied,
    InvalidLaunch,
    JoinData,
    ProviderError,
    QuotaReached,
    StockOut,
    Throttled,
)
from ..api.client import ApiClient, ApiStatusError, ApiUnreachable, Object
from ..cluster.nodes import ClusterNode, NodeSelector, project_node
from ..cluster.pod_requests import ENDED, MACHINE
from ..pods.manifest import PodSettings
from .objects import DEPLOYMENT, keeper, names_of, offers, placeholder, record, refusal, scale_up_of

T = TypeVar("T")
log = logging.getLogger("makeway.machines")

DECISION_SECONDS = 15.0
"""How long a launch waits for what the autoscaler says, which looks every ten seconds; later, lists say it"""
POLL_SECONDS = 1.0
UNFINISHED = 120.0
"""Seconds after which a record without its placeholder is of a launch that broke off"""


@dataclass(frozen=True, slots=True)
class _Cluster:
    """What one list read: the records of all deployments, pods of machines by name, and busy workers by node."""

    records: tuple[Object, ...]
    pods: Mapping[str, Object]
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
    ) -> None:
        """`priority`: the class of placeholders, below that of all work."""
        self._new_client, self._settings, self._selector = new_client, settings, selector
        self._priority, self._decision_seconds = priority, decision_seconds
        space = f"/api/v1/namespaces/{settings.namespace}"
        self._records, self._pods, self._events = f"{space}/configmaps", f"{space}/pods", f"{space}/events"

    # -- the protocol

    def check(self) -> None:
        """Raise Denied where the service's account lacks a right in the namespace of jobs."""
        ours = {"labelSelector": f"{KIND}=machine,{INSTANCE}={self._settings.instance}", "limit": "1"}

        async def read(client: ApiClient) -> None:
            for path in (self._records, self._pods, self._events):
                await client.get(path, {"limit": "1"} if path == self._events else ours)

        self._run(read)

    def list(self, deployment: str, now: float) -> InstanceList:
        """Return the machines of a deployment; a placeholder that was bound makes way for work here."""

        async def read(client: ApiClient) -> InstanceList:
            cluster = await self._read(client)
            taken = _takers(cluster)
            ours = [one for one in cluster.records if one["metadata"]["labels"].get(DEPLOYMENT) == deployment]
            await self._delete_strays(client, cluster, deployment, now)
            result = [await self._seen(client, cluster, one, taken, now) for one in ours]
            complete = None not in result
            return InstanceList(now, tuple(one for one in result if one is not None), complete=complete)

        return self._run(read)

    def launch(self, request: str, token: str, join: JoinData | None = None) -> Instance:
        """Create the placeholder, and wait a while for what the autoscaler says of it; nothing joins by an agent."""
        wanted = json.loads(request)
        selector = self._selector(str(wanted.get("pool", "")))
        if selector is None:
            raise InvalidLaunch(f"the policy has no pool {wanted.get('pool')!r} with labels of nodes")

        async def create(client: ApiClient) -> Instance:
            return await self._launched(client, request, wanted, selector)

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
            machine = result["metadata"]["labels"][MACHINE]
            if not result["data"]["ended"]:
                result["data"]["ended"] = "true"
                await client.replace(f"{self._records}/{instance}", result)
            placed = await self._delete_pods(client, machine)
            if not placed and not result["data"]["node"]:
                await client.delete(f"{self._records}/{instance}")
            return True

        return self._run(end)

    def console(self, instance: str) -> str:
        """Return what the scheduler and the autoscaler say of the placeholder."""
        pod = f"{instance}-place"

        async def read(client: ApiClient) -> str:
            events = await self._events_of(client, pod)
            lines = (f"{one.get('reason')}: {one.get('message')}" for one in events)
            return "\n".join(dict.fromkeys(lines))

        return self._run(read)

    # -- a launch

    async def _launched(
        self, client: ApiClient, request: str, wanted: Mapping[str, Any], selector: NodeSelector
    ) -> Instance:
        machine, deployment = str(wanted["machine"]), str(wanted["deployment"])
        names = names_of(machine)
        result = await _created(client, self._records, record(self._settings, request))
        if result["data"]["request"] != request:
            raise AnswerLost(f"{names.record} is the record of another request")
        if result["data"]["ended"]:
            return Instance(names.record, machine, deployment, "terminated")
        if not result["data"]["node"]:
            pod = placeholder(self._settings, wanted, selector, self._priority)
            try:
                await _created(client, self._pods, pod)
            except ApiStatusError as error:
                if 400 <= error.status < 500:  # certainly not created: of others the record is the trace
                    await client.delete(f"{self._records}/{names.record}")
                raise _launch_error(error) from error
            await self._wait(client, machine)
        return Instance(names.record, machine, deployment)

    async def _wait(self, client: ApiClient, machine: str) -> None:
        """Wait until the placeholder is bound, or the autoscaler has said what it does; StockOut if it adds no node."""
        names, until = names_of(machine), time.monotonic() + self._decision_seconds
        while time.monotonic() < until:
            pod = await client.get(f"{self._pods}/{names.placeholder}")
            if pod["spec"].get("nodeName"):
                return
            message = scale_up_of(await self._events_of(client, names.placeholder, pod["metadata"]["uid"]))
            if message is not None and message.coming:
                return
            if message is not None and not await self._delete_pods(client, machine):
                await client.delete(f"{self._records}/{names.record}")
                raise StockOut(refusal(message))
            await asyncio.sleep(min(POLL_SECONDS, self._decision_seconds / 5))

    # -- a list

    async def _read(self, client: ApiClient) -> _Cluster:
        """Read the records before the pods: a record without a pod may be of a launch that is under way."""
        ours = f"{MANAGED_BY}={MANAGER},{INSTANCE}={self._settings.instance}"
        machines = f"{ours},{KIND}=machine"
        records = await _items(client, self._records, {"labelSelector": machines})
        pods = await _items(client, self._pods, {"labelSelector": machines})
        jobs = await _items(client, self._pods, {"labelSelector": f"{ours},{KIND}=job"})
        running = (one for one in jobs if (one.get("status") or {}).get("phase") not in ENDED)
        busy = Counter(str(one["spec"]["nodeName"]) for one in running if one["spec"].get("nodeName"))
        return _Cluster(tuple(records), {one["metadata"]["name"]: one for one in pods}, busy)

    async def _delete_strays(self, client: ApiClient, cluster: _Cluster, deployment: str, now: float) -> None:
        """Delete pods whose record is gone, as of a launch that went on after its end; a node would come for ever."""
        known = {one["metadata"]["labels"].get(MACHINE) for one in cluster.records}
        for name, pod in cluster.pods.items():
            labels = pod["metadata"]["labels"]
            stray = labels.get(DEPLOYMENT) == deployment and labels.get(MACHINE) not in known
            if stray and now - (_created_at(pod) or now) > UNFINISHED:
                log.warning("The pod %s of a machine without a record is deleted", name)
                await client.delete(f"{self._pods}/{name}")

    async def _seen(
        self, client: ApiClient, cluster: _Cluster, stored: Object, taken: Mapping[str, str], now: float
    ) -> Instance | None:
        """Return one machine; None where that fails, as it holds up no other one."""
        try:
            return await self._instance(client, cluster, stored, taken, now)
        except ApiStatusError as error:
            why = str(error)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"its record is damaged: {type(error).__name__} {error}"
        log.warning("%s cannot be brought up to date: %s", stored["metadata"]["name"], why)
        return None

    async def _instance(
        self, client: ApiClient, cluster: _Cluster, stored: Object, taken: Mapping[str, str], now: float
    ) -> Instance:
        """Return one machine, and bring its objects to what it is now."""
        labels = stored["metadata"]["labels"]
        machine = str(labels[MACHINE])
        names = names_of(machine)
        result = Instance(names.record, machine, str(labels[DEPLOYMENT]), "pending", _created_at(stored))
        pod = cluster.pods.get(names.placeholder)
        node = stored["data"]["node"] or ((pod or {}).get("spec") or {}).get("nodeName") or ""
        if not node:
            return await self._unbound(client, stored, pod, result, now)
        known = await self._node(client, node)
        if known is None or taken.get(node, machine) != machine:
            await self._delete_pods(client, machine)
            await client.delete(f"{self._records}/{names.record}")
            return replace(result, state="terminated")
        if stored["data"]["ended"]:
            return replace(result, state="stopping")
        return await self._bound(client, cluster, stored, known, result)

    async def _unbound(
        self, client: ApiClient, stored: Object, pod: Object | None, result: Instance, now: float
    ) -> Instance:
        """Return a machine without a node: one that was ended, or broke off, is over."""
        broken_off = pod is None and now - (result.launched_at or now) > UNFINISHED
        if stored["data"]["ended"] or broken_off:
            if not await self._delete_pods(client, result.machine):
                await client.delete(f"{self._records}/{result.id}")
            return replace(result, state="terminated")
        if pod is None:
            return result
        message = scale_up_of(await self._events_of(client, pod["metadata"]["name"], pod["metadata"]["uid"]))
        if message is not None and not message.coming:
            return replace(result, refused=refusal(message))
        return result

    async def _bound(
        self, client: ApiClient, cluster: _Cluster, stored: Object, node: ClusterNode, result: Instance
    ) -> Instance:
        """Return a machine on its node: ready once the node has the GPUs, and nothing of ours holds them."""
        wanted, names = json.loads(stored["data"]["request"]), names_of(result.machine)
        if not stored["data"]["node"]:
            stored["data"]["node"] = node.name
            await client.replace(f"{self._records}/{names.record}", stored)
        if names.keeper not in cluster.pods:
            await _created(client, self._pods, keeper(self._settings, wanted, node.name, self._priority))
        selector = self._selector(str(wanted.get("pool", "")))
        gpus = int(wanted["gpus"])
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

    async def _delete_pods(self, client: ApiClient, machine: str) -> bool:
        """Delete the pods of a machine; return whether the placeholder has got a node meanwhile."""
        names = names_of(machine)
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
            raise AnswerLost(str(error)) from error
        except ApiStatusError as error:
            raise _error(error) from error


def _takers(cluster: _Cluster) -> dict[str, str]:
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


def _created_at(stored: Object) -> float | None:
    text = stored["metadata"].get("creationTimestamp")
    return datetime.fromisoformat(text).timestamp() if text else None


def _error(error: ApiStatusError) -> ProviderError:
    """Return what a refusal of the API server is to those who size; of others nothing is known to be done."""
    if error.status in (401, 403):
        return Denied(f"{error}; the chart gives the rights where clusterAutoscaler.enabled is set")
    if error.status in (409, 429):
        return Throttled(str(error))
    return AnswerLost(str(error))


def _launch_error(error: ApiStatusError) -> ProviderError:
    """Return the refusal of a placeholder, which was certainly not created."""
    if "exceeded quota" in error.message:
        return QuotaReached(str(error))
    if error.status == 403 and "cannot create resource" not in error.message:  # an admission policy
        return InvalidLaunch(str(error))
    return InvalidLaunch(str(error)) if error.status in (400, 422) else _error(error)
