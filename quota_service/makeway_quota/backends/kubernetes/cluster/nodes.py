"""Keep what the inventory needs of a node, and decide which pool it is in and whether it takes work.

Pure: no requests. Nodes are kept small, because there may be thousands; equal texts are kept once.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from sys import intern
from typing import Literal
from zlib import crc32

from makeway_api import taints

from ....policy import Document
from ....values import MAX_DEVICES
from ..api.client import Object
from ..api.quantities import allocatable

INDEX_BLOCKS = 512
"""How many ranges of indices the resources of nodes in several pools are spread over."""
NO_SCHEDULE = ("NoSchedule", "NoExecute")
"""The effects that keep a pod away; PreferNoSchedule does not."""
NOT_READY_TAINTS = (
    "node.kubernetes.io/not-ready",
    "node.kubernetes.io/unreachable",
    "node.kubernetes.io/network-unavailable",
)
"""The taints that Kubernetes gives to nodes that are not ready, and takes away some time after they are again."""
LEAVING_TAINTS = ("ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted", "karpenter.sh/disruption")
"""The taints of nodes that an autoscaler is about to remove: nothing starts there, whatever pods tolerate. Those that
only may be removed (DeletionCandidateOfClusterAutoscaler) take work, which keeps them."""
READY_CONDITIONS = {"Ready": "True", "NetworkUnavailable": "False"}
"""The conditions by which a node is ready, and the status that they need."""
CORDON = "node.kubernetes.io/unschedulable"
MODEL_LABELS = ("nvidia.com/gpu.product", "cloud.google.com/gke-accelerator", "k8s.amazonaws.com/accelerator")
"""Labels with the model of a node's GPUs: of GPU feature discovery, then of clouds."""
_ACCELERATOR = re.compile(
    r"(?:nvidia\.com|amd\.com|gpu\.intel\.com|habana\.ai|cloud-tpus\.google\.com)/.+(?<!_monitoring)"
    r"|[^/]+/(?:.*[^a-z])?[vx]?(?:gpu|npu|tpu|dcu|mlu|gaudi|neuron|ascend).*",
    re.IGNORECASE,
)
"""Extended resources of device plugins that are GPUs or other accelerators, whole, cut up or shared by time; not what
else plugins offer, such as network cards or /dev/kvm."""


@dataclass(frozen=True, slots=True)
class Taint:
    """A taint of a node."""

    key: str
    value: str
    effect: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}:{self.effect}" if self.value else f"{self.key}:{self.effect}"


@dataclass(frozen=True, slots=True)
class Toleration:
    """A toleration of pods; `key` "" with Exists tolerates every taint, `effect` "" every effect."""

    key: str = ""
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str = ""
    effect: str = ""

    def covers(self, taint: Taint) -> bool:
        """Whether pods with this toleration may go where the taint is."""
        if self.effect and self.effect != taint.effect:
            return False
        if self.key != taint.key and not (self.key == "" and self.operator == "Exists"):
            return False
        return self.operator == "Exists" or self.value == taint.value


def toleration(text: str) -> Toleration:
    """Read a toleration written as taints are: `key`, `key=value`, `key:NoSchedule` or `key=value:NoSchedule`."""
    parts = taints.toleration(text)
    operator: Literal["Equal", "Exists"] = "Equal" if parts["operator"] == "Equal" else "Exists"
    return Toleration(parts["key"], operator, parts.get("value", ""), parts.get("effect", ""))


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """What is kept of a node; `allocatable` has CPU in milli-cores, memory in MiB and all else in whole devices."""

    name: str
    uid: str
    labels: Mapping[str, str]
    allocatable: Mapping[str, int]
    taints: tuple[Taint, ...] = ()
    ready: bool = False
    down_since: float | None = None
    """since when it is not ready, in Unix seconds, where Kubernetes says so"""
    unschedulable: bool = False
    """cordoned, or about to be removed"""
    created: float | None = None
    """when it joined, in Unix seconds by the clock of the API server"""
    withheld: Mapping[str, int] = field(default_factory=dict)
    """how many it has of the resources that it has and offers none of, as while a device plugin is away"""

    @property
    def leaving(self) -> bool:
        """Whether an autoscaler is about to remove it."""
        return any(taint.key in LEAVING_TAINTS and taint.effect in NO_SCHEDULE for taint in self.taints)


