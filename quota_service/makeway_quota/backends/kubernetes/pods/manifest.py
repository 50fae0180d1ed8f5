"""Make the pod of a worker, and the Service of a gang: pure functions of order and settings.

Names follow from workload, attempt and worker, so that creating twice creates once. The pods pass the *restricted* pod
security standard, have no token of the API server, and may run on the planned node alone.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from makeway_api.pods import INSTANCE, KIND, MANAGED_BY, MANAGER, NO_EVICTION_ANNOTATIONS, OWNER, PROFILE, TEAM

from ....policy.pod_template import WORKER_CONTAINER, claim_templates_of
from ...base import Key, StartOrder
from ..api.client import Object
from ..cluster.nodes import Toleration
from ..cluster.pod_requests import ATTEMPT, JOB, WORKER
from .compute import share_compute
from .disk import Disk, bound_disk
from .template import merged

WORKERS = "makeway/workers"
DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
"""The annotation of a pod with the container that `kubectl logs` and `exec` mean, also where sidecars come first."""
OWN_IMAGE = "makeway/own-image"
"""The annotation of pods whose image the job or its profile chose; others have the image of the site."""
MASTER_PORT = 29500
LAUNCHER = "/makeway/launcher"
HOME = "/makeway/job"
PLATFORM = "platform"
"""Instead of a user and group: the platform assigns them"""
USER = "jovyan"
"""The user's name inside of the pod, the same for all: some programs make folders of it"""
SHARED_MEMORY = "/dev/shm"
"""Without a volume it has 64 MB, too few for NCCL and for workers of PyTorch's DataLoader. What is in it counts as the
container's memory."""
CHECKPOINTS = "/makeway/checkpoints"
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
TOKEN = "MAKEWAY_ATTEMPT_TOKEN"
GRACE_MARGIN = 20
"""Seconds beyond a job's grace after which the kubelet kills its container: the launcher reports meanwhile."""
MAX_START = 21_600
"""Seconds for which a pod may pull its image, as in `pod_waits.MAX_WAIT_SECONDS`."""
MAX_SECONDS = 2**31 - 1
"""The longest `activeDeadlineSeconds` that Kubernetes takes"""
OUTAGE_TOLERATIONS = tuple(
    {"key": f"node.kubernetes.io/{state}", "operator": "Exists", "effect": "NoExecute"}
    for state in ("not-ready", "unreachable")
)
"""The tolerations by which a pod outlives a time in which its node is out of Kubernetes' reach: its launcher may reach
the service all the same, and a job whose worker is silent for too long is started elsewhere by Makeway."""
LABEL_VALUE = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True)
class PodSettings:
    """What is the same for all pods of an installation on one cluster."""

    namespace: str
    instance: str
    address: str
    """the service as pods reach it: http://host:port/prefix"""
    launcher_image: str
    """an image with Python and Makeway, from which the launcher is copied"""
    image: str
    """the image of jobs whose profile names none"""
    launcher_source: str = ""
    """the launcher's folder in its image; "": where Python finds it"""
    pull_policy: str = "IfNotPresent"
    service_account: str = "default"
    priority_class: str = ""
    run_as: tuple[int, int] | None = (1000, 100)
    """user and group; None: the platform assigns them, as OpenShift does"""
    checkpoint_claim: str = ""
    """the PersistentVolumeClaim of a team's checkpoints; {team} stands for its name; "": they end with the pod"""
    disk: Disk = field(default_factory=Disk)
    """of pods whose profile names none"""
    cpu_limits: bool = False
    """whether containers without a CPU limit get their request as one, as quotas and LimitRanges may demand"""
    launcher_resources: Mapping[str, Any] = field(default_factory=dict)
    """requests and limits of the launcher's container, and of the one that removes checkpoints; empty: usual ones"""
    template: Mapping[str, Any] = field(default_factory=dict)
    """the site's pod template for all pods of jobs; that of a profile comes on top"""


