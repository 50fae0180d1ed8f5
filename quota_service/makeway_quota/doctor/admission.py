"""Check that the cluster admits pods: a dry run of a pod of each profile, and what limits the namespace."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..backends.base import BackendError, StartOrder
from ..backends.kubernetes.api.client import ApiStatusError, Object
from ..backends.kubernetes.api.quantities import MIB, parse_quantity
from ..backends.kubernetes.attempts.start_errors import fits_later
from ..backends.kubernetes.pods.claim_templates import ClaimTemplates
from ..backends.kubernetes.pods.disk import RESOURCE as DISK
from ..backends.kubernetes.pods.manifest import WorkerResources, container_security, worker_pod
from ..backends.kubernetes.settings import pod_settings
from ..engine.snapshot import GPU, Profile
from ..values import Place
from .cluster import ClusterAccess
from .findings import Finding, Severity

MAX_PROFILES = 30
"""So many profiles are checked, the first of the policy"""
LARGE_DISK = 2**40
"""MiB of a disk on which the settings alone bound what pods have"""
DRY_RUN = "?dryRun=All"
NO_DRY_RUN = "does not support dry run"
USED_UP = "Wait until other pods end, or raise the ResourceQuota of the namespace."
REMEDIES: Mapping[str, str] = {
    NO_DRY_RUN: "Set sideEffects of this webhook to None or NoneOnDryRun if that is true of it, or watch a job.",
    r"violates PodSecurity": "Remove from the profile's pod template what the level of the namespace forbids, or "
    "change its label pod-security.kubernetes.io/enforce.",
    r"exceeded quota|failed quota": "Raise the ResourceQuota of the namespace, or make the profile smaller.",
    r"(maximum|minimum) .* usage per|limit to request ratio": "Change the LimitRange of the namespace, or the profile.",
    r"no PriorityClass": "Create the PriorityClass, or leave jobs.priorityClass empty.",
    r"service account": "Create the ServiceAccount of jobs in this namespace, as the chart does.",
    r"RuntimeClass": "Create the RuntimeClass, or remove runtimeClassName from the pod template.",
    r"security context constraint": "Set podSecurity.users: platform (MAKEWAY_KUBE_RUN_AS=platform), and let the "
    "account of jobs use restricted-v2.",
    r"admission webhook|ValidatingAdmissionPolicy|denied the request": "Change what this policy of the cluster asks "
    "for in the profile's pod template, or exempt the namespace from it.",
    r"namespaces? .* not found": "Create the namespace, as the chart does.",
}
"""What an administrator does, by what the refusal says"""


async def check_job_pods(cluster: ClusterAccess) -> Iterable[Finding]:
    """Return why pods of jobs are refused, once for each reason."""
    if cluster.document is None or cluster.as_hub:
        return []
    facts = cluster.document.profile_facts
    profiles = [profile for profile in cluster.document.profiles if "job" in facts[profile.name].kinds]
    disk = await _smallest_disk(cluster)
    return await _refusals(cluster, profiles[:MAX_PROFILES], partial(_job_pod, disk=disk))


async def _smallest_disk(cluster: ClusterAccess) -> int:
    """Return the least that a node of the pools offers of its disk, in MiB; 0 where none says.

    Where the pools have no node, or none can be seen, which is a finding of its own, pods are as on one that is large.
    """
    try:
        nodes = await cluster.nodes()
    except ApiStatusError:
        return LARGE_DISK
    chosen = [node for node in nodes if any(selector.selects(node) for selector in cluster.selectors)]
    if not chosen:
        return LARGE_DISK
    return min((disk for node in chosen if (disk := node.allocatable.get(DISK, 0) // MIB)), default=0)


async def check_notebook_pods(cluster: ClusterAccess) -> Iterable[Finding]:
    """Return why pods like those of notebooks are refused; only for the Hub's account, which makes them."""
    if cluster.document is None or not cluster.as_hub:
        return []
    facts = cluster.document.profile_facts
    profiles = [profile for profile in cluster.document.profiles if "session" in facts[profile.name].kinds]
    return await _refusals(cluster, profiles[:MAX_PROFILES], _notebook_pod)


async def _refusals(cluster: ClusterAccess, profiles: Iterable[Profile], made: Any) -> list[Finding]:
    path = f"/api/v1/namespaces/{cluster.work_namespace}/pods{DRY_RUN}"
    messages = dict[tuple[Severity, str], tuple[str, list[str]]]()
    for profile in profiles:
        try:
            await cluster.client.create(path, made(cluster, profile))
        except ApiStatusError as refusal:
            if refusal.status == 409:
                continue
            message = refusal.message
        except BackendError as error:
            message = str(error)
        else:
            continue
        key = _severity(message), re.sub(r'"[^"]*"|\d+', "#", message)
        messages.setdefault(key, (message, []))[1].append(profile.name)
    return [_refused(cluster, severity, *refused) for (severity, _), refused in messages.items()]


def _severity(message: str) -> Severity:
    """Return how bad a refusal is: a quota that others use up now is no error, nor a webhook that takes no dry run."""
    if NO_DRY_RUN in message:
        return "note"
    return "warning" if fits_later(message) else "error"


