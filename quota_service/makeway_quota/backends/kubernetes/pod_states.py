"""Keep of a job's pod what it says about its attempt, and read it: why it waits, and how it ended.

Pure. How a worker ended is what its launcher reported; the pod's state counts where there is no report.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from sys import intern

from ...policy.pod_template import WORKER
from ..base import Key
from ..machines import Machines
from .client import Object
from .manifest import NUMBER, WORKERS, token_secret_of
from .pod_requests import ATTEMPT, ENDED, JOB

IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
NO_IMAGE = ("InvalidImageName", "ErrImageNeverPull")
"""Those of an image that cannot be pulled, however long the pod waits"""
REFUSED = (
    *("notfound", "not found", "does not exist", "manifest unknown", "name unknown", "denied", "unauthorized"),
    *("authorization failed", "403 forbidden", "invalid reference format"),
)
"""In the message of a container runtime: the registry answered that it does not have the image, or not for this pod."""
NO_CONFIG = "CreateContainerConfigError"
"""Something that the container's description names is not there."""
SETUP = (NO_CONFIG, "CreateContainerError", "RunContainerError")
NODE_REASONS = ("NodeLost", "NodeShutdown", "Terminated", "NodeAffinity", "UnexpectedAdmissionError")
"""Reasons of a pod that its node ended or never took: they say nothing about the job."""
UNKNOWN_ENDS = ("Unknown", "ContainerStatusUnknown")
"""Reasons of a container of whose end its node knows nothing, as after a restart of the node."""
OWN_FAULT = ("ephemeral", "exceeded its local", "EmptyDir")
"""In the message of a pod that the kubelet evicted: it used more of the disk than it may."""
LONGEST_WORDS = 4096
"""Characters of a termination message that are kept, as many as the kubelet keeps"""
KILLED = 137
"""The exit code of a process that was ended by SIGKILL, as a shell and the kubelet report it."""


@dataclass(frozen=True, slots=True)
class JobPod:
    """What is kept of a pod of a job."""

    name: str
    uid: str
    key: Key
    worker: int
    workers: int
    node: str
    created: float
    phase: str = "Pending"
    deleting: bool = False
    waiting: str = ""
    """why it does not run yet, in Kubernetes' word; Unschedulable without a node"""
    disruption: str = ""
    """the reason of the condition DisruptionTarget"""
    reason: str = ""
    """Evicted, NodeLost, OOMKilled and others"""
    message: str = ""
    exit_code: int | None = None
    tokens: str = ""
    """the Secret with its token"""
    last_words: str = ""
    """what its ended worker left as its termination message"""

    @property
    def present(self) -> bool:
        """Whether its containers may still run."""
        return self.phase not in ENDED


def project_job_pod(item: Object) -> JobPod | None:
    """Return what is kept of a pod of a job; None for other pods of ours."""
    metadata, spec, status = item["metadata"], item.get("spec") or {}, item.get("status") or {}
    labels = metadata.get("labels") or {}
    if JOB not in labels or not str(labels.get(ATTEMPT, "")).isdecimal():
        return None
    numbers = [int(labels[name]) if str(labels.get(name, "")).isdecimal() else 0 for name in (NUMBER, WORKERS)]
    pod = JobPod(
        name=metadata["name"],
        uid=metadata["uid"],
        key=(labels[JOB], int(labels[ATTEMPT])),
        worker=numbers[0],
        workers=max(1, numbers[1]),
        node=intern(spec.get("nodeName") or ""),
        created=seconds_of(metadata.get("creationTimestamp")),
        phase=intern(status.get("phase") or "Pending"),
        deleting="deletionTimestamp" in metadata,
        reason=status.get("reason") or "",
        message=status.get("message") or "",
        tokens=intern(token_secret_of(item)),
    )
    return _with_containers(_with_conditions(pod, status), status)


def _with_conditions(pod: JobPod, status: Object) -> JobPod:
    for one in status.get("conditions") or ():
        if one["type"] == "DisruptionTarget" and one["status"] == "True":
            pod = replace(pod, disruption=one.get("reason") or "", message=one.get("message") or pod.message)
        if one["type"] == "PodScheduled" and one["status"] == "False":
            pod = replace(pod, waiting=one.get("reason") or "Unschedulable", message=one.get("message") or "")
    return pod


def _with_containers(pod: JobPod, status: Object) -> JobPod:
    for one in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        state = one.get("state") or {}
        waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
        if waiting.get("reason") in (*IMAGE, *SETUP) and not pod.waiting:
            pod = replace(pod, waiting=waiting["reason"], message=waiting.get("message") or "")
        if one["name"] == WORKER and ended:
            pod = replace(pod, exit_code=ended.get("exitCode"), reason=pod.reason or ended.get("reason") or "")
            pod = replace(pod, last_words=str(ended.get("message") or "")[:LONGEST_WORDS])
        elif ended.get("exitCode") and pod.phase == "Failed":
            said = ended.get("message") or ended.get("reason") or ""
            pod = replace(pod, message=pod.message or f"container {one['name']}: {said}".strip(": "))
    return pod


