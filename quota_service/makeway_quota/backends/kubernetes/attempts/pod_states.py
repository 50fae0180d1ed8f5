"""Keep of a job's pod what it says about its attempt.

Pure. `pod_waits` reads why it waits, `pod_ends` how it ended.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from sys import intern

from makeway_api.pods import IMAGE_FAULTS, missing_claims

from ....policy.pod_template import WORKER_CONTAINER
from ...base import Key
from ..api.client import Object
from ..api.quantities import in_service_units
from ..cluster.pod_requests import ATTEMPT, ENDED, JOB, WORKER, pod_requests
from ..pods.manifest import OWN_IMAGE, WORKERS, token_secret_of

NO_CONFIG = "CreateContainerConfigError"
"""Something that the container's description names is not there."""
SETUP = (NO_CONFIG, "CreateContainerError", "RunContainerError")
NO_START = ("StartError", "ContainerCannotRun")
"""Reasons of a container whose command could not be started."""
MAX_MESSAGE = 4096
"""Characters of a termination message that are kept, as many as the kubelet keeps"""
MAX_LINE = 300
"""Characters of its last line that people read"""


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
    """why it does not run yet, in Kubernetes' word; Unschedulable or SchedulingGated without a node"""
    requests: tuple[int, int] = (0, 0)
    """milli-cores and MiB, with all that admission added"""
    gates: tuple[str, ...] = ()
    """the scheduling gates that keep it from the scheduler, which some other controller has to remove"""
    missing_claims: tuple[str, ...] = ()
    """the ResourceClaimTemplates from which it has no claim yet; its scheduler does not look at it before"""
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
    cause: str = ""
    """why its volumes are not mounted or its network is not set up, where an event said it"""
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
    def sets_up(self) -> bool:
        """Whether its node mounts its volumes or sets up its network, as far as its status shows it."""
        waits = self.phase == "Pending" and bool(self.node) and not self.waiting and not self.preparing
        return waits and self.ready != "True"

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
    numbers = [int(labels[name]) if str(labels.get(name, "")).isdecimal() else 0 for name in (WORKER, WORKERS)]
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
        requests=_requests(spec),
        missing_claims=tuple(map(intern, missing_claims(item))),
        gates=tuple(intern(str(one["name"])) for one in spec.get("schedulingGates") or ()),
    )
    return _with_containers(_with_conditions(pod, status), status)


def _requests(spec: Object) -> tuple[int, int]:
    asked = pod_requests(spec)
    return asked.get("cpu", 0), asked.get("memory", 0)


def _with_conditions(pod: JobPod, status: Object) -> JobPod:
    for item in status.get("conditions") or ():
        if item["type"] == "DisruptionTarget" and item["status"] == "True":
            pod = replace(pod, disruption=item.get("reason") or "", message=item.get("message") or pod.message)
        if item["type"] == "PodScheduled" and item["status"] == "False":
            pod = replace(pod, waiting=item.get("reason") or "Unschedulable", message=item.get("message") or "")
        if item["type"] == "PodReadyToStartContainers":
            pod = replace(pod, ready=intern(item["status"]))
    return pod


def _with_containers(pod: JobPod, status: Object) -> JobPod:
    first = status.get("initContainerStatuses") or ()
    for item in (*first, *(status.get("containerStatuses") or ())):
        name, state = item["name"], item.get("state") or {}
        waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
        if waiting.get("reason") in (*IMAGE_FAULTS, *SETUP) and not pod.waiting:
            message = waiting.get("message") or ""
            pod = replace(
                pod, waiting=waiting["reason"], message=message, container=intern(name), image=item.get("image") or ""
            )
        if name == WORKER_CONTAINER:
            pod = _with_worker(pod, state, item.get("image") or "")
        elif ended.get("exitCode") and pod.phase == "Failed":
            message = f"its container {name} ended with exit code {ended['exitCode']}: {_last_line(ended)}".rstrip(": ")
            pod = replace(pod, message=pod.message or message)
        elif "running" in state and item in first:
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
        termination_message=str(ended.get("message") or "")[:MAX_MESSAGE],
    )


def _last_line(ended: Object) -> str:
    """Return the last line of what a container said about its end; the report of a launcher is not for people."""
    message = (ended.get("message") or "").strip()
    return "" if message.startswith("{") else str("".join(message.splitlines()[-1:]))[:MAX_LINE]


def _memory_of(spec: Object) -> int:
    """Return the MiB that the worker of a pod may use; 0 without a limit."""
    for container in spec.get("containers") or ():
        if container["name"] == WORKER_CONTAINER:
            limits = (container.get("resources") or {}).get("limits") or {}
            return in_service_units("memory", str(limits.get("memory") or 0))
    return 0


def seconds_of(time: str | None) -> float:
    """Return a time of Kubernetes in Unix seconds; 0 without one."""
    return datetime.fromisoformat(time).timestamp() if time else 0.0
