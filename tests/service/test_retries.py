"""A job that fails soon after each start is tried again ever later, and takes no GPUs meanwhile."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
from makeway_quota.backends.base import AttemptStatus, NodeStatus, Observation, Phase
from makeway_quota.control.reconcile import reconcile
from makeway_quota.control.start_backoff import MAX_RETRY, RETRY_DELAYED, backoff_until, retry_delay
from makeway_quota.store.records import NewWorkload, Workload
from makeway_quota.store.rows import initial_record
from makeway_quota.values import Place
from running import python, running

NODE = NodeStatus("local", "", tuple(range(10)), virtual=True)
FAILS = python("raise SystemExit(3)")


def after_failure(row: Workload, now: float, ran: float) -> Workload:
    """Return a row as it is once its attempt has failed."""
    started = row._replace(state="running", attempt=row.attempt + 1, started_at=now - ran)
    seen = AttemptStatus(row.id, started.attempt, Phase.EXITED, ended_at=now, exit_code=3)
    [change] = reconcile({row.id: started}, Observation((NODE,), (seen,)), now=now, max_infra_failures=3).changes
    made: Workload = started._replace(**change.fields)
    return made


@pytest.mark.parametrize("ran", [0.0, 0.3, 7.0])
def test_a_thousand_failures_take_days(ran: float) -> None:
    now = 1_800_000_000.0
    made = NewWorkload("j-12345678", "job", "rnd", "gpu1", "ana", name="x", max_failures=1000)
    row, begins = initial_record(made, now), []
    while row.state == "pending":
        now = backoff_until(row, now) or now
        begins.append(now)
        now += ran
        row = after_failure(row, now, ran)
    assert row.state == "failed"
    assert len(begins) == 1001
    gaps = [later - before for before, later in itertools.pairwise(begins)]
    expected = [max(ran, min(300.0, 2.0**n)) for n in range(1000)]
    assert gaps == pytest.approx(expected, abs=0.01)


def test_a_job_that_ran_for_longer_is_tried_at_once() -> None:
    assert retry_delay(1000, 3600.0) == 0.0
    now = 1_800_000_000.0
    row = initial_record(NewWorkload("j-12345678", "job", "rnd", "gpu1", "ana", name="x", max_failures=9), now)
    row = after_failure(row._replace(failures=5), now, 3600.0)
    assert (row.reason_code, row.not_before, backoff_until(row, now)) == ("retry", None, None)
    assert row.reason_message == "“x” of ana failed (exit code 3) and is tried again, 3 more tries left."


EVICTED = {"node_lost": True, "evicted": True}


@pytest.mark.covers("F83")
@pytest.mark.parametrize(
    ("told", "outcome", "says"),
    [
        (EVICTED | {"phase": Phase.EXITED, "exit_code": 75, "notice_received": True, "step": 5}, "preempted", "step 5"),
        (EVICTED | {"phase": Phase.EXITED, "exit_code": -15, "notice_received": True}, "preempted", "from the beginn"),
        (EVICTED | {"phase": Phase.LOST, "message": "its pod was disrupted"}, "preempted", "from the beginn"),
        (EVICTED | {"phase": Phase.EXITED, "exit_code": 3}, "failed", "failed: exit code 3"),
        (EVICTED | {"phase": Phase.EXITED, "exit_code": 0, "completed": True}, "succeeded", "succeeded"),
        ({"phase": Phase.EXITED, "exit_code": 75, "notice_received": True, "step": 5}, "lost", "not by Makeway"),
        ({"phase": Phase.LOST, "node_lost": True, "message": "its node is gone"}, "lost", "its node is gone"),
    ],
)
def test_an_eviction_before_any_notice_has_one_outcome_and_counts_as_no_loss(
    told: dict[str, Any], outcome: str, says: str
) -> None:
    """Karpenter evicts at the moment of its notice: whichever of the two is seen first, the job was preempted."""
    now = 1_800_000_000.0
    row = initial_record(NewWorkload("j-12345678", "job", "rnd", "gpu1", "ana", name="x"), now)
    row = row._replace(state="running", attempt=1, started_at=now - 100.0, placement=(Place("n1", (0,)),))
    seen = AttemptStatus(row.id, 1, told.pop("phase"), started_at=now - 90.0, ended_at=now, **told)
    nodes = tuple(NodeStatus(name, "", (0, 1)) for name in ("n1", "n2"))
    [change] = reconcile({row.id: row}, Observation(nodes, (seen,)), now=now, max_infra_failures=3).changes
    assert change.close_attempt is not None
    assert change.close_attempt["outcome"] == outcome
    assert says in change.fields["reason_message"]
    if outcome == "preempted":
        assert change.fields["state"] == "pending"
        assert "had to leave n1, a node that is drained or removed" in change.fields["reason_message"]
        assert not {"infra_failures", "failures", "preemptions", "failed_node"} & change.fields.keys()


def test_a_clock_that_was_set_back_holds_no_job() -> None:
    now = 1_800_000_000.0
    row = initial_record(NewWorkload("j-12345678", "job", "rnd", "gpu1", "ana", name="x", max_failures=9), now)
    row = after_failure(row, now, 0.0)
    assert row.reason_code == RETRY_DELAYED
    assert backoff_until(row, now) == now + 1.0
    assert backoff_until(row, now - MAX_RETRY - 3600) is None


async def test_a_job_in_backoff_says_when_it_is_tried_and_leaves_its_gpus_to_others(tmp_path: Path) -> None:
    async with running(tmp_path, gpus=10, MAKEWAY_TICK_SECONDS=0.1) as run:
        job = await run.submit("ana", "fails", FAILS, profile="gpu1", max_failures=1000)

        async def delayed() -> bool:
            result = await run.client("ana").job(job.id)
            return result.failures >= 3 and result.reason is not None and result.reason.code == RETRY_DELAYED

        began = time.monotonic()
        await run.until(delayed, "it failed three times")
        assert time.monotonic() - began >= 3.0, "1 s and 2 s were waited"
        result = await run.client("ana").job(job.id)
        assert result.state.value == "pending"
        assert result.reason is not None
        assert "failed (exit code 3) and is tried again" in result.reason.message
        assert "later, 99" in result.reason.message
        assert result.reason.not_before is not None
        assert (await run.used())["idle"] == 10
        await run.client("ana").cancel(job.id)
        await run.job(job.id, "cancelled")
