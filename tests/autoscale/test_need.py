"""Need counts once: machines on their way, gangs, shapes, types and pools.

Where a docstring names a report, users of another autoscaler made it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from autoscale.fleet import CLOUD, CPU_TYPE, GPU_TYPE, Fleet, cpu_work, gpu_work, one_ready


def test_a_booting_machine_is_not_asked_for_twice() -> None:
    """karpenter#3121, and the ClearML autoscaler: need 3, two types, 5 launched."""
    fleet = Fleet(pending=[gpu_work(f"job-{n}") for n in range(3)])
    for _ in range(5):
        fleet.now += 15
        fleet.cycle()
    assert fleet.running == 3


def test_one_demand_is_not_acted_upon_twice() -> None:
    """nomad-autoscaler#610: the same demand in two cycles, the machine being ready in between."""
    fleet = Fleet(pending=[gpu_work()], nodes=frozenset())  # the engine has not seen the node yet
    fleet.cycle()
    fleet.boot()
    fleet.cycle()
    assert fleet.states == ["ready"]
    assert fleet.running == 1


def test_a_node_is_not_ready_before_its_gpus_are() -> None:
    """autoscaler#1659, gpu-operator#708: four nodes for one job."""
    fleet = Fleet(pending=[gpu_work()])
    fleet.cycle()
    (machine,) = fleet.rows
    fleet.report(machine.id, "joined", boot="boot-1", at=fleet.now)
    for _ in range(4):
        fleet.now += 15
        fleet.cycle()
        assert fleet.states == ["joining"]
    assert fleet.running == 1


def test_a_machine_with_other_gpus_than_its_type_is_ended_and_its_type_waits() -> None:
    fleet = Fleet(pending=[gpu_work()])
    fleet.cycle()
    fleet.boot(gpus=1)
    assert fleet.states == ["terminating"]
    assert [(one.type, one.failure) for one in fleet.store.backoffs] == [("g2", "boot_failed")]


def test_need_is_counted_once_over_types_and_pools() -> None:
    other = replace(GPU_TYPE, name="g2-other", pool="gpu-other")
    fleet = Fleet(replace(CLOUD, types=(GPU_TYPE, other, CPU_TYPE)))
    fleet.pending = [gpu_work()._replace(pools=("gpu", "gpu-other"))]
    fleet.cycle()
    fleet.pending = [gpu_work()._replace(pools=("gpu-other", "gpu"))]
    fleet.cycle()
    assert fleet.running == 1


def test_two_deployments_do_not_serve_the_same_work() -> None:
    first = Fleet(replace(CLOUD, max_machines=1), pending=[gpu_work("job-1"), gpu_work("job-2")])
    remaining = first.cycle().unserved
    second = Fleet(replace(CLOUD, name="second"), pending=remaining)
    second.cycle()
    assert [work.workload for work in remaining] == ["job-2"]
    assert (first.running, second.running) == (1, 1)


def test_small_work_shares_a_machine_that_boots() -> None:
    fleet = Fleet(pending=[gpu_work(f"job-{n}", gpus=500, cpu=1000) for n in range(4)])
    fleet.cycle()
    assert fleet.running == 1
    fleet.pending = [gpu_work(f"job-{n}", gpus=600, cpu=1000) for n in range(3)]  # 1.8 GPUs, but three devices
    fleet.cycle()
    assert fleet.running == 2


@pytest.mark.covers("F79", "F62", "F68")
def test_two_pools_with_two_jobs_each_launch_two_machines_each() -> None:
    fleet = Fleet(pending=[gpu_work("a"), gpu_work("b"), cpu_work("c"), cpu_work("d")])
    fleet.cycle()
    fleet.run(60)
    assert sorted(row.type for row in fleet.rows) == ["c8", "c8", "g2", "g2"]
    assert fleet.running == 4


@pytest.mark.covers("F62", "F68")
def test_work_without_gpus_gets_a_machine_with_gpus_only_where_its_pools_have_one() -> None:
    """However much waits: five machines without GPUs are all that there may be, and those with GPUs stand first."""
    fleet = Fleet(pending=[cpu_work(f"job-{n}") for n in range(7)])
    for _ in range(3):
        fleet.cycle()
        fleet.now += 15
    assert [row.type for row in fleet.rows] == ["c8"] * 5
    listed = [cpu_work(f"job-{n}")._replace(pools=("cpu", "gpu")) for n in (5, 6)]
    fleet.pending = [*fleet.pending[:5], *listed]
    fleet.cycle()
    assert sorted(row.type for row in fleet.rows) == ["c8"] * 5 + ["g2"], "both fit on one"


def test_a_gang_that_does_not_fit_launches_nothing() -> None:
    fleet = Fleet(replace(CLOUD, max_machines=3), pending=[gpu_work("gang", workers=4), gpu_work("small")])
    result = fleet.cycle()
    assert [work.workload for work in result.unserved] == ["gang"]
    assert fleet.running == 1


