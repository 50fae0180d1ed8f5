"""Read what the pods of an attempt are together: that they run or wait, or how they ended.

Pure. How a worker ended is what its launcher reported; the pod's state counts where there is no report.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from makeway_api.quantities import memory

from ....policy.pod_template import WORKER_CONTAINER
from ...remote.worker_hosts import WorkerHosts
from .pod_states import NO_START, JobPod
from .pod_waits import MAX_WAIT_SECONDS, shortest_wait, site_image, wait_reason

NODE_REASONS = ("NodeLost", "NodeShutdown", "Terminated", "Preempting", "NodeAffinity", "UnexpectedAdmissionError")
"""Reasons of a pod that its node ended: they say nothing about the job."""
OUT_OF = "OutOf"
"""The beginning of further such reasons, as OutOfcpu: the node has too little room."""
ADMISSION_ERROR = "UnexpectedAdmissionError"
"""The reason of a pod whose devices the kubelet could not allocate, as when the device plugin has just gone away.

This and `OUT_OF` pass in seconds as a rule: the kubelet knows of a pod that ended, or of a plugin that went, before
the scheduler does. NodeAffinity, NodeShutdown, TopologyAffinityError and Evicted last: another node may take the pod.
"""
NO_PYTHON = ('exec: "python3"', "executable file `python3`")
"""In the message of a container that NO_START is about, by runc and crun: its image has no such program."""
UNKNOWN_ENDS = ("Unknown", "ContainerStatusUnknown")
"""Reasons of a container of whose end its node knows nothing, as after a restart of the node."""
OWN_FAULT = (
    "ephemeral local storage usage exceeds the total limit",
    "exceeded its local ephemeral storage limit",
    "Usage of EmptyDir volume",
)
"""In the message of a pod that the kubelet evicted for more of the disk than it may use, however much its node has."""
OVER_REQUEST = f"Container {WORKER_CONTAINER} was using "
"""In the kubelet's message about a pod that it evicts as its node is short of something: the job used more than it
requested. That is true of all jobs without a request, not only of those that exhaust the node: so it counts as a loss.
"""
EVICTION = "EvictionByEvictionAPI"
"""The reason of a disruption that a drain or an autoscaler asked for: the pod was told to leave, and may save. The
others are of nodes that are short of something or out of reach, or of the scheduler."""
DEADLINE_EXCEEDED = "DeadlineExceeded"
"""The reason of a pod that was active for longer than its `activeDeadlineSeconds`."""
KILLED = 137
"""The exit code of a process that was ended by SIGKILL, as a shell and the kubelet report it."""
NO_COMMAND = 127
"""The exit code of a job that could not be started, as a shell has it."""


def hosts_of(
    pods: Sequence[JobPod],
    usable: Mapping[str, bool],
    reported_workers: Collection[int] = (),
    gone: Iterable[JobPod] = (),
    limits: Mapping[str, float] = MAX_WAIT_SECONDS,
) -> WorkerHosts:
    """Return what the pods of one attempt are together; `usable` are the nodes that there are, and whether they run.

    An attempt is there while any of its pods may run, and none has ended without a report: the first failure of a gang
    decides. `reported_workers` are those that reported their end, `gone` the last states of pods that are listed no
    more, `limits` the seconds that a pod may wait, by what it waits for.
    """
    size = pods[0].workers
    failed = [pod for pod in pods if not pod.present and pod.worker not in reported_workers]
    if not failed and any(pod.present for pod in pods):
        disrupted = next((pod for pod in (*pods, *gone) if pod.disruption and not _over_request(pod)), None)
        waiting_pod = shortest_wait(pods, limits)
        code, message = wait_reason(waiting_pod) if waiting_pod is not None else _incomplete(pods, reported_workers)
        worker = one.worker if (one := waiting_pod or disrupted) is not None else 0
        cpu, mebibytes = (max(pod.requests[at] for pod in pods) for at in range(2))
        lost, evicted = disrupted is not None, disrupted is not None and disrupted.disruption == EVICTION
        result = WorkerHosts(size, True, lost, code, message, worker=worker, cpu=cpu, memory=mebibytes)
        return replace(result, evicted=evicted)
    ends = [replace(end_of_pod(pod, usable), worker=pod.worker) for pod in failed or pods]
    # The job's own fault says more than a loss, and that more than one by a node, or before it ran.
    worst = max(ends, key=lambda end: (end.exit_code is not None, not end.node_lost, not end.never_ran, -end.worker))
    message = f"worker {worst.worker}: {worst.message}" if size > 1 else worst.message
    return replace(worst, workers=size, message=message)


def end_of_deleted_pods(pods: Iterable[JobPod], usable: Mapping[str, bool]) -> WorkerHosts:
    """Return what it means that pods are there no more, from their last states."""
    return hosts_of([replace(pod, phase="Failed") for pod in pods], usable)


def never_ran(pods: Iterable[JobPod], usable: Mapping[str, bool]) -> bool:
    """Whether pods that are there no more were deleted while they waited, on nodes that run: nothing of them ran."""
    return all(
        pod.phase == "Pending" and not pod.disruption and (not pod.node or usable.get(pod.node, False)) for pod in pods
    )


def _incomplete(pods: Sequence[JobPod], reported_workers: Collection[int]) -> tuple[str, str]:
    """Return that pods of a gang are missing: they were not created yet, or others deleted them before their end."""
    missing = pods[0].workers - len({pod.worker for pod in pods} | set(reported_workers))
    return ("incomplete", f"{missing} of its {pods[0].workers} pods are not there") if missing > 0 else ("", "")


def end_of_pod(pod: JobPod, usable: Mapping[str, bool]) -> WorkerHosts:
    """Return how a pod ended by which no worker reported: by its job, by its node, or by others."""
    if (result := _own_fault(pod)) is not None:
        return result
    if pod.node and not usable.get(pod.node, False):
        if pod.node in usable:
            return _by_node(f"its node {pod.node} is down")
        return replace(_by_node(f"its node {pod.node} is gone"), evicted=pod.disruption == EVICTION)
    if _over_request(pod):
        message = f"its pod was evicted, as it used more than it requested of what its node {pod.node} was short of"
        return WorkerHosts(1, present=False, message=f"{message}: {pod.message}")
    if (result := _by_others(pod)) is not None:
        return result if pod.began else replace(result, never_ran=True, refused=_is_refused_for_now(pod))
    if not pod.began:
        message = pod.message or "its pod was deleted by others before it ran"
        return WorkerHosts(1, present=False, never_ran=True, message=message)
    if pod.exit_code is not None:
        message = f"its launcher ended with exit code {pod.exit_code} without a report: {pod.message}"
        return WorkerHosts(1, present=False, message=message.rstrip(": "))
    return WorkerHosts(1, present=False, message=pod.message or "its pod was deleted by others")


def _own_fault(pod: JobPod) -> WorkerHosts | None:
    """Return the end of a pod that its job, or the image of its job, is to blame for; None where it is not."""
    if pod.reason == DEADLINE_EXCEEDED:
        message = "time limit reached, and neither its launcher nor Makeway ended it: Kubernetes did"
        return WorkerHosts(1, present=False, message=message, exit_code=KILLED, timed_out=True)
    if pod.reason == "OOMKilled":
        return WorkerHosts(1, present=False, message=_out_of_memory(pod.memory), exit_code=KILLED)
    if pod.reason == "Evicted" and any(word in pod.message for word in OWN_FAULT):
        return WorkerHosts(1, present=False, message=_over_disk(pod.message), exit_code=KILLED)
    if pod.reason in NO_START and any(words in pod.message for words in NO_PYTHON):
        message = pod.message[max(0, pod.message.find(NO_PYTHON[0])) :]
        if pod.own_image:
            message = f"its image does not start python3: {message}: choose an image that has python3"
            return WorkerHosts(1, present=False, message=message, exit_code=NO_COMMAND)
        message = f"{site_image(pod)} does not start python3, and an administrator has to change it: {message}"
        return WorkerHosts(1, present=False, never_ran=True, message=message)
    return None


def _over_request(pod: JobPod) -> bool:
    """Whether the kubelet evicts, or evicted, a pod whose worker used more than it requested of what its node lacks."""
    return (pod.reason == "Evicted" or bool(pod.disruption)) and OVER_REQUEST in pod.message


def _out_of_memory(limit: int) -> str:
    """Return that a worker used too much memory; without a limit of its own (MiB), its node had no more."""
    if not limit:
        return "its node ran out of memory"
    return (
        f"it used more memory than the {memory(limit)} that its container may use: choose a profile with more memory, "
        "or use less"
    )


def _over_disk(message: str) -> str:
    """Return that a pod wrote too much to the disk of its node; the kubelet's message names the limit."""
    return (
        "it wrote more to the disk of its node than its pod may: write large files to its checkpoint folder or to a "
        f"volume, or choose a profile with more disk. Kubernetes said: {message.strip()}"
    )


