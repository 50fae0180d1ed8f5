"""The need of work that waits for machines which boot counts once, wherever its other workers have their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from autoscale.fleet import CLOUD, GPU_TYPE, START, Fleet, gpu_work, machine
from makeway_quota.autoscale.demand import MachineDemand
from makeway_quota.autoscale.machine import Machine
from makeway_quota.autoscale.retirement import StepTime, retire
from makeway_quota.autoscale.sizing import Sizing, size
from makeway_quota.backends.base import NodeStatus
from makeway_quota.control.machines.booting_nodes import booting_node
from makeway_quota.control.machines.cycle_demand import cycle_demand
from makeway_quota.engine import Plan, schedule
from makeway_quota.store.records import NewWorkload
from makeway_quota.store.rows import initial_record
from makeway_quota.values import Place
from worlds import World

ROWS = [machine(id="m-boots", state="booting"), machine(id="m-ready", state="ready", ready_at=START)]


def planned(*, busy: bool, workers: int = 3) -> tuple[Plan, MachineDemand]:
    """Return the plan for a gang of one GPU each beside a machine that is ready and one that boots, and its demand.

    `busy`: a job runs on one of the two GPUs of the machine that is ready.
    """
    world = World().pool("gpu", 0, 2, kind="autoscaled").team("rnd", reserved=9)
    world.profile("one", 1).profile("gang", 1, workers=workers)
    boots, ready = (booting_node(row, GPU_TYPE, world.now + 60) for row in ROWS)
    world.nodes = {"m-boots": boots, "m-ready": replace(ready, ready=True, ready_at=None)}
    running = []
    if busy:
        world.run("runs", "rnd", "one", "m-ready")
        made = initial_record(NewWorkload("runs", "job", "rnd", "one", "ana", gpus=1000), 0.0)
        running.append(made._replace(state="running", placement=(Place("m-ready", (0,), (1000,)),)))
    plan = schedule(world.submit("g", "rnd", "gang").snapshot())
    nodes = {"m-ready": NodeStatus("m-ready", "gpu", (0, 1))}
    known = cycle_demand(0.0, plan.demand, nodes, running, {"m-ready": "m-ready"}).of(ROWS)
    assert known is not None
    return plan, known


def sized(known: MachineDemand, limit: int, rows: Sequence[Machine] = ROWS) -> Sizing:
    fleet = Fleet(replace(CLOUD, types=(replace(GPU_TYPE, max_machines=limit),), hourly_budget=None))
    fleet.store.rows = {row.id: row for row in rows}
    money = fleet.step(demand=False).money
    assert money is not None
    return size(fleet.deployment, rows, known, (), money, START + 10)


@pytest.mark.covers("N23")
@pytest.mark.parametrize("limit", [2, 5])
def test_a_gang_with_a_place_on_a_used_machine_needs_only_the_one_that_boots(limit: int) -> None:
    plan, known = planned(busy=True)
    assert [sorted(place.node for place in one.awaits) for one in plan.pending] == [["m-boots", "m-boots", "m-ready"]]
    result = sized(known, limit)
    assert (result.launches, result.unserved, result.needed) == ((), (), {"m-boots"})


@pytest.mark.covers("N23")
def test_an_idle_machine_that_a_gang_waits_on_is_kept_and_no_room_for_others() -> None:
    plan, known = planned(busy=False)
    assert [sorted(place.node for place in one.awaits) for one in plan.pending] == [["m-boots", "m-boots", "m-ready"]]
    assert not sized(known, 5).launches
    late = StepTime(START + 86_400, START)
    events = {row.id: event.kind for row, event in retire(CLOUD, ROWS, known, sized(known, 5).needed, late)}
    assert events == {"m-boots": "needed", "m-ready": "needed"}


def test_other_work_takes_no_room_that_the_engine_keeps_on_a_machine_that_boots() -> None:
    waits = gpu_work("waits", awaits=("m-boots",))
    result = sized(MachineDemand((gpu_work("earlier"), waits)), 5, ROWS[:1])
    assert result.served == {"waits": ("m-boots",), "earlier": (0,)}
    assert len(result.launches) == 1


def test_work_whose_machine_is_gone_meanwhile_takes_room_like_all_others() -> None:
    waits = gpu_work("waits", workers=2, awaits=("m-gone", "m-boots"))
    result = sized(MachineDemand((waits, gpu_work("later"))), 5, ROWS[:1])
    assert result.served == {"waits": ("m-boots", 0), "later": (1,)}
