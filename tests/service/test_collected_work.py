"""What runs on machines is collected once in a cycle and looked up by machine, however many steps and questions ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from makeway_quota.autoscale.demand import MachineDemand, PlacedWork
from makeway_quota.backends.base import NodeStatus
from makeway_quota.control.machines import cycle_demand
from makeway_quota.control.machines.cycle_demand import JobFacts
from makeway_quota.store.records import NewWorkload, Workload
from makeway_quota.store.rows import changed, initial_record
from makeway_quota.values import Place

MACHINES = 50


class Passes(tuple[PlacedWork, ...]):
    """Placed work that counts how often it is gone through."""

    number = 0

    def __iter__(self) -> Iterator[PlacedWork]:
        Passes.number += 1
        return super().__iter__()


def running(at: int) -> Workload:
    new = NewWorkload(f"job-{at}", "job", "rnd", "gpu1", "ana", gpus=1000)
    place = Place(f"m-{at}", (0,), (1000,))
    return changed(initial_record(new, 0.0), {"state": "running", "started_at": 1.0, "placement": (place,)})


def test_what_holds_room_of_each_machine_is_found_in_one_pass() -> None:
    placed = Passes(PlacedWork(f"job-{at}-{one}", f"m-{at}") for at in range(MACHINES) for one in range(2))
    demand = MachineDemand(placed=placed)
    Passes.number = 0
    found = [[one.workload for one in demand.placed_on(f"m-{at}")] for at in range(MACHINES + 1)]
    assert found == [[f"job-{at}-0", f"job-{at}-1"] for at in range(MACHINES)] + [[]]
    assert Passes.number == 1


@pytest.mark.covers("F49")
def test_all_steps_and_questions_of_a_cycle_collect_its_work_once(monkeypatch: pytest.MonkeyPatch) -> None:
    collected, make = list[str](), cycle_demand._placed_work

    def count(row: Workload, place: Place, machine: str, jobs: JobFacts | None) -> PlacedWork:
        collected.append(row.id)
        return make(row, place, machine, jobs)

    monkeypatch.setattr(cycle_demand, "_placed_work", count)
    names = {f"m-{at}": f"m-{at}" for at in range(MACHINES)}
    nodes = {name: NodeStatus(name, "gpu", (0, 1)) for name in names}
    jobs = JobFacts(10.0, lambda row, now: None)
    known = cycle_demand.cycle_demand(0.0, (), nodes, map(running, range(MACHINES)), names, jobs=jobs)
    assert collected == []
    for moved in (frozenset[str](), frozenset({"m-1"}), frozenset({"m-2"})):
        known = known.with_answers(restartable=moved | known.restartable).with_answers(moved=moved)
        asked = known.of((), moves=True)
        assert asked is not None
        assert [work.workload for work in asked.placed_on("m-3")] == ["job-3"]
    assert sorted(collected) == sorted(f"job-{at}" for at in range(MACHINES))
    assert (known.restartable, known.moved) == ({"m-1", "m-2"}, {"m-2"})
