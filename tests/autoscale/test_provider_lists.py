"""Lost answers, and lists that are empty, partial, late or old: no second machine, and none forgotten.

Where a docstring names a report, users of another autoscaler made it.
"""

from __future__ import annotations

from dataclasses import replace

from autoscale.fleet import CLOUD, CPU_TYPE, GPU_TYPE, START, Fleet, gpu_work, one_ready
from makeway_quota.autoscale.instances import Instance, InstanceList
from makeway_quota.autoscale.step import StepInput, step

ORPHAN = '{"deployment":"cloud","instance":"big-2","machine":"m-none","market":"on_demand","zone":"a"}'
"""The request of an instance that has no row"""


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
    assert fleet.store.finished[lost.id].state == "gone"
    assert fleet.running == 2


def test_a_lost_answer_is_one_machine_also_if_the_type_changes() -> None:
    """The third trap: the document changes between the call without an answer and the repeated one."""
    fleet = Fleet(pending=[gpu_work()])
    fleet.provider.lost_after = 1
    fleet.provider.delay = 200  # not on a list meanwhile
    fleet.cycle()
    assert fleet.states == ["requested"]
    fleet.deployment = replace(CLOUD, types=(replace(GPU_TYPE, instance_type="bigger"), CPU_TYPE))
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
    fleet.provider.launch(ORPHAN, "m-none")
    fleet.run(400)
    assert fleet.running == 1
    fleet.run(60)
    assert fleet.running == 0


def test_an_instance_without_a_row_does_not_get_its_window_anew_with_each_leader() -> None:
    fleet = Fleet()
    fleet.provider.launch(ORPHAN, "m-none")
    for _ in range(4):
        fleet.run(120)
        fleet.change_leader()
    assert fleet.running == 0


def test_an_instance_without_a_row_that_has_ended_is_forgotten() -> None:
    fleet = Fleet()
    fleet.provider.forgets = 30
    fleet.provider.launch(ORPHAN, "m-none")
    fleet.provider.launch(ORPHAN.replace("m-none", "m-other"), "m-other")
    fleet.run(400)
    assert len(fleet.store.first_seen) == 2
    fleet.pending = [gpu_work()]
    fleet.run(120)
    assert (fleet.running, fleet.store.first_seen) == (1, {})


def test_the_time_when_an_instance_was_seen_moves_with_the_clock() -> None:
    listed = InstanceList(START, (Instance("i-1", "m-none", "cloud"),))
    fleet = Fleet()
    step(fleet.store, CLOUD, StepInput(START, START, lists=(listed,)), fleet.leader())
    assert fleet.store.first_seen == {"i-1": START}
    step(fleet.store, CLOUD, StepInput(START + 3600, START + 3600, clock_step=3600.0), fleet.leader())
    assert fleet.store.first_seen == {"i-1": START + 3600}
    step(fleet.store, CLOUD, StepInput(START, START, lists=(listed,)), fleet.leader())
    assert fleet.store.first_seen == {"i-1": START}, "the clock was set back while no leader watched"


def test_instances_of_others_are_left_alone() -> None:
    fleet = Fleet()
    fleet.provider.launch(ORPHAN.replace("cloud", "other"), "m-none")
    fleet.run(2000)
    assert fleet.running == 1
