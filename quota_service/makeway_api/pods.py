"""Define what the pods of jobs and of notebooks have in common: labels, annotations, faults, and claims of devices.

The spawner and the service set the labels and annotations, and the service reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .quantities import listed

MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "makeway"
"""The value of MANAGED_BY."""
INSTANCE = "makeway/instance"
"""The installation that a pod belongs to, as several may share a cluster."""
SESSION = "makeway/session"
"""The id of the session whose pod it is."""
KIND = "makeway/kind"
"""What the pod is of: a job or a session."""
TEAM = "makeway/team"
PROFILE = "makeway/profile"
PREEMPTIBLE = "makeway/preemptible"
OWNER = "makeway/owner"
"""An annotation, since names of users are no label values."""
PLACEMENT = "makeway/placement"
"""An annotation: the granted nodes and devices."""
NO_EVICTION_ANNOTATIONS = {
    "karpenter.sh/do-not-disrupt": "true",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
}
"""Annotations by which autoscalers do not move a pod to another node, which would end what runs in it."""
IMAGE_FAULTS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)
"""The reasons with which the kubelet has a container wait that has no image; those of its events are others."""


def missing_claims(pod: Mapping[str, Any]) -> list[str]:
    """Return the ResourceClaimTemplates from which there is no claim for a pod, which has no node for that reason."""
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    generated = {one.get("name") for one in status.get("resourceClaimStatuses") or ()}
    requested = [] if spec.get("nodeName") else spec.get("resourceClaims") or ()
    templates = ((one.get("name"), one.get("resourceClaimTemplateName")) for one in requested)
    return [str(template) for name, template in templates if template and name not in generated]


def template_list(names: Sequence[str]) -> str:
    """Return the names of templates as in a sentence: `ResourceClaimTemplates gpus and nic`."""
    return f"ResourceClaimTemplate{'' if len(names) == 1 else 's'} {listed(names)}"
