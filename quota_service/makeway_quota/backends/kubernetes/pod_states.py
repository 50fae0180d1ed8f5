"""Keep of a job's pod what it says about its attempt, and read it: why it waits, and how it ended.

Pure. How a worker ended is what its launcher reported; the pod's state counts where there is no report.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from sys import intern

from makeway_api.quantities import memory

from ...policy.pod_template import WORKER
from ..base import Key
from ..machines import Machines
from .client import Object
from .manifest import NUMBER, OWN_IMAGE, WORKERS, token_secret_of
from .pod_requests import ATTEMPT, ENDED, JOB
from .quantities import amount

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
"""Reasons of a pod that its node ended: they say nothing about the job."""
OUT_OF = "OutOf"
"""The beginning of further such reasons, as OutOfcpu: the node has too little room."""
NO_START = ("StartError", "ContainerCannotRun")
"""Reasons of a container whose command could not be started."""
NO_PYTHON = ('exec: "python3"', "executable file `python3`")
"""In the message of such a container, by runc and crun: its image lacks the program, or it is none."""
UNKNOWN_ENDS = ("Unknown", "ContainerStatusUnknown")
"""Reasons of a container of whose end its node knows nothing, as after a restart of the node."""
OWN_FAULT = ("ephemeral", "exceeded its local", "EmptyDir")
"""In the message of a pod that the kubelet evicted: it used more of the disk than it may."""
LONGEST_MESSAGE = 4096
"""Characters of a termination message that are kept, as many as the kubelet keeps"""
LONGEST_LINE = 300
"""Characters of its last line that people read"""
KILLED = 137
"""The exit code of a process that was ended by SIGKILL, as a shell and the kubelet report it."""
NO_COMMAND = 127
"""The exit code of a job that could not be started, as a shell has it."""


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
    container: str = ""
    """the container that waits"""
    image: str = ""
    """of the container that waits, or of a worker that could not be started"""
    own_image: bool = True
    """whether its job or profile chose the image of its worker"""
    ready: str = ""
    """the condition PodReadyToStartContainers: True with volumes and network, False before; "" where it is not there"""
    preparing: str = ""
    """the init container that runs"""
    began: bool = False
    """whether its worker runs, or ran"""
    exit_code: int | None = None
    """of its worker"""
    memory: int = 0
    """MiB that its worker may use; 0: no limit"""
    tokens: str = ""
    """the Secret with its token"""
    termination_message: str = ""
    """what its ended worker left as its termination message"""

    @property
    def over(self) -> bool:
        """Whether all of its containers have ended."""
        return self.phase in ENDED

    @property
    def present(self) -> bool:
        """Whether its worker may still run, or begin: a worker that has ended is not restarted."""
        return not self.over and self.exit_code is None


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
        own_image=OWN_IMAGE in (metadata.get("annotations") or {}),
        began=status.get("phase") in ("Running", "Succeeded"),
        memory=_memory_of(spec),
        tokens=intern(token_secret_of(item)),
    )
    return _with_containers(_with_conditions(pod, status), status)


def _with_conditions(pod: JobPod, status: Object) -> JobPod:
    for one in status.get("conditions") or ():
        if one["type"] == "DisruptionTarget" and one["status"] == "True":
            pod = replace(pod, disruption=one.get("reason") or "", message=one.get("message") or pod.message)
        if one["type"] == "PodScheduled" and one["status"] == "False":
            pod = replace(pod, waiting=one.get("reason") or "Unschedulable", message=one.get("message") or "")
        if one["type"] == "PodReadyToStartContainers":
            pod = replace(pod, ready=intern(one["status"]))
    return pod


def _with_containers(pod: JobPod, status: Object) -> JobPod:
    first = status.get("initContainerStatuses") or ()
    for one in (*first, *(status.get("containerStatuses") or ())):
        name, state = one["name"], one.get("state") or {}
        waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
        if waiting.get("reason") in (*IMAGE, *SETUP) and not pod.waiting:
            said = waiting.get("message") or ""
            pod = replace(
                pod, waiting=waiting["reason"], message=said, container=intern(name), image=one.get("image") or ""
            )
        if name == WORKER:
            pod = _with_worker(pod, state, one.get("image") or "")
        elif ended.get("exitCode") and pod.phase == "Failed":
            said = f"its container {name} ended with exit code {ended['exitCode']}: {_last_line(ended)}".rstrip(": ")
            pod = replace(pod, message=pod.message or said)
        elif "running" in state and one in first:
            pod = replace(pod, preparing=intern(name))
    return pod


def _with_worker(pod: JobPod, state: Object, image: str) -> JobPod:
    """Return a pod with the state of the container that runs the job."""
    if "waiting" in state:
        return replace(pod, began=False)
    if (ended := state.get("terminated")) is None:
        return replace(pod, began="running" in state)
    reason = ended.get("reason") or ""
    return replace(
        pod,
        began=reason not in NO_START,
        exit_code=ended.get("exitCode"),
        reason=pod.reason or reason,
        message=pod.message or _last_line(ended),
        image=image if reason in NO_START else "",
        termination_message=str(ended.get("message") or "")[:LONGEST_MESSAGE],
    )


def _last_line(ended: Object) -> str:
    """Return the last line of what a container said about its end; the report of a launcher is not for people."""
    said = (ended.get("message") or "").strip()
    return "" if said.startswith("{") else str("".join(said.splitlines()[-1:]))[:LONGEST_LINE]


def _memory_of(spec: Object) -> int:
    """Return the MiB that the worker of a pod may use; 0 without a limit."""
    for container in spec.get("containers") or ():
        if container["name"] == WORKER:
            limits = (container.get("resources") or {}).get("limits") or {}
            return amount("memory", str(limits.get("memory") or 0))
    return 0


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
        disrupted = next((pod for pod in (*pods, *left) if pod.disruption), None)
        about = min((pod for pod in pods if pod.phase == "Pending"), key=lambda pod: pod.worker, default=None)
        code, said = _waiting(about) if about is not None else _incomplete(pods, over)
        worker = one.worker if (one := about or disrupted) is not None else 0
        return Machines(size, True, disrupted is not None, code, said, worker=worker)
    ends = [replace(ended(pod, usable), worker=pod.worker) for pod in failed or pods]
    # The job's own fault says more than a loss, and that more than one by a node, or before it ran.
    worst = max(ends, key=lambda end: (end.exit_code is not None, not end.node_lost, not end.never_ran, -end.worker))
    said = f"worker {worst.worker}: {worst.message}" if size > 1 else worst.message
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


def _waiting(pod: JobPod) -> tuple[str, str]:
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
    return "site_image", f"{_site_image(pod)} cannot be pulled, and an administrator has to change it: {said}"


def _site_image(pod: JobPod) -> str:
    """Return the name of an image that the installation, or a pod template, chose."""
    if pod.container in ("", WORKER):
        return f"the default image of jobs {pod.image}".rstrip()
    return f"the image {pod.image} of its container {pod.container}"


def _has_no_image(pod: JobPod) -> bool:
    """Whether an image does not exist, or is refused; a registry that does not answer may have it."""
    said = pod.message.lower()
    return pod.waiting in NO_IMAGE or any(words in said for words in REFUSED)


def ended(pod: JobPod, usable: Mapping[str, bool]) -> Machines:
    """Return how a pod ended by which no worker reported: by its job, by its node, or by others."""
    if (found := _own_fault(pod)) is not None:
        return found
    if pod.node and not usable.get(pod.node, False):
        state = "is down" if pod.node in usable else "is gone"
        return _by_node(f"its node {pod.node} {state}")
    if (found := _by_others(pod)) is not None:
        return found if pod.began else replace(found, never_ran=True)
    if not pod.began:
        said = pod.message or "its pod was deleted by others before it ran"
        return Machines(1, present=False, never_ran=True, message=said)
    if pod.exit_code is not None:
        said = f"its launcher ended with exit code {pod.exit_code} without a report: {pod.message}"
        return Machines(1, present=False, message=said.rstrip(": "))
    return Machines(1, present=False, message=pod.message or "its pod was deleted by others")


def _own_fault(pod: JobPod) -> Machines | None:
    """Return the end of a pod that its job, or the image of its job, is to blame for; None where it is not."""
    if pod.reason == "OOMKilled":
        return Machines(1, present=False, message=_out_of_memory(pod.memory), exit_code=KILLED)
    if pod.reason == "Evicted" and any(word in pod.message for word in OWN_FAULT):
        return Machines(1, present=False, message=pod.message, exit_code=KILLED)
    if pod.reason in NO_START and any(words in pod.message for words in NO_PYTHON):
        said = pod.message[max(0, pod.message.find(NO_PYTHON[0])) :]
        if pod.own_image:
            said = f"its image does not start python3: {said}: choose an image that has python3"
            return Machines(1, present=False, message=said, exit_code=NO_COMMAND)
        said = f"{_site_image(pod)} does not start python3, and an administrator has to change it: {said}"
        return Machines(1, present=False, never_ran=True, message=said)
    return None


def _out_of_memory(limit: int) -> str:
    """Return that a worker used too much memory; without a limit of its own (MiB), its node had no more."""
    if not limit:
        return "its node ran out of memory"
    return (
        f"it used more memory than the {memory(limit)} that its container may use: choose a profile with more memory, "
        "or use less"
    )


def _by_others(pod: JobPod) -> Machines | None:
    """Return the end of a pod that its node, or Kubernetes, is to blame for; None where neither is known to be."""
    if pod.reason == "Evicted":
        return _by_node(f"its node {pod.node} was short of a resource and evicted its pod: {pod.message}")
    if pod.disruption:
        return _by_node(f"its pod was disrupted ({pod.disruption}): {pod.message}".rstrip(": "))
    if pod.reason in UNKNOWN_ENDS:
        return _by_node(f"its node {pod.node} was restarted, or lost its container for another reason")
    if pod.reason in NODE_REASONS or pod.reason.startswith(OUT_OF):
        verb = "ended" if pod.began else "refused"
        return _by_node(f"its node {pod.node} {verb} its pod ({pod.reason}): {pod.message}".rstrip(": "))
    return None


def _by_node(message: str) -> Machines:
    return Machines(1, present=False, node_lost=True, message=message)


def seconds_of(time: str | None) -> float:
    """Return a time of Kubernetes in Unix seconds; 0 without one."""
    return datetime.fromisoformat(time).timestamp() if time else 0.0
