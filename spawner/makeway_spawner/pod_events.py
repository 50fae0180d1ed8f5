"""Describe what Kubernetes reports of a starting pod: the phase of the start, and a sentence. Pure.

Called with the pod's events, which the scheduler and the kubelet of its node write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from makeway_api.pods import IMAGE_FAULTS, missing_claims, template_list
from makeway_api.quantities import listed

NOTEBOOK = "spec.containers{notebook}"
"""The field path of events about the container with the notebook server."""
NO_RESOURCE_CLAIM = "FailedResourceClaimCreation"
"""The reason of the event of a pod whose claims of devices Kubernetes cannot make."""
UNPLACED = ("Unschedulable", "SchedulingGated")
"""Reasons of the condition PodScheduled of a pod that gets no node."""
_OF_VOLUME_CLAIM = re.compile(r"persistentvolumeclaim|persistent volumes to bind", re.IGNORECASE)
_OF_RESOURCE_CLAIM = re.compile(
    r"resourceclaim|allocate all claims|device class|claim has been generated", re.IGNORECASE
)
_REFUSAL = re.compile(r"^(pod didn't trigger scale-up|Failed to schedule pod)[:, ]*")
"""How refusals of Cluster Autoscaler and Karpenter begin"""
_PULLED_IN = re.compile(r" in ([\d.]+m?s|\d+m[\d.]+s)\b")


@dataclass(frozen=True, slots=True)
class StartStatus:
    """One sentence for the pending page. `problem`: the start cannot go on like this.

    `unscheduled`: the problem is over once the pod has a node. `volume`: it is one of a volume. `volume_claim`: it is
    one of a claim that has no volume. `gated`: it is one of another controller's scheduling gates.
    """

    phase: str
    message: str
    problem: bool = False
    unscheduled: bool = False
    volume: bool = False
    volume_claim: bool = False
    gated: bool = False
    coming: bool | None = None
    """whether an autoscaler adds a node for the pod; None where it says nothing about that"""


MAKES_RESOURCE_CLAIMS = StartStatus("node", "Waits for Kubernetes to make its claims of devices", unscheduled=True)
_RUNS = StartStatus("server", "The container runs; waiting for the notebook server to answer")


def event_status(event: Mapping[str, Any]) -> StartStatus | None:
    """Return what an event says to the user, None where it says nothing that they need."""
    reason, message = str(event.get("reason") or ""), str(event.get("message") or "").strip()
    about = (event.get("involvedObject") or {}).get("fieldPath") or ""
    if (scaling := _scaling(event, reason, message)) is not None:
        return scaling
    if reason == "FailedScheduling":
        words = f"Kubernetes does not place the notebook yet: {message}"
        return StartStatus("node", words, problem=True, unscheduled=True, volume_claim=waits_for_volume_claim(message))
    if reason == NO_RESOURCE_CLAIM:
        return StartStatus("node", f"A claim of devices is not made yet: {message}", problem=True, unscheduled=True)
    if reason in ("FailedMount", "FailedAttachVolume"):
        return StartStatus("node", f"A volume is not there yet: {message}", problem=True, volume=True)
    if reason == "Pulling":
        return StartStatus("image", f"Pulling the image {_quoted(message)}".rstrip())
    if reason == "Pulled":
        return StartStatus("image", _pulled(message))
    if reason in ("Failed", "BackOff", "InspectFailed", "ErrImageNeverPull") and "image" in message.lower():
        return StartStatus("image", f"The image cannot be pulled: {message}", problem=True)
    if reason == "Started" and about in ("", NOTEBOOK):
        return _RUNS
    if event.get("type") == "Warning":
        phase = "server" if about == NOTEBOOK else "node"
        return StartStatus(phase, message, problem=True) if message else None
    return None


def _scaling(event: Mapping[str, Any], reason: str, message: str) -> StartStatus | None:
    """Return what an autoscaler says: that it adds a node (also Karpenter, by Nominated), or that it cannot."""
    if reason == "TriggeredScaleUp":
        return StartStatus(
            "node", "The cluster is adding a node. That takes some minutes.", unscheduled=True, coming=True
        )
    by = str(event.get("reportingComponent") or (event.get("source") or {}).get("component") or "")
    of_karpenter = by.startswith("karpenter")
    if reason == "Nominated" and of_karpenter:
        return StartStatus("node", f"The cluster has a node for it: {message}", unscheduled=True, coming=True)
    if reason == "NotTriggerScaleUp" or (reason == "FailedScheduling" and of_karpenter):
        why = _REFUSAL.sub("", message) or "it gives no reason"
        words = f"The cluster's autoscaler adds no node for it: {why}"
        return StartStatus("node", words, problem=True, unscheduled=True, coming=False)
    return None


def placed(pod: Mapping[str, Any]) -> StartStatus | None:
    """Return where the pod runs, None while it has no node."""
    node = (pod.get("spec") or {}).get("nodeName")
    return StartStatus("node", f"Kubernetes has placed the notebook on {node}") if node else None


def waiting(pod: Mapping[str, Any]) -> StartStatus | None:
    """Return why a container of the pod waits for its image, from the pod itself: events may be dropped."""
    status = pod.get("status") or {}
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        state = (container.get("state") or {}).get("waiting") or {}
        if state.get("reason") in IMAGE_FAULTS:
            message = str(state.get("message") or state["reason"]).strip()
            return StartStatus(
                "image", f"The image {container.get('image', '')} cannot be pulled: {message}", problem=True
            )
    return None


def running(pod: Mapping[str, Any]) -> StartStatus | None:
    """Return that the notebook's container runs, None while it does not; a Hub may see no events."""
    for one in (pod.get("status") or {}).get("containerStatuses") or ():
        if one.get("name") == "notebook" and "running" in (one.get("state") or {}):
            return _RUNS
    return None


