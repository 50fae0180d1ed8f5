"""Faults of other autoscalers, as their users reported them, and the traps of the design: none of them here."""

from __future__ import annotations

from dataclasses import replace

import pytest
from autoscale.fleet import CLOUD, CPU_TYPE, EURO, GPU_TYPE, START, Fleet, cpu_work, gpu_work
from makeway_quota.autoscale.deployment import Deployment
from makeway_quota.autoscale.machine import Machine, MachineObservation
from makeway_quota.autoscale.provider import AnswerLost, StockOut
from makeway_quota.autoscale.step import answer, step


def one_ready(deployment: Deployment = CLOUD) -> Fleet:
    """Return a fleet with one idle machine that is ready, and nothing that waits."""
    fleet = Fleet(deployment, pending=[gpu_work()])
    fleet.cycle()
    fleet.boot()
    fleet.pending = []
    assert fleet.states == ["ready"]
    return fleet


# ── Need ────────────────────────────────────────────────────────────────────


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
    fleet.pending = [replace(gpu_work(), pools=("gpu", "gpu-other"))]
    fleet.cycle()
    fleet.pending = [replace(gpu_work(), pools=("gpu-other", "gpu"))]
    fleet.cycle()
    assert fleet.running == 1


def test_two_deployments_do_not_serve_the_same_work() -> None:
    first = Fleet(replace(CLOUD, max_machines=1), pending=[gpu_work("job-1"), gpu_work("job-2")])
    left = first.cycle().unserved
    second = Fleet(replace(CLOUD, name="second"), pending=left)
    second.cycle()
    assert [work.workload for work in left] == ["job-2"]
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


# ── Answers and lists ───────────────────────────────────────────────────────


def test_an_empty_list_starts_no_second_machine() -> None:
    """cluster-api-provider-aws#2915."""
    fleet = one_ready()
    fleet.busy = {fleet.rows[0].id: 1}
    fleet.provider.empty = True
    fleet.run(1800)
    assert fleet.states == ["ready"]
    assert fleet.provider.launches == 1


def test_an_empty_list_ends_no_machine_that_boots() -> None:
    fleet = Fleet(pending=[gpu_work()])
    fleet.cycle()
    fleet.provider.empty = True
    fleet.run(1100)  # beyond the window, within the time that a boot may take
    assert fleet.states == ["booting"]
    assert fleet.running == 1


def test_an_empty_list_does_not_say_that_a_machine_has_ended() -> None:
    """Found by the histories: it counted no more, while its end still took time."""
    fleet = one_ready()
    fleet.provider.empty, fleet.provider.end_delay = True, 10_000
    fleet.run(1800)
    assert fleet.states == ["terminating"]
    fleet.now += 20_000
    fleet.run(30)
    assert fleet.states == []


def test_a_partial_page_is_not_all() -> None:
    """aec#405."""
    fleet = Fleet(pending=[gpu_work("a"), gpu_work("b")])
    fleet.cycle()
    fleet.provider.partial = True
    fleet.run(1100)
    assert fleet.states == ["booting", "booting"]
    assert fleet.provider.launches == 2


def test_a_list_of_an_earlier_time_proves_nothing() -> None:
    fleet = Fleet(pending=[gpu_work("a")])
    fleet.cycle()
    fleet.now += 30
    fleet.pending = [gpu_work("a"), gpu_work("b")]
    fleet.cycle()
    fleet.provider.stale = 250
    fleet.run(600)
    assert fleet.states == ["booting", "booting"]
    assert fleet.provider.launches == 2


def test_a_machine_that_complete_lists_miss_is_gone_and_launched_anew() -> None:
    fleet = Fleet(pending=[gpu_work("a"), gpu_work("b")])
    fleet.cycle()
    lost = fleet.rows[0]
    del fleet.provider.instances[lost.instance or ""]
    fleet.run(600)
    assert fleet.store.over[lost.id].state == "gone"
    assert fleet.running == 2


def test_a_lost_answer_is_one_machine_also_if_the_type_changes() -> None:
    """The third trap: the document changes between the call without an answer and the repeated one."""
    fleet = Fleet(pending=[gpu_work()])
    fleet.provider.lost_after = 1
    fleet.provider.delay = 200  # not on a list meanwhile
    fleet.cycle()
    assert fleet.states == ["requested"]
    fleet.deployment = replace(CLOUD, types=(replace(GPU_TYPE, instance="bigger"), CPU_TYPE))
    fleet.run(30)
    assert fleet.states == ["booting"]
    assert fleet.running == 1


