"""Compare the store with what the backend reports: which jobs run, which ended, how, and which return to the queue.

Called by the loop with the attempts that a cycle looks at; returns the changes and decisions to commit. Whether an
attempt is requeued is decided by our own record of its eviction, never by its exit code alone.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..backends.base import AttemptStatus, Observation, Phase
from ..engine.snapshot import ADMITTED
from ..policy import Document
from ..quarantine import Quarantine
from ..store.records import Workload
from ..values import CHECKPOINT_STORAGE, Notice
from ..wording import IDS, Names, outcomes
from . import transitions
from .change_set import ChangeSet, job_name
from .losses import Losses
from .start_backoff import RETRY_DELAYED, START_DEFERRED, StartBackoff, retry_delay
from .transitions import TIME_LIMIT, AttemptEnd, End
from .world.corrected_times import CorrectedTimes

SKEW = 60.0
"""Seconds that a node's clock may be ahead of ours."""
SAME_TIME = 1.0
"""Seconds by which the time from a notice to its deadline may differ from the grace of its job"""

QUARANTINE_STEP = "reading the report of its attempt"
NO_DOCUMENT = Document()
SAVED = re.compile(r"; (saved at step -?\d+|no checkpoint)$")
"""The suffix of a launcher's message, as "; saved at step 12", that is cut off: `SavedWork` says it too"""


def reconcile(
    rows: Mapping[str, Workload],
    observation: Observation,
    *,
    now: float,
    max_infra_failures: int,
    names: Names = IDS,
    document: Document = NO_DOCUMENT,
    durable: Callable[[Workload], bool] = lambda row: True,
    backoff: StartBackoff | None = None,
    stopping: bool = False,
    times: CorrectedTimes | None = None,
    quarantine: Quarantine | None = None,
) -> ChangeSet:
    """Compare rows with the attempts that are reported, and the losses with the nodes in `observation`.

    `max_infra_failures`: how many counted losses (`Losses.counts`) a job survives; `document`: the nodes that it may go
    to; `backoff`: how often each job's start has failed, and on which nodes; `durable`: whether the attempt of a row
    leaves checkpoints to the next one. `stopping`: the service has just stopped all jobs, because it ends itself.
    `times`: the times of rows, corrected where the clock was set since they were written. `quarantine`: the rows that
    fail, which are tried later.
    """
    change_set, quarantine = ChangeSet(), quarantine or Quarantine()
    losses = Losses(observation.nodes, max_infra_failures, document)
    ends = _AttemptEnds(change_set, now, names, losses, backoff or StartBackoff(), durable, stopping, times)
    for reported in sorted(observation.attempts, key=lambda a: (a.workload, a.attempt)):
        row = rows.get(reported.workload)
        if row is None or row.attempt != reported.attempt or row.state not in ADMITTED:
            continue
        if quarantine.is_backing_off(QUARANTINE_STEP, "workload", row.id):
            continue
        before = len(change_set.changes), len(change_set.decisions)
        try:
            attempt = _with_possible_times(reported, now)
            if attempt.phase in (Phase.EXITED, Phase.LOST):
                ends.ended(row, attempt)
            else:
                transition = transitions.observe(row, attempt)
                if transition is not None:
                    change_set.add(*transition)
        except Exception as error:
            del change_set.changes[before[0] :], change_set.decisions[before[1] :]
            quarantine.failed(QUARANTINE_STEP, "workload", row.id, error)
        else:
            quarantine.passed(QUARANTINE_STEP, "workload", row.id)
    return change_set


def note_launched(change_set: ChangeSet, launched: Mapping[str, float]) -> None:
    """Record the time of each start order, for the attempts that have no other change."""
    known = {change.workload for change in change_set.changes}
    for id, at in launched.items():
        if id not in known:
            change_set.add(*transitions.launch(id, at))