def machines_of(
    pods: Sequence[JobPod], usable: Mapping[str, bool], over: Collection[int] = (), left: Iterable[JobPod] = ()
) -> Machines:
    """Return what the pods of one attempt are together; `usable` are the nodes that there are, and whether they run.

    An attempt is there while any of its pods may run, and none has ended without a report: the first failure of a gang
    decides. `over` are its workers that reported their end, `left` the last states of pods that are listed no more.
    """
    size = pods[0].workers
    failed = [pod for pod in pods if not pod.present and pod.worker not in over]
    if not failed and any(pod.present for pod in pods):
        disrupted = any(pod.disruption for pod in (*pods, *left))
        return Machines(size, True, disrupted, *(_waiting(pods) or _incomplete(pods, over)))
    ends = [(ended(pod, usable), pod.worker) for pod in failed or pods]
    # The job's own fault says more than a loss, and that more than one by a node.
    worst, worker = max(ends, key=lambda end: (end[0].exit_code is not None, not end[0].node_lost, -end[1]))
    said = f"worker {worker}: {worst.message}" if size > 1 else worst.message
    return replace(worst, workers=size, message=said)


def gone(pods: Iterable[JobPod], usable: Mapping[str, bool]) -> Machines:
    """Return what it means that pods are there no more, from their last states."""
    return machines_of([replace(pod, phase="Failed") for pod in pods], usable)


def never_ran(pods: Iterable[JobPod], usable: Mapping[str, bool]) -> bool:
    """Whether pods that are there no more were deleted while they waited, on nodes that run: nothing of them ran."""
    return all(
        pod.phase == "Pending" and not pod.disruption and (not pod.node or usable.get(pod.node, False)) for pod in pods
    )


def _incomplete(pods: Sequence[JobPod], over: Collection[int]) -> tuple[str, str]:
    """Return that pods of a gang are missing: they were not created yet, or others deleted them before their end."""
    missing = pods[0].workers - len({pod.worker for pod in pods} | set(over))
    return ("incomplete", f"{missing} of its {pods[0].workers} pods are not there") if missing > 0 else ("", "")


def _waiting(pods: Sequence[JobPod]) -> tuple[str, str] | None:
    """Return the code and the sentence of what the first pod that waits waits for; None where none waits."""
    for pod in sorted(pods, key=lambda pod: pod.worker):
        if pod.phase != "Pending":
            continue
        if pod.waiting in IMAGE:
            code = "no_image" if _has_no_image(pod) else "image_pull"
            return code, f"its image cannot be pulled: {pod.message or pod.waiting}"
        if pod.waiting == NO_CONFIG and pod.tokens and pod.tokens in pod.message:
            return "token", f"the token of its worker is not there: {pod.message}"
        if pod.waiting in SETUP:
            return "container", f"its container cannot be created: {pod.message or pod.waiting}"
        if not pod.node and not pod.waiting:
            return "scheduler", "Kubernetes has not placed its pod yet"
        if not pod.node:
            return "unschedulable", f"Kubernetes does not place its pod: {pod.message or pod.waiting}"
        return "init", "its container is being created"
    return None


def _has_no_image(pod: JobPod) -> bool:
    """Whether an image does not exist, or is refused; a registry that does not answer may have it."""
    said = pod.message.lower()
    return pod.waiting in NO_IMAGE or any(words in said for words in REFUSED)


def ended(pod: JobPod, usable: Mapping[str, bool]) -> Machines:
    """Return how a pod ended by which no worker reported: by its job, by its node, or by others."""
    if pod.reason == "OOMKilled":
        return Machines(1, present=False, message="it used more memory than its profile has", exit_code=KILLED)
    if pod.reason == "Evicted" and any(word in pod.message for word in OWN_FAULT):
        return Machines(1, present=False, message=pod.message, exit_code=KILLED)
    if pod.reason == "Evicted":
        return _by_node(f"its node {pod.node} was short of a resource and evicted its pod: {pod.message}")
    if pod.node and not usable.get(pod.node, False):
        state = "is down" if pod.node in usable else "is gone"
        return _by_node(f"its node {pod.node} {state}")
    if pod.disruption:
        return _by_node(f"its pod was disrupted ({pod.disruption}): {pod.message}".rstrip(": "))
    if pod.reason in UNKNOWN_ENDS:
        return _by_node(f"its node {pod.node} was restarted, or lost its container for another reason")
    if pod.reason in NODE_REASONS:
        return _by_node(f"its node {pod.node} ended its pod ({pod.reason}): {pod.message}".rstrip(": "))
    if pod.exit_code is not None:
        said = f"its launcher ended with exit code {pod.exit_code} without a report"
        return Machines(1, present=False, message=said)
    return Machines(1, present=False, message=pod.message or "its pod was deleted by others")


def _by_node(message: str) -> Machines:
    return Machines(1, present=False, node_lost=True, message=message)


def seconds_of(time: str | None) -> float:
    """Return a time of Kubernetes in Unix seconds; 0 without one."""
    return datetime.fromisoformat(time).timestamp() if time else 0.0
