"""Limits of machines and money hold within one pass and from the request on.

Where a docstring names a report, users of another autoscaler made it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from autoscale.fleet import CLOUD, CPU_TYPE, EURO, GPU_TYPE, Fleet, cpu_work, gpu_work


def test_the_maximum_is_not_exceeded_within_one_pass() -> None:
    """karpenter#2915: a limit of 608, 627 machines."""
    fleet = Fleet(replace(CLOUD, max_machines=4, hourly_budget=None), pending=[gpu_work(f"job-{n}") for n in range(9)])
    fleet.run(60)
    assert fleet.running == 4
    fleet = Fleet(replace(CLOUD, types=(replace(GPU_TYPE, max_machines=3), CPU_TYPE)), pending=fleet.pending)
    fleet.run(60)
    assert fleet.running == 3


@pytest.mark.covers("F50")
def test_each_type_has_its_own_maximum_and_time_to_start() -> None:
    quick = replace(GPU_TYPE, max_machines=1, spin_up_timeout=300.0)
    patient = replace(CPU_TYPE, max_machines=3, spin_up_timeout=1800.0)
    work = [*(gpu_work(f"gpu-{n}") for n in range(4)), *(cpu_work(f"cpu-{n}") for n in range(4))]
    fleet = Fleet(replace(CLOUD, types=(quick, patient), hourly_budget=None), pending=work)
    fleet.cycle()
    assert sorted(row.type for row in fleet.rows) == ["c8", "c8", "c8", "g2"]
    first = {row.id: row.type for row in fleet.rows}
    fleet.run(400)
    late = {
        type: {fleet.store.all_machines()[id].reason for id, item in first.items() if item == type}
        for type in ("g2", "c8")
    }
    assert late == {"g2": {"spin_up_timeout"}, "c8": {"launched"}}
    fleet.run(1500)
    assert {fleet.store.all_machines()[id].reason for id in first} == {"spin_up_timeout"}


@pytest.mark.covers("F72")
def test_the_budget_counts_machines_from_their_request() -> None:
    fleet = Fleet(replace(CLOUD, hourly_budget=7 * EURO), pending=[gpu_work(f"job-{n}") for n in range(9)])
    fleet.step()  # killed before the calls
    result = fleet.step()
    assert sum(row.price or 0 for row in fleet.rows) == 6 * EURO
    assert {one.code for one in result.refusals} == {"hour_budget"}


def test_an_unknown_price_is_never_zero() -> None:
    machine_type = replace(GPU_TYPE, price=None)
    fleet = Fleet(replace(CLOUD, types=(machine_type,)), pending=[gpu_work()])
    assert {one.code for one in fleet.cycle().refusals} == {"price_unknown"}
    assert not fleet.rows
    fleet = Fleet(replace(CLOUD, types=(machine_type,), hourly_budget=None), pending=[gpu_work()])
    result = fleet.cycle()
    assert fleet.running == 1
    assert result.money is not None
    assert fleet.cycle().money.unpriced_machines == 1  # type: ignore[union-attr]


def test_a_spot_machine_counts_at_its_maximum_price() -> None:
    machine_type = replace(GPU_TYPE, market="spot", spot_price=2 * EURO)
    fleet = Fleet(
        replace(CLOUD, types=(machine_type,), hourly_budget=5 * EURO), pending=[gpu_work(f"job-{n}") for n in range(9)]
    )
    fleet.cycle()
    assert fleet.running == 2


def test_the_price_of_a_machine_is_that_of_its_request() -> None:
    fleet = Fleet(pending=[gpu_work()])
    fleet.cycle()
    fleet.deployment = replace(CLOUD, types=(replace(GPU_TYPE, price=9 * EURO), CPU_TYPE))
    fleet.boot()
    assert fleet.rows[0].price == 3 * EURO


def test_a_month_that_is_used_up_drains_all_machines_and_launches_none() -> None:
    fleet = Fleet(replace(CLOUD, hourly_budget=None, monthly_budget=12 * EURO), pending=[gpu_work()])
    fleet.cycle()
    fleet.boot()
    fleet.pending, fleet.busy = [gpu_work("next")], {fleet.rows[0].id: 1}
    fleet.run(3 * 3600, every=60)
    assert "budget" in {row.drain for row in fleet.store.all_machines().values()}
    fleet.busy = {}
    fleet.run(1200)
    assert (fleet.states, fleet.running) == ([], 0)
    assert sum(fleet.store.closed_spend.values()) <= 12 * EURO
