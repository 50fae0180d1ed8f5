"""Silent machines and clocks that are set end no work.

Where a docstring names a report, users of another autoscaler made it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from autoscale.fleet import START, Fleet, draining, gpu_work, one_ready
from makeway_quota.autoscale.machine import Machine, MachineEvent
from makeway_quota.autoscale.provider import CallOutcomeUnknown, StockOut
from makeway_quota.autoscale.step import step


def test_a_silent_machine_is_lost_and_ended_only_when_its_attempts_are_fenced() -> None:
    fleet = one_ready()
    machine = fleet.rows[0]
    fleet.busy = {machine.id: 1}
    fleet.run(150, heartbeats=False)
    assert fleet.states == ["lost"]
    fleet.hear()
    fleet.cycle()
    assert fleet.states == ["ready"]
    fleet.run(150, heartbeats=False)
    fleet.busy = {}
    fleet.report(machine.id, "fenced")
    fleet.run(60, heartbeats=False)
    assert (fleet.states, fleet.running) == ([], 0)


def test_a_service_that_was_down_does_not_count_its_own_silence() -> None:
    fleet = one_ready()
    fleet.busy = {fleet.rows[0].id: 1}
    fleet.now += 7200
    fleet.listening = fleet.now
    fleet.cycle()
    fleet.run(60)
    assert fleet.states == ["ready"]


@pytest.mark.parametrize("seconds", [-7200.0, 7200.0])
def test_a_clock_that_is_set_ends_no_machine(seconds: float) -> None:
    fleet = Fleet(pending=[gpu_work("a"), gpu_work("b")])
    fleet.cycle()
    fleet.boot(fleet.rows[0].id)
    fleet.pending, fleet.busy = [gpu_work("b")], {fleet.rows[0].id: 1}
    fleet.run(60)
    fleet.now += seconds
    seen = replace(fleet.seen(listed=False), clock_step=seconds)
    assert step(fleet.store, fleet.deployment, seen, fleet.leader()).committed
    assert sorted(fleet.states) == ["booting", "ready"]
    fleet.run(60)
    assert sorted(fleet.states) == ["booting", "ready"]
    assert fleet.running == 2


def test_an_administrator_hears_of_a_machine_that_does_not_end() -> None:
    fleet = one_ready()
    fleet.provider.end_delay = 10_000
    fleet.run(1300)
    assert fleet.cycle().overdue == (fleet.rows[0].id,)


def test_errors_say_whether_something_may_have_been_done() -> None:
    assert StockOut.certain
    assert not CallOutcomeUnknown.certain


def test_a_machine_is_tagged_in_the_call_that_launches_it() -> None:
    """terraform-aws-gitlab-runner#450: untagged spot machines for ever."""
    fleet = Fleet(pending=[gpu_work()])
    fleet.step()
    row: Machine = fleet.rows[0]
    assert f'"machine":"{row.id}"' in row.request
    assert '"deployment":"cloud"' in row.request


def test_an_event_of_no_machine_changes_nothing() -> None:
    fleet = Fleet()
    fleet.reports = [("m-none", MachineEvent("joined", boot="x", at=START))]
    assert fleet.step().committed
    assert fleet.rows == []


def test_a_report_from_before_the_drain_does_not_make_a_machine_vacant_however_late_it_comes() -> None:
    fleet = draining()
    machine = fleet.rows[0]
    fleet.now += 15
    for early in (machine.state_since - 5, machine.state_since):
        fleet.report(machine.id, "heard", at=early, boot=machine.boot or "", attempts=0)
        fleet.cycle()
        assert fleet.states == ["draining"]
    fleet.hear()
    fleet.cycle()
    assert fleet.states == ["terminating"]


def test_of_two_reports_the_one_that_was_sent_last_counts_in_whatever_order_they_come() -> None:
    fleet = draining()
    machine = fleet.rows[0]
    fleet.now += 15
    fleet.report(machine.id, "heard", at=fleet.now - 1, boot=machine.boot or "", attempts=1)
    fleet.report(machine.id, "heard", at=fleet.now - 3, boot=machine.boot or "", attempts=0)
    fleet.cycle()
    assert fleet.states == ["draining"]
    assert (fleet.rows[0].attempts, fleet.rows[0].heard_at) == (1, fleet.now - 1)


def test_a_report_from_before_the_last_use_does_not_make_a_machine_vacant() -> None:
    fleet = one_ready()
    machine = fleet.rows[0]
    fleet.busy = {machine.id: 1}
    fleet.report(machine.id, "drain", drain="age")
    fleet.cycle()
    fleet.now += 15
    fleet.report(machine.id, "heard", at=fleet.now - 1, boot=machine.boot or "", attempts=0)  # the order comes after it
    fleet.cycle()
    fleet.busy = {}  # cancelled, while its process may still save
    fleet.now += 1
    fleet.cycle()
    assert fleet.states == ["draining"]
    fleet.hear()
    fleet.cycle()
    assert fleet.states == ["terminating"]


def test_a_report_that_is_older_than_the_silence_may_be_finds_no_machine_again() -> None:
    fleet = one_ready()
    machine = fleet.rows[0]
    fleet.busy = {machine.id: 1}
    fleet.run(150, heartbeats=False)
    assert fleet.states == ["lost"]
    (lost,) = fleet.rows
    fleet.now += 1
    fleet.report(machine.id, "heard", at=fleet.now - 130, boot=machine.boot or "", attempts=1)
    fleet.cycle()
    assert fleet.rows == [lost]


def test_a_machine_that_is_heard_again_in_its_drain_is_vacant_by_a_new_report_only() -> None:
    fleet = draining()
    machine = fleet.rows[0]
    fleet.busy = {machine.id: 1}
    fleet.store.rows[machine.id] = replace(machine, drain="age")
    fleet.run(150, heartbeats=False)
    assert fleet.states == ["lost"]
    fleet.report(machine.id, "heard", at=fleet.now - 100, boot=machine.boot or "", attempts=0)
    fleet.cycle()
    fleet.busy = {}
    fleet.cycle()
    assert fleet.states == ["draining"]
