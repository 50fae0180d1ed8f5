"""Sentences about what became of a workload: how it ended, why it returns to the queue, what its lease did.

Called by the loop and the services, with milli-GPUs, seconds and names; state first, then the cause, then what follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from makeway_api.bars import WHEN_NEEDED
from makeway_api.quantities import count

from .amounts import duration, gpus, gpus_are, names
from .naming import kind_name


@dataclass(frozen=True, slots=True)
class SavedWork:
    """How much of an attempt's work is saved: the step of the last checkpoint, and the seconds of work lost since.

    Checkpoints that are not `durable` end with their attempt, and all of its work is lost.
    """

    saved: bool
    step: int | None
    lost: float
    durable: bool = True

    def __str__(self) -> str:
        if not self.saved:
            return f"no checkpoint, lost {duration(self.lost)} of work"
        return f"saved at step {self.step}" if self.step is not None else "saved a checkpoint"

    @property
    def with_loss(self) -> str:
        """The same, with the work that was lost since the checkpoint."""
        if not self.saved:
            return str(self)
        return f"{self}, {duration(self.lost)} of work {'since then ' if self.durable else ''}is lost"


STARTS_AGAIN = "and then starts from the beginning, because checkpoints are not kept here"
"""What making way means for a job whose checkpoints its next attempt does not find"""
FASTER_SAVES = "save less or faster, or use a profile with a longer grace"
"""What helps against saves that take long for the grace"""


def over_quota_risk(size: int | None, durable: bool, checkpoint_age: float | None = None) -> str:
    """Return what over quota means for a job that runs on so many milli-GPUs, or (None) for one before it starts.

    `durable`: its next attempt finds checkpoints; `checkpoint_age`: the seconds since the newest one of this attempt.
    """
    saved = "no checkpoint yet" if checkpoint_age is None else f"last checkpoint {duration(checkpoint_age)} ago"
    advice = ", so save checkpoints often" if size is None else f" ({saved})"
    runs = "It would run over quota" if size is None else f"Runs over quota on {gpus(size)}"
    return f"{runs}: it makes way {WHEN_NEEDED}{advice if durable else f', {STARTS_AGAIN}'}."


def slow_save(seconds: float, grace: float, killed: bool = False) -> str:
    """Return that the last save took more than half of the grace, or was `killed` at its end; "" if it was not so.

    Worded as in the launcher's causes.py.
    """
    if killed:
        return f"its last save was killed after {duration(seconds)}, as the grace of {duration(grace)} was over"
    if grace <= 0 or seconds <= grace / 2:
        return ""
    part = "longer than" if seconds > grace else "more than half of"
    return f"its last save took {duration(seconds)}, {part} the grace of {duration(grace)}"


def job_of(name: str, owner: str) -> str:
    """Return what people call a job: `“train” of ana`."""
    return f"“{name}” of {owner}"


def free_again(milli: int) -> str:
    """Return what an allocation leaves behind: `2 GPUs are free again.`; CPU and memory where it had no GPUs."""
    return f"{gpus_are(milli)} free again." if milli else "its CPU and memory are free again."


# -- jobs ------------------------------------------------------------------------------------------------------


RESULT_LOST = "result_lost"
"""The number, in a job's reason, by which it succeeded and its result did not reach the service; an error code, too"""


def succeeded(job: str, ran: float, milli: int, *, result_lost: bool = False) -> str:
    """Return that a job succeeded; `ran` are the seconds since the command of its last attempt began."""
    if result_lost:
        free = free_again(milli)
        return f"{job} succeeded after {duration(ran)}, but {no_result()} {free[:1].upper()}{free[1:]}"
    return f"{job} succeeded after {duration(ran)}; {free_again(milli)}"


def no_result() -> str:
    """Return what became of a result that did not reach the service as a whole, and what to do."""
    return (
        "its result was lost: the service did not receive the whole of it, as its pod ended first or it was too large. "
        "Write large results to shared storage; resume the job to run it again from its checkpoint."
    )


def cancelled(job: str, milli: int) -> str:
    """Return that a running job was cancelled and is gone."""
    return f"{job} was cancelled; {free_again(milli)}"