def unschedulable(pod: Mapping[str, Any]) -> str:
    """Return why the pod gets no node: the scheduler's words, or the gates that keep the pod from it.

    Empty where it has a node, or the scheduler did not try.
    """
    if names := gates(pod):
        return (
            f"it is kept from the scheduler by the scheduling {'gate' if len(names) == 1 else 'gates'} {listed(names)}"
        )
    if missing := missing_claims(pod):
        return f"no claim has been generated for it from the {template_list(missing)}"
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if (condition.get("type"), condition.get("status")) == ("PodScheduled", "False") and condition.get(
            "reason"
        ) in UNPLACED:
            return str(condition.get("message") or "no node fits").strip()
    return ""


def without_resource_claims(pod: Mapping[str, Any]) -> StartStatus | None:
    """Return that the pod's claims of devices are being made, of which there is no event; None once they are."""
    return MAKES_RESOURCE_CLAIMS if missing_claims(pod) and not gates(pod) else None


def gates(pod: Mapping[str, Any]) -> list[str]:
    """Return the scheduling gates of a pod, which some other controller has to remove, such as Kueue's."""
    spec = pod.get("spec") or {}
    return [] if spec.get("nodeName") else [str(one.get("name")) for one in spec.get("schedulingGates") or ()]


def gated(pod: Mapping[str, Any]) -> StartStatus | None:
    """Return that scheduling gates keep the pod from the scheduler, of which there is no event."""
    if not gates(pod):
        return None
    words = f"Kubernetes does not place the notebook yet: {unschedulable(pod)}"
    return StartStatus("node", words, problem=True, unscheduled=True, gated=True)


def waits_for_volume_claim(words: str) -> bool:
    """Whether the scheduler says that a claim has no volume, or that it is not there."""
    return _OF_VOLUME_CLAIM.search(words) is not None


def waits_for_resource_claim(words: str) -> bool:
    """Whether a pod gets no node for lack of the claims of its devices, or of what these claim."""
    return _OF_RESOURCE_CLAIM.search(words) is not None


def silent_volume_claims(pod: Mapping[str, Any]) -> list[str]:
    """Return the claims of a pod that has no node while the scheduler gives no reason, as while it has volumes made."""
    spec, conditions = pod.get("spec") or {}, (pod.get("status") or {}).get("conditions") or ()
    if spec.get("nodeName") or any(one.get("type") == "PodScheduled" for one in conditions):
        return []
    claims = ((one.get("persistentVolumeClaim") or {}).get("claimName") for one in spec.get("volumes") or ())
    return [str(name) for name in claims if name]


def cannot_be_pulled(pod: Mapping[str, Any]) -> bool:
    """Whether the image has no valid name, or may not be pulled at all: waiting does not help."""
    status = pod.get("status") or {}
    reasons = {
        ((one.get("state") or {}).get("waiting") or {}).get("reason")
        for one in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    }
    return not reasons.isdisjoint({"InvalidImageName", "ErrImageNeverPull"})


def _quoted(message: str) -> str:
    parts = message.split('"')
    return parts[1] if len(parts) > 2 else ""


def _pulled(message: str) -> str:
    if "already present" in message:
        return "The image is on the node already."
    took = _PULLED_IN.search(message)
    return "The image is pulled" + (f", in {took[1]}." if took else ".")