def test_a_lost_answer_and_a_provider_without_tokens_leave_one_machine_in_the_end() -> None:
    fleet = Fleet(pending=[gpu_work()])
    fleet.provider.lost_after, fleet.provider.ignores_tokens, fleet.provider.delay = 1, True, 60
    fleet.run(60)
    assert fleet.running == 2
    fleet.run(600)
    assert fleet.running == 1
    assert fleet.states == ["booting"]


def test_a_refusal_after_a_lost_answer_does_not_forget_the_machine() -> None:
    fleet = Fleet(pending=[gpu_work()])
    fleet.provider.lost_after, fleet.provider.ignores_tokens, fleet.provider.delay = 1, True, 60
    fleet.cycle()
    fleet.provider.stock_out = {("big-2", zone, "on_demand") for zone in "ab"}
    fleet.run(20)
    assert fleet.states == ["terminating"], "it counts until it is known what became of the first call"
    fleet.pending = []
    fleet.run(900)
    assert (fleet.states, fleet.running) == ([], 0)


def test_the_token_of_a_terminated_instance_is_used_for_no_other() -> None:
    """boto3#4406: a repeated token returns the instance that has ended."""
    fleet = Fleet(pending=[gpu_work()])
    fleet.provider.lost_after = 1
    fleet.cycle()
    (instance,) = fleet.provider.running()
    fleet.provider.interrupt(instance)
    fleet.run(60)
    assert fleet.states == ["booting"]
    assert fleet.running == 1
    assert len({one.token for one in fleet.provider.instances.values()}) == 2


def test_an_answer_that_never_comes_ends_in_nothing() -> None:
    fleet = Fleet(pending=[gpu_work()])
    fleet.provider.lost_before = 1000
    fleet.cycle()
    first = fleet.rows[0].id
    fleet.run(200)
    assert fleet.store.rows[first].state == "terminating"
    fleet.pending = []
    fleet.run(1200)
    assert fleet.states == []


def test_an_instance_that_shows_up_after_its_time_out_is_ended() -> None:
    fleet = Fleet(pending=[gpu_work()])
    fleet.provider.lost_after, fleet.provider.delay, fleet.provider.lost_before = 1, 280, 0
    fleet.cycle()
    fleet.provider.lost_before = 1000
    fleet.pending = []
    fleet.run(900)
    assert (fleet.states, fleet.running) == ([], 0)


def test_an_instance_without_a_row_is_ended_after_the_window_and_not_before() -> None:
    fleet = Fleet()
    request = '{"deployment":"cloud","instance":"big-2","machine":"m-none","market":"on_demand","zone":"a"}'
    fleet.provider.launch(request, "m-none")
    fleet.run(400)
    assert fleet.running == 1
    fleet.run(60)
    assert fleet.running == 0


def test_instances_of_others_are_left_alone() -> None:
    fleet = Fleet()
    request = '{"deployment":"other","instance":"big-2","machine":"m-none","market":"on_demand","zone":"a"}'
    fleet.provider.launch(request, "m-none")
    fleet.run(2000)
    assert fleet.running == 1


# ── Ends ────────────────────────────────────────────────────────────────────


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
            fleet.report(fleet.rows[0].id, "initialised", gpus=2)
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
    fleet = one_ready()
    fleet.run(600)
    fleet.now += 15
    fleet.cycle()  # no report since
    assert fleet.states == ["draining"]
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
    assert not step(fleet.store, fleet.deployment, stale, fleet.store.term - 1, fleet.new_id).committed
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
    assert fleet.store.every()[first.id].reason == "spin_up_timeout"
    assert first.instance not in fleet.provider.running()


def test_a_dead_idle_machine_does_not_count_as_free() -> None:
    """The ClearML autoscaler: nothing starts, as a machine that is gone counts as idle."""
    fleet = one_ready()
    dead = fleet.rows[0].id
    fleet.provider.interrupt(fleet.rows[0].instance or "")
    fleet.pending = [gpu_work()]
    fleet.cycle()
    assert fleet.store.over[dead].state == "gone"
    fleet.run(15)
    assert fleet.running == 1


# ── Stock, spot, throttling ─────────────────────────────────────────────────


