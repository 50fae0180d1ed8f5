"""Rows of machines that are damaged hide and stop no other, and no machine with work is taken for an unknown one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from autoscale.fleet import EURO, START
from makeway_quota.autoscale.backoff import LaunchBackoff
from makeway_quota.autoscale.step import MachineChanges
from makeway_quota.store import Store, open_store
from makeway_quota.store.machines.rows import COLUMNS
from makeway_quota.store.tables import machines
from sqlalchemy import text

from .machine_rows import end, launch, row_of

BLOB = b"\xff\x00"
READY: dict[str, Any] = {
    "state": "ready", "boot": "boot-a", "instance": "i-1", "launched_at": START, "ready_at": START, "heard_at": START,
    "attempts": 1,
}  # fmt: skip


@pytest.fixture
def sqlite_store(sqlite_url: str) -> Iterator[Store]:
    """Open an empty store in a file, whose columns take values of any type."""
    with closing(open_store(sqlite_url)) as store:
        yield store


def damage(store: Store, table: str, column: str, value: object, condition: str = "1 = 1") -> None:
    with store._database.write(quiet=True) as connection:
        statement = f'UPDATE "{table}" SET "{column}" = :value WHERE {condition}'
        assert connection.execute(text(statement), {"value": value}).rowcount


@pytest.mark.parametrize("value", [BLOB, 2.5, "odd", "", float("inf"), -1])
def test_no_damage_of_one_machine_stops_any_other(sqlite_store: Store, value: object) -> None:
    store = sqlite_store
    nullable = {column.name for column in machines.columns if column.nullable}
    names = [name for name in COLUMNS if name not in ("id", "deployment")]
    ids = [f"m-{name}" for name in names]
    term = launch(store, *ids, "m-whole", **READY)
    whole = row_of(store, "m-whole")
    for name, id in zip(names, ids, strict=True):
        damage(store, "machines", name, value, f"id = '{id}'")
    rows = store.machines.read("cloud").machines
    assert [row.id for row in rows] == sorted([*ids, "m-whole"])
    assert whole in rows
    if value == BLOB:
        assert store.machines.damaged == {f"m-{name}": [name] for name in names}
    assert store.machines.live() == list(rows)
    assert len(store.machines.machines("cloud")) >= len(rows) - 1
    for row in rows:
        assert row.price in (3 * EURO, None, value), "unknown, not zero"
        assert {row.requested_at, row.state_since} <= {START, value}
    changed = tuple(replace(row, needed_at=START + 5) for row in rows)
    assert store.machines.commit("cloud", term, MachineChanges(changed=changed)), "what was read can be written"
    assert store.machines.read("cloud").machines == tuple(replace(row, version=row.version + 1) for row in changed)
    assert store.machines.damaged == {}, "and is not damaged any more"
    assert nullable >= {"price", "boot", "over_at"}


@pytest.mark.parametrize(
    ("fields", "state"),
    [(READY, "lost"), ({"state": "booting", "instance": "i-1"}, "terminating"), ({}, "terminating")],
)
def test_a_machine_whose_state_cannot_be_read_stays_one(store: Store, fields: dict[str, Any], state: str) -> None:
    launch(store, "m-1", **fields)
    damage(store, "machines", "state", "stat\u00e9")
    [row] = store.machines.read("cloud").machines
    assert (row.state, row.instance) == (state, fields.get("instance"))
    assert store.machines.damaged == {"m-1": ["state"]}


def test_times_that_cannot_be_read_are_none_of_long_ago(store: Store) -> None:
    launch(store, "m-1", **READY)
    for name in ("requested_at", "since", "needed_at", "heard_at"):
        damage(store, "machines", name, float("nan") if not store._database.sqlite else BLOB)
    [row] = store.machines.read("cloud").machines
    assert (row.requested_at, row.state_since, row.needed_at, row.heard_at) == (START, START, START, None)


def test_a_machine_without_an_id_or_a_request_hides_no_other(sqlite_store: Store) -> None:
    launch(sqlite_store, "m-1", "m-2", "m-3")
    with sqlite_store._database.write() as connection:
        connection.execute(text("DELETE FROM machine_requests WHERE machine IN ('m-1', 'm-2')"))
    damage(sqlite_store, "machines", "id", BLOB, "id = 'm-2'")
    assert [(row.id, row.request) for row in sqlite_store.machines.read("cloud").machines] == [
        ("m-1", ""),
        ("m-3", "{}"),
    ]
    assert sqlite_store.machines.damaged == {"m-1": ["request"], "b'\\xff\\x00'": ["id"]}


def test_spend_that_cannot_be_read_is_added_up_again(sqlite_store: Store) -> None:
    term = launch(sqlite_store, "m-1", "m-2", "m-3")
    end(sqlite_store, term, "m-1", at=START + 3600, spent={"2026-09": 3 * EURO, "2026-08": 5})
    end(sqlite_store, term, "m-2", at=START + 60, state="failed")
    damage(sqlite_store, "spend_months", "amount", "odd", "month = '2026-09'")
    assert sqlite_store.machines.read("cloud").closed_spend == {"2026-08": 5, "2026-09": 3 * EURO}
    end(sqlite_store, term, "m-3", at=START + 1800, spent={"2026-09": EURO})
    assert sqlite_store.machines.spend("cloud")["2026-09"] >= 4 * EURO


def test_other_damaged_rows_are_passed_over(sqlite_store: Store) -> None:
    store = sqlite_store
    term = launch(store, "m-1")
    backoffs = tuple(LaunchBackoff(kind, "a", "spot", "stock_out", 1, 1.0, 2.0) for kind in ("one", "two"))
    assert store.machines.commit("cloud", term, MachineChanges(backoffs=backoffs, first_seen={"i-1": 1.0, "i-2": 2.0}))
    damage(store, "launch_backoffs", "until", "odd", "type = 'one'")
    damage(store, "unknown_instances", "first_seen", "odd", "instance = 'i-1'")
    rows = store.machines.read("cloud")
    assert (rows.backoffs, rows.first_seen) == (backoffs[1:], {"i-2": 2.0})
    damage(store, "launch_backoffs", "failure", "odd", "type = 'two'")
    assert store.machines.backoffs("cloud") == []
    store.machine_log.write_output("m-1", "init", "x", 0, 1.0)
    for table, column in (("machine_events", "message"), ("machine_events", "at"), ("machine_outputs", "text")):
        damage(store, table, column, BLOB)
    assert [event.message for event in store.machine_log.events()] == [""]
    assert [output.text for output in store.machine_log.outputs("m-1")] == [""]
    version = store.deployments.save("cloud", "x", 0, "ana", 1.0).version
    damage(store, "deployments", "version", "odd")
    [deployment] = store.deployments.list()
    assert deployment.version == 0
    assert store.machines.commit("cloud", term, MachineChanges(spent={"2026-09": 1}, revision=0))
    assert store.deployments.save("cloud", "y", 0, "ana", 1.0).version == version


@pytest.mark.parametrize("column", ["report", "boot", "number", "serial", "joined_at", "heard_at"])
def test_a_damaged_report_hides_no_other_and_ends_with_the_next_one(sqlite_store: Store, column: str) -> None:
    launch(sqlite_store, "m-1", "m-2")
    for id in ("m-1", "m-2"):
        sqlite_store.machine_reports.join(id, "boot", {"gpus": 2}, 1.0)
    damage(sqlite_store, "machine_reports", column, "odd" if column == "report" else BLOB, "machine = 'm-1'")
    result = {report.machine: report for report in sqlite_store.machine_reports.after(0)}
    assert result["m-2"].facts == {"gpus": 2}
    assert (result["m-1"].facts, result["m-1"].damaged[:9]) == ({}, "its repor")
    serial = sqlite_store.machine_reports.report("m-1", "boot", {"gpus": 2}, 2.0, 1)
    if column == "boot":
        assert serial is None, "which boot has joined cannot be guessed"
        assert sqlite_store.machine_reports.join("m-1", "another", {}, 2.0).outcome == "other"
    else:
        assert sqlite_store.machine_reports.after(result["m-2"].serial)[0].facts == {"gpus": 2}