def _refused(cluster: ClusterAccess, severity: Severity, message: str, names: Sequence[str]) -> Finding:
    pods = f"pods of {'notebooks' if cluster.as_hub else 'jobs'} are"
    what = f"Not checked whether {pods} admitted" if severity == "note" else f"{pods.capitalize()} refused"
    remedies = (remedy for words, remedy in REMEDIES.items() if re.search(words, message))
    return Finding(
        severity,
        f"{what}: {message.rstrip('.')}.",
        f"namespace {cluster.work_namespace}, profile{'s' if len(names) > 1 else ''} {', '.join(names)}",
        USED_UP if severity == "warning" else next(remedies, "Change what the message names."),
    )


def _job_pod(cluster: ClusterAccess, profile: Profile, disk: int) -> Object:
    """Return the pod of a worker as the service makes it, for a node with so many MiB of disk that need not exist."""
    document = cluster.document
    assert document is not None
    facts = document.profile_facts[profile.name]
    pool = next((one for one in cluster.selectors if not profile.pools or one.pool in profile.pools), None)
    devices = -(-profile.gpus // GPU)
    order = StartOrder(
        workload="doctor",
        attempt=1,
        name="doctor",
        owner="doctor",
        team="doctor",
        profile=profile.name,
        command=("true",),
        env={},
        workers=(Place("doctor", tuple(range(devices)), (GPU,) * devices),),
        grace=profile.grace or document.settings.grace,
        signal=facts.signal,
        cpu=profile.cpu,
        memory=profile.memory,
    )
    given = WorkerResources(
        resource=pool.resource if pool else "",
        devices=devices,
        tolerations=pool.tolerations if pool else (),
        template=facts.pod,
        disk=facts.disk,
        node_disk=disk,
    )
    settings = pod_settings(cluster.settings, cluster.jobs_namespace)
    launcher = settings.launcher_image or "launcher"  # which an administrator need not name to look at the cluster
    settings = replace(settings, launcher_image=launcher, image=settings.image or launcher)
    return worker_pod(settings, order, 0, "doctor", "makeway-doctor", given)


def _notebook_pod(cluster: ClusterAccess, profile: Profile) -> Object:
    """Return a pod with the security and the resources of a notebook."""
    pool = next((one for one in cluster.selectors if not profile.pools or one.pool in profile.pools), None)
    resources: dict[str, str] = {}
    if profile.cpu:
        resources["cpu"] = f"{profile.cpu}m"
    if profile.memory:
        resources["memory"] = f"{profile.memory}Mi"
    if pool is not None and profile.gpus:
        resources[pool.resource] = str(-(-profile.gpus // GPU))
    user, _, group = cluster.settings.run_as.partition(":")
    security: Object = {"runAsNonRoot": True}
    if user.isdecimal() and group.isdecimal():  # else the platform assigns them
        security |= {"runAsUser": int(user), "fsGroup": int(group)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "makeway-doctor-notebook", "namespace": cluster.work_namespace},
        "spec": {
            "automountServiceAccountToken": False,
            "securityContext": {**security, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "notebook",
                    "image": cluster.settings.image or "notebook",
                    "resources": {"requests": resources, "limits": resources},
                    "securityContext": container_security(),
                }
            ],
        },
    }


async def check_claim_templates(cluster: ClusterAccess) -> Iterable[Finding]:
    """Return the profiles whose pods would not get their GPUs by the claims of their pod templates (DRA)."""
    if cluster.document is None or cluster.as_hub:
        return []
    spaces = {"job": cluster.jobs_namespace}
    if cluster.client.connection.token_file is not None:  # in a pod, beside those of notebooks
        spaces["session"] = cluster.client.connection.namespace
    problems = await ClaimTemplates(cluster.client).profile_problems(cluster.document, cluster.selectors, spaces)
    return [
        Finding(
            "error",
            f"Pods of the profile {name} would not get their GPUs: {why}.",
            f"profile {name}",
            "Correct spec.resourceClaims of its pod template, or what it names on the cluster.",
        )
        for name, why in problems
    ]


async def check_limits(cluster: ClusterAccess) -> Iterable[Finding]:
    """Return quotas of the namespace that are used up or closed; LimitRanges show in the dry run."""
    quotas = await cluster.list_objects(f"/api/v1/namespaces/{cluster.work_namespace}/resourcequotas")
    return [finding for quota in quotas or () for finding in _used_up(cluster, quota)]


def _used_up(cluster: ClusterAccess, quota: Object) -> Iterator[Finding]:
    status = quota.get("status") or {}
    for resource, hard in sorted((status.get("hard") or {}).items()):
        used = (status.get("used") or {}).get(resource, "0")
        if parse_quantity(str(hard)) == 0:
            what = f"The ResourceQuota {quota['metadata']['name']} allows no {resource}."
        elif parse_quantity(str(used)) >= parse_quantity(str(hard)):
            what = f"The ResourceQuota {quota['metadata']['name']} is used up: {used} of {hard} {resource}."
        else:
            continue
        yield Finding("warning", what, f"namespace {cluster.work_namespace}", "Raise it, or end what holds it.")
