"""Notices of jobs whose machine is to go hold by the clock as it is now, and while a document is edited."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from autoscale.fleet import START
from autoscale.test_moves import RULES, running, shared
from makeway_quota.autoscale.retirement import StepTime, retire
from makeway_quota.autoscale.step import MachineRows
from makeway_quota.backends.base import AttemptStatus, NodeStatus, Observation, Phase
from makeway_quota.control.machines.cycle_demand import JobFacts, cycle_demand, known_demand
from makeway_quota.control.machines.deployment_driver import _may_move
from makeway_quota.control.machines.machine_notices import MARGIN, notices
from makeway_quota.control.reconcile import reconcile
from makeway_quota.control.world.clock_steps import ClockSteps
from makeway_quota.control.world.corrected_times import CorrectedTimes
from makeway_quota.values import Notice


async def hastened(step: float, seconds: float, limit: float | None) -> list[float]:
    """Return the times to save that a spot notice of two minutes leaves a job, if they are to be shorter.

    The job had a notice of `seconds` already five seconds before the clock was set by `step`.
    """
    fleet = shared(None)
    machine, ahead = fleet.rows[0].id, [0.0]
    steps = ClockSteps(lambda: fleet.now + ahead[0], lambda: fleet.now)
    times = CorrectedTimes(steps)
    given = Notice("evicted", fleet.now - 5, fleet.now - 5 + seconds, "evict")
    row = running("small", machine, grace=seconds, notice=given, state="checkpointing", time_limit=limit)
    times.of(row)
    ahead[0] = step
    times.stepped([row], steps.observe())
    now = fleet.now + step

    async def rows() -> dict[str, Any]:
        return {row.id: row}

    world: Any = SimpleNamespace(
        placed=rows,
        rows_as_of_now=rows,
        times=times,
        has_durable_checkpoints=lambda row: True,
        durations=SimpleNamespace(remaining=lambda row, at: None),
        observed=SimpleNamespace(nodes={machine: NodeStatus(machine, "gpu", (0, 1, 2, 3))}),
    )
    known = await known_demand(world, (), {machine: machine}, 0.0, now, moves=False)
    taken_back = fleet.rows[0].with_fields(state="draining", drain="spot", deadline=now + 120)
    changes = notices([taken_back], known.rows, known.machines, (), now).changes
    told: list[Any] = [change.fields["notice"] for change in changes]
    return [notice.deadline - now for notice in told]


@pytest.mark.parametrize("limit", [None, 1e6], ids=["without a time limit", "with one"])
@pytest.mark.parametrize("step", [0.0, 7200.0, -7200.0])
def test_a_spot_notice_shortens_the_time_to_save_also_after_the_clock_was_set(step: float, limit: float | None) -> None:
    assert asyncio.run(hastened(step, 1800.0, limit)) == [120 - MARGIN]


@pytest.mark.parametrize("limit", [None, 1e6], ids=["without a time limit", "with one"])
@pytest.mark.parametrize("step", [0.0, 7200.0, -7200.0])
def test_a_spot_notice_never_prolongs_the_time_to_save(step: float, limit: float | None) -> None:
    assert asyncio.run(hastened(step, 30.0, limit)) == []


def test_a_machine_whose_job_saves_for_a_move_is_given_back_though_the_document_moves_nothing_any_more() -> None:
    fleet = shared()
    first, second = fleet.rows
    told = Notice("", fleet.now, fleet.now + 60, "give_back")
    rows = (running("small", first.id, notice=told, state="checkpointing"), running("one", second.id))
    nodes = {row.id: NodeStatus(row.id, row.pool, (0, 1, 2, 3), cordoned=row.state == "draining") for row in fleet.rows}
    facts = JobFacts(fleet.now, lambda row, at: None)
    known = cycle_demand(0.0, [], nodes, rows, {row.id: row.id for row in fleet.rows}, {}, facts)
    for moves in (RULES, None):
        deployment = replace(fleet.deployment, moves=moves)
        demand = known.of(fleet.rows, moves=_may_move(deployment, MachineRows(tuple(fleet.rows)), known))
        seen = {
            row.id: event.kind
            for row, event in retire(deployment, fleet.rows, demand, frozenset(), StepTime(fleet.now, 0))
        }
        assert seen[first.id] == "moving"


IN_TIME = "“small” of ana did not leave in time and was killed"
WITHIN = "“small” of ana did not leave within 30 min and was killed"


@pytest.mark.parametrize(
    ("kind", "reason", "seconds", "words"),
    [
        ("evict", "bo is first.", 1800, WITHIN),
        ("evict", "bo is first.", 110, IN_TIME),
        (
            "machine_ends",
            "The provider takes it back.",
            110,
            f"{IN_TIME}: the provider takes it back",
        ),
        ("machine_ends", "Its machine is ended.", 1800, f"{WITHIN}: its machine is ended"),
        ("give_back", "It is moved.", 1800, f"{WITHIN}: it is moved"),
    ],
    ids=["its whole grace", "hastened by a spot notice", "a spot notice", "the budget", "a move"],
)
def test_a_job_that_is_killed_is_told_no_longer_time_than_it_had_and_why_its_machine_ends(
    kind: Any, reason: str, seconds: float, words: str
) -> None:
    given = Notice(reason, START, START + seconds, kind)
    row = running("small", grace=1800.0, notice=given, state="checkpointing")
    end = AttemptStatus("small", 1, Phase.EXITED, exit_code=-9, killed=True, ended_at=given.deadline)
    seen = reconcile({"small": row}, Observation((), (end,)), now=given.deadline + 1, max_infra_failures=3)
    (decision,) = seen.decisions
    assert decision.message.startswith(f"{words}; saved a checkpoint")
