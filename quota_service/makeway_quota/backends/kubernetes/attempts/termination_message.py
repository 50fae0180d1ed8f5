"""Read how a worker ended from its pod, where its launcher could not report it: the service was away for too long.

What a pod says was written in its user's container. It is checked like a report of that worker, and counts as one.
"""

from __future__ import annotations

from collections.abc import Mapping

from makeway_api.models.attempts import WorkerReportIn

from ...base import Key
from ...remote.channel import Channel
from ...remote.workers import WorkerStatus
from .attempt_pods import AttemptPods
from .pod_states import JobPod

UNSENT = "its launcher did not reach the service any more: the end of its log, and its result, may be missing"


async def record_final_reports(
    channel: Channel, pods: AttemptPods, reported: Mapping[Key, Mapping[int, WorkerStatus]]
) -> set[Key]:
    """Hand the channel the final reports that pods hold, of workers that began and reported no end, each once.

    Return the attempts with a report that could not be recorded; it is handed over again.
    """
    result: dict[tuple[str, int, int], WorkerReportIn] = {}
    of_workers = [
        (pod, worker)
        for pod in pods.with_final_report()
        if (worker := reported.get(pod.key, {}).get(pod.worker)) is not None  # else it may be read that it began
    ]
    for pod, worker in of_workers:
        if not worker.ended and (report := report_of(pod)) is not None:
            result[(*pod.key, pod.worker)] = report
    failed = await channel.record_final_reports(result) if result else frozenset()
    for pod, _ in of_workers:
        if (*pod.key, pod.worker) not in failed:
            pods.final_report_read(pod)
    return {key[:2] for key in failed}


def report_of(pod: JobPod) -> WorkerReportIn | None:
    """Return the end of a worker as its termination message reports it, None where there is none, or something else."""
    if not pod.termination_message:
        return None
    try:
        report = WorkerReportIn.model_validate_json(pod.termination_message)
    except (ValueError, RecursionError, OverflowError):
        return None
    if report.exit is None:
        return None
    message = "; ".join(filter(None, [report.exit.message, UNSENT]))
    return report.model_copy(update={"exit": report.exit.model_copy(update={"message": message})})
