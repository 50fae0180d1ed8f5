"""Check that the account may do all that the service, or the Hub's spawner, does on the cluster."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..backends.kubernetes.api.access_reviews import denied_verbs
from ..backends.kubernetes.cluster.dra_devices import CLASSES, IMPLICIT_RESOURCE_PREFIX
from ..backends.kubernetes.machines.provisioning_requests import REQUEST_RIGHTS
from ..policy.pod_template import claim_templates_of
from .cluster import ClusterAccess
from .findings import Finding


class Right(NamedTuple):
    """Verbs on one resource; `everywhere`: in all namespaces, else in that of jobs, or of notebooks for the Hub."""

    group: str
    resource: str
    verbs: tuple[str, ...]
    everywhere: bool = False
    without: str = ""
    """what does not work without it"""
    needed: bool = False
    """whether nothing else works without it either"""


NOT_FOLLOWED = "the cluster cannot be followed, and nothing starts"
SERVICE = (
    Right("", "nodes", ("list", "watch"), everywhere=True, without=NOT_FOLLOWED, needed=True),
    Right("", "pods", ("list", "watch"), everywhere=True, without=NOT_FOLLOWED, needed=True),
    Right("", "pods", ("get", "list", "watch", "create", "delete")),
    Right("", "secrets", ("create",)),
    Right("", "services", ("create", "delete"), without="jobs with several workers do not start"),
    Right("", "events", ("create",), without="pods show no events of Makeway"),
    Right("", "events", ("list",), without="jobs do not say why their volumes are not mounted"),
    Right("coordination.k8s.io", "leases", ("get", "create", "update"), without="a copy beside it is not noticed"),
    Right("networking.k8s.io", "networkpolicies", ("create", "delete"), without="gangs have no network policy"),
)
"""As in the chart's templates/service/rights.yaml"""
DEVICES = tuple(
    Right("resource.k8s.io", resource, ("list", "watch"), everywhere=True, without="GPUs of DRA drivers do not count")
    for resource in ("deviceclasses", "resourceclaims", "resourceslices")
)
"""Where the cluster has classes of devices, or a pool names one, besides; all three, or none of the devices counts"""
TEMPLATES = Right("resource.k8s.io", "resourceclaimtemplates", ("get",), without="claims of profiles are not checked")
"""Where a profile's pod template has claims, besides"""
HOMES = Right("", "persistentvolumeclaims", ("get",), without="jobs have no home")
"""With a claim of homes (`jobs.home` of the chart) besides"""
MACHINES = Right(
    "",
    "configmaps",
    ("create", "get", "list", "update", "delete"),
    without="deployments with the provider kubernetes launch no nodes",
)
"""With a priority class of placeholders (`clusterAutoscaler.enabled` of the chart) besides"""
REQUESTS = tuple(
    Right(group, resource, verbs, without="deployments with `provisioning: request` launch no nodes")
    for group, resource, verbs in REQUEST_RIGHTS
)
"""Where a deployment asks by ProvisioningRequests (`clusterAutoscaler.provisioningRequests` of the chart), besides"""
HUB = (
    Right("", "pods", ("get", "list", "watch", "create", "delete")),
    Right("", "persistentvolumeclaims", ("get", "create", "delete")),
    Right("", "events", ("list", "watch"), without="a notebook's page does not show why its pod waits"),
)
"""As in the chart's templates/hub/rights.yaml"""


async def check_rights(cluster: ClusterAccess) -> Iterable[Finding]:
    """Return one finding for each resource on which a verb is not allowed."""
    if cluster.as_hub:
        wanted = list(HUB)
    else:
        wanted = [*SERVICE, *([HOMES] if cluster.settings.home_claim else [])]
        wanted += [MACHINES] if cluster.settings.placeholder_class else ()
        wanted += REQUESTS if cluster.asks_for_nodes else ()
        wanted += DEVICES if await _counts_devices(cluster) else ()
        wanted += [TEMPLATES] if _has_claims(cluster) else ()
    return [finding for right in wanted if (finding := await _denied(cluster, right))]


async def _counts_devices(cluster: ClusterAccess) -> bool:
    """Whether GPUs of DRA drivers may have to count: by a pool's resource, or by a class that may be read."""
    if any(one.resource.startswith(IMPLICIT_RESOURCE_PREFIX) for one in cluster.selectors):
        return True
    return bool(await cluster.list_objects(CLASSES))


def _has_claims(cluster: ClusterAccess) -> bool:
    """Whether pods of jobs get their GPUs by claims."""
    facts = cluster.document.profile_facts.values() if cluster.document is not None else ()
    return any("job" in one.kinds and claim_templates_of(one.pod) for one in facts)


async def _denied(cluster: ClusterAccess, right: Right) -> Finding | None:
    namespace = "" if right.everywhere else cluster.work_namespace
    denied = await denied_verbs(cluster.client, right.group, right.resource, right.verbs, namespace)
    if not denied:
        return None
    where = f"namespace {namespace}" if namespace else "all namespaces"
    name = f"{right.resource}.{right.group}" if right.group else right.resource
    then = f": {right.without}" if right.without else ""
    return Finding(
        "warning" if right.without and not right.needed else "error",
        f"The account may not {', '.join(denied)} {name}{then}.",
        where,
        f"Bind it to a {'Role' if namespace else 'ClusterRole'} with these verbs, as the chart does.",
    )
