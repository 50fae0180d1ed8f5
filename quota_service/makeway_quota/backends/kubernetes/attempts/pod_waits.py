"""Read why a pod of a job waits, and which one of a gang may wait the shortest.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from makeway_api.pods import IMAGE_FAULTS, template_list
from makeway_api.quantities import listed

from ....policy.pod_template import WORKER_CONTAINER
from ....values import CHECKPOINT_STORAGE
from .pod_states import NO_CONFIG, SETUP, JobPod

MAX_WAIT_SECONDS: Mapping[str, float] = {
    "scheduler": 3600.0,
    "unschedulable": 60.0,
    "claims": 600.0,
    "incomplete": 60.0,
    "container": 120.0,
    CHECKPOINT_STORAGE: 60.0,
    "token": 30.0,
    "no_image": 60.0,
    "site_image": 60.0,
    "image_pull": 21_600.0,
    "image": 21_600.0,
    "volume_source": 120.0,
    "volumes": 1800.0,
    "init": 21_600.0,
}
"""Seconds that a pod may wait, by what it waits for; then its job gives its GPUs back, is delayed, and is planned anew.

Without its token no worker has run: such an attempt is not lost, but started again, and so is one without some of its
pods. The kubelet looks for a token again every 15 seconds at least.

A job whose image the registry refuses fails, where it or its profile chose that image. A registry that does not answer
says nothing about the image, and the kubelet asks it again every five minutes at least. Without the condition
PodReadyToStartContainers a pod that is being created may be pulling its image, which may be large.
Of a scheduler that says nothing about a pod nothing is known: jobs wait for it. Kubernetes makes some ten claims of
devices a second, so that those of large gangs take minutes; templates are looked at before pods are made.
"""
GATED = "SchedulingGated"
"""The reason of a pod that scheduling gates keep from the scheduler"""
NO_IMAGE = ("InvalidImageName", "ErrImageNeverPull")
"""Those of an image that cannot be pulled, however long the pod waits"""
REFUSED = (
    *("notfound", "not found", "does not exist", "manifest unknown", "name unknown", "denied", "unauthorized"),
    *("authorization failed", "403 forbidden", "invalid reference format"),
)
"""In the message of a container runtime: the registry answered that it does not have the image, or not for this pod."""
NO_FOLDER = ("subPath", '"checkpoints"')
"""In the message of a container whose own folder of the volume `checkpoints` the kubelet could not make"""
NOT_THERE = re.compile(
    r'\b(secret|configmap)s? "[^"]*" not found|references non-existent (secret|config) key', re.IGNORECASE
)
"""In the message about a volume: something that it names does not exist."""
NOT_ALLOWED = ("permission denied", "operation not permitted", "read-only")
"""In that message: no user may write there; else the volume may be away, or only its mount on this node hang"""


def shortest_wait(pods: Iterable[JobPod], limits: Mapping[str, float] = MAX_WAIT_SECONDS) -> JobPod | None:
    """Return the pod that waits for what it may wait for the shortest, then the one of the lowest worker.

    A gang runs only as a whole: what blocks it would be hidden by a worker that waits for something slow.
    """
    waits = (pod for pod in pods if pod.phase == "Pending")
    return min(waits, key=lambda pod: (limits[wait_reason(pod)[0]], pod.worker), default=None)


def with_cause(pod: JobPod, before: JobPod | None) -> JobPod:
    """Return a pod; between two tries to pull an image that its registry does not have, with the cause of the last one.

    So what it waits for does not change with each try. What an event said stays until its volumes are mounted.
    """
    if before is None or before.uid != pod.uid:
        return pod
    if before.cause and pod.sets_up:
        pod = replace(pod, cause=before.cause)
    if before.container != pod.container:
        return pod
    between = pod.waiting in IMAGE_FAULTS and "back-off" in pod.message.lower()
    if between and before.waiting in IMAGE_FAULTS and _has_no_image(before):
        return replace(pod, waiting=before.waiting, message=before.message)
    return pod


def wait_reason(pod: JobPod) -> tuple[str, str]:
    """Return the code and the sentence of what a pod waits for."""
    if pod.waiting in IMAGE_FAULTS:
        return _pulling(pod)
    if pod.waiting == NO_CONFIG and pod.tokens and pod.tokens in pod.message:
        return "token", f"the token of its worker is not there: {pod.message}"
    if pod.waiting in SETUP and all(words in pod.message for words in NO_FOLDER):
        return CHECKPOINT_STORAGE, _without_folder(pod)
    if pod.waiting in SETUP:
        return "container", f"its container cannot be created: {pod.message or pod.waiting}"
    if not pod.node and (pod.gates or pod.waiting == GATED):
        return "unschedulable", _gated(pod)
    if not pod.node and not pod.waiting and pod.missing_claims:
        return "claims", _without_claims(pod)
    if not pod.node and not pod.waiting:
        return "scheduler", "Kubernetes has not placed its pod yet"
    if not pod.node:
        return "unschedulable", f"Kubernetes does not place its pod: {pod.message or pod.waiting}"
    if pod.preparing:
        return "init", f"its init container {pod.preparing} is still running"
    if pod.cause and pod.sets_up:
        return _setting_up(pod.cause)
    if pod.ready == "False":
        return "volumes", "its volumes are being mounted, or its network is being set up"
    return ("image", "its image is being pulled") if pod.ready else ("init", "its container is being created")


def _setting_up(cause: str) -> tuple[str, str]:
    """Return the code and the sentence of a pod on its node, by what an event said."""
    if NOT_THERE.search(cause):
        return (
            "volume_source",
            f"a volume of its pod names something that is not there, and an administrator has to act: {cause}",
        )
    return "volumes", f"its volumes cannot be mounted, or its network cannot be set up, yet: {cause}"


def _without_folder(pod: JobPod) -> str:
    """Return the sentence of a pod whose folder of checkpoints the kubelet cannot make."""
    refused = any(words in pod.message.lower() for words in NOT_ALLOWED)
    who = ", where neither the user of jobs nor root may write" if refused else ""
    return (
        f"its folder of checkpoints cannot be made on its volume{who}, and an administrator has to act: {pod.message}"
    )


def _without_claims(pod: JobPod) -> str:
    """Return the sentence of a pod whose claims do not exist, so that the scheduler does not look at it."""
    return f"Kubernetes has not made its claims of devices from the {template_list(pod.missing_claims)} yet"


def _gated(pod: JobPod) -> str:
    """Return the sentence of a pod that scheduling gates keep from the scheduler, as Kueue's do."""
    which = f"the scheduling {'gate' if len(pod.gates) == 1 else 'gates'} {listed(pod.gates)}" if pod.gates else GATED
    return (
        f"its pod is kept from the scheduler by {which}: an administrator has to take its namespace out of what sets "
        "and removes such gates, as a rule Kueue"
    )


def _pulling(pod: JobPod) -> tuple[str, str]:
    """Return the code and the sentence of an image that cannot be pulled; that of a job or profile is its own fault."""
    message, worker = pod.message or pod.waiting, pod.container == WORKER_CONTAINER
    if not _has_no_image(pod):
        what = "its image" if worker else f"the image {pod.image} of its container {pod.container}"
        return "image_pull", f"{what} cannot be pulled: {message}"
    if worker and pod.own_image:
        return "no_image", f"its image cannot be pulled: {message}"
    return "site_image", f"{site_image(pod)} cannot be pulled, and an administrator has to change it: {message}"


def site_image(pod: JobPod) -> str:
    """Return the name of an image that the installation, or a pod template, chose."""
    if pod.container in ("", WORKER_CONTAINER):
        return f"the default image of jobs {pod.image}".rstrip()
    return f"the image {pod.image} of its container {pod.container}"


def _has_no_image(pod: JobPod) -> bool:
    """Whether an image does not exist, or is refused; a registry that does not answer may have it."""
    message = pod.message.lower()
    return pod.waiting in NO_IMAGE or any(words in message for words in REFUSED)
