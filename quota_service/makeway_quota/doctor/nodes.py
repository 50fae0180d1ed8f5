"""Check the nodes: pools without nodes, taints without toleration, GPUs that no pool takes, profiles too large."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from makeway_api.quantities import count, listed

from ..backends.kubernetes.cluster.dra_devices import (
    CLAIMS,
    CLASSES,
    SLICES,
    DeviceClass,
    index_of,
    project_class,
    project_slice,
)
from ..backends.kubernetes.cluster.nodes import (
    ClusterNode,
    NodeSelector,
    pools_of,
    resources_of,
    unassigned,
    untolerated,
    with_devices,
)
from ..backends.kubernetes.cluster.unassigned_slices import described
from ..engine.snapshot import GPU, Profile
from ..policy import Document
from ..wording.unassigned import unassigned_sentences
from .cluster import ClusterAccess
from .findings import Finding


async def check_nodes(cluster: ClusterAccess) -> Iterable[Finding]:
    """Return what keeps nodes from their pools, and jobs from nodes."""
    if cluster.as_hub:  # it makes pods, and need not see nodes
        return []
    selectors = cluster.selectors
    if cluster.document is None:
        return [Finding("error", "There is no policy.", "policy", "Name one in MAKEWAY_POLICY_FILE.")]
    slices, classes = [await cluster.list_objects(path) or () for path in (SLICES, CLASSES)]
    if classes and await cluster.list_objects(CLAIMS) is None:  # without all three the service counts none
        classes = ()
    kept = {str(at): one for at, one in enumerate(map(project_slice, slices)) if one is not None}
    index, nodes = index_of(kept, map(project_class, classes), {}), await cluster.nodes()
    devices = {node.name: index.on(node.name, resources_of(node, selectors)).offered for node in nodes}
    nodes = [with_devices(node, devices[node.name]) for node in nodes]
    offered = {node.name: unassigned(node, selectors, pools_of(node, selectors)) for node in nodes}
    return [
        *_unselected(cluster.document, selectors),
        *_not_evaluated(map(project_class, classes), selectors),
        *(finding for selector in selectors for finding in _pool(selector, nodes)),
        *_not_assigned(unassigned_sentences(offered)),
        *_not_assigned(described(slices, devices)),
        *_too_large(cluster.document, selectors, nodes),
    ]


def _unselected(document: Document, selectors: Sequence[NodeSelector]) -> Iterator[Finding]:
    known = {selector.pool for selector in selectors}
    for pool in document.pools:
        if pool.name not in known and pool.kind == "static":
            yield Finding(
                "error",
                f"The pool {pool.name} names no labels, so it has no nodes.",
                f"pool {pool.name}",
                "Write labels of its nodes into the policy (nodes: {labels: …}).",
            )


def _not_evaluated(classes: Iterable[DeviceClass], selectors: Sequence[NodeSelector]) -> Iterator[Finding]:
    """Yield the DeviceClasses of pools whose selectors cannot be evaluated, so that none of their devices counts."""
    for one in classes:
        for selector in selectors:
            if not one.understood and selector.resource in one.resources:
                yield Finding(
                    "error",
                    f"The selectors of the DeviceClass {one.name} cannot be evaluated, so that none of its devices "
                    f"counts for the pool {selector.pool}.",
                    f"pool {selector.pool}",
                    "Make a class for it whose selectors compare device.driver and attributes by ==, joined by &&.",
                )


def _pool(selector: NodeSelector, nodes: Sequence[ClusterNode]) -> Iterator[Finding]:
    where, labels = f"pool {selector.pool}", ", ".join(f"{key}={value}" for key, value in selector.labels.items())
    own = [node for node in nodes if selector.selects(node)]
    offering = [node for node in own if node.allocatable.get(selector.resource)]
    if not own:
        yield Finding(
            "error",
            f"No node has the labels of the pool {selector.pool}: {labels or 'none'}.",
            where,
            "Label its nodes (kubectl label node NODE LABEL=VALUE), or change the labels in the policy.",
        )
        return
    if not offering:
        yield Finding(
            "error",
            f"No node of the pool {selector.pool} offers {selector.resource}.",
            where,
            "Install the device plugin or driver of these GPUs, or name the resource that the nodes offer.",
        )
    for node in offering:
        if (taints := untolerated(node, selector)) and not node.unschedulable:
            yield Finding(
                "warning",
                f"The taint {listed([str(taint) for taint in taints])} keeps jobs away.",
                f"node {node.name}",
                "Add it to jobs.tolerations (MAKEWAY_KUBE_TOLERATIONS), or remove it.",
            )
    if offering and not any(node.ready and not node.unschedulable for node in offering):
        yield Finding(
            "error",
            f"No node of the pool {selector.pool} takes work: {listed([node.name for node in offering])}.",
            where,
            "Make one ready, or schedulable again (kubectl uncordon NODE).",
        )
    for node in offering:
        if not node.ready:
            yield Finding(
                "warning",
                f"The node {node.name} is not ready.",
                f"node {node.name}",
                "kubectl describe node shows why; restart its kubelet, or the node.",
            )


def _not_assigned(sentences: Iterable[str]) -> Iterator[Finding]:
    """Yield sentences about GPUs that no pool has, each `what: remedy`, as findings."""
    for sentence in sentences:
        what, _, remedy = sentence.partition(": ")
        yield Finding("warning", f"{what}.", "nodes", f"{remedy[:1].upper()}{remedy[1:]}")


def _too_large(
    document: Document, selectors: Sequence[NodeSelector], nodes: Sequence[ClusterNode]
) -> Iterator[Finding]:
    """Yield the profiles whose worker fits on no node, however idle that is."""
    for profile in document.profiles:
        pools = [selector for selector in selectors if not profile.pools or selector.pool in profile.pools]
        fitting = [(node, pool) for pool in pools for node in nodes if pool.selects(node)]
        if not fitting or not profile.gpus:
            continue
        needed = -(-profile.gpus // GPU)
        if not any(_fits(profile, needed, node, pool) for node, pool in fitting):
            what = f"{count(needed, 'GPU')}, {profile.cpu / 1000:g} CPU and {profile.memory} MiB"
            yield Finding(
                "error",
                f"No node is large enough for a worker of the profile {profile.name}: {what}.",
                f"profile {profile.name}",
                "Make the profile smaller, or give one of its pools larger nodes.",
            )


def _fits(profile: Profile, gpus: int, node: ClusterNode, pool: NodeSelector) -> bool:
    """Whether a worker would fit on a node on which nothing runs."""
    if node.allocatable.get(pool.resource, 0) < gpus:
        return False
    return all(
        node.allocatable.get(name, amount) >= amount
        for name, amount in (("cpu", profile.cpu), ("memory", profile.memory))
    )