@dataclass(frozen=True, slots=True)
class NodeSelector:
    """The nodes of one pool: those with all the labels. `resource` is what its devices are called there."""

    pool: str
    resource: str
    labels: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()

    def selects(self, node: ClusterNode) -> bool:
        """Whether a node has all the labels."""
        return all(node.labels.get(name) == value for name, value in self.labels.items())


def project_node(item: Object) -> ClusterNode:
    """Return what is kept of a node."""
    metadata, spec, status = item["metadata"], item.get("spec") or {}, item.get("status") or {}
    conditions = {one["type"]: one for one in status.get("conditions") or ()}
    down = [one for one in spec.get("taints") or () if one["key"] in NOT_READY_TAINTS]
    ready = (
        not down and _has_status(conditions, "Ready", "True") and _has_status(conditions, "NetworkUnavailable", "False")
    )
    labels = {intern(str(name)): intern(str(value)) for name, value in (metadata.get("labels") or {}).items()}
    offered = allocatable(status.get("allocatable") or status.get("capacity"))
    has = allocatable(status.get("capacity"))
    return ClusterNode(
        name=intern(str(metadata["name"])),
        uid=metadata.get("uid", ""),
        labels=labels,
        allocatable={intern(name): value for name, value in offered.items()},
        taints=tuple(
            Taint(intern(one["key"]), intern(one.get("value") or ""), intern(one["effect"]))
            for one in spec.get("taints") or ()
            if one["key"] not in NOT_READY_TAINTS
        ),
        ready=ready,
        down_since=None if ready else _down_since(conditions, down),
        unschedulable=bool(spec.get("unschedulable")) or "deletionTimestamp" in metadata or _leaves(spec),
        created=_time(metadata.get("creationTimestamp")),
        withheld={intern(name): has[name] for name, many in offered.items() if not many and has.get(name)},
    )


def _leaves(spec: Object) -> bool:
    """Whether an autoscaler is about to remove a node."""
    return any(one["key"] in LEAVING_TAINTS and one.get("effect") in NO_SCHEDULE for one in spec.get("taints") or ())


def _has_status(conditions: Mapping[str, Object], name: str, wanted: str) -> bool:
    """Whether a condition has a status; one that is not there is not against it, but for Ready."""
    return bool(conditions.get(name, {"status": "" if name == "Ready" else wanted})["status"] == wanted)


def _down_since(conditions: Mapping[str, Object], taints: Iterable[Object]) -> float | None:
    """Return since when a node is not ready: by its conditions, or the taints that outlive them; None: not said."""
    failing = [
        one for name, one in conditions.items() if name in READY_CONDITIONS and one["status"] != READY_CONDITIONS[name]
    ]
    times = [one.get("lastTransitionTime") for one in failing] or [one.get("timeAdded") for one in taints]
    return min((at for text in times if (at := _time(text)) is not None), default=None)


def _time(text: object) -> float | None:
    """Return a time of Kubernetes in Unix seconds; None for what is none."""
    try:
        return datetime.fromisoformat(str(text)).timestamp() if text else None
    except (ValueError, OverflowError):
        return None


def selectors(document: Document, tolerations: Iterable[Toleration] = ()) -> tuple[NodeSelector, ...]:
    """Return the node selectors of a policy document, in its order.

    A pool without labels selects no node, unless it is the only pool: then it selects all. `tolerations` are those
    of every pool; each pool also tolerates the usual taints of nodes with its resource.
    """
    result = []
    for pool in document.pools:
        labels = document.pool_facts[pool.name].labels
        if labels or len(document.pools) == 1:
            own = usual_tolerations(pool.resource)
            result.append(NodeSelector(pool.name, pool.resource, labels, (*own, *tolerations)))
    return tuple(result)