def _with_possible_times(status: AttemptStatus, now: float) -> AttemptStatus:
    """Return the report with times that are possible: jobs write what they like, and nodes have clocks of their own."""
    began, ended, saved = status.started_at, status.ended_at, status.checkpoint_at
    if ended is not None and not 0 <= ended <= now:
        began = None if began is None else began + (now - ended)  # by the same clock
        ended = now
    if saved is not None and not 0 <= saved <= now + SKEW:
        saved = None
    if ended is status.ended_at and saved is status.checkpoint_at:
        return status
    return replace(status, started_at=began, ended_at=ended, checkpoint_at=saved)


@dataclass(frozen=True, slots=True)
class _AttemptEnds:
    """Adds the ends of attempts to a change set; `now` is in Unix seconds, `names` gives titles to teams."""

    change_set: ChangeSet
    now: float
    names: Names
    losses: Losses
    backoff: StartBackoff
    durable: Callable[[Workload], bool]
    stopping: bool
    times: CorrectedTimes | None

    def ended(self, row: Workload, status: AttemptStatus) -> None:
        """End or requeue a job whose attempt is over or lost."""
        # A launcher is notified once: at the time limit if that came before the notice, which changes nothing any more.
        notice = None if status.timed_out and status.phase is Phase.EXITED else row.notice
        notice_received = notice is not None or status.notice_received
        # exit code 0 after a notice is a success only of a job that reported that its work is complete
        finished = status.exit_code == 0 and not status.acknowledged and (status.completed or not notice_received)
        job = job_name(row)
        over_time = row.reason_code == TIME_LIMIT
        if over_time and not finished:
            message = outcomes.time_limit_reached(row.time_limit or 0.0)
            status = replace(status, timed_out=True, notice_received=False, message=message)
        if row.cancel_requested:
            self._finish(row, status, "cancelled", outcomes.cancelled(job, row.size))
        elif finished:
            message = outcomes.succeeded(job, self._worked(row, status), row.size, result_lost=status.result_lost)
            self._finish(row, status, "succeeded", message)
        elif over_time:
            self._finish(row, status, "failed", outcomes.failed(job, _cause(status), row.size))
        elif notice is not None:
            self._evicted(row, status, notice)
        elif status.storage_failed and row.state == "starting":
            self._never_ran(row, status, CHECKPOINT_STORAGE)
        elif status.phase is Phase.LOST and status.never_ran and row.state == "starting":
            self._never_ran(row, status)
        elif status.evicted and (status.phase is Phase.LOST or status.notice_received) and not status.timed_out:
            self._left_node(row, status)
        elif status.phase is Phase.LOST:
            self._lost(row, status)
        elif status.notice_received and not status.timed_out:
            self._stopped_by_others(row, status)
        elif row.failures < row.max_failures and not status.timed_out:
            self._retry(row, status)
        else:
            self._finish(row, status, "failed", outcomes.failed(job, _cause(status), row.size))

    def _retry(self, row: Workload, status: AttemptStatus) -> None:
        """Requeue a job that failed and may fail again, after a delay where it failed soon after its start."""
        failures = row.failures + 1
        delay = retry_delay(failures, self._worked(row, status))
        remaining = row.max_failures - failures
        message = outcomes.failed_and_retried(job_name(row), _cause(status), remaining, delay)
        fields: dict[str, object] = {"failures": failures}
        if delay > 0:
            fields |= {"reason_code": RETRY_DELAYED, "not_before": self.now + delay}
        self._requeue(row, status, "failed", "retry", message, fields)

    def _finish(self, row: Workload, status: AttemptStatus, state: End, message: str) -> None:
        self.change_set.add(*transitions.finish(row, self._end(row, status), state, message))

    def _end(self, row: Workload, status: AttemptStatus, lost: float | None = None) -> AttemptEnd:
        return AttemptEnd(status, self.now, self._ran(row, status), self.durable(row), lost)

    def _evicted(self, row: Workload, status: AttemptStatus, notice: Notice) -> None:
        progress = self._saved(row, status)
        if status.killed:
            whole = abs(notice.deadline - notice.at - row.grace) < SAME_TIME
            why = notice.reason if notice.kind in ("give_back", "machine_ends") else ""
            message = outcomes.killed_at_deadline(job_name(row), row.grace if whole else None, progress, why)
        elif notice.kind in ("give_back", "machine_ends"):
            moved, error = notice.kind == "give_back", _unexpected_end(row, status)
            message = outcomes.left_machine(job_name(row), progress, error, moved=moved)
        else:
            message = outcomes.made_way(job_name(row), self._preemptor(notice), progress, _unexpected_end(row, status))
        outcome = "moved" if notice.kind in ("move", "give_back") else "preempted"
        fields: dict[str, object] = {"preemptions": row.preemptions + 1}
        self._requeue(row, status, outcome, "made_way", message, fields, progress.lost)

    def _preemptor(self, notice: Notice) -> str:
        if notice.kind == "preempt_test":
            return outcomes.PREEMPT_TEST
        return outcomes.preemptor(notice.by_owner, notice.by_team and self.names.team(notice.by_team))

    def _stopped_by_others(self, row: Workload, status: AttemptStatus) -> None:
        """Requeue a job that a drain, `kubectl delete` or a SIGTERM stopped; a loss, unless Makeway itself stops."""
        progress = self._saved(row, status)
        if self.stopping:
            message = outcomes.stopped_with_makeway(job_name(row), progress, _unexpected_end(row, status))
            self._requeue(row, status, "preempted", "made_way", message, {}, progress.lost)
        else:
            nodes = _nodes(row)
            message = outcomes.stopped_by_others(job_name(row), nodes, progress, _unexpected_end(row, status))
            self._requeue_after_loss(
                row, status, message, outcomes.stopped_for_good(job_name(row), nodes, row.infra_failures + 1)
            )

    def _left_node(self, row: Workload, status: AttemptStatus) -> None:
        """Requeue a job that was evicted from a node which is drained or removed, as if it had had its notice.

        An autoscaler may evict before Makeway has seen that the node is to go: the outcome is the same. It counts
        neither as a loss nor as making way for other work.
        """
        progress = self._saved(row, status)
        error = "" if status.phase is Phase.LOST else _unexpected_end(row, status)
        self._avoid(row, status)
        fields: dict[str, object] = {"avoids": self.backoff.avoided_for_row(row.id)}
        message = outcomes.evicted(job_name(row), _nodes(row), progress, error)
        self._requeue(row, status, "preempted", "made_way", message, fields, progress.lost)

    def _never_ran(self, row: Workload, status: AttemptStatus, code: str = START_DEFERRED) -> None:
        """Requeue a job of which nothing ran, which is no loss: it is delayed, and goes elsewhere if it can.

        Where its node refused it for now, it keeps its GPUs first, and is started there again: others would get them,
        and others make way for it once more.

        Also where no checkpoint could be kept: one node's mount may hang, and a volume that is away comes back.
        """
        if status.refused and self.losses.all_offered(row):
            again = self.backoff.start_again(row, job_name(row), _cause(status), self.now)
            if again is not None:
                self.change_set.add(*again)
                return
        self._avoid(row, status)
        self.change_set.add(*self.backoff.requeue(row, job_name(row), _cause(status), self.now, code))

    def _avoid(self, row: Workload, status: AttemptStatus) -> None:
        """Remember the node that did not start a worker, or ended it, if the node is ready."""
        if status.worker < len(row.placement):
            before = [node for node, _ in self.backoff.avoided_nodes(row.id, self.now)]
            nodes = self.losses.nodes_to_avoid(row, row.placement[status.worker].node, before)
            self.backoff.avoid(row.id, nodes, self.now)

    def _lost(self, row: Workload, status: AttemptStatus) -> None:
        """Requeue a job that was lost."""
        job, nodes, cause = job_name(row), _nodes(row), _cause(status)
        began = row.state != "starting" or status.started_at is not None
        message = outcomes.lost(job, nodes, cause, self._saved(row, status) if began else None)
        self._requeue_after_loss(
            row, status, message, outcomes.lost_for_good(job, nodes, cause, row.infra_failures + 1)
        )

    def _requeue_after_loss(self, row: Workload, status: AttemptStatus, message: str, final_message: str) -> None:
        """Requeue a job after a loss; it ends only where it was lost too often without a node to blame."""
        nodes = _nodes(row)
        fields: dict[str, object] = {"failed_node": ", ".join(nodes) or "its node"}
        if self.losses.counts(row, status):
            fields |= {"infra_failures": row.infra_failures + 1, "lost_on": self.losses.remembered(row, nodes)}
        elif status.node_lost and not status.node_returned:
            self._avoid(row, status)
            fields["avoids"] = self.backoff.avoided_for_row(row.id)
        if "lost_on" in fields and self.losses.ends_job(row, (*row.lost_on, *nodes)):
            self._finish(row, status, "failed", final_message)
        else:
            lost = self._saved(row, status).lost
            self._requeue(row, status, "lost", "lost", message, fields, lost)

    def _requeue(
        self,
        row: Workload,
        status: AttemptStatus,
        outcome: str,
        code: str,
        message: str,
        fields: dict[str, object],
        lost: float | None = None,
    ) -> None:
        end = self._end(row, status, lost)
        self.change_set.add(*transitions.requeue(row, end, outcome, code, message, fields))

    def _present(self, row: Workload) -> Workload:
        return self.times.of(row) if self.times is not None else row

    def _worked(self, row: Workload, status: AttemptStatus) -> float:
        """Return the seconds since the command of this attempt began, without those that its start took.

        Both times are of the node's clock. Without a start time from the launcher, it is as long as the GPUs were held.
        """
        held = self._ran(row, status) - row.ran
        if status.started_at is None:
            return held
        worked = (self.now if status.ended_at is None else status.ended_at) - status.started_at
        return min(held, worked) if worked >= 0 else held

    def _ran(self, row: Workload, status: AttemptStatus) -> float:
        """Return the seconds for which all attempts of the job held GPUs, this one included."""
        started = self._present(row).started_at
        if started is None:
            return row.ran
        ended = status.ended_at or self.now
        return row.ran + max(0.0, (ended if ended >= started else self.now) - started)

    def _saved(self, row: Workload, status: AttemptStatus) -> outcomes.SavedWork:
        """Return what is saved, and the seconds of work since; 0 where it saved on notice."""
        step = status.step if status.step is not None else row.checkpoint_step
        saved = step is not None or bool(status.checkpoint_at or row.checkpoint_at or status.acknowledged)
        ended = status.ended_at or self.now
        present = self._present(row)
        began = present.started_at or ended
        worked = 0.0 if row.state == "starting" and status.started_at is None else self._worked(row, status)
        if not self.durable(row):
            return outcomes.SavedWork(saved, step, min(worked, max(0.0, ended - began)), durable=False)
        # a time that has not changed since the row was written: the row's, by the present clock
        reported = present.checkpoint_at if status.checkpoint_at == row.checkpoint_at else status.checkpoint_at
        since = max(reported or 0.0, present.checkpoint_at or 0.0, began)
        lost = 0.0 if status.acknowledged and status.checkpoint_at else min(worked, max(0.0, ended - since))
        return outcomes.SavedWork(saved, step, lost)


def _cause(status: AttemptStatus) -> str:
    if status.message:
        return status.message.strip().splitlines()[-1][:300] if status.message.strip() else "no output"
    if status.exit_code is None:
        return "exit code unknown"
    return f"killed by signal {-status.exit_code}" if status.exit_code < 0 else f"exit code {status.exit_code}"


def _unexpected_end(row: Workload, status: AttemptStatus) -> str:
    """Return how a job ended after its notice; empty if as expected: saved, exit code 0 or 75, by the signal."""
    number = getattr(signal, row.signal, signal.SIGTERM)
    usual = (None, 0, 75, -number, 128 + number, -signal.SIGKILL, 128 + signal.SIGKILL)
    if status.acknowledged or status.killed or status.phase is Phase.LOST or status.exit_code in usual:
        return ""
    return SAVED.sub("", _cause(status))


def _nodes(row: Workload) -> list[str]:
    return sorted({place.node for place in row.placement})
