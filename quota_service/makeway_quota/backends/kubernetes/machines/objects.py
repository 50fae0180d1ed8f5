"""Make the objects of a machine of the cluster, and read what events and nodes say of it: pure functions.

A ConfigMap is the record of a machine: its request, the node that it has got, and whether it was ended. For a
placeholder, a pod of the machine's shape, the autoscaler adds a node; once it is bound, a pod without requests keeps
the node from being removed, and the placeholder makes way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

from makeway_api.pods import INSTANCE, KIND, MANAGED_BY, MANAGER, NO_EVICTION_ANNOTATIONS

from ..api.client import Object
from ..cluster.nodes import ClusterNode, NodeSelector
from ..cluster.pod_requests import MACHINE
from ..pods.compute import limit_cpu
from ..pods.manifest import PodSettings, container_security, pod_security, toleration_of
from ..pods.template import merged

DEPLOYMENT = "makeway/deployment"
ANY = "any"
"""The `instance` of a type whose machines may be any nodes of their pool"""
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
ZONE = "topology.kubernetes.io/zone"
OF_CLUSTER_AUTOSCALER, OF_KARPENTER = ("TriggeredScaleUp", "NotTriggerScaleUp"), ("Nominated", "FailedScheduling")
"""Reasons of events by which each says that a node is coming, and that none is; the scheduler has the last one, too"""
REFUSES = ("NotTriggerScaleUp", "FailedScheduling")
REFUSAL = re.compile(r"^(pod didn't trigger scale-up|Failed to schedule pod)[:, ]*")
"""How their refusals begin"""


class MachineObjects(NamedTuple):
    """The names of the objects of one machine."""

    record: str
    placeholder: str
    keeper: str


def names_of(machine: str) -> MachineObjects:
    """Return the names, which follow from the machine: creating twice creates once."""
    name = f"makeway-machine-{machine}"
    return MachineObjects(name, f"{name}-place", f"{name}-keep")


def labels_of(settings: PodSettings, deployment: str, machine: str) -> dict[str, str]:
    """Return the labels of all objects of a machine."""
    return {
        MANAGED_BY: MANAGER,
        INSTANCE: settings.instance,
        KIND: "machine",
        MACHINE: machine,
        DEPLOYMENT: deployment,
    }


def record(settings: PodSettings, request: str) -> Object:
    """Return the record of a machine that is requested."""
    wanted = json.loads(request)
    machine, deployment = str(wanted["machine"]), str(wanted["deployment"])
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": names_of(machine).record,
            "namespace": settings.namespace,
            "labels": labels_of(settings, deployment, machine),
        },
        "data": {"request": request, "node": "", "ended": ""},
    }


def placeholder(
    settings: PodSettings,
    request: Mapping[str, Any],
    selector: NodeSelector,
    priority: str,
    annotations: Mapping[str, str] | None = None,
) -> Object:
    """Return the pod of the shape of a machine, for which the autoscaler adds a node."""
    requests = {"cpu": f"{request['cpu']}m", "memory": f"{request['memory']}Mi", selector.resource: request["gpus"]}
    asked = {name: str(many) for name, many in requests.items() if str(many).rstrip("mMi") not in ("", "0")}
    limits = {name: many for name, many in asked.items() if name == selector.resource}
    pod = _pod(settings, request, "placeholder", {"requests": asked, "limits": limits}, priority)
    labels = dict(selector.labels)
    if request["instance"] != ANY:
        labels[INSTANCE_TYPE] = request["instance"]
    if request["zone"]:
        labels[ZONE] = request["zone"]
    pod["metadata"]["annotations"] |= annotations or {}
    pod["spec"]["nodeSelector"] = labels
    pod["spec"]["tolerations"] = [toleration_of(one) for one in selector.tolerations]
    return _with_template(pod, settings)


def keeper(settings: PodSettings, request: Mapping[str, Any], node: str, priority: str) -> Object:
    """Return the pod that keeps a node from being removed, and takes nothing of it."""
    pod = _pod(settings, request, "keeper", {}, priority)
    pod["spec"]["nodeName"] = node
    pod["spec"]["tolerations"] = [{"operator": "Exists"}]
    return _with_template(pod, settings)


def _pod(settings: PodSettings, request: Mapping[str, Any], what: str, resources: Object, priority: str) -> Object:
    machine = str(request["machine"])
    names = names_of(machine)
    pod: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": names.placeholder if what == "placeholder" else names.keeper,
            "namespace": settings.namespace,
            "labels": labels_of(settings, str(request["deployment"]), machine),
            "annotations": dict(NO_EVICTION_ANNOTATIONS),
        },
        "spec": {
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": 1,
            "serviceAccountName": settings.service_account,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": pod_security(settings),
            "containers": [
                {
                    "name": what,
                    "image": settings.launcher_image,
                    "imagePullPolicy": settings.pull_policy,
                    "command": ["python3", "-c", "import signal; signal.pause()"],
                    "resources": resources,
                    "securityContext": {**container_security(), "readOnlyRootFilesystem": True},
                }
            ],
            **({"priorityClassName": priority} if priority else {}),
        },
    }
    if settings.cpu_limits:
        limit_cpu(pod)
    return pod


def _with_template(pod: Object, settings: PodSettings) -> Object:
    """Return the pod with what all pods of the site share; its containers are those of jobs."""
    template = deepcopy(dict(settings.template))
    spec = template.get("spec") or {}
    shared = {name: spec[name] for name in ("imagePullSecrets", "securityContext", "nodeSelector") if name in spec}
    shared |= {"tolerations": spec["tolerations"]} if "tolerations" in spec and "nodeName" not in pod["spec"] else {}
    return merged(pod, {"metadata": template.get("metadata") or {}, "spec": shared})


class ScaleUp(NamedTuple):
    """What the autoscaler said last of a placeholder: whether a node is coming, and its words."""

    coming: bool
    message: str


def scale_up_of(events: Iterable[Object]) -> ScaleUp | None:
    """Return what the autoscaler said last, by the events of one placeholder; None where it said nothing."""
    text = [one for one in events if _is_of_autoscaler(one)]
    if not text:
        return None
    newest = max(text, key=_time_of)
    message = " ".join(str(newest.get("message") or "").split())
    return ScaleUp(newest["reason"] not in REFUSES, message)


def _is_of_autoscaler(event: Object) -> bool:
    if event.get("reason") not in OF_KARPENTER:
        return event.get("reason") in OF_CLUSTER_AUTOSCALER
    by = str(event.get("reportingComponent") or (event.get("source") or {}).get("component") or "")
    return by.startswith("karpenter")


def _time_of(event: Object) -> tuple[str, str]:
    series, metadata = event.get("series") or {}, event.get("metadata") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return max((str(one) for one in times if one), default=""), str(metadata.get("creationTimestamp") or "")


def refusal(scale_up: ScaleUp) -> str:
    """Return in plain words why no node is added."""
    why = REFUSAL.sub("", scale_up.message) or "it gives no reason"
    return f"the cluster's autoscaler adds no node: {why}"


def offers(node: ClusterNode, resource: str, gpus: int) -> bool:
    """Whether a node is ready with so many GPUs: one whose device plugin has not registered yet is not."""
    return node.ready and node.allocatable.get(resource, 0) >= gpus