def test_a_stock_out_goes_on_to_the_next_zone_and_type_in_the_same_cycle_and_comes_back() -> None:
    """gardener/autoscaler#340, cluster-toolkit#4940; the seventh trap."""
    other = replace(GPU_TYPE, name="g2-dear", instance="dear-2", price=4 * EURO)
    fleet = Fleet(replace(CLOUD, types=(GPU_TYPE, other)), pending=[gpu_work()])
    fleet.provider.stock_out = {("big-2", zone, "on_demand") for zone in "ab"}
    fleet.cycle()
    assert [row.type for row in fleet.rows] == ["g2-dear"]
    assert fleet.running == 1
    fleet.provider.stock_out = set()
    fleet.now += 301
    fleet.pending = [gpu_work(), gpu_work("job-2")]
    fleet.cycle()
    assert [row.type for row in fleet.rows] == ["g2-dear", "g2"]


def test_a_stock_out_without_an_end_is_tried_with_pauses_and_for_ever() -> None:
    fleet = Fleet(pending=[gpu_work()])
    fleet.provider.stock_out = {("big-2", zone, "on_demand") for zone in "ab"}
    fleet.run(6 * 3600)
    assert 10 <= fleet.provider.launches <= 60
    before = fleet.provider.launches
    fleet.run(2 * 3600)
    assert fleet.provider.launches > before
    fleet.provider.stock_out = set()
    end = fleet.now + 1815
    while not fleet.running:
        assert fleet.now < end
        fleet.run(15)


def test_spot_is_tried_again_after_the_fall_back_to_on_demand() -> None:
    """autoscaler#4438."""
    kind = replace(GPU_TYPE, market="spot_first", spot_price=EURO)
    fleet = Fleet(replace(CLOUD, types=(kind,)), pending=[gpu_work("a")])
    fleet.provider.stock_out = {("big-2", zone, "spot") for zone in "ab"}
    fleet.cycle()
    assert [row.market for row in fleet.rows] == ["on_demand"]
    fleet.provider.stock_out = set()
    fleet.now += 301
    fleet.pending = [gpu_work("a"), gpu_work("b")]
    fleet.cycle()
    assert [row.market for row in fleet.rows] == ["on_demand", "spot"]


def test_after_a_spot_loss_another_zone_comes_first() -> None:
    kind = replace(GPU_TYPE, market="spot_first", spot_price=EURO)
    fleet = Fleet(replace(CLOUD, types=(kind,)), pending=[gpu_work()])
    fleet.cycle()
    fleet.boot()
    fleet.provider.interrupt(fleet.rows[0].instance or "")
    fleet.run(30)
    assert [(row.zone, row.market) for row in fleet.rows] == [("b", "spot")]


def test_a_spot_machine_drains_until_the_real_deadline() -> None:
    """runs-on#277: ended 95 s before the deadline."""
    fleet = one_ready()
    machine = fleet.rows[0]
    fleet.busy = {machine.id: 1}
    fleet.report(machine.id, "spot_notice", deadline=fleet.now + 120)
    fleet.run(105)
    assert fleet.states == ["draining"]
    assert fleet.running == 1
    fleet.run(30)
    assert "draining" not in fleet.states


def test_spot_notices_do_not_queue_behind_others() -> None:
    """karpenter-provider-aws#5400: all in one step, and the replacements in the same cycle."""
    fleet = Fleet(pending=[gpu_work(f"job-{n}") for n in range(3)])
    fleet.cycle()
    fleet.boot()
    fleet.nodes = frozenset()
    fleet.pending = [gpu_work(f"job-{n}") for n in range(3)]
    fleet.nodes = None
    for row in fleet.rows:
        fleet.report(row.id, "spot_notice", deadline=fleet.now + 120)
    fleet.deployment = replace(CLOUD, types=(replace(GPU_TYPE, max_machines=10), CPU_TYPE))
    fleet.cycle()
    assert sorted(fleet.states) == ["booting"] * 3 + ["draining"] * 3


def test_a_stopped_spot_machine_is_not_a_deleted_one() -> None:
    """karpenter-provider-gcp#143."""
    fleet = one_ready()
    fleet.provider.interrupt(fleet.rows[0].instance or "", stop=True)
    fleet.run(60)
    assert (fleet.states, fleet.running) == ([], 0)


def test_a_throttled_call_is_repeated_and_its_machine_not_given_up() -> None:
    """ray#1346."""
    fleet = Fleet(pending=[gpu_work()])
    fleet.provider.busy = 5
    fleet.run(300)
    assert fleet.running == 1
    assert len(fleet.store.every()) == 1


