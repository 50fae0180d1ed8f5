"""Reads use an index, and cost no more after months of history."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from makeway_quota.history.retention import Keep, Retention
from makeway_quota.store import Store, open_store
from makeway_quota.store.records import (
    ENDED,
    LIVE_STATES,
    Cap,
    Change,
    NewDecision,
    NewWorkload,
    SharedFiles,
    SubmissionKey,
)
from sqlalchemy import event

from .machine_rows import end, launch

CURSOR = "50.0~j50"
READS: dict[str, list[Callable[[Store], Any]]] = {
    "workload": [lambda s: s.workload("j1")],
    "active": [lambda s: s.active()],
    "workloads": [
        lambda s, owner=owner, teams=teams, states=states, cursor=cursor: s.workloads(
            "job", owner, teams, states, 10, cursor
        )
        for owner, teams in ((None, None), ("ana", None), (None, ["rnd"]), (None, ["rnd", "ops"]), ("ana", ["rnd"]))
        for states in (None, LIVE_STATES, ENDED, ("pending", "failed"))
        for cursor in (None, CURSOR)
    ],
    "submitted": [lambda s: s.submitted([SubmissionKey("k", "ana", "")])],
    "files": [lambda s: s.files("j1")],
    "attempts": [lambda s: s.attempts("j1")],
    "worker_reports": [lambda s: s.worker_reports.after(5)],
    "outputs": [
        lambda s: s.outputs.read("j1", 1, "log", 5, 10),
        lambda s: s.outputs.read("j1", 1, "result", 5, 10),
        lambda s: s.outputs.has("j1", 1, "result"),
        lambda s: s.outputs.gap("j1", 1),
    ],
    "decisions": [
        lambda s, workload=workload, teams=teams, owner=owner, before=before: s.decisions(
            workload, teams, 10, before, owner
        )
        for workload in (None, "j1")
        for teams, owner in ((None, None), (["rnd"], None), (["rnd", "ops"], "ana"), (None, "ana"))
        for before in (None, 50)
    ],
    "events": [lambda s: s.events(5, 10)],
    "last_event_id": [lambda s: s.last_event_id()],
    "oldest_event_id": [lambda s: s.oldest_event_id()],
    "past_runs": [lambda s: s.past_runs(10)],
    "histories": [lambda s: s.histories()],
    "policy_current": [lambda s: s.policies.current()],
    "policy_version": [lambda s: s.policies.version(1)],
    "policy_history": [lambda s: s.policies.history(10)],
    "machines": [
        lambda s, deployment=deployment, states=states, after=after: s.machines.machines(deployment, states, 10, after)
        for deployment, states in ((None, None), ("cloud", None), (None, ("lost",)))
        for after in (None, (50.0, "m50"))
    ],
    "live_machines": [lambda s: s.machines.read("cloud"), lambda s: s.machines.machine("m1")],
    "machine_events": [
        lambda s, deployment=deployment, machine=machine, before=before: s.machine_log.events(
            deployment, machine, before, 10
        )
        for deployment, machine in ((None, None), ("cloud", None), (None, "m1"))
        for before in (None, 50)
    ],
    "machine_outputs": [lambda s: s.machine_log.outputs("m1")],
    "machine_reports": [lambda s: s.machine_reports.after(5)],
}
LONG = {
    "workloads",
    "attempts",
    "files",
    "blobs",
    "sources",
    "decisions",
    "events",
    "submission_keys",
    "outputs",
    "worker_reports",
    "machines",
    "machine_requests",
    "machine_events",
    "machine_outputs",
    "machine_reports",
}
"""Tables that grow with the history; a scan of the others reads a few rows."""

ORDERED = {"ix_workloads_submitted_at_id", "ix_workloads_live", "ix_machines_requested_at_id"}
"""Indexes that are walked in the order of the answer, up to its limit."""


@contextmanager
def statements(store: Store) -> Iterator[list[tuple[str, Any]]]:
    """Collect every statement that the store runs, with its parameters."""
    recorded: list[tuple[str, Any]] = []

    def heard(connection: object, cursor: object, statement: str, parameters: Any, *_: object) -> None:
        recorded.append((statement, parameters))

    event.listen(store._database.engine, "before_cursor_execute", heard)
    try:
        yield recorded
    finally:
        event.remove(store._database.engine, "before_cursor_execute", heard)


def scans(path: str, statement: str, parameters: Any) -> list[str]:
    """Return the lines of SQLite's plan that read or sort whole tables."""
    with sqlite3.connect(path) as bare:
        plan = [line for *_, line in bare.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)]
    bad, read = [], ""
    for line in plan:
        walk = re.match(r"SCAN (\w+)(?: USING (?:COVERING )?INDEX (\w+))?$", line)
        if walk and walk[1] in LONG and walk[2] not in ORDERED and not first_rows(line, statement):
            bad.append(line)
        table = re.match(r"(?:SCAN|SEARCH) (\w+)", line)
        read = table[1] if table else read
        if line == "USE TEMP B-TREE FOR ORDER BY" and read in LONG:
            bad.append(f"{read}, then sorted")
    return bad


def first_rows(line: str, statement: str) -> bool:
    """Whether a plan's line walks a log in the order of its ids, up to a limit."""
    return line in ("SCAN decisions", "SCAN events", "SCAN machine_events") and "LIMIT" in statement


@pytest.mark.parametrize("name", READS)
def test_no_read_scans_or_sorts_a_long_table(sqlite_url: str, name: str) -> None:
    store = open_store(sqlite_url)
    path = sqlite_url.removeprefix("sqlite:///")
    fill(store, 100)
    with statements(store) as recorded:
        for read in READS[name]:
            read(store)
    store.close()
    assert recorded
    assert {s: bad for s, p in recorded if s.startswith("SELECT") and (bad := scans(path, s, p))} == {}


