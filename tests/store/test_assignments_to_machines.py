"""No attempt is opened on a machine that is not ready any more: its state is read in the commit that would open it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from makeway_quota.autoscale.machine import MachineState
from makeway_quota.autoscale.step import MachineChanges
from makeway_quota.store import Store
from makeway_quota.store.records import Attempt, Change, NewDecision
from makeway_quota.values import Place

from .conftest import NewJob
from .machine_rows import launch, row_of


def ready(store: Store, *ids: str) -> int:
    """Commit machines that are ready in a term of their own, and return the term."""
    return launch(store, *ids, state="ready", instance="i-1", boot="boot-1")


def enter(store: Store, term: int, id: str, state: MachineState) -> None:
    changed = replace(row_of(store, id), state=state, reason="idle")
    assert store.machines.commit("cloud", term, MachineChanges(changed=(changed,)))


def start(job: str, *nodes: str) -> Change:
    """Return the decision to start a job with a worker on each of the nodes."""
    placement = tuple(Place(node, (0,), (1000,), "machines") for node in nodes)
    opened = Attempt(job, 1, 2.0, placement=placement)
    return Change(job, {"state": "starting", "attempt": 1, "placement": placement}, 1, open_attempt=opened)


@pytest.mark.parametrize("state", ["draining", "terminating", "gone", "lost"])
def test_an_attempt_is_not_opened_on_a_machine_that_was_left_meanwhile(
    store: Store, job: NewJob, state: MachineState
) -> None:
    """The job on another machine is started by the same commit; a gang is started as a whole or not."""
    term = ready(store, "m-1", "m-2")
    for id in ("alone", "gang", "other"):
        store.add_workload(job(id), now=0.0)
    decided = [start("alone", "m-1"), start("gang", "m-2", "m-1"), start("other", "m-2")]
    enter(store, term, "m-1", state)
    told = NewDecision("start", "gang", None, None, "", "", {})
    assert store.commit(decided, [told], now=3.0, term=term) == {"other"}
    rows = {row.id: row for row in store.active()}
    assert {id: (row.state, row.attempt, bool(row.placement)) for id, row in rows.items()} == {
        "alone": ("pending", 0, False),
        "gang": ("pending", 0, False),
        "other": ("starting", 1, True),
    }
    assert store.decisions() == []


def test_work_that_runs_on_a_draining_machine_is_still_written(store: Store, job: NewJob) -> None:
    term = ready(store, "m-1")
    store.add_workload(job(), now=0.0)
    assert store.commit([start("j1", "m-1")], now=3.0, term=term)
    enter(store, term, "m-1", "draining")
    assert store.commit([Change("j1", {"state": "running"}, 2)], now=4.0, term=term) == {"j1"}


def test_nodes_that_are_no_machines_of_deployments_take_work(store: Store, job: NewJob) -> None:
    term = ready(store, "m-1")
    store.add_workload(job(), now=0.0)
    assert store.commit([start("j1", "node-7")], now=3.0, term=term) == {"j1"}
