"""Joins and reports of the agents on machines: one boot joins, changes have serials, nothing is written twice."""

from __future__ import annotations

from makeway_quota.autoscale.machine import Machine
from makeway_quota.store import Store

from .machine_rows import launch

FACTS = {"gpus": 2, "cpu": 16_000, "memory": 65_536, "model": "H100", "attempts": []}


def only(store: Store) -> Machine:
    [row] = store.machines.live()
    return row


def test_one_boot_joins_and_is_told_so_again(store: Store) -> None:
    launch(store, "m-1")
    first = store.machine_reports.join("m-1", "boot-a", FACTS, 10.0)
    assert (first.outcome, first.machine) == ("joined", only(store))
    again, other = (store.machine_reports.join("m-1", boot, FACTS, 11.0) for boot in ("boot-a", "boot-b"))
    assert (again.outcome, other.outcome) == ("again", "other")
    assert store.machine_reports.join("m-2", "boot-a", FACTS, 12.0).outcome == "over"
    [report] = store.machine_reports.after(0)
    assert (report.boot, report.joined_at, report.facts) == ("boot-a", 10.0, FACTS)
    assert store.machine_reports.after(report.serial) == []


def test_only_what_is_new_in_a_report_is_written(store: Store) -> None:
    launch(store, "m-1", "m-2")
    store.machine_reports.join("m-1", "boot-a", FACTS, 10.0)
    store.machine_reports.join("m-2", "boot-b", FACTS, 10.0)
    first = store.machine_reports.after(0)
    running = {**FACTS, "attempts": [{"job": "j", "attempt": 1, "worker": 0, "state": "running"}]}
    assert store.machine_reports.report("m-1", "boot-a", FACTS, 20.0, 1) == first[0].serial
    serial = store.machine_reports.report("m-1", "boot-a", running, 30.0, 3)
    assert store.machine_reports.report("m-1", "boot-a", FACTS, 31.0, 2) == serial, "it was on its way for long"
    assert store.machine_reports.report("m-1", "boot-c", FACTS, 32.0) is None
    [changed] = store.machine_reports.after(first[-1].serial)
    assert (changed.machine, changed.serial, changed.heard_at, changed.facts) == ("m-1", serial, 30.0, running)
    store.machine_reports.heard({"m-1": 40.0, "m-2": 41.0, "m-3": 42.0})
    assert {one.machine: one.heard_at for one in store.machine_reports.after(changed.serial)} == {
        "m-1": 40.0,
        "m-2": 41.0,
    }
