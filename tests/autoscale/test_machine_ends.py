"""Machines end once, never under work, and none is left behind.

Where a docstring names a report, users of another autoscaler made it.
"""

from __future__ import annotations

from autoscale.fleet import Fleet, draining, gpu_work, one_ready
from makeway_quota.autoscale.step import answer, step


def test_terminated_means_terminated() -> None:
    """dstack#1551: a row that says terminated while the instance runs."""
    fleet = one_ready()
    fleet.provider.end_delay = 500
    fleet.run(700)
    assert fleet.states == ["terminating"]
    while fleet.rows:
        fleet.run(15)
    assert fleet.running == 0


def test_a_machine_is_not_added_to_a_deployment_that_is_being_deleted() -> None:
    """dstack#3449."""
    fleet = Fleet(pending=[gpu_work()])
    result = fleet.step(deleting=True)
    assert not result.calls
    assert not fleet.rows
    assert {one.code for one in result.refusals} == {"paused"}


def test_a_cancelled_job_leaves_no_machine_whatever_its_machine_was_doing() -> None:
    """skypilot#4410: a cancel in the middle of a recovery."""
    for state in ("requested", "booting", "joining", "ready"):
        fleet = Fleet(pending=[gpu_work()])
        if state == "requested":
            fleet.step()  # killed before the call
        else:
            fleet.cycle()
        if state in ("joining", "ready"):
            fleet.report(fleet.rows[0].id, "joined", boot=f"boot-{fleet.rows[0].id}", at=fleet.now)
            fleet.cycle()
        if state == "ready":
            fleet.report(fleet.rows[0].id, "initialised", boot=f"boot-{fleet.rows[0].id}", gpus=2)
            fleet.cycle()
        assert fleet.states == [state]
        fleet.pending = []
        fleet.run(2500)
        assert (fleet.states, fleet.running) == ([], 0), state


def test_no_job_is_ended_between_check_and_kill() -> None:
    """terraform-aws-github-runner#5085: 22 jobs."""
    fleet = one_ready()
    fleet.run(615)
    assert fleet.states == ["draining"] or fleet.states == ["terminating"]
    fleet = one_ready()
    machine = fleet.rows[0]
    fleet.busy = {machine.id: 1}  # placed in the cycle in which it would have drained
    fleet.now += 5000
    fleet.hear()
    fleet.cycle()
    assert fleet.states == ["ready"]


def test_a_draining_machine_waits_for_the_report_of_its_agent() -> None:
    fleet = draining()  # no report since
    fleet.now += 15
    machine = fleet.rows[0]
    fleet.report(machine.id, "heard", at=fleet.now, boot=machine.boot or "", attempts=1)
    fleet.cycle()
    assert fleet.states == ["draining"]
    fleet.hear()
    fleet.cycle()
    assert fleet.states == ["terminating"]


def test_a_late_call_of_a_deposed_leader_harms_nothing() -> None:
    """The fifth trap: one leader ends a machine while another one would assign work to it."""
    fleet = one_ready()
    fleet.run(600)
    fleet.now += 15
    fleet.hear()
    stale = fleet.seen()
    fleet.store.term += 1
    before = dict(fleet.store.rows)
    fleet.reports = []
    assert not step(fleet.store, fleet.deployment, stale, fleet.leader(fleet.store.term - 1)).committed
    assert fleet.store.rows == before


def test_a_leader_killed_between_commit_and_call_leaves_the_call_to_the_next() -> None:
    fleet = Fleet(pending=[gpu_work()])
    assert len(fleet.step().calls) == 1
    assert fleet.running == 0
    fleet.store.term += 1
    fleet.run(30)
    assert fleet.running == 1
    assert len(fleet.rows) == 1


def test_the_answer_of_a_call_is_not_lost_by_a_report_in_between() -> None:
    fleet = Fleet(pending=[gpu_work()])
    result = fleet.step()
    answers = [(call, fleet.now, call.make(fleet.provider)) for call in result.calls]
    fleet.report(fleet.rows[0].id, "joined", boot="boot-1", at=fleet.now)
    fleet.step()
    assert answer(fleet.store, fleet.deployment, answers, fleet.store.term, fleet.now)
    assert fleet.rows[0].state == "joining"
    assert fleet.rows[0].instance == next(iter(fleet.provider.running()))


def test_a_late_report_of_a_first_life_does_not_end_the_job_of_a_second_boot() -> None:
    fleet = one_ready()
    machine = fleet.rows[0]
    fleet.report(machine.id, "heard", at=fleet.now + 1, boot="another", attempts=7)
    fleet.now += 2
    fleet.cycle()
    assert fleet.rows[0].attempts != 7


def test_five_minutes_are_not_too_short_for_a_gpu_machine() -> None:
    """ray#60392."""
    fleet = Fleet(pending=[gpu_work()])
    fleet.cycle()
    fleet.run(1100)
    assert fleet.states == ["booting"]
    fleet.boot()
    assert fleet.states == ["ready"]


def test_a_machine_that_never_joins_does_not_run_for_ever() -> None:
    """The ClearML autoscaler: machines that never register."""
    fleet = Fleet(pending=[gpu_work()])
    fleet.cycle()
    first = fleet.rows[0]
    fleet.pending = []
    fleet.pending = [gpu_work()]
    fleet.run(1260)
    assert fleet.store.all_machines()[first.id].reason == "spin_up_timeout"
    assert first.instance not in fleet.provider.running()


def test_a_dead_idle_machine_does_not_count_as_free() -> None:
    """The ClearML autoscaler: nothing starts, as a machine that is gone counts as idle."""
    fleet = one_ready()
    dead = fleet.rows[0].id
    fleet.provider.interrupt(fleet.rows[0].instance or "")
    fleet.pending = [gpu_work()]
    fleet.cycle()
    assert fleet.store.finished[dead].state == "gone"
    fleet.run(15)
    assert fleet.running == 1