def _by_others(pod: JobPod) -> WorkerHosts | None:
    """Return the end of a pod that its node, or Kubernetes, is to blame for; None where neither is known to be."""
    if pod.reason == "Evicted":
        return _by_node(f"its node {pod.node} was short of a resource and evicted its pod: {pod.message}")
    if pod.disruption:
        result = _by_node(f"its pod was disrupted ({pod.disruption}): {pod.message}".rstrip(": "))
        return replace(result, evicted=pod.disruption == EVICTION)
    if pod.reason in UNKNOWN_ENDS:
        return _by_node(f"its node {pod.node} was restarted, or lost its container for another reason")
    if pod.reason in NODE_REASONS or pod.reason.startswith(OUT_OF):
        verb = "ended" if pod.began else "refused"
        return _by_node(f"its node {pod.node} {verb} its pod ({pod.reason}): {pod.message}".rstrip(": "))
    return None


def _is_refused_for_now(pod: JobPod) -> bool:
    """Whether the kubelet refused a pod for a reason that passes in seconds as a rule."""
    return pod.phase == "Failed" and (pod.reason == ADMISSION_ERROR or pod.reason.startswith(OUT_OF))


def _by_node(message: str) -> WorkerHosts:
    return WorkerHosts(1, present=False, node_lost=True, message=message)
