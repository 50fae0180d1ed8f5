"""Apply the changes that are still as expected, all in one transaction, under the leading term."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest
from makeway_quota.store import LeadershipLost, Store, open_store
from makeway_quota.store.records import Attempt, Change, NewDecision, Workload
from makeway_quota.values import Place


def decision(workload: str | None, message: str = "because", **numbers: object) -> NewDecision:
    return NewDecision("start", workload, "rnd", "ana", "starting", message, numbers)


def test_what_changed_meanwhile_is_skipped_with_its_decisions(store: Store, job) -> None:
    for id in ("j1", "j2", "j3"):
        store.add_workload(job(id), now=0.0)
    applied = store.commit(
        [
            Change("j1", {"state": "running"}, expect_version=1),
            Change("j2", {"state": "running"}, expect_version=2),
            Change("j3", {"state": "running"}, expect_states=("running", "checkpointing")),
            Change("j4", {"state": "running"}),
        ],
        [decision("j1"), decision("j2"), decision("j3"), decision("j4"), decision(None), decision("j5")],
        now=1.0,
    )
    assert applied == {"j1"}
    assert [(w.state, w.version) for w in store.active()] == [("running", 2), ("pending", 1), ("pending", 1)]
    assert [d.workload for d in store.decisions()] == ["j5", None, "j1"]


def test_an_attempt_opens_once(store: Store, job) -> None:
    store.add_workload(job(), now=0.0)
    start = Change("j1", {"state": "starting", "attempt": 1}, open_attempt=Attempt("j1", 1, 1.0))
    assert store.commit([start], now=1.0) == {"j1"}
    assert store.commit([start], [decision("j1")], now=1.0) == frozenset()
    assert store.decisions() == []


@pytest.mark.parametrize(
    "change",
    [
        Change("j1", {"stat": "running"}),
        Change("j1", {"id": "j2"}),
        Change("j1", {"version": 9}),
        Change("j1", close_attempt={"number": 2}),
        Change("j1", open_attempt=Attempt("j2", 1, 1.0)),
    ],
)
def test_fields_that_cannot_change_are_refused_and_nothing_is_done(store: Store, job, change: Change) -> None:
    store.add_workload(job(), now=0.0)
    store.add_workload(job("j0"), now=0.0)
    with pytest.raises(ValueError, match="cannot"):
        store.commit([Change("j0", {"state": "running"}), change], [decision("j0")], now=1.0)
    with pytest.raises(ValueError, match="two changes"):
        store.commit([Change("j1"), Change("j1")], now=1.0)
    assert {w.version for w in store.active()} == {1}
    assert store.decisions() == []


def test_unstorable_values_of_a_running_job_are_replaced(store: Store, job) -> None:
    store.add_workload(job(), now=0.0)
    fields = {"message": "a\x00b\ud800", "checkpoint_step": 10**40, "reason_numbers": {"x": float("nan"), "y": "\x00"}}
    store.commit([Change("j1", fields)], [decision("j1", "c\x00", z=float("inf"))], now=1.0)
    result = store.workload("j1")
    assert result is not None
    assert (result.message, result.checkpoint_step) == ("a\ufffdb?", 2**63 - 1)
    assert result.reason_numbers == {"x": None, "y": "\ufffd"}
    assert store.decisions()[0].message == "c\ufffd"
    assert store.decisions()[0].numbers == {"z": None}
    assert store.events(0)[1].data["message"] == "a\ufffdb?"


def test_every_change_writes_an_event(store: Store, job) -> None:
    store.add_workload(job(name="train"), decision=decision("j1"), now=1.0)
    fields = {"state": "running", "reason_code": "starting", "reason_message": "There is room."}
    store.commit([Change("j1", fields)], [decision("j1", gpus=1)], now=2.0)
    store.add_event("usage", "rnd", None, {"used": 1}, 3.0)
    events = store.events(0)
    assert [(e.kind, e.team, e.workload) for e in events] == [
        ("job", "rnd", "j1"),
        ("decision", "rnd", "j1"),
        ("job", "rnd", "j1"),
        ("decision", "rnd", "j1"),
        ("usage", "rnd", None),
    ]
    data = events[2].data
    assert (data["id"], data["state"], data["version"], data["name"], data["gpus"]) == ("j1", "running", 2, "train", 1)
    assert data["reason"] == {"code": "starting", "message": "There is room."}
    assert events[3].data["id"] == store.decisions()[0].id
    assert events[3].data["numbers"] == {"gpus": 1}
    assert [e.id for e in store.events(events[2].id, limit=1)] == [events[3].id]
    assert (store.oldest_event_id(), store.last_event_id()) == (events[0].id, events[-1].id)


def test_listeners_are_called_after_writes_only(store: Store, job) -> None:
    heard: list[str] = []

    def fail() -> None:
        raise RuntimeError("a listener's own trouble")

    store.on_commit(fail)
    stop = store.on_commit(lambda: heard.append(str(store.last_event_id())))
    store.add_workload(job(), now=1.0)
    store.active()
    with pytest.raises(ValueError, match="cannot"):
        store.commit([Change("j1", {"no": 1})], now=1.0)
    assert heard == ["1"]
    stop()
    store.add_event("usage", None, None, {}, 1.0)
    assert heard == ["1"]


def test_of_two_changes_of_one_version_one_is_applied(store: Store, job) -> None:
    store.add_workload(job(), now=0.0)
    for version in range(1, 41):
        gate = threading.Barrier(2)
        won: list[frozenset[str]] = []

        def change(version: int = version, gate: threading.Barrier = gate, won: list[frozenset[str]] = won) -> None:
            gate.wait()
            change = Change("j1", {"preemptions": version}, expect_version=version)
            won.append(store.commit([change], [decision("j1")], now=1.0))

        threads = [threading.Thread(target=change) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(map(len, won)) == [0, 1]
    assert len(store.decisions()) == 40


def test_two_services_on_one_database_take_turns(url: str, job) -> None:
    stores = [open_store(url), open_store(url)]
    stores[0].add_workload(job(), now=0.0)

    def write(store: Store) -> None:
        for _ in range(50):
            store.commit([Change("j1")], [decision("j1")], now=1.0)

    threads = [threading.Thread(target=write, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    result = stores[1].workload("j1")
    assert result is not None
    assert result.version == 101
    ids = [event.id for event in stores[0].events(0)]
    assert ids == list(range(1, 202))
    for store in stores:
        store.close()


def test_a_deposed_service_cannot_commit(store: Store, job) -> None:
    store.add_workload(job(), now=0.0)
    with pytest.raises(LeadershipLost):
        store.commit([Change("j1")], now=1.0, term=1)
    assert store.take_term("first", 1.0) == 1
    assert store.commit([Change("j1")], now=1.0, term=1)
    assert store.take_term("second", 2.0) == 2
    with pytest.raises(LeadershipLost, match="second holds term 2"):
        store.commit([Change("j1")], [decision("j1")], now=3.0, term=1)
    assert store.commit([Change("j1")], now=3.0, term=2)
    assert store.decisions() == []


WRITER = """
import sys
from makeway_quota.store import open_store
from makeway_quota.store.records import Attempt, Change, NewDecision
store = open_store(sys.argv[1])
step = store.workload("a").checkpoint_step or 0
while True:
    step += 1
    attempts = [Attempt(id, step, 0.0) for id in ("a", "b")]
    changes = [Change(a.workload, {"checkpoint_step": step}, open_attempt=a) for a in attempts]
    store.commit(changes, [NewDecision("save", None, None, None, "", "", {"step": step})], now=0.0)
    print(step, flush=True)
