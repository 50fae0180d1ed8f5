"""A commit of machines is whole or nothing: by the leader, of the rows and the document that were read."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from autoscale.fleet import START, machine
from makeway_quota.autoscale.backoff import LaunchBackoff
from makeway_quota.autoscale.machine import Machine
from makeway_quota.autoscale.step import MachineChanges, MachineRows
from makeway_quota.control.machines.tokens import MachineTokens
from makeway_quota.store import Store, StoreError, open_store
from makeway_quota.store.machines.log import add_events, event_of
from sqlalchemy import event

from .machine_rows import end, launch, row_of
from .test_earlier_release import contents
from .test_indexes import statements

BACKOFF = LaunchBackoff("g2", "a", "spot", "stock_out", 2, 1.0, 2.0)


def everything(store: Store, term: int, **changes: Any) -> MachineChanges:
    """Return a commit with something of each kind: one machine ends, one boots, one is launched."""
    first, second = row_of(store, "m-1"), row_of(store, "m-2")
    given: dict[str, Any] = {
        "launched": (machine(id="m-3", term=term),),
        "changed": (
            replace(first, state="gone", state_since=START + 9, reason="idle"),
            replace(second, state="booting", state_since=START + 9, reason="launched", instance="i-2"),
        ),
        "backoffs": (BACKOFF,),
        "spent": {"2026-09": 7, "2026-10": 8},
        "first_seen": {"i-9": 5.0},
    }
    return MachineChanges(**(given | changes))


def state_of(store: Store) -> tuple[Any, ...]:
    """Return all that a commit could have written."""
    rows = store.machines.machines("cloud")
    return store.machines.read("cloud"), rows, store.machine_log.events(), store.last_event_id(), reports(store)


def reports(store: Store) -> list[str]:
    return [report.machine for report in store.machine_reports.after(0)]


def test_a_commit_is_read_back_as_it_was_made(store: Store) -> None:
    term = launch(store, "m-1", "m-2", price=None, request='{"init_script":"echo \\"hü\\"\\n"}')
    store.machine_reports.join("m-1", "boot-a", {}, 1.0)
    done = everything(store, term)
    assert store.machines.commit("cloud", term, done)
    rows = store.machines.read("cloud")
    [_, booting], [launched] = done.changed, done.launched
    assert rows == MachineRows(
        (replace(booting, version=2), replace(launched, version=1)),
        (BACKOFF,),
        {"2026-09": 7, "2026-10": 8},
        {"i-9": 5.0},
    )
    assert row_of(store) == replace(done.changed[0], version=2)
    assert reports(store) == [], "the report of a machine goes with its end"
    assert store.machines.counts() == {"cloud": {"booting": 1, "requested": 1}}
    assert store.machines.commit("cloud", term, MachineChanges(backoffs=(), spent={"2026-10": 2}, first_seen={}))
    assert store.machines.read("cloud") == MachineRows(rows.machines, (), {"2026-09": 7, "2026-10": 10}, {})


def test_every_change_of_a_state_or_its_cause_is_in_the_log(store: Store) -> None:
    term = launch(store, "m-1", "m-2")
    assert store.machines.commit("cloud", term, everything(store, term))
    draining = replace(row_of(store, "m-2"), state="draining", drain="idle", reason="idle", state_since=START + 20)
    assert store.machines.commit("cloud", term, MachineChanges(changed=(draining,)))
    stronger = replace(row_of(store, "m-2"), drain="pause", reason="pause")
    assert store.machines.commit("cloud", term, MachineChanges(changed=(stronger,)))
    heard = replace(row_of(store, "m-2"), heard_at=START + 30, attempts=1)
    assert store.machines.commit("cloud", term, MachineChanges(changed=(heard,)))
    told = store.machine_log.events(machine="m-2")
    assert [(one.state, one.reason) for one in told] == [
        ("draining", "pause"), ("draining", "idle"), ("booting", "launched"), ("requested", ""),
    ]  # fmt: skip
    assert [one.at for one in told[1:]] == [START + 20, START + 9, START]
    assert (told[2].message, told[3].message) == ("instance i-2", "g2, a, on demand")
    assert store.machine_log.events(machine="m-2", before=told[1].id, limit=1) == [told[2]]
    assert {one.machine for one in store.machine_log.events("cloud")} == {"m-1", "m-2", "m-3"}


@pytest.mark.parametrize(
    "refused",
    [
        lambda store, done: replace(done, changed=(done.changed[0], replace(done.changed[1], version=0))),
        lambda store, done: replace(done, changed=(*done.changed, machine(id="m-unknown"))),
        lambda store, done: replace(done, changed=(*done.changed, row_of(store, "m-of-another"))),
        lambda store, done: replace(done, launched=(*done.launched, machine(id="m-2"))),
        lambda store, done: replace(done, revision=2),
        lambda store, done: replace(done, revision=0),
    ],
    ids=["a row", "no row", "another deployment's", "an id", "a newer document", "no document"],
)
def test_a_commit_that_was_decided_by_other_rows_or_another_document_writes_nothing(
    store: Store, refused: Callable[[Store, MachineChanges], MachineChanges]
) -> None:
    launch(store, "m-of-another", deployment="other")
    term = launch(store, "m-1", "m-2")
    version = store.deployments.save("cloud", "name: cloud\n", 0, "ana", 1.0).version
    done = everything(store, term, revision=version)
    before = state_of(store)
    assert not store.machines.commit("cloud", term, refused(store, done))
    assert state_of(store) == before
    assert store.machines.commit("cloud", term, done)
    store.deployments.save("cloud", "name: cloud # 2\n", version, "ana", 2.0)
    assert not store.machines.commit("cloud", term, MachineChanges((machine(id="m-4"),), revision=version))
    assert store.machines.commit("cloud", term, MachineChanges(spent={"2026-09": 1})), "answers hold with any document"


def test_a_deposed_leader_commits_nothing(store: Store) -> None:
    term = launch(store, "m-1", "m-2")
    done = everything(store, term)
    store.take_term("another", 0.0)
    before = state_of(store)
    assert not store.machines.commit("cloud", term, done)
    assert not store.machines.commit("cloud", term + 2, done), "nor does one of a term that was not taken"
    assert state_of(store) == before


def test_of_two_that_commit_at_once_one_writes(url: str) -> None:
    """Each adds to the spend with the row that both have read; what both write is added up."""
    stores = [open_store(url) for _ in range(2)]
    term = launch(stores[0], "m-1")
    for number in range(4):
        row, begin, done = row_of(stores[0]), threading.Barrier(2), list[tuple[str, bool]]()

        def commit(store: Store, boot: str, row: Machine = row, begin: Any = begin, done: Any = done) -> None:
            begin.wait(10)
            changes = MachineChanges(changed=(replace(row, boot=boot),), spent={"2026-09": 1})
            done.append((boot, store.machines.commit("cloud", term, changes)))

        threads = [threading.Thread(target=commit, args=(one, f"b-{at}")) for at, one in enumerate(stores)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        [winner] = [boot for boot, written in done if written]
        assert len(done) == 2
        assert (row_of(stores[1]).boot, row_of(stores[1]).version) == (winner, row.version + 1)
        assert stores[1].machines.spend("cloud") == {"2026-09": number + 1}
    for store in stores:
        store.close()


def test_a_commit_that_fails_at_any_statement_writes_nothing(store: Store) -> None:
    term = launch(store, "m-1", "m-2")
    store.machine_reports.join("m-1", "boot-a", {}, 1.0)
    done, before = everything(store, term), state_of(store)
    remaining = 0

    def fail(*_: object) -> None:
        nonlocal remaining
        remaining -= 1
        if remaining == 0:
            raise RuntimeError("killed")

    tried = 0
    while True:
        remaining = tried = tried + 1
        event.listen(store._database.engine, "before_cursor_execute", fail)
        try:
            committed = store.machines.commit("cloud", term, done)
            break
        except RuntimeError:
            pass
        finally:
            event.remove(store._database.engine, "before_cursor_execute", fail)
        assert state_of(store) == before
    assert committed
    assert tried > 12, "each statement failed once"
    assert state_of(store) != before


def test_a_process_that_is_killed_in_a_commit_leaves_all_of_it_or_nothing(sqlite_url: str) -> None:
    store = open_store(sqlite_url)
    term = launch(store, "m-1", "m-2")
    done = everything(store, term)
    store.close()
    before = contents(sqlite_url)
    for line in range(4, 40, 6):
        process = os.fork()
        if process == 0:
            _commit_and_die(sqlite_url, term, done, line)
        ended = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        assert ended in (0, 9)
        if ended == 0:
            break
        assert contents(sqlite_url) == before
    assert ended == 0
    store = open_store(sqlite_url)
    assert [row.id for row in store.machines.live()] == ["m-2", "m-3"]
    store.close()


def _commit_and_die(url: str, term: int, done: MachineChanges, line: int) -> None:
    """Commit in this process, which ends at a statement with 9, after the commit with 0."""
    try:
        store = open_store(url)
        executed = 0

        def count(*_: object) -> None:
            nonlocal executed
            executed += 1
            if executed == line:
                os._exit(9)

        event.listen(store._database.engine, "before_cursor_execute", count)
        os._exit(0 if store.machines.commit("cloud", term, done) else 1)
    finally:
        os._exit(2)


def test_what_the_database_refuses_is_told_and_nothing_is_written(store: Store) -> None:
    term = launch(store, "m-1", "m-2")
    before = state_of(store)
    with pytest.raises(StoreError):
        store.machines.commit("cloud", term, everything(store, term, backoffs=(BACKOFF, BACKOFF)))
    assert state_of(store) == before


ODD = "o'brien \"; DROP TABLE machines; -- %s :name \\ \U0001f600 ñ"


def test_names_may_have_any_characters(store: Store) -> None:
    term = launch(store, ODD, deployment=ODD, zone=ODD, type=ODD, request=ODD)
    [row] = store.machines.read(ODD).machines
    assert (row.id, row.zone, row.request) == (ODD, ODD, ODD)
    held = LaunchBackoff(ODD, ODD, "*", "invalid", 1, 1.0, 2.0)
    joined = replace(row, instance=ODD, boot=ODD)
    changes = MachineChanges(changed=(joined,), backoffs=(held,), spent={ODD: 1}, first_seen={ODD: 1.0})
    assert store.machines.commit(ODD, term, changes)
    assert store.machines.read(ODD) == MachineRows((replace(joined, version=2),), (held,), {ODD: 1}, {ODD: 1.0})
    assert store.machine_reports.join(ODD, ODD, {ODD: ODD}, 1.0).outcome == "again", "the leader knew it already"
    assert store.machine_reports.after(0)[0].facts == {ODD: ODD}
    assert store.machine_log.write_output(ODD, "console", ODD, 1, 2.0)
    assert store.deployments.save(ODD, ODD, 0, ODD, 1.0) == store.deployments.read(ODD)
    assert [one.deployment for one in store.machine_log.events(ODD)] == [ODD, ODD]


def test_what_no_database_can_hold_is_replaced(store: Store) -> None:
    term = launch(store, "m-1", request="a\x00b\ud800")
    assert store.machines.commit("cloud", term, MachineChanges(first_seen={"i\x00": 1.0, "i\ufffd": 2.0}))
    assert row_of(store).request == "a\ufffdb?"
    assert store.machines.read("cloud").first_seen == {"i\ufffd": 2.0}
    assert store.machine_log.write_output("m-1", "init", "\x00 half \ud800", -(2**70), 1.0)
    assert store.machine_log.outputs("m-1")[0].text == "\ufffd half ?"


def test_the_join_token_of_a_machine_is_not_kept_in_what_it_wrote(store: Store) -> None:
    launch(store, "m-1")
    token = MachineTokens(b"a secret of the service").join_token("m-1")
    assert store.machine_log.write_output("m-1", "console", f"+ join --token={token}\nm-1.local is up\n", None, 1.0)
    assert store.machine_log.outputs("m-1")[0].text == "+ join --token=m-1.…\nm-1.local is up\n"


def test_of_a_long_output_the_beginning_and_the_end_are_kept(store: Store) -> None:
    launch(store, "m-1")
    text = "".join(f"line {number}\n" for number in range(200_000))
    assert store.machine_log.write_output("m-1", "console", "first", None, 1.0)
    assert store.machine_log.write_output("m-1", "console", text, None, 2.0)
    assert store.machine_log.write_output("m-1", "init", "", 137, 2.0)
    assert not store.machine_log.write_output("m-2", "init", "", 0, 2.0)
    console, init = store.machine_log.outputs("m-1")
    assert (init.text, init.exit_code, init.omitted) == ("", 137, 0)
    assert console.at == 2.0
    assert len(console.text) + console.omitted == len(text)
    assert len(console.text) == 64 * 1024
    assert console.text.startswith("line 0\n")
    assert console.text.endswith("line 199999\n")


def test_a_thousand_machines_are_read_and_written_in_a_bounded_number_of_statements(store: Store) -> None:
    ids = [f"m-{number:04}" for number in range(1000)]
    term = launch(store, *ids)
    with statements(store) as reading:
        rows = store.machines.read("cloud")
        assert len(store.machines.live()) == 1000
    assert [row.id for row in rows.machines] == ids
    assert len([one for one, _ in reading if one.startswith("SELECT")]) == 6
    with statements(store) as writing:
        ends = tuple(replace(row, state="gone", state_since=START + 60, reason="idle") for row in rows.machines)
        assert store.machines.commit("cloud", term, MachineChanges(changed=ends))
    assert len(writing) < 20
    assert store.machines.read("cloud") == MachineRows()
    page = store.machines.machines("cloud", ["gone"], 400)
    rest = store.machines.machines("cloud", ["gone"], 1000, (page[-1].requested_at, page[-1].id))
    assert [row.id for row in (*page, *rest)] == ids[::-1]


def test_only_machines_that_have_changed_are_read_again(store: Store) -> None:
    ids = [f"m-{number:03}" for number in range(100)]
    term = launch(store, *ids)
    rows = store.machines.live()
    assert store.machines.live() == rows
    assert all(one is other for one, other in zip(store.machines.live(), rows, strict=True))
    changed = rows[7].with_fields(reason="late")
    gone = rows[8].with_fields(state="gone")
    assert store.machines.commit("cloud", term, MachineChanges(changed=(changed, gone)))
    launch(store, "m-new")
    with statements(store) as reading:
        again = store.machines.read("cloud").machines
    assert [one.id for one in again] == [*ids[:8], *ids[9:], "m-new"]
    assert again[7].reason == "late"
    assert [one for one, other in zip(again, rows, strict=False) if one is other] == rows[:7]
    [some] = [values for one, values in reading if " IN (" in one]
    assert len([value for value in str(some).split(",") if "m-" in value]) == 2
    assert store.machines.live() == list(again)
    assert store.machines.read("other").machines == ()
    assert store.machines.live() == list(again)


def test_listeners_of_commits_are_called_and_the_stream_is_told_of_states(store: Store) -> None:
    called = list[int]()
    term = launch(store, "m-1")
    store.on_commit(lambda: called.append(1))
    last = store.last_event_id()
    assert store.machines.commit("cloud", term, MachineChanges(changed=(replace(row_of(store), needed_at=START + 9),)))
    assert store.last_event_id() == last
    end(store, term, "m-1")
    [told] = store.events(last)
    assert (told.kind, told.team, told.data) == ("machines", None, {"deployment": "cloud", "machines": ["m-1"]})
    assert len(called) == 2


@pytest.mark.parametrize(("changes", "recent"), [(0, 0), (150, 20), (500, 20), (500, 199), (500, 200), (500, 450)])
def test_a_history_has_all_changes_of_its_time_however_long_the_log_is(store: Store, changes: int, recent: int) -> None:
    """Of the machines that have changed in it, the state before counts, too."""
    states = ("requested", "booting", "ready", "draining")
    told = [(START + at, f"m-{at % 7}", states[at // 7 % 4]) for at in range(changes)]
    with store._database.write() as connection:
        add_events(connection, [event_of("cloud", id, state, "", "", at) for at, id, state in told])
    history = store.machine_log.states("cloud", START + changes - recent)
    assert list(history.changes) == told[changes - recent :]
    before = {id: state for _, id, state in told[: changes - recent]}
    changed = {id for _, id, _ in history.changes}
    assert {id: state for id, state in history.earlier.items() if id in changed} == {
        id: state for id, state in before.items() if id in changed
    }
