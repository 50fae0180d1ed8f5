"""Write the state of a workload: each event as a change of its row, and a decision for the log where people read of it.

Nothing else makes a `Change`. Each function makes one or two events of `EVENTS`: it says in which states the event has
an effect (the store refuses the change in all others), and which state follows. Two ends of the same kind leave the
same row, whichever way they came. Called by `decisions`, `reconcile`, `actuate`, `leases`, `membership`, `time_limits`,
`start_backoff`, the services and the simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ..backends.base import AttemptStatus, Phase
from ..engine.plan import Evict, Move, Refusal, Start, Waiting
from ..engine.snapshot import ADMITTED, LIVE
from ..store.records import ENDED, LIVE_STATES, Attempt, Change, NewDecision, Workload
from ..values import Notice, places
from ..wording.outcomes import RESULT_LOST
from .change_set import decide

TIME_LIMIT = "time_limit"
"""The reason code of a job that is ended because it ran past its time limit"""

End = Literal["succeeded", "failed", "cancelled"]
States = frozenset[str]


class WorkloadEvent(NamedTuple):
    """One event: the states in which it has an effect, and the state after it; None where the state stays."""

    before: States
    after: str | None
    meaning: str


PENDING: States = frozenset({"pending"})
STARTING: States = frozenset({"starting"})

EVENTS: Mapping[str, WorkloadEvent] = {
    "start": WorkloadEvent(PENDING, "starting", "the plan starts it, or it is a session that holds no GPUs"),
    "explain": WorkloadEvent(PENDING, None, "it waits for another reason than before, or has a nomination"),
    "exclude": WorkloadEvent(PENDING, None, "no plan can be made with it, or its owner left the team"),
    "try_soon": WorkloadEvent(PENDING, None, "a node came back, so that its next try is earlier"),
    "move_queue": WorkloadEvent(PENDING, None, "it waits in the queue of another team or profile"),
    "refuse": WorkloadEvent(PENDING, "cancelled", "it can never start, or the session's owner left the team"),
    "cancel": WorkloadEvent(PENDING, "cancelled", "its owner or an administrator cancels it before it starts"),
    "request_cancel": WorkloadEvent(
        ADMITTED, None, "its owner or an administrator cancels it: its processes are ended first"
    ),
    "launch": WorkloadEvent(STARTING, None, "the backend was ordered to start it"),
    "retry_launch": WorkloadEvent(STARTING, None, "the backend or the files are not reached: it is ordered again"),
    "start_again": WorkloadEvent(
        STARTING, None, "a node refused it for now: it keeps its GPUs, and is started on them again"
    ),
    "defer": WorkloadEvent(
        STARTING, "pending", "the backend has no room, or nothing of the attempt ran: tried again later"
    ),
    "run": WorkloadEvent(STARTING, "running", "the backend reports that it runs"),
    "open": WorkloadEvent(frozenset({"starting", "running"}), "running", "the notebook server of the session is up"),
    "report": WorkloadEvent(ADMITTED, None, "it saved a checkpoint, or its start waits for another cause"),
    "notice": WorkloadEvent(ADMITTED, "checkpointing", "it has to make way: evicted or moved"),
    "preempt_test": WorkloadEvent(frozenset({"running"}), "checkpointing", "a person tests its preemption"),
    "overrun": WorkloadEvent(ADMITTED, None, "it ran past its time limit and grace: its processes are ended"),
    "requeue": WorkloadEvent(ADMITTED, "pending", "its attempt made way, was lost, or failed and may fail again"),
    "succeed": WorkloadEvent(ADMITTED, "succeeded", "its command ended with 0"),
    "fail": WorkloadEvent(
        ADMITTED, "failed", "its command failed, ran out of time, was lost too often, or could not start"
    ),
    "end_cancelled": WorkloadEvent(ADMITTED, "cancelled", "the processes of a cancelled job are gone"),
    "release": WorkloadEvent(
        LIVE,
        "stopped",
        "the session's server is gone, its lease expired, or it made way; cancelled if it never started",
    ),
    "resume": WorkloadEvent(frozenset(ENDED), "pending", "a person requeues a job that ended"),
}
"""Every event by name, in the order of a workload's life"""


