"""Stock-outs, spot losses and throttling hold back what they have to do with, and nothing else.

Where a docstring names a report, users of another autoscaler made it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from autoscale.fleet import CLOUD, CPU_TYPE, EURO, GPU_TYPE, Fleet, gpu_work, one_ready


def test_a_stock_out_goes_on_to_the_next_zone_and_type_in_the_same_cycle_and_comes_back() -> None:
    """gardener/autoscaler#340, cluster-toolkit#4940; the seventh trap."""
    other = replace(GPU_TYPE, name="g2-dear", instance_type="dear-2", price=4 * EURO)
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


def test_machines_that_never_join_are_launched_ever_less_often_until_one_boots() -> None:
    fleet = Fleet(replace(CLOUD, types=(replace(GPU_TYPE, max_machines=1),)), pending=[gpu_work()])
    fleet.run(6 * 3600)
    failed = [row for row in fleet.store.all_machines().values() if row.reason == "spin_up_timeout"]
    assert len(failed) >= 6
    assert _pauses(fleet)[:5] == [300, 600, 1200, 1800, 1800]
    while "booting" not in fleet.states:
        fleet.run(15)
    fleet.boot()
    assert fleet.store.backoffs == ()
    fleet.pending = []
    fleet.run(1800)
    fleet.pending, known = [gpu_work()], len(fleet.store.all_machines())
    fleet.run(4 * 3600)
    assert _pauses(fleet, known)[:3] == [300, 600, 1200]


def _pauses(fleet: Fleet, known: int = 0) -> list[int]:
    """Return for how long no machine was on its way, between those that were launched after so many others."""
    rows = sorted(fleet.store.all_machines().values(), key=lambda row: row.requested_at)[known:]
    return [round((b.requested_at - a.requested_at - GPU_TYPE.spin_up_timeout) / 150) * 150 for a, b in pairwise(rows)]


def test_spot_is_tried_again_after_the_fall_back_to_on_demand() -> None:
    """autoscaler#4438."""
    machine_type = replace(GPU_TYPE, market="spot_first", spot_price=EURO)
    fleet = Fleet(replace(CLOUD, types=(machine_type,)), pending=[gpu_work("a")])
    fleet.provider.stock_out = {("big-2", zone, "spot") for zone in "ab"}
    fleet.cycle()
    assert [row.market for row in fleet.rows] == ["on_demand"]
    fleet.provider.stock_out = set()
    fleet.now += 301
    fleet.pending = [gpu_work("a"), gpu_work("b")]
    fleet.cycle()
    assert [row.market for row in fleet.rows] == ["on_demand", "spot"]


def test_after_a_spot_loss_another_zone_comes_first() -> None:
    machine_type = replace(GPU_TYPE, market="spot_first", spot_price=EURO)
    fleet = Fleet(replace(CLOUD, types=(machine_type,)), pending=[gpu_work()])
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
    assert len(fleet.store.all_machines()) == 1


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
