"""Read why a pod of a job waits.

Pure.
"""

from __future__ import annotations

from ...policy.pod_template import WORKER
from .pod_states import IMAGE, NO_CONFIG, SETUP, JobPod

NO_IMAGE = ("InvalidImageName", "ErrImageNeverPull")
"""Those of an image that cannot be pulled, however long the pod waits"""
REFUSED = (
    *("notfound", "not found", "does not exist", "manifest unknown", "name unknown", "denied", "unauthorized"),
    *("authorization failed", "403 forbidden", "invalid reference format"),
)
"""In the message of a container runtime: the registry answered that it does not have the image, or not for this pod."""


def waiting(pod: JobPod) -> tuple[str, str]:
    """Return the code and the sentence of what a pod waits for."""
    if pod.waiting in IMAGE:
        return _pulling(pod)
    if pod.waiting == NO_CONFIG and pod.tokens and pod.tokens in pod.message:
        return "token", f"the token of its worker is not there: {pod.message}"
    if pod.waiting in SETUP:
        return "container", f"its container cannot be created: {pod.message or pod.waiting}"
    if not pod.node and not pod.waiting:
        return "scheduler", "Kubernetes has not placed its pod yet"
    if not pod.node:
        return "unschedulable", f"Kubernetes does not place its pod: {pod.message or pod.waiting}"
    if pod.preparing:
        return "init", f"its init container {pod.preparing} is still running"
    if pod.ready == "False":
        return "volumes", "its volumes are being mounted, or its network is being set up"
    return ("image", "its image is being pulled") if pod.ready else ("init", "its container is being created")


def _pulling(pod: JobPod) -> tuple[str, str]:
    """Return the code and the sentence of an image that cannot be pulled; that of a job or profile is its own fault."""
    said, worker = pod.message or pod.waiting, pod.container == WORKER
    if not _has_no_image(pod):
        what = "its image" if worker else f"the image {pod.image} of its container {pod.container}"
        return "image_pull", f"{what} cannot be pulled: {said}"
    if worker and pod.own_image:
        return "no_image", f"its image cannot be pulled: {said}"
    return "site_image", f"{site_image(pod)} cannot be pulled, and an administrator has to change it: {said}"


def site_image(pod: JobPod) -> str:
    """Return the name of an image that the installation, or a pod template, chose."""
    if pod.container in ("", WORKER):
        return f"the default image of jobs {pod.image}".rstrip()
    return f"the image {pod.image} of its container {pod.container}"


def _has_no_image(pod: JobPod) -> bool:
    """Whether an image does not exist, or is refused; a registry that does not answer may have it."""
    said = pod.message.lower()
    return pod.waiting in NO_IMAGE or any(words in said for words in REFUSED)