def cancelled_before_start(job: str) -> str:
    """Return that a job was cancelled before its processes started."""
    return f"{job} was cancelled before it started."


def could_not_start(job: str, cause: str) -> str:
    """Return that a backend refused to start a job."""
    return f"{job} could not be started: {cause}"


def over_time_limit(job: str, limit: float) -> str:
    """Return that a job is ended that ran past its time limit, as its launcher does not end it."""
    return f"{job} is ended: it runs past its time limit of {duration(limit)} and its grace, and did not end by itself."


def time_limit_reached(limit: float) -> str:
    """Return how such a job ended."""
    return f"time limit of {duration(limit)} reached; it did not end within its grace, and was killed"


def start_postponed(job: str, cause: str) -> str:
    """Return that a job has its GPUs and cannot be started at the moment."""
    return f"{job} cannot be started yet: {cause}"


def not_member(owner: str, team: str, gone: bool, kind: str) -> str:
    """Return that work is held, because its owner is in the team no more, or (`gone`) no user of the Hub."""
    cause = f"the Hub has no user {owner} any more" if gone else f"{owner} is not in the team {team} (any more)"
    if kind == "session":
        return f"Not started: {cause}, and the GPUs of this notebook are {team}'s."
    until = "an administrator can cancel it" if gone else f"it is released when {owner} is in {team} again"
    return f"Held: {cause}; {until}."


def quarantined(kind: str, by: str, error: str) -> str:
    """Return that a workload is left out of the plans, because Makeway fails with it, or with its team (`by`)."""
    what = f"this {kind_name(kind)}" if by == "workload" else f"the {by} of this {kind_name(kind)}"
    return (
        f"Makeway cannot plan {what} because of an internal error ({error}). All others are planned without it; "
        "it is tried again from time to time. Show this to an administrator, or cancel it and submit it again."
    )


def start_delayed(job: str, cause: str, tries: int, delay: str) -> str:
    """Return that a backend did not start a job, after so many tries in a row; its GPUs are free for others.

    It is read at any time of the delay, and shown beside the time of the next try.
    """
    waits = f"it waits {delay} before the next try"
    if tries > 1:
        waits = f"after {tries} tries in a row it waits {delay} before the next one"
    return f"{job} cannot be started yet: {cause.rstrip('.')}. Its GPUs go to others; {waits}."


def start_refused(job: str, cause: str, refusals: int, pause: str) -> str:
    """Return that a node refused a job, so many times in a row, which keeps its GPUs for the next try."""
    again = f" (refusal {refusals} in a row)" if refusals > 1 else ""
    kept = f"It keeps its GPUs, and is started again in {pause}."
    return f"{job} could not be started{again}: {cause.rstrip('.')}. {kept}"


def start_soon(job: str, nodes: Sequence[str], before: str) -> str:
    """Return that a job which was not started is tried soon, as nodes are back; `before` says why it was not."""
    cause = before.partition(" cannot be started yet: ")[2].partition(" Its GPUs go to others;")[0]
    first = f"{job} could not be started: {cause}" if cause else f"{job} could not be started."
    return f"{first} Nodes are back ({names(nodes)}), so it is tried again soon."


def failed(job: str, cause: str, milli: int) -> str:
    """Return that a job failed for good."""
    return f"{job} failed: {cause}; {free_again(milli)}"


def checkpoint_risk(team: str, before: str) -> str:
    """Return that a job might not start, as the newest one of its team did not; `before` is the sentence about that."""
    cause = before.partition(" Its GPUs go to others;")[0]
    return f"It might not start: the last job of {team} could not keep checkpoints: {cause}"


def failed_and_retried(job: str, cause: str, remaining: int, delay: float = 0.0) -> str:
    """Return that a job failed and starts again `delay` seconds later; `remaining` tries remain after the next one."""
    after = f" {duration(max(1.0, delay))} later" if delay > 0 else ""
    return f"{job} failed ({cause}) and is tried again{after}, {count(remaining, 'more try', 'more tries')} left."