class Transition(NamedTuple):
    """The effect of one event, for `ChangeSet.add`."""

    change: Change
    decision: NewDecision | None = None

    @property
    def decisions(self) -> tuple[NewDecision, ...]:
        """The decision for `Store.commit`, where there is one."""
        return () if self.decision is None else (self.decision,)


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """How an attempt was over, when it was looked at.

    `now` is in Unix seconds; `ran`: seconds of all attempts of the job, this one included; `durable`: its checkpoints
    are there for the next attempt; `lost_seconds`: seconds of work that nothing was saved of, None where it is over.
    """

    status: AttemptStatus
    now: float
    ran: float
    durable: bool = True
    lost_seconds: float | None = None


def _change(
    event: str,
    row: Workload,
    fields: dict[str, object],
    version: int | None = None,
    *,
    opened: Attempt | None = None,
    closed: Mapping[str, object] | None = None,
    dropped: bool = False,
) -> Change:
    """Return the change of an event; with `version` it has no effect once the row has changed."""
    before, after, _ = EVENTS[event]
    if after is not None:
        fields = {"state": after, **fields}
    return Change(row.id, fields, version, before, opened, closed, dropped)


# ── Waiting ─────────────────────────────────────────────────────────────────


def explain(row: Workload, waiting: Waiting, message: str) -> Transition:
    """Return why a workload waits, with its nomination; a decision where the cause is another than before."""
    fields: dict[str, object] = {
        "reason_code": waiting.code,
        "reason_message": message,
        "reason_numbers": dict(waiting.numbers),
        "nomination": places(waiting.nomination),
        "not_before": waiting.not_before,
    }
    new = row.reason_code != waiting.code
    decision = decide(row, "wait", waiting.rule, message, **_plain(waiting.numbers)) if new else None
    return Transition(_change("explain", row, fields, row.version), decision)


def exclude(row: Workload, code: str, message: str) -> Transition:
    """Keep a workload out of the plans: it waits without a nomination."""
    fields = _reason(code, message) | {"nomination": (), "not_before": None}
    return Transition(_change("exclude", row, fields, row.version), decide(row, "wait", code, message))


def try_soon(row: Workload, at: float, message: str, avoids: tuple[tuple[str, float], ...]) -> Transition:
    """Move the next try of a deferred job to an earlier time, in Unix seconds."""
    numbers = {**row.reason_numbers, "soon": True}
    fields: dict[str, object] = {
        "not_before": at,
        "reason_numbers": numbers,
        "avoids": avoids,
        "reason_message": message,
    }
    return Transition(_change("try_soon", row, fields, row.version))


def move_queue(row: Workload, team: str, code: str, message: str, fields: Mapping[str, object]) -> Change:
    """Move a pending job to another queue; `fields` are what the new profile says of it."""
    return _change("move_queue", row, {**fields, "team": team, **_reason(code, message)}, row.version)


def refuse(row: Workload, refusal: Refusal, message: str, now: float) -> Transition:
    """End a workload that can never start."""
    fields = _ended(row, now, refusal.code, message, refusal.numbers)
    decision = decide(row, "refuse", refusal.rule, message, **_plain(refusal.numbers))
    return Transition(_change("refuse", row, fields, row.version), decision)


def refuse_session(row: Workload, code: str, message: str, now: float) -> Transition:
    """End a session that waits for GPUs, as its owner may not have them."""
    change = _change("refuse", row, _ended(row, now, code, message), row.version)
    return Transition(change, decide(row, "refuse", code, message))


def cancel(row: Workload, by: str, message: str, now: float) -> Transition:
    """End a job that waits; of one that holds GPUs only request it, as its processes have to end first."""
    decision = decide(row, "cancel", "cancelled", message, by=by)
    if row.state == "pending":
        return Transition(_change("cancel", row, _ended(row, now, "cancelled", message)), decision)
    return Transition(_change("request_cancel", row, {"cancel_requested": True}), decision)


def withdraw(row: Workload, now: float) -> Transition:
    """End a workload at the end of its demand, whether it waits or runs: in simulations only, so it is no event."""
    change = Change(row.id, {"state": "cancelled", **_ended(row, now, "cancelled", "")}, expect_states=LIVE_STATES)
    return Transition(change)


# ── Starting ────────────────────────────────────────────────────────────────


