"""Keep the nodes of one cluster as the control loop needs them, from informers on nodes and on pods.

Only nodes that changed, or on which a pod came or went, are looked at again. Pods of our jobs and sessions are listed
apart, as long as their containers run; every other pod is foreign and counts by its requests, likewise.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ....engine.snapshot import GPU
from ....quarantine import Kind, Quarantine
from ....values import MAX_DEVICES
from ...base import NodePart, NodeStatus, WorkloadPod
from ..api.client import ApiClient, ApiUnreachable
from ..api.informer import DEFAULT_TIMING, Informer, Timing
from .dra_devices import HeldDevice
from .dra_informers import DraInformers
from .nodes import (
    ClusterNode,
    NodeSelector,
    first_devices,
    model_of,
    pools_of,
    project_node,
    resources_of,
    unassigned,
    untolerated,
    with_devices,
)
from .pod_requests import PodShare, project_share

READING, COUNTING = "reading it", "counting what it holds"
COUNTING_DEVICES = "counting GPUs of DRA drivers"
FOLLOWING = "following GPUs of DRA drivers"
DEVICES_SECONDS = 10.0
"""How long nodes and pods wait for the first lists of DRA devices"""
HOLDING_PODS = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
"""The field selector of the pods that hold resources of a node."""

VANISHED_SECONDS = 60.0
"""Seconds for which a node that offers no GPU any more counts as before: while its device plugin or its kubelet
restarts, it offers none, and what is nominated there would go elsewhere, for which others would be evicted."""

DEFAULT_MAX_PODS = 110
"""Pods that a node may run whose status has no number: the default of the kubelet"""


class KubernetesInventory:
    """The nodes of one cluster that are in a pool, by name. `open` returns once they are complete."""

    def __init__(
        self,
        client: ApiClient,
        selectors: Sequence[NodeSelector],
        instance: str = "",
        wake: Callable[[], None] = lambda: None,
        timing: Timing = DEFAULT_TIMING,
        namespace: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`instance` is the installation whose pods are ours, `namespace` that of its jobs' pods ("": any)."""
        self.quarantine = Quarantine()
        """that of the loop, once it runs"""
        self._clock = clock
        self._wake = wake
        self._unread: set[str] = set()
        """nodes that changed and could not be read"""
        self._uncounted: set[str] = set()
        """pods that changed and could not be counted"""
        self._down_since: dict[str, float] = {}
        """since when nodes are not ready of which Kubernetes does not say it"""
        self._offered: dict[tuple[str, str], tuple[str, int, float | None]] = {}
        """by node and resource: the node's UID, how many devices it offered last, and since when it offers none"""
        self._selectors = tuple(selectors)
        share = partial(project_share, instance=instance, namespace=namespace)
        self.nodes: Informer[ClusterNode] = Informer(client, "/api/v1/nodes", project_node, wake=wake, timing=timing)
        self.pods: Informer[PodShare] = Informer(
            client, "/api/v1/pods", share, query={"fieldSelector": HOLDING_PODS}, wake=wake, timing=timing
        )
        self.devices = DraInformers(client, wake, timing)
        self.devices.follow_resources(one.resource for one in self._selectors)
        self._complete = asyncio.Event()
        self._on_node: dict[str, set[str]] = {}
        """the keys of the pods on each node"""
        self._node_of: dict[str, str] = {}
        self._placed_claims: set[str] = set()
        """generated claims whose pods were on a node, until they hold nothing any more"""
        self._statuses: dict[str, NodeStatus] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def synced(self) -> bool:
        """Whether nodes and pods were read completely, and so were the devices of DRA drivers where that can be."""
        return self._complete.is_set()

    @property
    def problem(self) -> str:
        """Why the API server cannot be followed at the moment; "" when it can."""
        return self.nodes.problem or self.pods.problem

    @property
    def refused(self) -> bool:
        """Whether the API server refuses to show the cluster to this service."""
        return self.nodes.refused or self.pods.refused

    async def open(self) -> None:
        """Start to follow the cluster and return once the first lists are complete."""
        running = (self.nodes.run(), self.pods.run(), self.devices.run(), self._note_complete())
        self._tasks = [asyncio.create_task(coroutine) for coroutine in running]
        await self._complete.wait()

    async def _note_complete(self) -> None:
        """Note once that all was read: what DRA drivers do later never unmakes that."""
        await self.nodes.wait_synced()
        await self.pods.wait_synced()
        with suppress(TimeoutError):
            async with asyncio.timeout(DEVICES_SECONDS):
                await self.devices.first_answer.wait()
        self._complete.set()
        self._wake()

    def retry_now(self) -> None:
        """Cancel requests and waits and repeat them at once: the API server can be reached again."""
        self.nodes.retry_now()
        self.pods.retry_now()
        self.devices.retry_now()

    async def close(self) -> None:
        """Stop following."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def select(self, selectors: Sequence[NodeSelector]) -> None:
        """Use these selectors from now on, as a policy document came into force."""
        if tuple(selectors) != self._selectors:
            self._selectors = tuple(selectors)
            self._unread.update(self.nodes.objects)
            self.devices.follow_resources(one.resource for one in self._selectors)

    def node_statuses(self) -> Mapping[str, NodeStatus]:
        """Return the nodes by name as they are now; those in no pool have the pool "" and no devices."""
        changed = self.nodes.take() | self._unread | self._no_longer_vanished()
        pods, self._uncounted, self._unread = self.pods.take() | self._uncounted, set(), set()
        for key in sorted(pods):
            if not self._run_guarded(COUNTING, "pod", key, partial(self._count, key, changed)):
                self._uncounted.add(key)
        with self.quarantine.step(COUNTING_DEVICES):
            changed |= self.devices.take_changed_nodes()
            self._placed_claims = {key for key in self._placed_claims if self.devices.is_generated(key)}
        self._note_devices()
        for name in sorted(changed):
            if not self._run_guarded(READING, "node", name, partial(self._read, name)):
                self._unread.add(name)
        return self._statuses

    def _note_devices(self) -> None:
        """Quarantine the following of DRA devices while it alone fails: everything else goes on."""
        if not (problem := self.devices.problem):
            self.quarantine.passed(FOLLOWING, "step", FOLLOWING)
        elif not self.problem and not self.quarantine.is_backing_off(FOLLOWING, "step", FOLLOWING):
            self.quarantine.add(FOLLOWING, "step", FOLLOWING, ApiUnreachable(problem))

    def _run_guarded(self, step: str, kind: Kind, name: str, work: Callable[[], None]) -> bool:
        """Whether something was done with one node or pod; False where it fails, or has to rest after it failed."""
        if self.quarantine.is_backing_off(step, kind, name):
            return False
        with self.quarantine.guard(step, kind, name):
            work()
            return True
        if kind == "node" and (before := self._statuses.get(name)) is not None:
            self._statuses[name] = replace(before, cordoned=True)  # runs on, and takes no work until it can be read
        return False

    def _count(self, key: str, changed: set[str]) -> None:
        """Note on which node a pod is now, and add the nodes that this changes."""
        share = self.pods.objects.get(key)
        before, now = self._node_of.get(key), share.node if share else None
        changed.update(name for name in (before, now) if name is not None)
        self._move(key, before, now)

    def _read(self, name: str) -> None:
        if (node := self.nodes.objects.get(name)) is not None:
            before = self._statuses[name].pools if name in self._statuses else ()
            devices = self.devices.on(name, resources_of(node, self._selectors))
            node = with_devices(self._with_vanished(self._with_down_since(node)), devices.offered)
            shares, claimed = self._with_claims(self._shares(name), devices.held)
            self._statuses[name] = _node_status(node, self._selectors, shares, before, claimed)
        else:
            self._statuses.pop(name, None)
            self._down_since.pop(name, None)
            self._offered = {key: last for key, last in self._offered.items() if key[0] != name}

    def _with_vanished(self, node: ClusterNode) -> ClusterNode:
        """Return a node with the devices of device plugins that it offered last, where it offers none for a moment.

        Of one that is seen first it is what the node has. Where it offers more of others, its GPUs were divided anew:
        what it offered before does not come back.
        """
        now, additions = self._clock(), dict[str, int]()
        offered = {(node.name, name): node.allocatable.get(name, 0) for name in resources_of(node, self._selectors)}
        divided = any(key in self._offered and amount > self._offered[key][1] for key, amount in offered.items())
        for (name, resource), amount in offered.items():
            first = node.uid, node.withheld.get(resource, 0), None
            uid, before, since = self._offered.get((name, resource), first)
            since = now if since is None else since
            last: tuple[str, int, float | None] = (node.uid, amount, None)
            if not amount and before and uid == node.uid and 0.0 <= now - since < VANISHED_SECONDS and not divided:
                additions[resource], last = before, (uid, before, since)
            self._offered[name, resource] = last
        return replace(node, allocatable={**node.allocatable, **additions}) if additions else node

    def _no_longer_vanished(self) -> set[str]:
        """Return the nodes that have offered none of some devices for so long that they have none."""
        now = self._clock()
        return {
            node
            for (node, _), (_, _, since) in self._offered.items()
            if since is not None and not 0.0 <= now - since < VANISHED_SECONDS
        }

    def _with_claims(
        self, shares: Sequence[PodShare], held: Sequence[HeldDevice]
    ) -> tuple[list[PodShare], dict[str, int]]:
        """Return pods with the devices of the claims that were generated for them, and how many other claims hold.

        A generated claim counts from when its pod is on the node, and until Kubernetes frees its devices, which may be
        later than the end of the pod.
        """
        owners = {key: at for at, share in enumerate(shares) for key in share.claims}
        additions: dict[int, dict[str, int]] = {}
        claimed: dict[str, int] = {}
        for resource, keys in held:
            owner = next((owners[key] for key in sorted(keys) if key in owners), None)
            if owner is not None:
                self._placed_claims.update(keys & owners.keys())
                amounts = additions.setdefault(owner, {})
            elif any(key in self._placed_claims or not self.devices.is_generated(key) for key in keys):
                amounts = claimed
            else:
                continue
            amounts[resource] = amounts.get(resource, 0) + 1
        return [
            _with_claimed(share, additions[at]) if at in additions else share for at, share in enumerate(shares)
        ], claimed

    def dra_devices(self) -> dict[str, Mapping[str, int]]:
        """Return how many devices of DRA drivers pools count, by node and resource."""
        return self.devices.by_node(
            {node.name: resources_of(node, self._selectors) for node in self.nodes.objects.values()}
        )

    def allocatable(self, node: str, resource: str) -> int:
        """Return what a node offers of a resource, in the units of ClusterNode; 0 where it offers none, or is gone."""
        cluster_node = self.nodes.objects.get(node)
        return cluster_node.allocatable.get(resource, 0) if cluster_node is not None else 0

    def _with_down_since(self, node: ClusterNode) -> ClusterNode:
        """Return a node that is not ready with the time since when; where Kubernetes does not say it, as was seen."""
        if node.ready or node.down_since is not None:
            self._down_since.pop(node.name, None)
            return node
        return replace(node, down_since=self._down_since.setdefault(node.name, self._clock()))

    def _shares(self, node: str) -> list[PodShare]:
        return [self.pods.objects[key] for key in sorted(self._on_node.get(node, ())) if key in self.pods.objects]

    def _move(self, key: str, before: str | None, now: str | None) -> None:
        if before == now:
            return
        if before is not None:
            keys = self._on_node[before]
            keys.discard(key)
            if not keys:
                del self._on_node[before]
            del self._node_of[key]
        if now is not None:
            self._on_node.setdefault(now, set()).add(key)
            self._node_of[key] = now


def _with_claimed(share: PodShare, devices: Mapping[str, int]) -> PodShare:
    """Return a pod that holds devices besides what it requests."""
    held = dict(share.requests)
    for resource, amount in devices.items():
        held[resource] = held.get(resource, 0) + amount
    return replace(share, requests=tuple(sorted(held.items())))


def _node_status(
    node: ClusterNode,
    selectors: Sequence[NodeSelector],
    shares: Sequence[PodShare],
    before: Sequence[str] = (),
    claimed: Mapping[str, int] | None = None,
) -> NodeStatus:
    """Return a node with what foreign pods hold of it, in the units of the control loop.

    `before`: its pools so far; `claimed`: devices that claims hold which no request of a pod says, by resource.
    """
    held = {resource for share in shares if share.workload for resource, _ in share.requests}
    chosen = pools_of(node, selectors, before, held)
    foreign = _foreign(shares, chosen)
    for resource, amount in (claimed or {}).items():
        foreign[resource] = foreign.get(resource, 0) + amount
    firsts = first_devices(chosen)
    parts = [_part(node, selector, firsts[selector.pool], foreign) for selector in chosen]
    return NodeStatus(
        name=node.name,
        pool=parts[0].pool if parts else "",
        devices=tuple(device for part in parts for device in part.devices),
        anonymous_devices=True,
        model=model_of(node),
        cpu=_offered(node, "cpu"),
        memory=_offered(node, "memory"),
        ready=node.ready,
        down_since=node.down_since,
        foreign_gpus=sum(part.foreign_gpus for part in parts),
        foreign_cpu=foreign.get("cpu", 0),
        foreign_memory=foreign.get("memory", 0),
        max_pods=node.allocatable.get("pods", DEFAULT_MAX_PODS),
        foreign_pods=sum(not share.workload for share in shares),
        cordoned=all(part.cordoned for part in parts),
        labels={name: node.labels[name] for selector in selectors for name in selector.labels if name in node.labels},
        taints=tuple(str(taint) for taint in node.taints),
        unassigned=unassigned(node, selectors, chosen),
        pods=tuple(_workload_pod(share, chosen) for share in shares if share.workload),
        parts=tuple(parts) if len(parts) > 1 else (),
    )


def _part(node: ClusterNode, selector: NodeSelector, first: int, foreign: Mapping[str, int]) -> NodePart:
    """Return what a node offers to a pool; one that claims to have too many GPUs offers none, and takes no work."""
    devices = node.allocatable.get(selector.resource, 0)
    believed = devices <= MAX_DEVICES
    return NodePart(
        selector.pool,
        tuple(range(first, first + (devices if believed else 0))),
        GPU * foreign.get(selector.resource, 0),
        node.unschedulable or not believed or bool(untolerated(node, selector)),
    )


def _foreign(shares: Sequence[PodShare], chosen: Sequence[NodeSelector]) -> dict[str, int]:
    """Return what pods hold by resource that are not ours; and GPUs of a second kind that pods of ours hold."""
    result: dict[str, int] = {}
    for share in shares:
        asked = share.requests
        if share.workload:
            own = _selector_of(share, chosen)
            others = {one.resource for one in chosen if one is not own}
            asked = tuple((resource, value) for resource, value in asked if resource in others)
        for resource, value in asked:
            result[resource] = result.get(resource, 0) + value
    return result


def _offered(node: ClusterNode, resource: str) -> int:
    """Return what a node offers of CPU or memory, 0 where it does not say it: that is no limit, and nothing is one."""
    return max(1, node.allocatable[resource]) if resource in node.allocatable else 0


def _selector_of(share: PodShare, chosen: Sequence[NodeSelector]) -> NodeSelector | None:
    """Return the selector of the pool whose GPUs a pod holds; None where it holds none of its node's pools."""
    asked = dict(share.requests)
    return next((one for one in chosen if asked.get(one.resource)), None)


def _workload_pod(share: PodShare, chosen: Sequence[NodeSelector]) -> WorkloadPod:
    asked, selector = dict(share.requests), _selector_of(share, chosen)
    return WorkloadPod(
        share.workload,
        GPU * asked[selector.resource] if selector else 0,
        asked.get("cpu", 0),
        asked.get("memory", 0),
        share.attempt,
        share.worker,
        ends_at=share.ends_at,
        grace=share.grace,
        pool=selector.pool if selector and len(chosen) > 1 else "",
    )
