"""No machine is launched for work whose room is certain to be free before the machine would be ready."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from autoscale.fleet import CLOUD, EURO, GPU_TYPE, START, Fleet, gpu_work, machine, one_ready
from makeway_quota.autoscale.demand import MachineDemand, PlacedWork
from makeway_quota.autoscale.machine import Machine
from makeway_quota.autoscale.placement import releases
from makeway_quota.autoscale.placement.releases import room_without
from makeway_quota.autoscale.placement.rooms import MachineRoom
from makeway_quota.autoscale.prospects import NoLaunch, WaitingDecision, launch_what_if, prospects
from makeway_quota.control.machines.cycle_demand import certain_end, cycle_demand
from makeway_quota.control.machines.machine_offers import with_machines
from makeway_quota.engine.plan import Demand, Offer
from makeway_quota.store.records import NewWorkload, Workload
from makeway_quota.store.rows import initial_record
from makeway_quota.values import Place
from makeway_quota.wording.machines import no_launch

BOOT = 180.0


def running_job(**fields: object) -> Workload:
    """Return a job that runs since START, and has to be over after ten minutes."""
    made = initial_record(NewWorkload("job", "job", "rnd", "gpu1", "ana"), 0.0)
    return made._replace(
        **{"state": "running", "started_at": START, "attempt": 1, "time_limit": 600.0, "grace": 30.0, **fields}
    )


def limited(ends_in: float | None, *, workers: int = 1, gpus: int = 1) -> Fleet:
    """Return a fleet whose one machine has running work of known ends, and one job that waits since now."""
    fleet = one_ready()
    machine = fleet.rows[0].id
    ends_at = None if ends_in is None else fleet.now + ends_in
    fleet.placed = [
        PlacedWork("runs-0", machine, (0,), 1000, 1000, 1024, ends_at),
        PlacedWork("runs-1", machine, (1,), 1000, 1000, 1024, ends_at),
    ]
    fleet.busy = {machine: 2}
    fleet.boots = {"g2": BOOT}
    fleet.pending = [gpu_work("next", workers=workers, gpus=gpus * 1000)]
    fleet.submitted = {"next": fleet.now}
    return fleet


def launches(fleet: Fleet) -> int:
    fleet.cycle()
    return fleet.provider.launches - 1


def test_a_launch_is_held_while_a_time_limit_ends_a_job_within_the_boot_time() -> None:
    assert launches(limited(170.0, gpus=2)) == 0


@pytest.mark.parametrize("ends_in", [None, 190.0, -1.0])
def test_a_launch_is_not_held_for_an_end_that_is_later_or_not_known_or_overdue(ends_in: float | None) -> None:
    assert launches(limited(ends_in)) == 1


def test_a_launch_is_not_held_where_the_boot_time_is_not_known() -> None:
    fleet = limited(170.0)
    fleet.boots = {}
    assert launches(fleet) == 1


def test_room_that_is_released_is_promised_once() -> None:
    fleet = limited(170.0)
    fleet.pending = [gpu_work(f"next-{n}", gpus=1000) for n in range(3)]
    fleet.submitted = {work.workload: fleet.now for work in fleet.pending}
    assert launches(fleet) == 1, "two of them get the GPUs of the jobs that end"


def releasing(machines: int, ends_in: float, *, every: float = 0.0) -> tuple[list[Machine], list[PlacedWork]]:
    """Return machines of two GPUs, whose first GPU is free soon: of each some seconds after that of the one before."""
    rows = [machine(id=f"m-{n}", state="ready", instance=f"i-{n}") for n in range(machines)]
    ends = [START + ends_in + n * every for n in range(machines)]
    soon = [PlacedWork(f"soon-{n}", f"m-{n}", (0,), 1000, 1000, 1024, ends[n]) for n in range(machines)]
    return rows, [
        *soon,
        *(one._replace(workload=f"long-{n}", devices=(1,), ends_at=None) for n, one in enumerate(soon)),
    ]


@pytest.mark.parametrize(("gpus", "every", "held"), [(2000, 0.0, 0), (1000, 0.0, 40), (1000, 1.0, 40), (1000, 6.0, 31)])
def test_the_rooms_of_machines_are_reckoned_anew_only_where_some_is_taken(
    monkeypatch: pytest.MonkeyPatch, gpus: int, every: float, held: int
) -> None:
    rows, placed = releasing(40, 5.0, every=every)
    pending = [gpu_work(f"p-{n}", gpus=gpus) for n in range(100)]
    submitted = {work.workload: START - n % 7 for n, work in enumerate(pending)}
    nodes = frozenset(row.id for row in rows)
    demand = MachineDemand(tuple(pending), nodes, placed=tuple(placed), submitted=submitted)
    made: list[object] = []

    def counted(room: MachineRoom, work: Iterable[PlacedWork]) -> MachineRoom:
        made.append(room)
        return room_without(room, work)

    monkeypatch.setattr(releases, "room_without", counted)
    tried = releases.Releases([(row, GPU_TYPE) for row in rows], demand, {GPU_TYPE.name: BOOT + 6.0}, START)
    assert sum(tried.take(work, 1, GPU_TYPE.name) is not None for work in pending) == held
    assert len(made) <= 8 * len(rows), "and not for each machine and workload"


def test_work_that_waits_for_a_limit_has_another_reason_than_the_rest_of_its_shape() -> None:
    fleet = limited(170.0, gpus=2)
    fleet.pending = [gpu_work("first"), gpu_work("second"), gpu_work("third")]
    fleet.submitted = {work.workload: fleet.now for work in fleet.pending}
    fleet.deployment = replace(fleet.deployment, max_machines=1)
    made = fleet.cycle()
    decision = WaitingDecision(made.served or {}, made.unserved, made.refusals)
    told = prospects(fleet.deployment, fleet.rows, decision, made.money, fleet.boots, fleet.now)
    causes = {name: [cause.code for cause in one.causes] for name, one in told.items() if isinstance(one, NoLaunch)}
    assert causes == {"first": ["soon_free"], "second": ["max_machines"], "third": ["max_machines"]}
    assert told["second"] is told["third"]


def test_part_of_the_work_that_ends_makes_no_room_for_all_of_it() -> None:
    fleet = limited(170.0, gpus=2)
    fleet.placed = [fleet.placed[0], fleet.placed[1]._replace(ends_at=None)]
    assert launches(fleet) == 1
    smaller = limited(170.0)
    smaller.placed = [smaller.placed[0], smaller.placed[1]._replace(ends_at=None)]
    assert launches(smaller) == 0


def test_a_gang_is_held_for_room_of_all_its_workers_together() -> None:
    assert launches(limited(170.0, workers=2)) == 0
    assert launches(limited(170.0, workers=3)) == 2, "three GPUs are two machines, as one that ends is too small"


def test_work_that_was_overtaken_waits_no_longer_than_a_boot() -> None:
    """Others took what was released again and again: it gets the machine that it would have had from the beginning."""
    fleet = limited(60.0)
    for _ in range(12):
        fleet.now += 15
        fleet.placed = [one._replace(ends_at=fleet.now + 60) for one in fleet.placed]
        if launches(fleet):
            break
    assert START + BOOT - 75 < fleet.now - (fleet.submitted["next"] - START) <= START + BOOT


def test_a_launch_is_not_held_for_a_machine_that_takes_no_work_any_more_or_keeps_its_room() -> None:
    draining = limited(170.0)
    draining.report(draining.rows[0].id, "drain", drain="age")
    assert launches(draining) == 1
    kept = limited(170.0)
    kept.nominated = frozenset({kept.rows[0].id})
    assert launches(kept) == 1


def test_work_that_does_not_start_where_there_is_room_is_held_for_none() -> None:
    fleet = limited(170.0)
    fleet.placed = fleet.placed[:1]
    assert launches(fleet) == 1


def test_cpu_and_memory_have_to_be_free_too() -> None:
    fleet = limited(170.0)
    fleet.placed = [fleet.placed[0], fleet.placed[1]._replace(ends_at=None, memory=GPU_TYPE.memory - 500)]
    assert launches(fleet) == 1


def test_a_hold_ends_with_the_job_that_it_waits_for() -> None:
    fleet = limited(170.0)
    assert launches(fleet) == 0
    fleet.placed = []
    fleet.busy, fleet.pending = {}, []
    fleet.run(170)
    assert launches(fleet) == 0
    assert fleet.states == ["ready"]


def test_the_owner_reads_why_no_machine_is_launched_and_when_there_is_room() -> None:
    fleet = limited(170.0)
    result = fleet.cycle()
    decision = WaitingDecision(result.served or {}, result.unserved, result.refusals)
    told = prospects(fleet.deployment, fleet.rows, decision, result.money, fleet.boots, fleet.now)["next"]
    assert isinstance(told, NoLaunch)
    assert told.retry_at == fleet.now + 170
    assert no_launch({"cause": told.causes[0].code, **told.causes[0].values}) == (
        "Jobs that reach their time limit make room before one of type g2 would be ready."
    )


def test_an_offer_says_that_room_is_free_before_a_machine_would_be_ready() -> None:
    fleet = limited(170.0)
    seen = fleet.seen().demand
    assert isinstance(seen, MachineDemand)
    told = launch_what_if(fleet.deployment, fleet.store.read("cloud"), seen, fleet.boots, fleet.now)
    assert isinstance(told, NoLaunch)
    offer = Offer("team", "g1", "wait", "no_free_gpus", (), demand=(Demand("next", ("gpu",), 1, 1000, 0, 0),))
    assert with_machines(offer, "gpu", [told], fleet.now).code == "wait"


def test_the_certain_end_is_that_of_a_running_job_with_a_limit_that_makes_no_way() -> None:
    row = running_job()
    assert certain_end(row) == START + 630
    assert certain_end(row._replace(time_limit=None)) is None
    assert certain_end(row._replace(state="starting")) is None
    assert certain_end(row._replace(kind="session")) is None


def test_a_cycle_passes_on_what_holds_room_while_work_waits() -> None:
    places = Place("node-1", (4096,), (1000,)), Place("elsewhere", (0,), (1000,))
    row = running_job(cpu=500, memory=100, placement=places)
    waits = [Demand("next", ("gpu",), 1, 1000, 0, 0)]
    known = cycle_demand(0.0, waits, {}, [row], {"node-1": "m-1"}, {"next": START}).of(())
    assert known is not None
    assert known.placed == (PlacedWork("job", "m-1", (0,), 1000, 500, 100, START + 630, START),)
    assert known.submitted == {"next": START}


def test_a_budget_that_is_used_up_is_not_said_where_no_machine_is_needed() -> None:
    fleet = limited(170.0)
    fleet.deployment = replace(CLOUD, hourly_budget=3 * EURO)
    assert {one.code for one in fleet.cycle().refusals} == {"soon_free"}