@dataclass(frozen=True, slots=True)
class WorkerResources:
    """What a worker gets on its node besides the CPU and memory of its order."""

    resource: str = ""
    devices: int = 0
    tolerations: tuple[Toleration, ...] = ()
    template: Mapping[str, Any] = field(default_factory=dict)
    """of the profile"""
    disk: int = 0
    """of the profile, in MiB"""
    node_disk: int = 0
    """what its node offers of its disk to pods, in MiB; 0: it does not count its disk"""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """by which it uses what the cluster's autoscaler provisioned for it"""


def user_and_group(text: str) -> tuple[int, int] | None:
    """Return user and group of a setting such as 1000:100, None for platform; ValueError for root and other texts."""
    if text.strip() == PLATFORM:
        return None
    user, _, group = text.partition(":")
    if not (user.isdecimal() and group.isdecimal()) or int(user) == 0:
        raise ValueError(f"{text!r} is not a user and group for jobs: expected two numbers such as 1000:100, not root.")
    return int(user), int(group)


def pod_name(workload: str, attempt: int, worker: int) -> str:
    """Return the name of a worker's pod."""
    return f"{attempt_name(workload, attempt)}-{worker}"


def attempt_name(workload: str, attempt: int) -> str:
    """Return the name of an attempt's Service."""
    return f"makeway-{workload}-{attempt}"


def claim_of(settings: PodSettings, team: str) -> str:
    """Return the claim with the checkpoints of a team's jobs; "" where they end with their pods."""
    return settings.checkpoint_claim.replace("{team}", label_value(team).lower())


def token_key(workload: str, attempt: int, worker: int) -> str:
    """Return the key of a worker's token in its Secret."""
    return f"{workload}.{attempt}.{worker}"


def token_secret_of(pod: Object) -> str:
    """Return the name of the Secret that a worker's pod takes its token from, "" where its manifest is not known."""
    containers = pod.get("spec", {}).get("containers", ())
    variables = [
        one for container in containers if container["name"] == WORKER_CONTAINER for one in container.get("env", ())
    ]
    return next((str(one["valueFrom"]["secretKeyRef"]["name"]) for one in variables if one["name"] == TOKEN), "")


def labels_of(settings: PodSettings, key: Key) -> dict[str, str]:
    """Return the labels that everything of an attempt has."""
    return {MANAGED_BY: MANAGER, INSTANCE: settings.instance, JOB: key[0], ATTEMPT: str(key[1])}


def worker_pod(
    settings: PodSettings, order: StartOrder, number: int, path: str, token_secret: str, resources: WorkerResources
) -> Object:
    """Return the pod of one worker.

    `path` is that of the worker below the service's address, `token_secret` the name of the Secret with its token.
    BackendError where its order has no CPU or memory left for it.
    """
    key = (order.workload, order.attempt)
    name = attempt_name(*key)
    node = order.workers[number].node
    pod: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(*key, number),
            "namespace": settings.namespace,
            "labels": {
                "app.kubernetes.io/name": "makeway-job",
                **labels_of(settings, key),
                WORKER: str(number),
                WORKERS: str(len(order.workers)),
                KIND: "job",
                TEAM: label_value(order.team),
                PROFILE: label_value(order.profile),
                "makeway/user": label_value(order.owner),
            },
            "annotations": {**_annotations(order), **resources.annotations},
        },
        "spec": {
            "restartPolicy": "Never",
            "serviceAccountName": settings.service_account,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": math.ceil(order.grace) + GRACE_MARGIN,
            **deadline_of(order),
            "affinity": _affinity_to(node),
            "tolerations": [*(toleration_of(one) for one in resources.tolerations), *OUTAGE_TOLERATIONS],
            "securityContext": pod_security(settings),
            "initContainers": [_launcher_container(settings, order)],
            "containers": [_worker_container(settings, order, number, path, token_secret, resources)],
            "volumes": _volumes(settings, order),
            "hostname": f"worker-{number}",
            **({"subdomain": name} if len(order.workers) > 1 else {}),
            **({"priorityClassName": settings.priority_class} if settings.priority_class else {}),
        },
    }
    pod = merged(merged(pod, settings.template), resources.template)
    share_compute(pod, order, limit=settings.cpu_limits)
    bound_disk(pod, _disk(settings, resources), order.memory)
    for container in (*pod["spec"]["initContainers"], *pod["spec"]["containers"]):
        container["securityContext"] = {**container_security(), **(container.get("securityContext") or {})}
        _hide_gpus(container, resources)
    return pod


