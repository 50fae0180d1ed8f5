"""Idle machines end after their time, and serve what comes before.

Where a docstring names a report, users of another autoscaler made it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from autoscale.fleet import CLOUD, CPU_TYPE, GPU_TYPE, Fleet, cpu_work, draining, gpu_work, one_ready


@pytest.mark.covers("F49", "F70")
def test_three_jobs_are_three_machines_and_none_when_all_is_done() -> None:
    fleet = Fleet(pending=[gpu_work(f"job-{n}") for n in range(3)])
    fleet.cycle()
    fleet.boot()
    assert fleet.running == 3
    fleet.pending, fleet.busy = [], {row.id: 1 for row in fleet.rows}
    fleet.run(3600)
    assert fleet.running == 3
    fleet.busy = {fleet.rows[0].id: 1}
    fleet.run(700)
    assert fleet.running == 1
    fleet.busy = {}
    fleet.run(700)
    assert fleet.running == 0


def test_a_machine_that_was_never_used_is_idle_from_the_moment_it_was_ready() -> None:
    """ec2-fleet-plugin#85: idle counted from the boot, a machine that was never used never idle."""
    fleet = Fleet(pending=[gpu_work()])
    fleet.cycle()
    fleet.run(900)
    fleet.boot()
    fleet.pending = []
    fleet.run(585)
    assert fleet.states == ["ready"]
    fleet.run(100)
    assert fleet.running == 0


@pytest.mark.covers("F63")
def test_each_type_has_its_own_idle_timeout() -> None:
    short, long = replace(GPU_TYPE, idle_timeout=300.0), replace(CPU_TYPE, idle_timeout=1800.0)
    fleet = Fleet(replace(CLOUD, types=(short, long)), pending=[gpu_work(), cpu_work("job-2")])
    fleet.cycle()
    fleet.boot()
    fleet.pending = []
    fleet.run(400)
    assert [row.type for row in fleet.rows] == ["c8"]
    fleet.run(1600)
    assert fleet.rows == []


@pytest.mark.covers("F67", "F69")
def test_work_within_the_window_starts_on_the_warm_machine_and_the_window_begins_anew() -> None:
    fleet = one_ready()
    machine = fleet.rows[0]
    fleet.run(550)
    fleet.busy = {machine.id: 1}
    fleet.run(60)
    fleet.busy = {}
    fleet.run(550)
    assert fleet.rows[0].id == machine.id
    assert fleet.states == ["ready"]
    assert fleet.provider.launches == 1


def test_a_drain_ends_when_its_machine_is_needed_and_no_other_is_launched() -> None:
    """nomad-autoscaler#521: a drain that cannot be cancelled."""
    fleet = draining()
    fleet.pending = [gpu_work()]
    fleet.cycle()
    assert fleet.states == ["ready"]
    assert fleet.provider.launches == 1


def test_one_drain_does_not_block_scaling() -> None:
    """nomad-autoscaler#672 and #191: also if the service is killed in its middle."""
    fleet = one_ready()
    machine = fleet.rows[0]
    fleet.busy = {machine.id: 1}
    fleet.report(machine.id, "drain", drain="age")
    fleet.cycle()
    fleet.store.term += 1
    fleet.listening = fleet.now
    fleet.pending = [gpu_work("next"), cpu_work("other")]
    fleet.run(30)
    assert sorted(fleet.states) == ["booting", "booting", "draining"]


def test_a_machine_that_keeps_room_for_a_gang_is_not_idle() -> None:
    fleet = one_ready()
    fleet.nominated = frozenset({fleet.rows[0].id})
    fleet.run(3600)
    assert fleet.states == ["ready"]


def test_machines_are_kept_without_work_as_the_schedule_says() -> None:
    fleet = Fleet(replace(CLOUD, types=(replace(GPU_TYPE, min_idle=2),)))
    fleet.cycle()
    fleet.boot()
    fleet.run(3600)
    assert fleet.states == ["ready", "ready"]
    fleet.busy = {fleet.rows[0].id: 1}
    fleet.run(30)
    assert fleet.running == 3


def test_an_unneeded_boot_is_ended_after_a_while_and_not_at_once() -> None:
    fleet = Fleet(pending=[gpu_work()])
    fleet.cycle()
    fleet.pending = []
    fleet.run(45)
    assert fleet.states == ["booting"]
    fleet.run(60)
    assert fleet.running == 0