def start(
    row: Workload,
    planned: Start,
    message: str,
    now: float,
    lease_seconds: float,
    borrowed_from: tuple[str, ...],
    backend_of: Callable[[str], str] = lambda node: "",
) -> Transition:
    """Start a workload as planned; the lease of a session begins. `backend_of` tells which of several has a node."""
    placement = places(planned.placement, backend_of)
    fields = _started(row, now, message) | {
        "placement": placement,
        "over_quota": not planned.in_quota,
        "borrowed_from": borrowed_from,
        "reason_numbers": dict(planned.numbers),
    }
    if row.kind == "session":
        fields["expires_at"] = now + lease_seconds
    opened = Attempt(row.id, row.attempt + 1, now, placement=placement, over_quota=not planned.in_quota)
    decision = decide(row, "start", planned.rule, message, **_plain(planned.numbers))
    return Transition(_change("start", row, fields, row.version, opened=opened), decision)


def start_without_gpus(row: Workload, message: str, now: float) -> Transition:
    """Start a session that holds no GPUs and has no team, outside every plan; it opens no attempt."""
    change = _change("start", row, _started(row, now, message))
    return Transition(change, decide(row, "start", "no_gpus", message))


def launch(id: str, at: float) -> Transition:
    """Note when the backend was ordered to start an attempt, in Unix seconds."""
    return Transition(Change(id, {"launched_at": at}, expect_states=EVENTS["launch"].before))


def retry_launch(row: Workload, code: str, message: str) -> Transition:
    """Record why a start could not be ordered; it is ordered again."""
    return Transition(_change("retry_launch", row, {"reason_code": code, "reason_message": message}))


def start_again(
    row: Workload, code: str, message: str, numbers: Mapping[str, object], at: float, now: float
) -> Transition:
    """Start a job again on the GPUs that it has, at a time in Unix seconds, as nothing of it ran; no attempt is lost.

    It is another attempt, so that its pods have other names than those that were refused.
    """
    fields = _reason(code, message, {**row.reason_numbers, **numbers})
    fields |= {"attempt": row.attempt + 1, "launched_at": None, "not_before": at}
    opened = Attempt(row.id, row.attempt + 1, now, placement=row.placement, over_quota=row.over_quota)
    change = _change("start_again", row, fields, row.version, opened=opened, dropped=True)
    return Transition(change, decide(row, "wait", code, message, attempt=row.attempt))


def defer(
    row: Workload, code: str, message: str, tries: int, not_before: float, avoids: tuple[tuple[str, float], ...]
) -> Transition:
    """Requeue a job of which nothing ran: the try is no attempt, and is repeated from `not_before`, in Unix seconds.

    Not where it was cancelled meanwhile: only a job that is admitted is ended by that request.
    """
    fields = _freed() | _reason(code, message, {"tries": tries})
    fields |= {"not_before": not_before, "start_tries": tries, "avoids": avoids}
    change = _change("defer", row, fields, row.version, dropped=True)
    return Transition(change, decide(row, "requeue", code, message, attempt=row.attempt))


# ── Running ─────────────────────────────────────────────────────────────────


def observe(row: Workload, status: AttemptStatus) -> Transition | None:
    """Take over that an attempt runs, saved a checkpoint, or waits for another cause; None where nothing is new."""
    event, fields = "report", checkpoint_of(row, status)
    if row.state == "starting" and status.phase is not Phase.STARTING:
        event = "run"
        if row.start_tries or row.avoids:
            fields |= {"start_tries": 0, "avoids": ()}
        if row.not_before is not None:
            fields |= {"not_before": None, **_reason("starting", "")}
    elif row.state == "starting" and status.waiting_reason and row.reason_message != status.message:
        fields |= {"reason_code": status.waiting_reason, "reason_message": status.message or status.waiting_reason}
    return Transition(_change(event, row, fields)) if fields or event == "run" else None


def open_server(row: Workload, message: str) -> Transition:
    """Note that the notebook server of a session is up."""
    fields = {"server_started": True, "reason_code": "running", "reason_message": message}
    return Transition(_change("open", row, fields))


def checkpoint_of(row: Workload, status: AttemptStatus) -> dict[str, object]:
    """Return the step and time of the newest checkpoint, where they are others than those of the row."""
    if status.checkpoint_at is None or (status.step, status.checkpoint_at) == (row.checkpoint_step, row.checkpoint_at):
        return {}
    return {"checkpoint_step": status.step, "checkpoint_at": status.checkpoint_at}