def test_no_cap_counts_by_a_scan(sqlite_url: str) -> None:
    store = open_store(sqlite_url)
    fill(store, 100)
    with statements(store) as recorded:
        for number, cap in enumerate((Cap(2, "session", with_gpus=True), Cap(3, "job", ("pending",)))):
            new = NewWorkload(f"n{number}", cap.kind, "rnd", "gpu1", "ana", gpus=1000)
            store.add_workloads([(new, (), None, cap)], now=1.0)
    store.close()
    path = sqlite_url.removeprefix("sqlite:///")
    assert len([s for s, _ in recorded if s.startswith("SELECT")]) > 4
    assert {s: bad for s, p in recorded if s.startswith("SELECT") and (bad := scans(path, s, p))} == {}


def test_what_a_submission_adds_is_found_from_its_contents(sqlite_url: str) -> None:
    """Not by a walk over all jobs of its owner and their files; a copy in the same team adds no content."""
    store = open_store(sqlite_url)
    fill(store, 100)
    new = [NewWorkload(f"n{at}", "job", "rnd", "gpu1", "ana", gpus=1000) for at in range(4)]
    with statements(store) as recorded:
        store.add_workloads([(item, [("a", b"new", False)], None) for item in new[:2]], now=1.0)
        for item in new[2:]:
            store.add_workload(item, SharedFiles("n0"), now=1.0)
    store.close()
    path = sqlite_url.removeprefix("sqlite:///")
    [looked] = [(s, p) for s, p in recorded if "JOIN workloads" in s]
    with sqlite3.connect(path) as bare:
        plan = [line for *_, line in bare.execute(f"EXPLAIN QUERY PLAN {looked[0]}", looked[1])]
    searches = [line.split(" (")[-1].rstrip(")") for line in plan if line.startswith("SEARCH")]
    assert searches == ["digest=?", "blob=?", "id=?", "blob=?"], plan


async def test_the_retention_scans_and_sorts_no_long_table(sqlite_url: str) -> None:
    store = open_store(sqlite_url)
    fill(store, 100)

    async def purge(id: str, team: str) -> bool:
        return True

    keeper = Retention(store, Keep(workloads=1.0, decisions=1.0, events=1.0), purge, lambda: None, rest=0.0)
    with statements(store) as recorded:
        sweep = await keeper.sweep()
    assert sweep.report["removed"]["workloads"] == 100
    path = sqlite_url.removeprefix("sqlite:///")
    checked = [(s, p) for s, p in recorded if s.startswith(("SELECT", "DELETE"))]
    bad = {s: bad for s, p in checked if (bad := scans(path, s, p))}
    counted = "SELECT count(*) AS count_1 \nFROM workloads"
    assert {s: lines for s, lines in bad.items() if s != counted} == {}
    store.close()


def fill(store: Store, jobs: int) -> None:
    """Write a history of ended jobs of another team and of machines that are gone, and a few that live."""
    term = launch(store, *(f"m{number}" for number in range(jobs)))
    end(store, term, *(f"m{number}" for number in range(10, jobs)))
    for begin in range(0, jobs, 200):
        ids = [f"j{number}" for number in range(begin, min(begin + 200, jobs))]
        new = [NewWorkload(id, "job", "ops", "gpu1", "bo", gpus=1000) for id in ids]
        store.add_workloads([(one, (), None) for one in new], now=float(begin))
        decisions = [NewDecision("finish", id, "ops", "bo", "succeeded", "because") for id in ids]
        for id in ids:
            for kind in ("log", "result"):
                store.outputs.append((id, 1, 0), kind, 0, b"some output", 1000)
        store.commit(
            [Change(id, {"state": "succeeded", "ended_at": 1.0, "ran": 1.0}) for id in ids], decisions, now=1.0
        )
    for number in range(5):
        mine = NewWorkload(f"m{number}", "job", "rnd", "gpu1", "ana", gpus=1000)
        store.add_workload(mine, decision=NewDecision("submit", mine.id, "rnd", "ana", "job", "because"), now=2.0)


def test_reads_cost_the_same_after_a_long_history(sqlite_url: str) -> None:
    store = open_store(sqlite_url)
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1

    store._database.engine.dispose()
    event.listen(store._database.engine, "connect", lambda plain, _: plain.set_progress_handler(count, 50))

    def cost(read: Callable[[Store], Any]) -> int:
        nonlocal steps
        steps = 0
        read(store)
        return steps

    fill(store, 400)
    before = {name: [cost(read) for read in READS[name]] for name in READS}
    fill_more(store, 400, 4000)
    after = {name: [cost(read) for read in READS[name]] for name in READS}
    store.close()
    grew = {name: list(zip(before[name], after[name], strict=True)) for name in READS}
    assert {name: pairs for name, pairs in grew.items() if any(b > 1.5 * a + 20 for a, b in pairs)} == {}


def fill_more(store: Store, begin: int, end: int) -> None:
    """Write more ended jobs of the other team, older than what lives."""
    ids = [f"j{number}" for number in range(begin, end)]
    store.add_workloads([(NewWorkload(i, "job", "ops", "gpu1", "bo", gpus=1000), (), None) for i in ids], now=1.0)
    decisions = [NewDecision("finish", id, "ops", "bo", "succeeded", "because") for id in ids]
    store.commit([Change(id, {"state": "succeeded", "ended_at": 1.0, "ran": 1.0}) for id in ids], decisions, now=1.0)