def made_way(job: str, preemptor: str, progress: SavedWork, error: str = "") -> str:
    """Return that a job left within its grace; `error`: how it ended, where that was no way to leave."""
    saved = str(progress) if progress.durable else _kept(progress)
    if error:
        return f"{job} had to make way for {preemptor} and failed: {error}; {_kept(progress)}. {_goes_on(progress)}"
    return f"{job} made way for {preemptor}; {saved}. {_goes_on(progress)}"


LEAVES_MACHINE: Mapping[str, str] = {
    "move": "It is moved to another machine so that this one can be given back.",
    "pause": "Its machine is ended, as its deployment is paused or being deleted.",
    "budget": "Its machine is ended, as the budget of the month is used up.",
    "spot": "The provider takes back its machine.",
}
"""By the cause for which a machine drains: what its jobs are told"""


def leaves_machine(cause: str) -> str:
    """Return why a job has to leave its machine."""
    return LEAVES_MACHINE.get(cause, "Its machine is ended.")


def left_machine(job: str, progress: SavedWork, error: str = "", *, moved: bool = False) -> str:
    """Return that a job left its machine within its grace; `error`: how it ended, where that was no way to leave."""
    why = "so that its machine can be given back" if moved else "as its machine is ended"
    if error:
        return f"{job} had to leave its machine and failed: {error}; {_kept(progress)}. {_goes_on(progress)}"
    saved = str(progress) if progress.durable else _kept(progress)
    left = "was moved to another machine" if moved else "left its machine"
    return f"{job} {left} {why}; {saved}. {_goes_on(progress)}"


def killed_at_deadline(job: str, grace: float | None, progress: SavedWork, why: str = "") -> str:
    """Return that a job was killed because it was still there after its grace; None where it had another time to save.

    `why`: the sentence that it was told, where its machine was to go.
    """
    within = "in time" if grace is None else f"within {duration(grace)}"
    cause = f": {why[0].lower()}{why[1:].rstrip('.')}" if why else ""
    return f"{job} did not leave {within} and was killed{cause}; {progress.with_loss}. {_goes_on(progress)}"


def _goes_on(progress: SavedWork) -> str:
    if progress.saved and not progress.durable:
        return "Its checkpoint was not kept, so it starts from the beginning when it gets GPUs again."
    return f"It waits for GPUs again and {'goes on from there' if progress.saved else 'starts from the beginning'}."


def lost(job: str, nodes: Sequence[str], cause: str, progress: SavedWork | None) -> str:
    """Return that an attempt was lost, and the cause; the job returns to the queue. Without `progress` nothing ran."""
    if progress is None:
        return f"{job} was lost on {_nodes(nodes)} before it ran: {cause.rstrip('.')}. It waits for GPUs again."
    return f"{job} was lost on {_nodes(nodes)}: {cause.rstrip('.')}; {progress.with_loss}. {_goes_on(progress)}"


def stopped_with_makeway(job: str, progress: SavedWork, error: str = "") -> str:
    """Return that a job had to end because Makeway stopped; `error` as in `made_way`."""
    failed = f" and failed: {error}" if error else ""
    return f"{job} had to end because Makeway was stopped{failed}; {_kept(progress)}. {_goes_on(progress)}"


def evicted(job: str, nodes: Sequence[str], progress: SavedWork, error: str = "") -> str:
    """Return that a job had to leave nodes that are drained or removed; `error` as in `made_way`."""
    failed = f", and failed: {error}" if error else ""
    what = "a node that is" if len(nodes) == 1 else "nodes that are"
    return (
        f"{job} had to leave {_nodes(nodes)}, {what} drained or removed{failed}; {_kept(progress)}. "
        f"{_goes_on(progress)}"
    )


def stopped_by_others(job: str, nodes: Sequence[str], progress: SavedWork, error: str = "") -> str:
    """Return that something other than Makeway told a job to stop; `error` as in `made_way`."""
    failed = f", and failed: {error}" if error else ""
    return f"{job} was stopped on {_nodes(nodes)}, not by Makeway{failed}; {_kept(progress)}. {_goes_on(progress)}"


