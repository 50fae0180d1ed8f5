"""Make the ProvisioningRequest of a machine, and read what the autoscaler says in its conditions: pure functions.

A request has the shape of the machine by a PodTemplate. The placeholder comes only once the request is provisioned, and
consumes it, as the pods of jobs on that node do: the autoscaler adds no node for pods that say so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ....autoscale.deployment import provisioning_class, provisioning_parameters
from ...machines.machine_source import MachineSource, MachineStatus
from ..api.client import Object
from .held_nodes import machines_of
from .objects import ScaleUp, names_of

GROUP = "autoscaling.x-k8s.io"
CRD = f"provisioningrequests.{GROUP}"
CONSUMED = f"{GROUP}/consume-provisioning-request"
CLASS = f"{GROUP}/provisioning-class-name"
REQUEST_RIGHTS = (
    (GROUP, "provisioningrequests", ("create", "get", "list", "delete")),
    ("", "podtemplates", ("create", "get", "delete")),
)
"""What the service's account has to be allowed for them in the namespace of jobs: group, resource and verbs"""
PROVISIONED, FAILED, EXPIRED, REVOKED = "Provisioned", "Failed", "BookingExpired", "CapacityRevoked"
"""The types of conditions that decide something; `Accepted` says only that the autoscaler will try"""
NOT_FOUND = "CapacityIsNotFound"
"""The reason with which Provisioned is false until the autoscaler tries again; with others it has not tried yet"""
OVER = ScaleUp(False, "it has taken back what it had provisioned")
LATE = ScaleUp(False, "what it had reserved has expired before Makeway used it")


def requests_path(namespace: str) -> str:
    """Return the path of the requests of a namespace."""
    return f"/apis/{GROUP}/v1/namespaces/{namespace}/provisioningrequests"


def class_of(record: Object) -> str:
    """Return the class of the ProvisioningRequest of a machine by its record; "" where it has a placeholder alone."""
    try:
        request = json.loads(record["data"]["request"])
        return provisioning_class(request.get("settings") or {})
    except (ValueError, KeyError, TypeError, AttributeError):  # a damaged record is told where it is brought up to date
        return ""


def consumption(machine: str, wanted_class: str) -> dict[str, str]:
    """Return the annotations of pods that use what was provisioned for a machine."""
    return {CONSUMED: names_of(machine).record, CLASS: wanted_class} if wanted_class else {}


def consumed_on(node: str, machines: Iterable[MachineStatus]) -> dict[str, str]:
    """Return the annotations of pods of jobs on a node: those of its machine, where it has a request."""
    there = (one for one in machines if one.of_cluster and one.node == node and one.condition != "ending")
    return next((consumption(one.name, one.provisioning_class) for one in there), {})


def consumed_by(source: MachineSource | None) -> Callable[[str], Mapping[str, str]]:
    """Return a function from a node to the annotations of pods of jobs there."""
    known = tuple(machines_of(source))
    return lambda node: consumed_on(node, known)


def template(pod: Object, owner: Object) -> Object:
    """Return the PodTemplate of the placeholder of a machine; it goes with the machine's record."""
    metadata = pod["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "PodTemplate",
        "metadata": _metadata(owner),
        "template": {
            "metadata": {"labels": metadata["labels"], "annotations": metadata["annotations"]},
            "spec": pod["spec"],
        },
    }


def provisioning_request(wanted: Mapping[str, Any], owner: Object) -> Object:
    """Return the request for one machine; it goes with the machine's record."""
    settings = wanted.get("settings") or {}
    return {
        "apiVersion": f"{GROUP}/v1",
        "kind": "ProvisioningRequest",
        "metadata": _metadata(owner),
        "spec": {
            "provisioningClassName": provisioning_class(settings),
            "parameters": provisioning_parameters(settings),
            "podSets": [{"podTemplateRef": {"name": owner["metadata"]["name"]}, "count": 1}],
        },
    }


def _metadata(owner: Object) -> Object:
    metadata = owner["metadata"]
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": metadata["name"], "uid": metadata["uid"]}
    return {
        "name": metadata["name"],
        "namespace": metadata["namespace"],
        "labels": metadata["labels"],
        "ownerReferences": [reference],
    }


def answer_of(request: Object, consumed: bool = False) -> ScaleUp | None:
    """Return what the autoscaler says of a request that has no node yet; None where it has not decided.

    `consumed`: whether its placeholder waits. A node may take longer to join than the ten minutes for which it is
    reserved: it is for the placeholder all the same.
    """
    known = _conditions(request)
    if _is_true(known, FAILED):
        return ScaleUp(False, _message(known[FAILED]))
    if _is_true(known, REVOKED):
        return OVER
    if _is_true(known, EXPIRED) and not consumed:
        return LATE
    if _is_true(known, PROVISIONED):
        return ScaleUp(True, _message(known[PROVISIONED]))
    found = known.get(PROVISIONED) or {}
    if found.get("status") == "False" and found.get("reason") == NOT_FOUND:
        return ScaleUp(False, _message(found))
    return None


def is_revoked(request: Object | None) -> bool:
    """Whether the autoscaler takes back what it had provisioned, so that the node will go."""
    return request is not None and _is_true(_conditions(request), REVOKED)


def _conditions(request: Object) -> dict[str, Object]:
    return {str(one.get("type")): one for one in (request.get("status") or {}).get("conditions") or ()}


def _is_true(conditions: Mapping[str, Object], kind: str) -> bool:
    return (conditions.get(kind) or {}).get("status") == "True"


def _message(condition: Object) -> str:
    text = " ".join(str(condition.get("message") or "").split())
    return text or str(condition.get("reason") or "")
