"""Combine the reports of the workers of one attempt; used by backends whose workers are elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..base import AttemptStatus, Key, Phase

KILLED = (-9, 137)
"""Exit codes of a command that SIGKILL ended; shells report the second one."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What one worker reported; times are Unix seconds."""

    started_at: float | None = None
    step: int | None = None
    saved_at: float | None = None
    notice_received: bool = False
    ended_at: float | None = None
    exit_code: int | None = None
    killed: bool = False
    acknowledged: bool = False
    completed: bool = False
    timed_out: bool = False
    storage_failed: bool = False
    """it did not begin, as its folder of checkpoints takes no file"""
    service_unavailable: bool = False
    """it was ended because it did not reach the service, which was unavailable"""
    result_unsent: bool = False
    """it left a result that was not taken whole, so a job that got a notice is not done"""
    result_refused: bool = False
    """its result was not kept, for example as it is too large"""
    message: str = ""

    @property
    def ended(self) -> bool:
        """Whether it reported its end."""
        return self.exit_code is not None


def attempt_of(key: Key, workers: Mapping[int, WorkerStatus], size: int) -> AttemptStatus:
    """Return what the reports of the workers of one attempt mean together; `size` 0: as many as reported.

    It runs when all do, and is over when all are; a failure of one worker is that of the attempt. It never runs where
    one could not begin.
    """
    result = [workers[number] for number in sorted(workers)]
    whole = len(result) >= max(1, size)
    saved = max((w for w in result if w.saved_at is not None), key=lambda w: w.saved_at or 0.0, default=None)
    status = AttemptStatus(
        *key,
        phase=Phase.STARTING,
        started_at=min((w.started_at for w in result if w.started_at is not None), default=None),
        notice_received=any(w.notice_received for w in result),
        step=None if saved is None else saved.step,
        checkpoint_at=None if saved is None else saved.saved_at,
    )
    if whole and all(w.ended for w in result):
        return _over(status, workers)
    if whole and without_checkpoints(workers) is None and all(w.started_at is not None or w.ended for w in result):
        return replace(status, phase=Phase.STOPPING if status.notice_received else Phase.RUNNING)
    return status


def without_checkpoints(workers: Mapping[int, WorkerStatus]) -> int | None:
    """Return the first worker that did not begin, as its folder of checkpoints takes no file; None without one."""
    return min((number for number, worker in workers.items() if worker.storage_failed), default=None)


def ran_or_ended(status: AttemptStatus, workers: Mapping[int, WorkerStatus]) -> bool:
    """Whether an attempt ran as a whole, or any of its workers has ended."""
    return status.phase is not Phase.STARTING or any(w.ended for w in workers.values())


def ended_by_others(status: AttemptStatus) -> bool:
    """Whether SIGKILL or a stop ended the command of an attempt, and none of Makeway's deadlines did.

    Whether a stop was Makeway's own is not known here; what had finished before it stays finished.
    """
    if status.timed_out or status.completed:
        return False
    return status.notice_received or (status.exit_code in KILLED and not status.killed)


def exit_code_of(codes: list[int]) -> int:
    """Return an attempt's exit code: a worker's own failure first, then a kill, then 75 (saved and ended)."""
    failed = [code for code in codes if code not in (0, 75, -9)]
    return failed[0] if failed else min(codes) if -9 in codes else max(codes)


def _over(status: AttemptStatus, workers: Mapping[int, WorkerStatus]) -> AttemptStatus:
    result = [workers[number] for number in sorted(workers)]
    failed = without_checkpoints(workers)
    if failed is None:
        code = exit_code_of([w.exit_code or 0 for w in result])
        says = next((w for w in result if w.exit_code == code and w.message), None)
    else:  # the others were ended because of it
        code, says = workers[failed].exit_code or 0, workers[failed]
    return replace(
        status,
        phase=Phase.EXITED,
        ended_at=max(w.ended_at or 0.0 for w in result),
        exit_code=code,
        killed=any(w.killed for w in result),
        acknowledged=any(w.acknowledged for w in result)
        and all(w.acknowledged or w.exit_code in (0, 75) for w in result),
        completed=code == 0 and any(w.completed for w in result) and not any(w.result_unsent for w in result),
        result_lost=any(w.result_unsent or w.result_refused for w in result),
        timed_out=any(w.timed_out for w in result),
        storage_failed=failed is not None,
        worker=failed or 0,
        node_lost=any(w.service_unavailable for w in result),
        message="" if says is None else says.message,
    )
