"""An edit of the document while machines boot and run: what a machine is does not change with the type of its name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from autoscale.fleet import CLOUD, CPU_TYPE, EURO, GPU_TYPE, Fleet, gpu_work


def test_a_machine_that_boots_for_another_pool_serves_no_work_of_the_pool_that_its_type_has_now() -> None:
    fleet = Fleet(pending=[gpu_work()])
    fleet.cycle()
    fleet.deployment = replace(CLOUD, types=(replace(GPU_TYPE, pool="research"), CPU_TYPE))
    fleet.pending = [gpu_work()._replace(pools=("research",))]
    fleet.cycle()
    assert [(row.pool, row.state) for row in fleet.rows if row.starting] == [("research", "booting")]
    assert {row.reason for row in fleet.store.all_machines().values() if row.pool == "gpu"} == {"removed"}


@pytest.mark.parametrize("edit", [{"pool": "research"}, {"gpus": 4}])
def test_an_idle_machine_of_what_a_type_was_before_is_not_kept_in_place_of_one_of_what_it_is(
    edit: dict[str, object],
) -> None:
    kept = replace(GPU_TYPE, min_idle=1)
    fleet = Fleet(replace(CLOUD, types=(kept, CPU_TYPE)))
    fleet.cycle()
    fleet.boot()
    (before,) = fleet.rows
    fleet.deployment = replace(CLOUD, types=(replace(kept, **edit), CPU_TYPE))  # type: ignore[arg-type]
    fleet.run(60)
    fleet.boot()
    fleet.run(60)
    (after,) = (row for row in fleet.rows if row.state == "ready")
    assert (after.pool, after.gpus) == (edit.get("pool", "gpu"), edit.get("gpus", 2))
    assert fleet.store.all_machines()[before.id].reason == "removed"


def test_work_ends_on_a_machine_whose_type_has_another_pool_now() -> None:
    fleet = Fleet(pending=[gpu_work()])
    fleet.cycle()
    fleet.boot()
    (row,) = fleet.rows
    fleet.pending, fleet.busy = [], {row.id: 1}
    fleet.deployment = replace(CLOUD, types=(replace(GPU_TYPE, pool="research"), CPU_TYPE))
    fleet.run(1200)
    assert [(one.id, one.state, one.deadline) for one in fleet.rows] == [(row.id, "draining", None)]
    fleet.busy = {}
    fleet.run(60)
    assert fleet.running == 0


def test_a_month_without_money_launches_nothing_even_if_it_costs_nothing() -> None:
    free = replace(GPU_TYPE, price=0, min_idle=1)
    fleet = Fleet(replace(CLOUD, types=(free, CPU_TYPE), hourly_budget=None, monthly_budget=0), pending=[gpu_work()])
    fleet.run(300)
    assert not fleet.store.all_machines()
    assert {one.code for one in fleet.cycle().refusals} == {"month_budget"}
    fleet.deployment = replace(fleet.deployment, monthly_budget=EURO)
    fleet.cycle()
    assert fleet.running == 2  # one with the work, and one that is kept idle