"""


def test_a_killed_service_leaves_whole_commits_only(sqlite_url: str, job) -> None:
    store = open_store(sqlite_url)
    for id in ("a", "b"):
        store.add_workload(job(id), now=0.0)
    store.close()
    for round in range(5):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, sqlite_url], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        told = 0
        for _ in range(20 + 7 * round):
            told = int(writer.stdout.readline())
        writer.kill()
        told = max([told, *map(int, writer.stdout.read().split()[:-1])])
        writer.wait()
        writer.stdout.close()
        store = open_store(sqlite_url)
        a, b = store.active()
        newest = store.decisions(limit=1)[0].numbers["step"]
        assert a.checkpoint_step == b.checkpoint_step == newest
        assert newest >= told
        assert [attempt.number for attempt in store.attempts("a")] == list(range(1, newest + 1))
        assert len(store.attempts("b")) == newest
        store.close()


def test_listeners_get_every_row_in_the_order_of_the_commits(store: Store, job) -> None:
    rows: dict[str, Workload] = {}
    versions: list[int] = []

    def follow(changed: Sequence[Workload]) -> None:
        for row in changed:
            versions.append(row.version)
            rows[row.id] = row

    store.on_change(follow)
    store.add_workload(job("j1", source="x = 1", reason_numbers={"by": ("a", "b")}), now=0.0)
    places = (Place("n1", (0,), (1000,)),)
    store.commit(
        [
            Change(
                "j1", {"placement": places, "message": "a\x00", "reason_numbers": {"by": ("a", "b"), "x": float("nan")}}
            )
        ],
        now=1.0,
    )
    assert list(rows.values()) == store.active()

    def write() -> None:
        for _ in range(25):
            store.commit([Change("j1")], now=1.0)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert versions == list(range(1, 103))
    assert list(rows.values()) == store.active()


def test_many_changes_at_once_are_each_their_own(store: Store, job) -> None:
    for number in range(6):
        store.add_workload(job(f"j{number}"), now=0.0)
    opened = [Change(f"j{n}", {"attempt": 1}, open_attempt=Attempt(f"j{n}", 1, 1.0)) for n in range(3)]
    store.commit([*opened, Change("j3", {"state": "running"}), Change("j4", {"message": "m"})], now=1.0)
    ends = [Change(f"j{n}", {"state": "failed"}, close_attempt={"outcome": f"o{n}"}) for n in (2, 0)]
    moved = Change("j1", {"attempt": 2}, close_attempt={"ended_at": 2.0}, open_attempt=Attempt("j1", 2, 2.0))
    assert store.commit([*ends, moved, Change("j5")], now=2.0) == {"j0", "j1", "j2", "j5"}
    outcomes = {id: [(a.number, a.outcome, a.ended_at) for a in store.attempts(id)] for id in ("j0", "j1", "j2", "j3")}
    assert outcomes == {
        "j0": [(1, "o0", None)],
        "j1": [(1, None, 2.0), (2, None, None)],
        "j2": [(1, "o2", None)],
        "j3": [],
    }
    assert [(w.id, w.state, w.message, w.attempt) for w in store.active()] == [
        ("j1", "pending", "", 2),
        ("j3", "running", "", 0),
        ("j4", "pending", "m", 0),
        ("j5", "pending", "", 0),
    ]


def test_what_another_service_wrote_is_not_overwritten_from_memory(url: str, job) -> None:
    here, there = open_store(url), open_store(url)
    here.add_workload(job(), now=0.0)
    there.commit([Change("j1", {"state": "running"})], now=1.0)
    assert here.commit([Change("j1", {"message": "late"}, expect_states=("pending",))], now=2.0) == frozenset()
    told: list[Workload] = []
    here.on_change(told.extend)
    here.commit([Change("j1", {"message": "seen"})], now=3.0)
    assert [(w.state, w.message, w.version) for w in told] == [("running", "seen", 3)]
    here.close()
    there.close()


def test_readers_are_woken_after_all_other_listeners(store: Store, job) -> None:
    calls: list[str] = []
    store.on_commit(lambda: calls.append("stream"))
    store.on_change(lambda _: calls.append("reader"), last=True)
    stop = store.on_change(lambda _: calls.append("rows"))
    store.add_workload(job("j1"), now=0.0)
    assert calls == ["rows", "stream", "reader"]
    stop()
    store.add_workload(job("j2"), now=0.0)
    assert calls[3:] == ["stream", "reader"]