def stopped_for_good(job: str, nodes: Sequence[str], times: int) -> str:
    """Return that a job was stopped too often."""
    return (
        f"{job} was stopped on {_nodes(nodes)}, not by Makeway, {count(times, 'time')} in all: it is not tried again."
    )


def _kept(progress: SavedWork) -> str:
    return progress.with_loss if progress.lost else str(progress)


def lost_for_good(job: str, nodes: Sequence[str], cause: str, times: int) -> str:
    """Return that a job was lost too often, with the cause of the last loss."""
    last = f"the last time on {_nodes(nodes)}: {cause.rstrip('.')}"
    return f"{job} was lost {count(times, 'time')} and is not tried again; {last}."


def preemptor(owner: str | None, team: str | None) -> str:
    """Return for whom a workload makes way: `bo (DevOps)`."""
    return f"{owner} ({team})" if owner and team else owner or team or "another workload"


PREEMPT_TEST = "a test of preemption"


def _nodes(nodes: Sequence[str]) -> str:
    return names(nodes) or "its node"


# -- sessions --------------------------------------------------------------------------------------------------


def session_requested(owner: str, profile: str, team: str | None) -> str:
    """Return that a person requests a notebook; `profile` and `team` are titles."""
    return f"{owner} requests a notebook with {profile}" + (f" for {team}." if team else ".")


def session_runs(owner: str, devices: Sequence[int], node: str | None) -> str:
    """Return that a notebook is up, and where; `node` is None where it holds nothing."""
    return f"{owner}'s notebook runs" + (f" on {_where(devices, node)}." if node else ".")


def session_ended(owner: str, cause: str, devices: Sequence[int], node: str | None) -> str:
    """Return that a session was released; `node` is None where it held no GPUs."""
    freed = f"; {_where(devices, node)} {'are' if len(devices) > 1 else 'is'} free again." if node else "."
    return f"{owner}'s notebook ended ({_clause(cause)}){freed}"


def _clause(sentence: str) -> str:
    """Return a sentence as part of another one."""
    first, *more = sentence.rstrip(". ").split() or [""]
    return " ".join([first.lower() if first in ("It", "Its", "The") else first, *more])


def session_made_way(owner: str, preemptor: str, milli: int) -> str:
    """Return that a preemptible session was stopped after its grace."""
    return f"{owner}'s preemptible notebook made way for {preemptor}; {free_again(milli)}"


def lease_expired(owner: str, seconds: float, hub_answers: bool, milli: int) -> str:
    """Return that a session ended because its lease of `seconds` was not renewed."""
    known = "the Hub has no such server" if hub_answers else "the Hub cannot be reached"
    return f"The lease of {owner}'s notebook was not renewed for {duration(seconds)} and {known}; {free_again(milli)}"


def _where(devices: Sequence[int], node: str) -> str:
    return f"GPU{'' if len(devices) == 1 else 's'} {names([str(i) for i in devices], 8)} of {node}" if devices else node


def no_claims(profile: str, why: str) -> str:
    """Return why a notebook is refused that would hold GPUs which its pod does not get."""
    return f"{profile} cannot be started: a notebook would not get its GPUs, and an administrator has to act: {why}."


def no_sessions(profile: str, pools: Sequence[str]) -> str:
    """Return why no notebook starts with a profile: some of its pools are of a backend that holds none."""
    what = f"the pool {pools[0]}" if len(pools) == 1 else f"the pools {names(pools)}"
    out = "that pool" if len(pools) == 1 else "these pools"
    return (
        f"{profile} cannot be used for notebooks: it may go to {what}, where only jobs run, as notebooks start on the "
        f"nodes of the first backend. Leave it to jobs, or an administrator can take {out} out of it."
    )


def disabled_credentials(team: str, credentials: Sequence[str]) -> str:
    """Return what a document does to the credentials of a team that it does not have."""
    whose, them = ("credentials", "them") if len(credentials) > 1 else ("credential", "it")
    return (
        f"The team {team} is not in this document, which disables its {whose} {names(credentials)}. A later team "
        f"{team} gets {them} only if an administrator enables {them} again."
    )
