"""What is said of how long a job ran is the time since its command began, not since it was given its GPUs."""

from __future__ import annotations

import pytest
from makeway_quota.backends.base import AttemptStatus, NodeStatus, Observation, Phase
from makeway_quota.control.reconcile import reconcile
from makeway_quota.control.start_backoff import RETRY_DELAYED
from makeway_quota.store.records import NewWorkload, Workload
from makeway_quota.store.rows import initial_record
from makeway_quota.values import Notice

NODE = NodeStatus("local", "", (0,), virtual=True)
NOW = 1_800_000_000.0


def ended(exit_code: int, began: float | None, ends: float | None = NOW, now: float = NOW) -> Workload:
    """Return a job that got its GPUs 66 s ago, once an attempt is over that began and ended at these times."""
    new = NewWorkload("j-12345678", "job", "rnd", "gpu1", "ana", name="fit", gpus=1000, max_failures=9)
    row = initial_record(new, NOW - 100)._replace(state="running", attempt=1, started_at=NOW - 66)
    seen = AttemptStatus(row.id, 1, Phase.EXITED, started_at=began, ended_at=ends, exit_code=exit_code)
    [change] = reconcile({row.id: row}, Observation((NODE,), (seen,)), now=now, max_infra_failures=3).changes
    made: Workload = row._replace(**change.fields)
    return made


@pytest.mark.parametrize(
    ("began", "ends", "said"),
    [
        (NOW - 2, NOW, "2 s"),
        (NOW - 60, NOW - 10, "50 s"),
        (NOW - 3600 - 2, NOW - 3600, "2 s"),  # the clock of its node is slow
        (NOW + 3600 - 2, NOW + 3600, "2 s"),  # or fast
        (NOW - 2, None, "2 s"),  # its end is not known, and is seen now
        (None, NOW, "1 min 6 s"),  # a launcher that does not tell when it began
        (NOW - 9999, NOW, "1 min 6 s"),  # what a job writes is never longer than it had GPUs
        (NOW, NOW - 5, "1 min 1 s"),  # nor does it end before it begins
        (float(2**70), NOW, "1 min 6 s"),
        (-1.0, 1e300, "1 min 6 s"),
    ],
)
def test_a_job_that_succeeded_says_how_long_its_command_ran(began: float | None, ends: float | None, said: str) -> None:
    row = ended(0, began, ends)
    assert row.state == "succeeded"
    assert row.reason_message == f"“fit” of ana succeeded after {said}; 1 GPU is free again."
    assert 0 <= row.ran <= 66, "its GPUs were its own for the whole time, which is what a team has used"


def test_what_fails_at_once_is_delayed_however_long_its_image_was_pulled() -> None:
    row = ended(3, NOW - 0.2)
    assert (row.state, row.reason_code) == ("pending", RETRY_DELAYED)
    assert ended(3, NOW - 30).reason_code == "retry"


def test_what_was_lost_is_work_since_the_command_began() -> None:
    new = NewWorkload("j-12345678", "job", "rnd", "gpu1", "ana", name="fit", gpus=1000, max_failures=9)
    notice = Notice("reclaim", NOW - 1, NOW + 30)
    row = initial_record(new, NOW - 100)._replace(attempt=1, started_at=NOW - 66, notice=notice)
    for state, began, lost in (("checkpointing", NOW - 2, 2.0), ("checkpointing", None, 66.0), ("starting", None, 0.0)):
        seen = AttemptStatus(row.id, 1, Phase.EXITED, began, NOW, -15, notice_received=True)
        result = reconcile(
            {row.id: row._replace(state=state)}, Observation((NODE,), (seen,)), now=NOW, max_infra_failures=3
        )
        [change] = result.changes
        assert change.close_attempt is not None
        assert change.close_attempt["lost_seconds"] == lost, state