def test_a_gang_that_does_not_fit_leaves_the_room_that_it_tried() -> None:
    fleet = Fleet(replace(CLOUD, max_machines=2), pending=[gpu_work("a", gpus=1000)])
    fleet.cycle()
    fleet.pending = [gpu_work("gang", workers=5, gpus=1000), gpu_work("b", gpus=1000), gpu_work("c", gpus=1000)]
    result = fleet.cycle()
    assert [work.workload for work in result.unserved] == ["gang"]
    assert fleet.running == 1


def test_demand_that_is_not_known_launches_and_drains_nothing() -> None:
    fleet = one_ready()
    fleet.run(30)
    fleet.now += 10_000
    fleet.hear()
    fleet.cycle(demand=False)
    assert fleet.states == ["ready"]


ONE_ZONE = replace(GPU_TYPE, zones=("a",), max_machines=5)


@pytest.mark.covers("F49")
def test_a_gang_whose_machines_are_ready_one_after_the_other_launches_no_further_one() -> None:
    slow = replace(ONE_ZONE, spin_up_timeout=7200, idle_timeout=60)
    fleet = Fleet(replace(CLOUD, types=(slow,)), pending=[gpu_work("gang", workers=3)])
    fleet.cycle()
    for machine in [row.id for row in fleet.rows]:
        result = None
        for _ in range(3):
            fleet.now += 15
            result = fleet.cycle()
        assert result is not None
        assert result.served == {
            "gang": tuple(row.id for row in sorted(fleet.rows, key=lambda row: row.state != "ready"))
        }
        assert fleet.running == 3
        if machine != fleet.rows[-1].id:
            fleet.boot(machine)
    fleet.run(3600)
    assert fleet.states == ["ready", "ready", "booting"], "it is for the gang that the first two are kept"


@pytest.mark.covers("F49")
def test_idle_machines_alone_are_no_room_for_a_gang_that_does_not_start_there() -> None:
    """Where the engine does not start it on them, one more is launched: they may have less room than their type."""
    fleet = Fleet(replace(CLOUD, types=(ONE_ZONE,)), pending=[gpu_work("a"), gpu_work("b")])
    fleet.cycle()
    fleet.boot()
    fleet.pending = [gpu_work("gang", workers=2)]
    fleet.cycle()
    assert fleet.states == ["ready", "ready", "booting"]


@pytest.mark.covers("F49")
def test_an_idle_machine_is_room_for_no_single_workload_and_for_one_gang_only() -> None:
    fleet = Fleet(replace(CLOUD, types=(ONE_ZONE,)), pending=[gpu_work("a")])
    fleet.cycle()
    fleet.boot()
    fleet.pending = [gpu_work("single")]
    fleet.cycle()
    assert fleet.states == ["ready", "booting"]
    fleet.pending = [gpu_work("single"), gpu_work("gang", workers=2), gpu_work("other", workers=2)]
    fleet.cycle()
    assert fleet.states == ["ready"] + ["booting"] * 4
    fleet.busy = {fleet.rows[0].id: 1}
    fleet.pending = [gpu_work("single"), gpu_work("gang", workers=2)]
    result = fleet.cycle()
    assert result.served is not None
    assert fleet.rows[0].id not in result.served["gang"]


@pytest.mark.covers("F49")
def test_a_gang_gets_all_of_its_machines_in_one_pool() -> None:
    first, second = replace(ONE_ZONE, max_machines=1), replace(ONE_ZONE, name="h2", pool="spot", max_machines=2)
    gang = gpu_work("gang", workers=2)._replace(pools=("gpu", "spot"))
    fleet = Fleet(replace(CLOUD, types=(first, second)), pending=[gang])
    fleet.cycle()
    assert [row.pool for row in fleet.rows] == ["spot", "spot"]
    fleet = Fleet(replace(CLOUD, types=(first, replace(second, max_machines=1))), pending=[gang, gpu_work("single")])
    result = fleet.cycle()
    assert [work.workload for work in result.unserved] == ["gang"]
    assert [row.pool for row in fleet.rows] == ["gpu"]
    assert {(one.workload, one.code) for one in result.refusals} == {("gang", "max_machines")}


@pytest.mark.covers("F49")
def test_a_gang_takes_the_machines_that_boot_in_its_second_pool_before_new_ones_in_the_first() -> None:
    second = replace(ONE_ZONE, name="h2", pool="spot")
    fleet = Fleet(
        replace(CLOUD, types=(ONE_ZONE, second)), pending=[gpu_work(n)._replace(pools=("spot",)) for n in "ab"]
    )
    fleet.cycle()
    fleet.pending = [gpu_work("gang", workers=2)._replace(pools=("gpu", "spot"))]
    fleet.cycle()
    assert [row.pool for row in fleet.rows] == ["spot", "spot"]