def _annotations(order: StartOrder) -> dict[str, str]:
    own_image, stays = {OWN_IMAGE: "true"} if order.image else {}, {} if order.preemptible else NO_EVICTION_ANNOTATIONS
    return {OWNER: order.owner, "makeway/name": order.name, DEFAULT_CONTAINER: WORKER_CONTAINER, **own_image, **stays}


def deadline_of(order: StartOrder) -> Object:
    """Return the time after which the kubelet ends a pod that neither its launcher nor the service has ended.

    Kubernetes counts it from when the node accepts the pod. The job's own limit begins with its command, when the image
    and all volumes are there, and it may take its grace beyond the limit to save.
    """
    if order.time_limit is None:
        return {}
    seconds = math.ceil(min(order.time_limit, MAX_SECONDS) + order.grace) + MAX_START + 2 * GRACE_MARGIN
    return {"activeDeadlineSeconds": min(seconds, MAX_SECONDS)}


def label_value(text: str) -> str:
    """Return a text as the value of a label: what is not allowed in one becomes a dash."""
    return LABEL_VALUE.sub("-", text)[:63].strip("-_.")


def owned(name: str, labels: Mapping[str, str], owners: Sequence[Object]) -> Object:
    """Return the metadata of an object that goes with the last of the pods `owners`."""
    references = [
        {"apiVersion": "v1", "kind": "Pod", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
        for pod in owners
    ]
    return {"name": name, "labels": dict(labels), "ownerReferences": references}


def _affinity_to(node: str) -> Object:
    """Return the affinity to one node; the scheduler of Kubernetes still checks that the pod fits there."""
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}


def toleration_of(one: Toleration) -> Object:
    """Return a toleration as a pod has it."""
    result: Object = {"operator": one.operator}
    for name in ("key", "value", "effect"):
        if getattr(one, name):
            result[name] = getattr(one, name)
    return result


def pod_security(settings: PodSettings) -> Object:
    """Return what passes the restricted standard, as the user of jobs."""
    result: Object = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    if settings.run_as is not None:
        user, group = settings.run_as
        result |= {"runAsUser": user, "runAsGroup": group}
        result |= {"fsGroup": group, "fsGroupChangePolicy": "OnRootMismatch"}
    return result


