"""Decide the state of a remote attempt from its workers' reports, its pods and the time.

Pure, but for the end that was ordered (`Ending`), whose tries the backend counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from makeway_api.durations import duration

from ...values import Notice
from ..base import AttemptStatus, Key, Phase
from .worker_hosts import WorkerHosts
from .workers import WorkerStatus, attempt_of, ended_by_others, ran_or_ended, without_checkpoints

MAX_PAUSE = 300.0
"""Seconds between two removals of hosts that stay."""


@dataclass(slots=True)
class Ending:
    """An end that was ordered: from when on the hosts are removed (monotonic), and the notice, None for a kill."""

    remove_at: float
    notice: Notice | None = None
    removed: bool = False
    """whether a removal was accepted; one whose hosts stay is ordered again"""
    problem: str = ""
    """why the hosts could not be removed at the last try"""
    pause: float = 0.0
    """the seconds before the last try"""
    tries: int = 0
    """how often the hosts were removed, or that was tried"""

    def try_again(self, now: float, first: float) -> None:
        """Make the next removal wait for twice as long as this one did; `first` seconds the first time."""
        self.pause = min(MAX_PAUSE, 2.0 * self.pause) if self.pause else first
        self.remove_at = now + self.pause


@dataclass(frozen=True, slots=True)
class RemoteAttempt:
    """What this process remembers of an attempt besides its reports; another one finds it again. Monotonic seconds."""

    ending: Ending | None = None
    absent_since: float | None = None
    """since when its hosts are gone"""
    unheard_since: float | None = None
    """when its hosts were there first, with workers that have not reported yet"""
    ended_since: float | None = None
    """when it reported first that something killed or stopped it, while its hosts were still there"""
    silent: bool = False
    """whether a worker was silent at the last observation"""
    concluded: AttemptStatus | None = None
    """an end that no worker reported, as this replica concluded it while it led"""

    def timed(self, unheard_before: float) -> bool:
        """Whether a moment may change it, and not only a report.

        Workers that have not reported change it when they are unheard of since that moment.
        """
        waits = self.ending is not None or self.absent_since is not None or self.ended_since is not None
        return waits or self.silent or (self.unheard_since is not None and self.unheard_since <= unheard_before)

    def to_end(self, ending: Ending) -> RemoteAttempt:
        """Return it with an end that was ordered, unless an earlier one was."""
        known = self.ending
        if known is None or (not known.removed and not known.pause and ending.remove_at < known.remove_at):
            return replace(self, ending=ending)
        return self

    def in_new_term(self) -> RemoteAttempt:
        """Return it without what an earlier term concluded and ordered."""
        return replace(self, concluded=None, ending=None)


NOTHING = RemoteAttempt()


class AttemptObservation(NamedTuple):
    """What is observed of one attempt."""

    key: Key
    hosts: WorkerHosts | None
    """None: nothing is known of them"""
    workers: Mapping[int, WorkerStatus]
    silent: int | None = None
    """a worker that was not heard of for too long"""


class Timeouts(NamedTuple):
    """How long a backend waits, in seconds."""

    lost_after: float
    """for a worker that is silent"""
    report_within: float
    """for workers whose hosts are there"""
    report_grace: float
    """for a report after a host is gone, or before it is"""


class Conclusion(NamedTuple):
    """What follows from an observation."""

    known: RemoteAttempt
    status: AttemptStatus
    concluded: bool = False
    """whether it is an end that no worker reported"""


def conclude(
    known: RemoteAttempt, observed: AttemptObservation, now: float, timeouts: Timeouts, unreported: Callable[[int], str]
) -> Conclusion:
    """Return what is known of an attempt now, and its report; one that is concluded stays so, whatever comes later.

    `unreported` returns the sentence about a worker whose host is there and that did not report in time.
    """
    hosts, workers = observed.hosts, observed.workers
    known = replace(known, silent=observed.silent is not None)
    if known.concluded is not None:
        return Conclusion(known, known.concluded)
    status = attempt_of(observed.key, workers, hosts.workers if hosts else 0)
    if status.phase is Phase.EXITED:
        return _exited(known, status, hosts, now, timeouts.report_grace)
    ending = known.ending
    removed = ending is not None and ending.removed
    if hosts is not None and hosts.start_broke_off and not hosts.workers and removed:
        hosts = replace(hosts, present=False, start_broke_off=False)  # this service deleted what never ran
    if hosts is not None and not hosts.present:
        known = replace(known, absent_since=now if known.absent_since is None else known.absent_since)
        no_report = removed or (hosts.refused and hosts.worker not in workers)  # of what never began
        if now - (known.absent_since or 0.0) >= (0.0 if no_report else timeouts.report_grace):
            return _absent(known, status, hosts, workers)
    elif hosts is not None:
        known = replace(known, absent_since=None)
        waits, broke_off = hosts.waiting_reason, hosts.start_broke_off
        status = replace(status, waiting_reason=waits, message=hosts.message, start_broke_off=broke_off)
        status = replace(status, cpu=hosts.cpu, memory=hosts.memory)
        if len(workers) >= hosts.workers or hosts.waiting_reason:
            known = replace(known, unheard_since=None)
        else:
            known = replace(known, unheard_since=now if known.unheard_since is None else known.unheard_since)
            if now - (known.unheard_since or 0.0) >= timeouts.report_within:
                first = min(set(range(hosts.workers)) - workers.keys(), default=0)
                return _lost(known, replace(status, message=unreported(first)))
    if observed.silent is not None:
        message = f"worker {observed.silent} was not heard of for {duration(timeouts.lost_after)}"
        # A host that is there counts: a job can stop its own launcher. What is gone or unknown does not.
        by_node = hosts is None or hosts.node_lost
        return _lost(known, replace(status, message=message, node_lost=by_node, worker=observed.silent))
    return Conclusion(known, status)


def cut_off(conclusion: Conclusion, worker: int, message: str) -> Conclusion:
    """Return the loss of an attempt with the host of a worker, unless it is over already."""
    if conclusion.status.phase in (Phase.EXITED, Phase.LOST):
        return conclusion
    return _lost(conclusion.known, replace(conclusion.status, message=message, node_lost=True, worker=worker))


def _exited(
    known: RemoteAttempt, status: AttemptStatus, hosts: WorkerHosts | None, now: float, report_grace: float
) -> Conclusion:
    """Return an end that the workers reported, with what the hosts say about it.

    A launcher cannot know who killed or stopped its worker, such as a kubelet whose disk the job fills: for a short
    time it runs on until its host has ended, too.
    """
    if hosts is None:
        return Conclusion(known, status)
    if ended_by_others(status) and not hosts.node_lost and known.ending is None:
        if hosts.present:
            known = replace(known, ended_since=now if known.ended_since is None else known.ended_since)
            if now - (known.ended_since or 0.0) < report_grace:
                return Conclusion(
                    known, replace(status, phase=Phase.RUNNING, ended_at=None, exit_code=None, message="")
                )
        if hosts.exit_code is not None:
            code = hosts.exit_code if status.notice_received else status.exit_code
            failed = replace(status, message=hosts.message, exit_code=code, notice_received=False, acknowledged=False)
            return Conclusion(known, failed)
    if hosts.node_lost:
        status = replace(status, node_lost=True, evicted=hosts.evicted, worker=hosts.worker)
    return Conclusion(known, status)


def _absent(
    known: RemoteAttempt, status: AttemptStatus, hosts: WorkerHosts, workers: Mapping[int, WorkerStatus]
) -> Conclusion:
    """Return the end of an attempt without hosts whose workers did not report it."""
    if (ending := known.ending) is not None:
        message = "did not end in time and was killed" if ending.notice else "stopped"
        return Conclusion(known, replace(status, phase=Phase.EXITED, exit_code=-9, killed=True, message=message), True)
    message = hosts.message or "its worker vanished without a report"
    if hosts.exit_code is not None:
        ended = replace(status, phase=Phase.EXITED, exit_code=hosts.exit_code, message=message)
        return Conclusion(known, replace(ended, timed_out=hosts.timed_out), True)
    lost = replace(status, message=message, node_lost=hosts.node_lost, evicted=hosts.evicted, worker=hosts.worker)
    if (failed := without_checkpoints(workers)) is not None:
        message = workers[failed].message
        return _lost(known, replace(lost, storage_failed=True, message=message, worker=failed))
    never_ran = hosts.never_ran and not ran_or_ended(status, workers)
    storage_failed = hosts.storage_failed and never_ran
    refused = hosts.refused and never_ran
    return _lost(known, replace(lost, never_ran=never_ran, storage_failed=storage_failed, refused=refused))


def _lost(known: RemoteAttempt, status: AttemptStatus) -> Conclusion:
    return Conclusion(known, replace(status, phase=Phase.LOST), concluded=True)
