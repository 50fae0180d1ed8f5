"""Turn a lease into pod settings: node, devices, CPU, memory, priority class, labels and annotations. Pure."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from makeway_api import taints
from makeway_api.pods import (
    INSTANCE,
    KIND,
    MANAGED_BY,
    MANAGER,
    NO_EVICTION_ANNOTATIONS,
    OWNER,
    PLACEMENT,
    PREEMPTIBLE,
    PROFILE,
    SESSION,
    TEAM,
)

from .lease import Lease

MEBIBYTE = 2**20
DEFAULT_GPU_RESOURCE = taints.GPU
"""The resource of GPUs where the service does not name that of the pool."""
EPHEMERAL = frozenset({"emptyDir", "ephemeral", "configMap", "secret", "downwardAPI", "projected", "image"})
"""Kinds of volumes that end with the pod, or that it cannot write to."""
MERGED_TRAITS = (
    "common_labels",
    "extra_annotations",
    "extra_resource_limits",
    "extra_resource_guarantees",
    "node_affinity_required",
    "tolerations",
)
"""KubeSpawner's settings from which those of a lease are made."""


def labels(lease: Lease, instance: str) -> dict[str, str]:
    """Return the labels by which the service knows the pod as a session's of its own, not as foreign.

    User names are no label values (see `pod_annotations`).
    """
    result = {
        MANAGED_BY: MANAGER,
        INSTANCE: instance,
        KIND: "session",
        SESSION: lease.id,
        PROFILE: lease.profile,
        PREEMPTIBLE: str(lease.preemptible).lower(),
    }
    return result | ({TEAM: lease.team} if lease.team else {})


def pod_annotations(lease: Lease, owner: str) -> dict[str, str]:
    """Return the values that may be any text: the owner, and the placement as `node:devices`."""
    devices = ";".join(f"{node}:{','.join(map(str, indices))}" for node, indices in lease.placement)
    return {OWNER: owner, PLACEMENT: devices}


def gpu_resources(lease: Lease, resource: str) -> dict[str, str]:
    """Return the extended resource for a lease's GPUs, as request and limit alike.

    Nothing for a lease without GPUs, or whose GPUs are requested by claims.
    Extended resources are integers: ValueError for a fraction, which `LeaseMixin` refuses before the lease.
    """
    if not lease.gpus.is_integer():
        raise ValueError(f"{resource} is handed out in whole devices, and the lease has {lease.gpus:g}")
    return {resource: str(int(lease.gpus))} if lease.gpus and not lease.claim_templates else {}


def add_resource_claims(lease: Lease, manifest: Any, container: str) -> None:
    """Have a pod request the lease's GPUs by claims that Kubernetes generates, for its container of that name.

    Those of the site's own settings stay.
    """
    if not lease.gpus or not lease.claim_templates:
        return
    made = [{"name": name, "resourceClaimTemplateName": template} for name, template in lease.claim_templates.items()]
    manifest.spec.resource_claims = [*(manifest.spec.resource_claims or ()), *made]
    resources = next(one.resources for one in manifest.spec.containers if one.name == container)
    resources.claims = [*(resources.claims or ()), *({"name": name} for name in lease.claim_templates)]


def cpu_and_memory(lease: Lease) -> dict[str, float | int]:
    """Return KubeSpawner's settings for the profile's CPU and memory: requests and limits, cores and bytes.

    What the profile leaves at 0 is not in it, so that the site's own setting stays.
    """
    result: dict[str, float | int] = {}
    if lease.cpu:
        result |= {"cpu_guarantee": lease.cpu, "cpu_limit": lease.cpu}
    if lease.memory:
        result |= {"mem_guarantee": lease.memory * MEBIBYTE, "mem_limit": lease.memory * MEBIBYTE}
    return result


def ephemeral_storage(lease: Lease) -> dict[str, str]:
    """Return the disk of the profile as KubeSpawner's extra resources, as request and limit alike; else nothing."""
    return {"ephemeral-storage": f"{lease.disk}Mi"} if lease.disk else {}


def node_affinity(lease: Lease, terms: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return required node affinity terms that also require the granted node.

    Terms are alternatives ("or"), so the node goes into each of them; a term of its own would let the pod run
    anywhere that another term allows.
    """
    nodes = [node for node, _ in lease.placement]
    if not nodes:
        return terms
    field = {"key": "metadata.name", "operator": "In", "values": nodes}
    result = copy.deepcopy(terms) or [{}]
    for term in result:
        term["matchFields"] = [*term.get("matchFields", []), field]
    return result


def tolerations(lease: Lease, resource: str, site_tolerations: list[Any]) -> list[Any]:
    """Return the site's tolerations.

    Where a node is granted, add those for the GPU taints, and those that the service assumed when it counted that node
    as usable for sessions.
    """
    if not lease.placement:
        return site_tolerations
    gpu_tolerations = ({"key": key, "operator": "Exists"} for key in taints.keys_of(resource))
    added = [*gpu_tolerations, *(taints.toleration(text) for text in lease.tolerations)]
    return [*site_tolerations, *(one for one in added if one not in site_tolerations)]


def environment(env: dict[str, str], lease: Lease | None) -> dict[str, str]:
    """Return the variables without device numbers, which the device plugin sets; without GPUs no device is visible.

    With DRA, too: `void` keeps the NVIDIA runtime from showing every GPU of the node, and the DRA driver adds the
    granted ones itself.
    """
    result = {key: value for key, value in env.items() if key not in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")}
    if lease is None or not lease.gpus or lease.claim_templates:
        result["NVIDIA_VISIBLE_DEVICES"] = "void"
    return result


def settings(lease: Lease, owner: str, instance: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return KubeSpawner's settings for the pod of this lease, merged with the site's `own` (MERGED_TRAITS).

    The labels go into `common_labels`: these beat `extra_labels`, and otherwise `app.kubernetes.io/managed-by` would
    name KubeSpawner. `own` is not modified.
    """
    resource = lease.resource or DEFAULT_GPU_RESOURCE
    asked = gpu_resources(lease, resource) | ephemeral_storage(lease)
    return {
        "common_labels": {**own["common_labels"], **labels(lease, instance)},
        "extra_annotations": {**NO_EVICTION_ANNOTATIONS, **own["extra_annotations"], **pod_annotations(lease, owner)},
        "extra_resource_limits": {**own["extra_resource_limits"], **asked},
        "extra_resource_guarantees": {**own["extra_resource_guarantees"], **asked},
        "node_affinity_required": node_affinity(lease, _as_list(own["node_affinity_required"])),
        "tolerations": tolerations(lease, resource, _as_list(own["tolerations"])),
        **cpu_and_memory(lease),
    }


def persistent_paths(volumes: Any, mounts: Any) -> list[str]:
    """Return the folders whose files outlive the pod: where volumes are mounted that do not end with it."""
    lasting = {one.get("name") for one in _as_list(volumes) if EPHEMERAL.isdisjoint(one)}
    return [str(one.get("mountPath")) for one in _as_list(mounts) if one.get("name") in lasting]


def _as_list(entries: Any) -> list[Any]:
    """Return a setting that is a list, or a dictionary whose values count in the order of their keys."""
    return [entries[key] for key in sorted(entries)] if isinstance(entries, dict) else list(entries)