def container_security() -> Object:
    """Return what the restricted standard wants of each container."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _launcher_container(settings: PodSettings, order: StartOrder) -> Object:
    """Return the init container that copies the launcher to where an image without it can run it.

    It also makes the job's folder of checkpoints, for which it has the whole volume: the kubelet would make it as root.
    """
    source = [settings.launcher_source] if settings.launcher_source else ["-m", "makeway.launcher"]
    small: Object = {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "128Mi"}}
    return {
        "name": "launcher",
        "image": settings.launcher_image,
        "imagePullPolicy": settings.pull_policy,
        "command": ["python3", *source, "--copy", LAUNCHER],
        "env": [{"name": "MAKEWAY_CHECKPOINT_DIR", "value": f"{CHECKPOINTS}/{order.workload}"}],
        "resources": deepcopy(dict(settings.launcher_resources)) or small,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "makeway", "mountPath": "/makeway"},
            {"name": "checkpoints", "mountPath": CHECKPOINTS},
        ],
    }


def _worker_container(
    settings: PodSettings, order: StartOrder, number: int, path: str, token_secret: str, resources: WorkerResources
) -> Object:
    token = {"secretKeyRef": {"name": token_secret, "key": token_key(order.workload, order.attempt, number)}}
    variables = {
        "MAKEWAY_ATTEMPT_URL": f"{settings.address.rstrip('/')}/{path}",
        "MAKEWAY_JOB_DIR": HOME,
        "MAKEWAY_CHECKPOINT_DIR": f"{CHECKPOINTS}/{order.workload}",
        "MAKEWAY_TERMINATION_FILE": "/dev/termination-log",
        "MAKEWAY_WORKER_ENV": json.dumps(_rendezvous(settings, order, number), sort_keys=True),
        "HOME": HOME,
        # Else getpass.getuser() fails, which PyTorch calls: an image may not know the user that the platform assigns.
        "USER": USER,
        "LOGNAME": USER,
    }
    return {
        "name": WORKER_CONTAINER,
        "image": order.image or settings.image,
        "imagePullPolicy": settings.pull_policy,
        "command": ["python3", "-S", LAUNCHER, "--remote"],
        "workingDir": "/makeway",
        "env": [
            *({"name": name, "value": value} for name, value in variables.items()),
            {"name": TOKEN, "valueFrom": token},
        ],
        "resources": _resources(resources),
        "terminationMessagePolicy": "File",
        "volumeMounts": [
            {"name": "makeway", "mountPath": "/makeway"},
            # Its own folder alone: the volume has those of a team, or of everyone.
            {"name": "checkpoints", "mountPath": f"{CHECKPOINTS}/{order.workload}", "subPath": order.workload},
            {"name": "shm", "mountPath": SHARED_MEMORY},
        ],
    }


def _hide_gpus(container: Object, resources: WorkerResources) -> None:
    """Show a container without GPUs none: images made for them ask the runtime for all of the node's."""
    if resources.resource in container.get("resources", {}).get("limits", {}):
        return  # the device plugin says which; a driver (DRA) does so beside that variable
    env = container.setdefault("env", [])
    if not any(one["name"] == VISIBLE for one in env):
        env.append({"name": VISIBLE, "value": "void"})


def _rendezvous(settings: PodSettings, order: StartOrder, number: int) -> dict[str, str]:
    """Return the variables by which a worker knows its rank and, in a gang, finds the others."""
    size = len(order.workers)
    if size < 2:
        return {"RANK": "0", "WORLD_SIZE": "1"}
    first = f"worker-0.{attempt_name(order.workload, order.attempt)}.{settings.namespace}.svc"
    return {"RANK": str(number), "WORLD_SIZE": str(size), "MASTER_ADDR": first, "MASTER_PORT": str(MASTER_PORT)}


def _resources(resources: WorkerResources) -> Object:
    requests: Object = {}
    limits: Object = {}
    if resources.devices and (claims := claim_templates_of(resources.template)):
        return {"requests": requests, "limits": limits, "claims": [{"name": name} for name in claims]}
    if resources.devices:
        requests[resources.resource] = limits[resources.resource] = str(resources.devices)
    return {"requests": requests, "limits": limits}


def _disk(settings: PodSettings, resources: WorkerResources) -> Disk:
    """Return the disk of a worker's pod: as its profile says, even on a node that is too small, else the settings."""
    if resources.disk:
        return Disk(resources.disk if resources.node_disk else 0, resources.disk)
    return settings.disk.on(resources.node_disk)


def _volumes(settings: PodSettings, order: StartOrder) -> list[Object]:
    claim = claim_of(settings, order.team)
    durable: Object = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}
    shared: Object = {"emptyDir": {"medium": "Memory"}}
    return [{"name": "makeway", "emptyDir": {}}, {"name": "checkpoints", **durable}, {"name": "shm", **shared}]
