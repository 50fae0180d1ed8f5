"""Decide in which phase an attempt is from its pods, its workers' reports and the time.

Pure. `AttemptPods` keeps one record for each attempt and calls `step` when something may have changed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from makeway_api.durations import duration

from ...remote.worker_hosts import WorkerHosts
from ...remote.workers import WorkerStatus
from .pod_ends import NO_COMMAND, end_of_deleted_pods, hosts_of, never_ran
from .pod_states import JobPod
from .pod_waits import MAX_WAIT_SECONDS

BROKE_OFF = WorkerHosts(0, start_broke_off=True)
MAX_RECREATIONS = 3
"""How often the pods of an attempt are made again that others deleted before they ran; then its job waits longer."""


class AttemptPhase(Enum):
    """What the pods of an attempt are together."""

    UNSEEN = "no pods are known"
    CREATED = "was started again, and its pods are not listed yet"
    BROKEN_OFF = "its start broke off and has to be repeated"
    WAITING = "a pod waits before its worker begins"
    RUNNING = "its pods may run"
    UNRECOVERABLE = "a pod waits for something that nothing creates any more: it has to be started anew"
    EXPIRED = "a pod waited for too long"
    PARTLY_ENDED = "a pod ended without a report, while others run whose reports may come"
    ENDED = "none of its pods runs any more"
    DELETED = "its pods are listed no more, and it is not forgotten"
    FORGOTTEN = "it is reported no more, and its pods are still being deleted"


@dataclass(frozen=True, slots=True)
class PodAttempt:
    """What is remembered of an attempt beside its listed pods. Times are monotonic seconds."""

    phase: AttemptPhase = AttemptPhase.UNSEEN
    hosts: WorkerHosts | None = None
    """what is reported of it; None: nothing"""
    workers: int = 0
    """those of the start in CREATED"""
    recreations: int = 0
    """how often its pods were made again in this term"""
    waits_for: str = ""
    """what a pod waits for, as a code of `pod_waits`"""
    waits_since: float = 0.0
    last: Mapping[str, JobPod] = field(default_factory=dict)
    """the last states of pods that are listed no more, by name"""
    last_since: float = 0.0
    """since when there are any"""
    read_reports: Mapping[str, str] = field(default_factory=dict)
    """the final reports that were read in this term, by the UID of the pod"""

    @property
    def depends_on_time(self) -> bool:
        """Whether time, or a report of a worker, may change it."""
        return bool(self.waits_for) or self.phase in (AttemptPhase.PARTLY_ENDED, AttemptPhase.BROKEN_OFF)

    # -- what the service does

    def broken_off(self) -> PodAttempt:
        """Return it after its start broke off; one that is forgotten stays so."""
        if self.phase is AttemptPhase.FORGOTTEN:
            return self
        return replace(self, phase=AttemptPhase.BROKEN_OFF, waits_for="")

    def started(self, workers: int) -> PodAttempt:
        """Return it after its pods were created, one for each of these `workers`."""
        recreations = self.recreations + (1 if self.last else 0)
        return replace(self, phase=AttemptPhase.CREATED, workers=workers, recreations=recreations, last={})

    def without_start(self) -> PodAttempt:
        """Return it as its pods are: it did not break off, was not started again, and is not unrecoverable."""
        transient = (AttemptPhase.BROKEN_OFF, AttemptPhase.CREATED, AttemptPhase.UNRECOVERABLE)
        return replace(self, phase=AttemptPhase.UNSEEN) if self.phase in transient else self

    def pod_gone(self, pod: JobPod, now: float) -> PodAttempt:
        """Return it after a pod was listed for the last time."""
        return replace(self, last={**self.last, pod.name: pod}, last_since=self.last_since if self.last else now)

    def next_term(self) -> PodAttempt:
        """Return it without what only a leader counts."""
        return replace(self, recreations=0, read_reports={}) if self.recreations or self.read_reports else self


class ClusterConditions(NamedTuple):
    """What is the same for all attempts: the nodes, and whether they run, and the seconds that pods may wait."""

    usable: Mapping[str, bool]
    limits: Mapping[str, float] = MAX_WAIT_SECONDS


def step(
    attempt: PodAttempt,
    pods: Collection[JobPod],
    reports: Mapping[int, WorkerStatus],
    now: float,
    cluster: ClusterConditions,
) -> PodAttempt:
    """Return an attempt with these listed `pods`, and `reports` of its workers by number, at this time.

    Its record is a new one, with the phase and what is to be reported.
    """
    if attempt.phase is AttemptPhase.BROKEN_OFF and reports:
        attempt = attempt.without_start()  # it started all the same
    if attempt.phase is AttemptPhase.BROKEN_OFF:
        return replace(attempt, hosts=BROKE_OFF)
    if attempt.phase is AttemptPhase.FORGOTTEN:
        return replace(attempt, hosts=None) if pods else PodAttempt()
    if pods:
        return _listed(attempt, pods, reports, now, cluster)
    if attempt.last:
        last = attempt.last.values()
        recreate = attempt.recreations < MAX_RECREATIONS and not reports and never_ran(last, cluster.usable)
        return replace(
            attempt,
            phase=AttemptPhase.DELETED,
            hosts=BROKE_OFF if recreate else end_of_deleted_pods(last, cluster.usable),
        )
    if attempt.phase is AttemptPhase.CREATED:
        return replace(attempt, hosts=WorkerHosts(attempt.workers))
    return PodAttempt(recreations=attempt.recreations, read_reports=attempt.read_reports)


def _listed(
    attempt: PodAttempt,
    pods: Collection[JobPod],
    reports: Mapping[int, WorkerStatus],
    now: float,
    cluster: ClusterConditions,
) -> PodAttempt:
    ended = [number for number, worker in reports.items() if worker.ended]
    hosts = hosts_of(_as_reported(pods, reports), cluster.usable, ended, attempt.last.values(), cluster.limits)
    if not hosts.present:
        partly = any(pod.present for pod in pods)
        phase = AttemptPhase.PARTLY_ENDED if partly else AttemptPhase.ENDED
    elif hosts.waiting_reason:
        return _waiting(attempt, hosts, now, cluster, reported=bool(reports))
    else:
        phase = AttemptPhase.RUNNING
    return replace(attempt, phase=phase, hosts=hosts, waits_for="")


def _waiting(
    attempt: PodAttempt, hosts: WorkerHosts, now: float, cluster: ClusterConditions, *, reported: bool
) -> PodAttempt:
    """Return an attempt of which a pod waits; one that waited for too long counts as absent, with the reason."""
    reason = hosts.waiting_reason
    since = attempt.waits_since if attempt.waits_for == reason else now
    attempt = replace(attempt, waits_for=reason, waits_since=since)
    if now - since < cluster.limits[reason]:
        return replace(attempt, phase=AttemptPhase.WAITING, hosts=hosts)
    last = attempt.last.values()
    if not reported and (reason == "token" or (reason == "incomplete" and never_ran(last, cluster.usable))):
        return replace(attempt, phase=AttemptPhase.UNRECOVERABLE, hosts=replace(hosts, start_broke_off=True))
    if reason == "incomplete" and last:
        return replace(attempt, phase=AttemptPhase.EXPIRED, hosts=end_of_deleted_pods(last, cluster.usable))
    return replace(attempt, phase=AttemptPhase.EXPIRED, hosts=_expired(hosts, cluster.limits[reason]))


def _expired(hosts: WorkerHosts, limit: float) -> WorkerHosts:
    """Return pods that waited for longer than the `limit` in seconds as absent, with the reason."""
    over = replace(hosts, present=False, waiting_reason="")
    if hosts.waiting_reason == "no_image":
        return replace(over, exit_code=NO_COMMAND)
    storage_failed = hosts.waiting_reason == "checkpoint_storage"
    message = f"its pod waited for {duration(limit)}: {hosts.message}"
    return replace(over, never_ran=True, storage_failed=storage_failed, message=message)


def _as_reported(pods: Collection[JobPod], workers: Collection[int]) -> list[JobPod]:
    """Return pods, of which those of workers that report run, although their nodes have not said so yet."""
    return [replace(pod, phase="Running") if pod.phase == "Pending" and pod.worker in workers else pod for pod in pods]
