"""What is kept of machines is bounded by age and number, and removed by the pass of the leader."""

from __future__ import annotations

from typing import Any

import pytest
from autoscale.fleet import START
from makeway_quota.autoscale.step import MachineChanges
from makeway_quota.history.retention import Keep, Retention
from makeway_quota.store import LeadershipLost, Store
from makeway_quota.store.machines import pruning
from makeway_quota.store.tables import (
    deployments,
    machine_events,
    machine_outputs,
    machine_reports,
    machine_requests,
    machines,
    spend_months,
)
from sqlalchemy import func, select

from .machine_rows import end, launch

DAY = 86_400.0
TABLES = (machines, machine_requests, machine_outputs, machine_events, machine_reports, deployments, spend_months)


def counts(store: Store) -> dict[str, int]:
    with store._database.read() as connection:
        return {t.name: connection.execute(select(func.count()).select_from(t)).scalar_one() for t in TABLES}


def retention(store: Store, now: float, keep: Keep) -> Retention:
    async def purge(id: str, team: str) -> bool:
        return True

    return Retention(store, keep, purge, lambda: None, clock=lambda: now, rest=0.0)


def keep(days: float, **fields: Any) -> Keep:
    return Keep(days * DAY, days * DAY, days * DAY, **fields)


@pytest.mark.covers("N25")
async def test_machines_that_are_over_go_with_all_that_is_kept_of_them(store: Store) -> None:
    term = launch(store, "m-old", "m-new", "m-live")
    for id in ("m-old", "m-new", "m-live"):
        store.machine_reports.join(id, "boot", {}, START)
        store.machine_log.write_output(id, "init", "text", 0, START)
    end(store, term, "m-old", at=START + DAY, spent={"2026-09": 1})
    end(store, term, "m-new", at=START + 3 * DAY)
    report = (await retention(store, START + 12 * DAY, keep(10)).sweep()).report["removed"]
    assert report["machines"] == 1
    assert [row.id for row in store.machines.machines("cloud")] == ["m-new", "m-live"]
    result = counts(store)
    assert (result["machines"], result["machine_requests"], result["machine_outputs"]) == (2, 2, 2)
    assert (result["machine_reports"], result["spend_months"]) == (1, 1)
    assert [(event.machine, event.state) for event in store.machine_log.events()] == [("m-new", "gone")]
    assert store.machine_reports.join("m-old", "boot", {}, 1.0).outcome == "over"
    again = await retention(store, START + 12 * DAY, keep(10)).sweep()
    assert set(again.report["removed"].values()) == {0}


async def test_machines_and_their_events_and_outputs_are_bounded_by_number(store: Store) -> None:
    ids = [f"m-{number}" for number in range(8)]
    term = launch(store, *ids, "m-live")
    for at, id in enumerate((*ids, "m-live")):
        store.machine_log.write_output(id, "console", "text", None, START - at)
    for at, id in enumerate(ids):
        end(store, term, id, at=START + at)
    for_ever = keep(0, max_machines=5, max_machine_outputs=3, max_machine_events=4)
    report = (await retention(store, START + DAY, for_ever).sweep()).report["removed"]
    assert (report["machines"], report["machine_outputs"]) == (3, 2)
    assert sorted(row.id for row in store.machines.machines("cloud")) == ["m-3", "m-4", "m-5", "m-6", "m-7", "m-live"]
    with_outputs = [id for id in (*ids, "m-live") if store.machine_log.outputs(id)]
    assert with_outputs == ["m-3", "m-4", "m-5", "m-live"], "the newest of them, and those of live machines"
    assert [event.machine for event in store.machine_log.events()] == ["m-7", "m-6", "m-5", "m-4"]
    everything = keep(0)
    assert set((await retention(store, 1e12, everything).sweep()).report["removed"].values()) == {0}


async def test_a_deployment_that_was_deleted_goes_later_with_what_it_has_spent(store: Store) -> None:
    term = launch(store, "m-1")
    end(store, term, "m-1", spent={"2026-09": 1})
    for name in ("cloud", "other"):
        store.deployments.save(name, "", 0, "ana", START)
    store.deployments.delete("cloud", 1, "ana", START)
    assert store.deployments.close("cloud", term, START + DAY)
    assert store.machine_pruning.forget_deployments(START + DAY, 10, term) == 0
    assert store.machines.spend("cloud") == {"2026-09": 1}, "a new one of this name has spent it in this month"
    removed = (await retention(store, START + 12 * DAY, keep(10)).sweep()).report["removed"]
    assert removed["deployments"] == 1
    assert (counts(store)["deployments"], store.machines.spend("cloud")) == (1, {})


def test_no_transaction_removes_more_of_machines_than_it_may(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [f"m-{number}" for number in range(5)]
    term = launch(store, *ids)
    for id in ids:
        store.machine_log.write_output(id, "console", "x" * 1000, None, START)
    end(store, term, *ids)
    assert store.machine_pruning.forget_machines(1e12, 2, term) == 2
    monkeypatch.setattr(pruning, "PARTS_BYTES", 2500)
    assert store.machine_pruning.forget_machine_outputs(10, term, maximum=0) == 2
    assert store.machine_pruning.forget_machines(1e12, 10, term) == 3
    assert store.machine_pruning.forget_machine_events(1e12, 4, term, maximum=100) == 4


def test_a_deposed_leader_removes_no_machine(store: Store) -> None:
    term = launch(store, "m-1")
    end(store, term, "m-1")
    assert store.machines.commit("cloud", term, MachineChanges(spent={"2026-09": 1}))
    store.take_term("another", 0.0)
    before = counts(store)
    forget = store.machine_pruning
    for remove in (
        lambda: forget.forget_machines(1e12, 10, term),
        lambda: forget.forget_machine_outputs(10, term, maximum=0),
        lambda: forget.forget_machine_events(1e12, 10, term, maximum=0),
        lambda: forget.forget_deployments(1e12, 10, term),
        lambda: store.deployments.close("cloud", term, 1.0),
    ):
        with pytest.raises(LeadershipLost):
            remove()
    assert counts(store) == before