def test_wrong_credentials_stop_launches_and_forget_no_machine() -> None:
    """nomad-autoscaler#375: credentials that change in the middle of a drain."""
    fleet = one_ready()
    fleet.run(600)
    fleet.provider.denied = True
    fleet.run(600)
    assert fleet.states == ["terminating"]
    fleet.provider.denied = False
    fleet.run(60)
    assert (fleet.states, fleet.running) == ([], 0)


# ── Limits and money ────────────────────────────────────────────────────────


def test_the_maximum_is_not_exceeded_within_one_pass() -> None:
    """karpenter#2915: a limit of 608, 627 machines."""
    fleet = Fleet(replace(CLOUD, max_machines=4, hour=None), pending=[gpu_work(f"job-{n}") for n in range(9)])
    fleet.run(60)
    assert fleet.running == 4
    fleet = Fleet(replace(CLOUD, types=(replace(GPU_TYPE, max_machines=3), CPU_TYPE)), pending=fleet.pending)
    fleet.run(60)
    assert fleet.running == 3


@pytest.mark.covers("F72")
def test_the_budget_counts_machines_from_their_request() -> None:
    fleet = Fleet(replace(CLOUD, hour=7 * EURO), pending=[gpu_work(f"job-{n}") for n in range(9)])
    fleet.step()  # killed before the calls
    result = fleet.step()
    assert sum(row.price or 0 for row in fleet.rows) == 6 * EURO
    assert {one.code for one in result.refusals} == {"hour_budget"}


def test_an_unknown_price_is_never_zero() -> None:
    kind = replace(GPU_TYPE, price=None)
    fleet = Fleet(replace(CLOUD, types=(kind,)), pending=[gpu_work()])
    assert {one.code for one in fleet.cycle().refusals} == {"price_unknown"}
    assert not fleet.rows
    fleet = Fleet(replace(CLOUD, types=(kind,), hour=None), pending=[gpu_work()])
    result = fleet.cycle()
    assert fleet.running == 1
    assert result.held is not None
    assert fleet.cycle().held.unknown == 1  # type: ignore[union-attr]


def test_a_spot_machine_counts_at_its_maximum_price() -> None:
    kind = replace(GPU_TYPE, market="spot", spot_price=2 * EURO)
    fleet = Fleet(replace(CLOUD, types=(kind,), hour=5 * EURO), pending=[gpu_work(f"job-{n}") for n in range(9)])
    fleet.cycle()
    assert fleet.running == 2


def test_the_price_of_a_machine_is_that_of_its_request() -> None:
    fleet = Fleet(pending=[gpu_work()])
    fleet.cycle()
    fleet.deployment = replace(CLOUD, types=(replace(GPU_TYPE, price=9 * EURO), CPU_TYPE))
    fleet.boot()
    assert fleet.rows[0].price == 3 * EURO


def test_a_month_that_is_used_up_drains_all_machines_and_launches_none() -> None:
    fleet = Fleet(replace(CLOUD, hour=None, month=12 * EURO), pending=[gpu_work()])
    fleet.cycle()
    fleet.boot()
    fleet.pending, fleet.busy = [gpu_work("next")], {fleet.rows[0].id: 1}
    fleet.run(3 * 3600, every=60)
    assert "budget" in {row.drain for row in fleet.store.every().values()}
    fleet.busy = {}
    fleet.run(1200)
    assert (fleet.states, fleet.running) == ([], 0)
    assert sum(fleet.store.closed.values()) <= 12 * EURO


# ── Idle machines ───────────────────────────────────────────────────────────


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
    fleet = one_ready()
    fleet.run(600)
    fleet.now += 15
    fleet.cycle()
    assert fleet.states == ["draining"]
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


# ── Silence and clocks ──────────────────────────────────────────────────────


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
    assert step(fleet.store, fleet.deployment, seen, fleet.store.term, fleet.new_id).committed
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
    assert not AnswerLost.certain


def test_a_machine_is_tagged_in_the_call_that_launches_it() -> None:
    """terraform-aws-gitlab-runner#450: untagged spot machines for ever."""
    fleet = Fleet(pending=[gpu_work()])
    fleet.step()
    row: Machine = fleet.rows[0]
    assert f'"machine":"{row.id}"' in row.request
    assert '"deployment":"cloud"' in row.request


def test_an_observation_of_no_machine_changes_nothing() -> None:
    fleet = Fleet()
    fleet.reports = [("m-none", MachineObservation("joined", boot="x", at=START))]
    assert fleet.step().committed
    assert fleet.rows == []
