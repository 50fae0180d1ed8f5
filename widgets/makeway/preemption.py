"""Test the preemption of one's own job (`%job ID --preempt-test`): what it saved, how fast, and what was lost."""

from __future__ import annotations

import time

from makeway_api.durations import duration
from makeway_api.models import Job as JobData
from makeway_api.models import State

from .checkpoint_use import uses_checkpoint
from .follow import Reporter, changes, leaving_alone
from .training import Job
from .words import since, typed


def run_test(job: Job, patience: float = 900.0) -> Job:
    """Preempt the job, follow it until its GPUs are free (`patience` seconds at most), and print the verdict."""
    before = job.data
    job.preempt_test()
    reporter = Reporter()
    print(f"Test of preemption: job {job.id} gets the same notice as in a reclaim, and is requeued by itself.")
    with leaving_alone(job.id, "watching the test"):
        for data in changes(job.id, time.monotonic() + patience):
            job.data = data
            reporter.report(data)
            if _preempted(data, before.attempt):
                break
    print(verdict(job.data, before.attempt))
    return job


def verdict(data: JobData, number: int) -> str:
    """Return what attempt `number` had saved when it was preempted."""
    attempt = next((a for a in data.attempts if a.number == number), None)
    if attempt is None or attempt.ended_at is None:
        return typed("It still holds its GPUs; `%job` shows when it has made way.", data.id)
    if attempt.outcome not in ("preempted", "moved"):
        return f"It ended before it had to make way ({attempt.outcome})."
    newest = attempt.checkpoint
    lost = f" and lost {duration(attempt.lost_seconds)} of work" if attempt.lost_seconds else ""
    if newest is None or newest.step is None:
        if uses_checkpoint(data.source):
            advice = "Its code had not reached its first checkpoint; repeat the test after some more steps."
        else:
            advice = "Use makeway.checkpoint in the code: for step in checkpoint.loop(1000, save=save, load=load)."
        return f"It made way without a checkpoint{lost}. {advice}"
    took = f" {duration(since(newest.saved_at, attempt.ended_at))} before it made way" if newest.saved_at else ""
    return f"It saved step {newest.step}{took}{lost}; it is back in the queue and continues from there."


def _preempted(data: JobData, number: int) -> bool:
    ended = any(a.number == number and a.ended_at is not None for a in data.attempts)
    return ended or data.state.ended or (data.state is State.PENDING and data.attempt >= number)