def notice(row: Workload, evict: Evict | Move, message: str, by: Workload | None, now: float) -> Transition:
    """Notify a workload to make way for `by`; a moved one keeps where it goes as its nomination."""
    moved = isinstance(evict, Move)
    given = Notice(
        reason=message,
        at=now,
        deadline=evict.deadline,
        kind="move" if moved else "evict",
        by_team=by.team if by else None,
        by_owner=by.owner if by and by.team == row.team else None,
        by_workload=evict.preemptor,
    )
    fields: dict[str, object] = {
        "notice": given,
        "evicted_for": evict.preemptor,
        "nomination": places(evict.to) if isinstance(evict, Move) else (),
    }
    if row.reason_code != TIME_LIMIT:  # a job that is ended at its limit is not requeued because it also makes way
        fields |= _reason("moving" if moved else "making_way", message, evict.numbers)
    verb = "move" if moved else "evict"
    decision = decide(row, verb, evict.rule, message, **_plain(evict.numbers))
    return Transition(_change("notice", row, fields, row.version), decision)


def preempt_test(row: Workload, by: str, message: str, now: float) -> Transition:
    """Notify a running job, as `by` tests its preemption."""
    given = Notice(message, now, now + row.grace, "preempt_test", row.team, by, None)
    fields = {"notice": given, "reason_code": "preempt_test", "reason_message": message}
    return Transition(_change("preempt_test", row, fields, row.version), decide(row, "evict", "preempt_test", message))


def leave_machine(row: Workload, cause: str, message: str, deadline: float, now: float) -> Transition:
    """Notify a job that its machine is to go; `cause`: why that drains."""
    moves = cause == "move"
    given = Notice(message, now, deadline, "give_back" if moves else "machine_ends")
    fields: dict[str, object] = {"notice": given}
    if row.reason_code != TIME_LIMIT:
        fields |= _reason("moving" if moves else "making_way", message)
    decision = decide(row, "move" if moves else "evict", "machine_ends", message, cause=cause)
    return Transition(_change("notice", row, fields, row.version), decision)


def hasten(row: Workload, deadline: float, now: float) -> Transition:
    """Make the notice of a job end earlier, as its machine does; it counts as new, so that it is sent again."""
    notice = row.notice
    fields: dict[str, object] = {"notice": None if notice is None else replace(notice, at=now, deadline=deadline)}
    return Transition(_change("notice", row, fields, row.version))


def overrun(row: Workload, message: str, limit: str) -> Transition:
    """Mark a job that ran past its time limit, `limit` in words: it is ended, and not requeued."""
    fields: dict[str, object] = {"reason_code": TIME_LIMIT, "reason_message": message}
    decision = decide(row, "kill", TIME_LIMIT, message, attempt=row.attempt, time_limit=limit)
    return Transition(_change("overrun", row, fields, row.version), decision)


# ── The end of an attempt ───────────────────────────────────────────────────


def requeue(
    row: Workload, end: AttemptEnd, outcome: str, code: str, message: str, counted: Mapping[str, object]
) -> Transition:
    """Requeue a job under its id and first submit time; a moved job keeps its nomination.

    Not where it was cancelled meanwhile, as for `defer`. `counted`: the numbers of the row that the end of this attempt
    changes, such as its preemptions.
    """
    moves = row.notice is not None and row.notice.kind == "move"
    fields = _freed() | _reason(code, message) | {"exit_code": end.status.exit_code, "message": end.status.message}
    fields |= {"ran": end.ran, **_kept(row, end), **counted}
    if moves:
        fields["nomination"] = row.nomination
    numbers = {"attempt": row.attempt, "exit_code": end.status.exit_code, "lost_seconds": end.lost_seconds}
    decision = decide(row, "requeue", code, message, **numbers)
    return Transition(_change("requeue", row, fields, row.version, closed=_close(row, end, outcome)), decision)


def finish(row: Workload, end: AttemptEnd, state: End, message: str) -> Transition:
    """End a job whose attempt is over."""
    event, verb = _ENDS[state]
    numbers = {RESULT_LOST: True} if state == "succeeded" and end.status.result_lost else {}
    fields = _ended(row, end.now, state, message, numbers)
    fields |= {"exit_code": end.status.exit_code, "message": end.status.message, "ran": end.ran, **_kept(row, end)}
    if state == "failed":
        fields["failures"] = row.failures + 1
    decision = decide(row, verb, state, message, exit_code=end.status.exit_code, attempt=row.attempt)
    return Transition(_change(event, row, fields, closed=_close(row, end, state)), decision)


