"""Check the volumes: claims that are missing, not bound or lost, their access modes, and their classes."""

from __future__ import annotations

from collections.abc import Iterable

from ..backends.kubernetes.api.client import Object
from ..backends.kubernetes.pods.manifest import claim_of
from ..backends.kubernetes.settings import pod_settings
from .cluster import ClusterAccess
from .findings import Finding

SHARED_MODES = ("ReadWriteMany",)
CLASSES = "/apis/storage.k8s.io/v1/storageclasses"


async def check_volumes(cluster: ClusterAccess) -> Iterable[Finding]:
    """Return what is wrong with the claims of checkpoints."""
    if cluster.as_hub:
        return []
    settings = pod_settings(cluster.settings, cluster.jobs_namespace)
    if not settings.checkpoint_claim:
        return [
            Finding(
                "warning",
                "Checkpoints end with their pods, so that a job that makes way starts over from its first step.",
                "checkpoints",
                "Name a claim in jobs.checkpoints (MAKEWAY_KUBE_CHECKPOINT_CLAIM).",
            )
        ]
    teams = [team.name for team in cluster.document.policies] if cluster.document is not None else [""]
    claims = sorted({claim_of(settings, team) for team in teams if team or "{team}" not in settings.checkpoint_claim})
    return [finding for claim in claims for finding in await _claim(cluster, claim)]


async def _claim(cluster: ClusterAccess, name: str) -> list[Finding]:
    where = f"claim {name} of {cluster.jobs_namespace}"
    result = await cluster.existing(f"/api/v1/namespaces/{cluster.jobs_namespace}/persistentvolumeclaims/{name}")
    if result is None:
        return []
    if result is False or not isinstance(result, dict):
        return [
            Finding("error", f"The claim {name} of checkpoints does not exist.", where, "Create it: jobs wait for it.")
        ]
    return [*await _unbound(cluster, result, where), *await _modes(cluster, result, where)]


async def _unbound(cluster: ClusterAccess, claim: Object, where: str) -> list[Finding]:
    phase, name = (claim.get("status") or {}).get("phase"), claim["metadata"]["name"]
    spec = claim.get("spec") or {}
    if phase == "Lost":
        what = f"The volume of the claim {name} is gone."
        return [
            Finding("error", what, where, "Restore the volume, or create the claim anew: its checkpoints are lost.")
        ]
    if phase == "Bound":
        return []
    wanted = spec.get("storageClassName")
    classes = await cluster.list_objects(CLASSES)
    if classes is None:
        return []
    class_by_name = {one["metadata"]["name"]: one for one in classes}
    if wanted is None and not spec.get("volumeName"):
        return [
            Finding(
                "error",
                f"The claim {name} names no StorageClass, and the cluster has no default one.",
                where,
                "Name one in jobs.checkpoints.storageClass, or mark one as the default.",
            )
        ]
    if wanted and wanted not in class_by_name:
        return [
            Finding(
                "error",
                f"The claim {name} waits for the StorageClass {wanted}, which does not exist.",
                where,
                f"Create that class, or name one of those that exist: {', '.join(sorted(class_by_name)) or 'none'}.",
            )
        ]
    if class_by_name.get(wanted, {}).get("volumeBindingMode") == "WaitForFirstConsumer":
        return []
    return [
        Finding(
            "error",
            f"The claim {name} is not bound to a volume ({phase or 'Pending'}).",
            where,
            f"kubectl --namespace {cluster.jobs_namespace} describe pvc {name} shows why.",
        )
    ]


async def _modes(cluster: ClusterAccess, claim: Object, where: str) -> list[Finding]:
    modes = (claim.get("status") or {}).get("accessModes") or (claim.get("spec") or {}).get("accessModes") or []
    name = claim["metadata"]["name"]
    if "ReadOnlyMany" in modes and not {"ReadWriteMany", "ReadWriteOnce"} & set(modes):
        return [Finding("error", f"The claim {name} is read-only.", where, "Use one that jobs may write to.")]
    if any(mode in SHARED_MODES for mode in modes):
        return []
    chosen = cluster.selectors
    nodes = [node for node in await cluster.nodes() if any(one.selects(node) for one in chosen)]
    if len(nodes) < 2:
        return []
    return [
        Finding(
            "error",
            f"The claim {name} is {' and '.join(modes) or 'without an access mode'}, and {len(nodes)} nodes run jobs.",
            where,
            "Use storage with ReadWriteMany: jobs on a second node wait for the volume of the first.",
        )
    ]