def usual_tolerations(resource: str) -> tuple[Toleration, ...]:
    """Return the tolerations of the usual taints of nodes with a resource."""
    return tuple(Toleration(key, "Exists") for key in taints.keys_of(resource))


def pools_of(
    node: ClusterNode, candidates: Sequence[NodeSelector], before: Collection[str] = (), held: Collection[str] = ()
) -> tuple[NodeSelector, ...]:
    """Return the selectors of the pools that a node is in: for each resource that it has some of, the first one.

    A node whose GPUs were cut up, or shared by time, shows 0 of the resource that it had before, until its kubelet is
    restarted and beyond; it stays in that pool as long as pods hold some of it (`held` names their resources). While
    its device plugin restarts it shows 0 of every resource: it also stays in the pools that it was in `before`; if
    there are none of either, it is in that of the first selector.
    """
    fitting = {one.resource: one for one in reversed(candidates) if one.selects(node)}
    result = [one for one in candidates if fitting.get(one.resource) is one]
    offered = [one for one in result if node.allocatable.get(one.resource) or one.resource in held]
    if any(node.allocatable.get(one.resource) for one in offered):
        return tuple(offered)
    return tuple(one for one in result if one in offered or one.pool in before) or tuple(result[:1])


def resources_of(node: ClusterNode, candidates: Sequence[NodeSelector]) -> tuple[str, ...]:
    """Return the resources of all pools, each once: those of the pools first that select a node, in their order."""
    return tuple(dict.fromkeys(one.resource for one in sorted(candidates, key=lambda item: not item.selects(node))))


def unassigned(
    node: ClusterNode, candidates: Sequence[NodeSelector], taking: Collection[NodeSelector]
) -> tuple[tuple[str, int], ...]:
    """Return the GPUs of a node that no pool takes, by resource, sorted; a resource of any pool counts as GPUs.

    `taking` are the selectors of the node's pools.
    """
    known = {selector.resource for selector in candidates}
    taken = {selector.resource for selector in taking}
    return tuple(
        (resource, many)
        for resource, many in sorted(node.allocatable.items())
        if many and resource not in taken and (resource in known or _ACCELERATOR.fullmatch(resource))
    )


def first_devices(selectors: Iterable[NodeSelector]) -> dict[str, int]:
    """Return the index of the first device of each pool of a node: 0 where it is in one pool.

    Else it depends on the resource, so that devices keep their indices when other resources come and go.
    """
    resources = sorted({selector.resource: selector.pool for selector in selectors}.items())
    if len(resources) < 2:
        return {pool: 0 for _, pool in resources}
    result: dict[str, int] = {}
    taken: set[int] = set()
    for resource, pool in resources:
        block = 1 + crc32(resource.encode()) % INDEX_BLOCKS
        while block in taken:
            block += 1
        taken.add(block)
        result[pool] = block * MAX_DEVICES
    return result


def with_devices(node: ClusterNode, offered: Mapping[str, int]) -> ClusterNode:
    """Return a node with the devices that drivers offer there (DRA), by resource; a device plugin's go before."""
    more = {resource: many for resource, many in offered.items() if not node.allocatable.get(resource)}
    return replace(node, allocatable={**node.allocatable, **more}) if more else node


def untolerated(node: ClusterNode, selector: NodeSelector) -> tuple[Taint, ...]:
    """Return the taints of a node that keep pods away and that the pool does not tolerate."""
    return tuple(
        taint
        for taint in node.taints
        if taint.effect in NO_SCHEDULE and not any(one.covers(taint) for one in selector.tolerations)
    )


def model_of(node: ClusterNode) -> str:
    """Return the model of a node's GPUs, "" when it has no label for it."""
    return next((node.labels[name] for name in MODEL_LABELS if node.labels.get(name)), "")