def fail_to_start(row: Workload, message: str, now: float) -> Transition:
    """End a job that the backend cannot start, and never will."""
    fields = _ended(row, now, "could_not_start", message) | {"failures": row.failures + 1}
    change = _change("fail", row, fields, row.version, closed=_never_ran("failed", message, now))
    return Transition(change, decide(row, "fail", "could_not_start", message))


def cancel_before_start(row: Workload, message: str, now: float) -> Transition:
    """End a cancelled job of which nothing was started."""
    fields = _ended(row, now, "cancelled", message)
    change = _change("end_cancelled", row, fields, row.version, closed=_never_ran("cancelled", message, now))
    return Transition(change, decide(row, "cancel", "cancelled", message))


def release(row: Workload, verb: str, code: str, message: str, now: float) -> Transition:
    """Free a session's GPUs for good; `verb`: release, or expire where its lease was not renewed."""
    ran = row.ran + (max(0.0, now - row.started_at) if row.placement and row.started_at is not None else 0.0)
    fields = {"state": "stopped" if row.attempt else "cancelled", **_ended(row, now, code, message), "ran": ran}
    outcome = "succeeded" if code == "released" else "preempted" if row.notice else "lost"
    change = Change(row.id, fields, None, EVENTS["release"].before, close_attempt={"ended_at": now, "outcome": outcome})
    return Transition(change, decide(row, verb, code, message))


def resume(row: Workload, message: str, now: float) -> Transition:
    """Requeue a job that ended: the same id, from its last checkpoint, with all its retries."""
    fields: dict[str, object] = {
        "submitted_at": now,
        "ended_at": None,
        "cancel_requested": False,
        "failures": 0,
        "infra_failures": 0,
        "exit_code": None,
        "message": "",
        **_reason("resumed", message),
    }
    return Transition(_change("resume", row, fields, row.version), decide(row, "submit", "resumed", message))


# ── Fields that several events set ──────────────────────────────────────────

_ENDS: Mapping[End, tuple[str, str]] = {
    "succeeded": ("succeed", "finish"),
    "failed": ("fail", "fail"),
    "cancelled": ("end_cancelled", "cancel"),
}
"""End to its event and the verb of its decision"""


def _reason(code: str, message: str, numbers: Mapping[str, object] | None = None) -> dict[str, object]:
    return {"reason_code": code, "reason_message": message, "reason_numbers": _plain(numbers or {})}


def _freed() -> dict[str, object]:
    """Return the fields of a workload that holds no GPUs any more."""
    return {
        "placement": (),
        "nomination": (),
        "notice": None,
        "evicted_for": None,
        "over_quota": False,
        "borrowed_from": (),
        "not_before": None,
    }


def _ended(
    row: Workload, now: float, code: str, message: str, numbers: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Return the fields of a workload that has ended."""
    more = {"ended_at": now, "message": message, "start_tries": 0, "avoids": ()}
    return _freed() | _reason(code, message, numbers) | more


def _started(row: Workload, now: float, message: str) -> dict[str, object]:
    fields = _freed() | _reason("starting", message)
    more = {"attempt": row.attempt + 1, "started_at": now, "failed_node": None, "launched_at": None}
    return fields | more | {"message": "", "exit_code": None}


def _kept(row: Workload, end: AttemptEnd) -> dict[str, object]:
    """Return the changes of the checkpoint that the next attempt would find."""
    return checkpoint_of(row, end.status) if end.durable else {"checkpoint_step": None, "checkpoint_at": None}


def _close(row: Workload, end: AttemptEnd, outcome: str) -> dict[str, object]:
    status = end.status
    return {
        "ended_at": status.ended_at or end.now,
        "outcome": outcome,
        "exit_code": status.exit_code,
        "message": status.message,
        "checkpoint_step": status.step if status.checkpoint_at else row.checkpoint_step,
        "checkpoint_at": status.checkpoint_at or row.checkpoint_at,
        "lost_seconds": end.lost_seconds,
        "evicted_for": row.notice.by_workload if row.notice else None,
    }


def _never_ran(outcome: str, message: str, now: float) -> dict[str, object]:
    return {"ended_at": now, "outcome": outcome, "message": message}


def _plain(numbers: Mapping[str, object]) -> dict[str, object]:
    return {str(key): value for key, value in numbers.items()}
