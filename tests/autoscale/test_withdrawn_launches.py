"""What an administrator or the money forbids holds from the next step on, also for launches that were decided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from autoscale.fleet import CLOUD, CPU_TYPE, EURO, GPU_TYPE, Fleet, gpu_work, one_ready
from makeway_quota.autoscale.deployment import Deployment
from makeway_quota.autoscale.step import answer, step

FORBIDDEN: dict[str, Callable[[Deployment], Deployment]] = {
    "paused": lambda one: replace(one, paused=True),
    "type removed": lambda one: replace(one, types=(CPU_TYPE,)),
    "hour": lambda one: replace(one, hourly_budget=EURO),
    "month": lambda one: replace(one, hourly_budget=None, monthly_budget=EURO // 2),
    "machines": lambda one: replace(one, max_machines=0),
    "machines of the type": lambda one: replace(one, types=(replace(GPU_TYPE, max_machines=0), CPU_TYPE)),
}
ALL_ENDS = ("paused", "type removed", "month")
"""Changes after which no machine that exists may stay, either"""


@pytest.mark.parametrize("demand", [True, False])
@pytest.mark.parametrize("change", [*FORBIDDEN, "deleted"])
def test_a_launch_that_was_decided_is_not_called_any_more(change: str, demand: bool) -> None:
    fleet = Fleet(pending=[gpu_work()])
    fleet.step()  # killed before the call
    (row,) = fleet.rows
    fleet.store.rows[row.id] = replace(row, launch_calls=0, launch_called_at=None)  # and before the call was noted
    fleet.deployment = FORBIDDEN.get(change, replace)(fleet.deployment)
    fleet.cycle(demand=demand, deleting=change == "deleted")
    assert (fleet.provider.launches, fleet.states) == (0, [])
    assert fleet.store.finished[row.id].state == "failed"
    assert sum(fleet.store.closed_spend.values()) == 0


@pytest.mark.parametrize("change", [*ALL_ENDS, "deleted"])
def test_a_launch_without_an_answer_is_not_repeated_but_looked_for(change: str) -> None:
    fleet = Fleet(pending=[gpu_work()])
    fleet.provider.lost_after, fleet.provider.delay = 1, 100
    fleet.cycle()
    fleet.deployment = FORBIDDEN.get(change, replace)(fleet.deployment)
    for _ in range(60):
        fleet.now += 15
        fleet.cycle(demand=False, deleting=change == "deleted")
    assert (fleet.provider.launches, fleet.running, fleet.states) == (1, 0, [])


@pytest.mark.parametrize("demand", [True, False])
def test_a_machine_that_boots_ends_with_its_deployment_at_once(demand: bool) -> None:
    for state in ("booting", "joining"):
        fleet = Fleet(pending=[gpu_work()])
        fleet.cycle()
        if state == "joining":
            fleet.report(fleet.rows[0].id, "joined", boot="boot-1", at=fleet.now)
            fleet.cycle()
        assert fleet.states == [state]
        fleet.deployment = replace(CLOUD, paused=True)
        fleet.cycle(demand=demand)
        assert fleet.states == ["terminating"]
        assert fleet.running == 0


@pytest.mark.parametrize("change", ["paused", "month", "deleted"])
def test_a_pause_a_deletion_and_the_budget_are_kept_while_the_demand_is_not_known(change: str) -> None:
    fleet = one_ready()
    machine = fleet.rows[0]
    fleet.busy = {machine.id: 1}
    fleet.deployment = FORBIDDEN.get(change, replace)(fleet.deployment)
    fleet.cycle(demand=False, deleting=change == "deleted")
    (row,) = fleet.rows
    assert (row.state, row.deadline) == ("draining", fleet.now + CLOUD.drain_timeout)
    for _ in range(30):
        fleet.now += 15
        fleet.hear()
        fleet.cycle(demand=False, deleting=change == "deleted")
    assert (fleet.states, fleet.running) == ([], 0)


def test_the_newest_launches_go_until_the_limits_are_kept() -> None:
    fleet = Fleet(pending=[gpu_work("a"), gpu_work("b"), gpu_work("c")])
    fleet.step()
    for row in fleet.rows:
        fleet.store.rows[row.id] = replace(
            row, launch_calls=0, launch_called_at=None, requested_at=fleet.now + int(row.id[-1]) - 4
        )
    fleet.deployment = replace(CLOUD, hourly_budget=6 * EURO)
    fleet.cycle()
    assert [(row.id, row.state) for row in fleet.rows] == [("m-0001", "booting"), ("m-0002", "booting")]


def test_no_launch_without_a_price_is_called_after_money_was_limited() -> None:
    fleet = Fleet(replace(CLOUD, types=(replace(GPU_TYPE, price=None),), hourly_budget=None), pending=[gpu_work()])
    fleet.step()
    (row,) = fleet.rows
    fleet.store.rows[row.id] = replace(row, launch_calls=0, launch_called_at=None)
    fleet.deployment = replace(fleet.deployment, monthly_budget=100 * EURO)
    fleet.cycle()
    assert fleet.provider.launches == 0


def test_a_document_that_changed_since_it_was_read_launches_nothing() -> None:
    fleet = Fleet(pending=[gpu_work()])
    seen = fleet.seen()
    fleet.store.revision = 1  # paused meanwhile, by another process
    result = step(fleet.store, fleet.deployment, seen, fleet.leader())
    assert (result.committed, result.calls, fleet.states) == (False, (), [])
    fleet.deployment = replace(fleet.deployment, revision=1)
    assert fleet.cycle().committed
    assert fleet.states == ["booting"]


def test_the_answer_of_a_call_is_committed_though_the_document_changed_meanwhile() -> None:
    fleet = Fleet(pending=[gpu_work()])
    result = fleet.step()
    fleet.store.revision = 1
    answers = [(call, fleet.now, call.make(fleet.provider)) for call in result.calls]
    assert answer(fleet.store, fleet.deployment, answers, 1, fleet.now)
    assert fleet.states == ["booting"]
