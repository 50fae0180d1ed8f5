"""`%job ID --preempt-test`: my own job makes way on purpose, and I read what it saved and how fast."""

from __future__ import annotations

import time

from makeway_api.models import Job as JobData
from makeway_api.models import State

from .follow import Teller, changes, leaving_alone
from .training import Job
from .words import duration, since


def rehearse(job: Job, patience: float = 900.0) -> Job:
    """Give the notice, follow the job until it has left, and tell what that would have cost."""
    before = job.data
    job.preempt_test()
    teller = Teller()
    print(f"Rehearsal: job {job.id} gets the same notice as when an owner comes back; it returns by itself.")
    with leaving_alone(job.id, "watching the rehearsal"):
        for data in changes(job.id, time.monotonic() + patience):
            job.data = data
            teller.tell(data)
            if _left(data, before.attempt):
                break
    print(verdict(job.data, before.attempt))
    return job


def verdict(data: JobData, number: int) -> str:
    """What the attempt that left had saved."""
    attempt = next((a for a in data.attempts if a.number == number), None)
    if attempt is None or attempt.ended_at is None:
        return "It has not left yet; `%job` shows when it has."
    if attempt.outcome not in ("preempted", "moved"):
        return f"It ended before it had to leave ({attempt.outcome})."
    kept = attempt.checkpoint
    if kept is None or kept.step is None:
        lost = f" and lost {duration(attempt.lost_seconds)} of work" if attempt.lost_seconds else ""
        if "checkpoint" in data.source:
            advice = "Its code had not come to its first checkpoint; try again when it has made some steps."
        else:
            advice = "Use makeway.checkpoint in the code: for step in checkpoint.loop(1000, save=save, load=load)."
        return f"It left without a checkpoint{lost}. {advice}"
    took = f" {duration(since(kept.saved_at, attempt.ended_at))} before it left" if kept.saved_at else ""
    lost = f" and lost {duration(attempt.lost_seconds)} of work" if attempt.lost_seconds else ""
    return f"It saved step {kept.step}{took}{lost}; it is back in the queue and goes on from there."


def _left(data: JobData, number: int) -> bool:
    gone = any(a.number == number and a.ended_at is not None for a in data.attempts)
    return gone or data.state.ended or (data.state is State.PENDING and data.attempt >= number)
