"""Submissions go in, and come out as they were."""

from __future__ import annotations

import sqlite3
import stat
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from makeway_quota.store import Conflict, Store, StoreError, TooMany, open_store
from makeway_quota.store.database import database
from makeway_quota.store.errors import RowRefused
from makeway_quota.store.records import Attempt, Cap, Change, NewDecision, NewWorkload
from makeway_quota.values import Notice, Place
from sqlalchemy import text

NASTY = [
    "",
    "Robert'); DROP TABLE workloads;--",
    '<script>alert("x")</script>',
    "${jndi:ldap://x} {{ 7*7 }} %s %(x)s :name ?",
    "naïve 训练 🚀 \u202eabc",
    "back\\slash 'quote' \"double\"\nline\ttab",
    "x" * 10_000,
]


def test_a_submission_comes_back_as_it_went_in(store: Store, job) -> None:
    new = job(
        name="train",
        command=("python", "train.py"),
        env={"A": "1"},
        source="print(1)",
        workers=2,
        priority="high",
        time_limit=60.0,
        image="busybox",
        signal="SIGUSR1",
        clone_of="j0",
    )
    files = [("b/train.py", b"print(1)\n", True), ("a.bin", bytes(range(256)), False)]
    written = store.add_workload(new, files, now=5.0)
    assert store.workload("j1") == written
    assert (written.state, written.attempt, written.version, written.submitted_at) == ("pending", 0, 1, 5.0)
    assert (written.min_workers, written.source, written.command) == (2, "print(1)", ("python", "train.py"))
    assert [tuple(file) for file in store.files("j1")] == sorted(files)
    assert store.workload("j2") is None
    assert store.files("j2") == ()


@pytest.mark.parametrize("name", NASTY)
def test_any_text_is_kept_as_it_is(store: Store, job, name: str) -> None:
    files = [(f"f{name}"[:500], b"", False)]
    decision = NewDecision("submit", "j1", "rnd", name, "submitted", name, {name: name})
    store.add_workload(job(name=name, owner=f"o{name}", source=name, env={"A": name}), files, decision, now=1.0)
    result = store.workload("j1")
    assert result is not None
    assert (result.name, result.owner, result.source, result.env) == (name, f"o{name}", name, {"A": name})
    assert store.files("j1")[0].path == files[0][0]
    assert store.workloads(owner=f"o{name}")[0][0].id == "j1"
    assert store.decisions("j1")[0].numbers == {name: name}


@pytest.mark.parametrize(
    "given",
    [{"name": "a\x00b"}, {"owner": "\x00"}, {"command": ("a\x00",)}, {"env": {"\x00": ""}}, {"source": "\ud800"}],
)
def test_text_that_cannot_be_stored_is_refused_by_name(store: Store, job, given) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        store.add_workload(job(**given), now=1.0)
    with pytest.raises(ValueError, match="NUL"):
        store.add_workload(job(), [("a\x00", b"", False)], now=1.0)
    with pytest.raises(ValueError, match="twice"):
        store.add_workload(job(), [("a", b"", False), ("a", b"", False)], now=1.0)
    assert store.active() == []
    assert store.last_event_id() == 0


def test_questions_with_odd_texts_find_nothing(store: Store) -> None:
    assert store.workload("a\x00b") is None
    assert store.workloads(owner="\x00", teams=["\ud800"], states=["'"]) == ([], None)
    assert store.files("\x00") == ()
    assert store.attempts("\x00") == []
    assert store.decisions("\x00", ["\x00"], before=10**30) == []
    assert store.events(10**30) == []
    assert store.policies.version(10**30) is None


def test_an_id_is_used_once(store: Store, job) -> None:
    first = store.add_workload(job(), now=1.0)
    with pytest.raises(Conflict) as caught:
        store.add_workload(job(owner="bo"), now=2.0)
    assert caught.value.existing == first


def test_a_server_has_one_live_session(store: Store, job) -> None:
    first = store.add_workload(job("s1", kind="session", server=""), now=1.0)
    store.add_workload(job("s2", kind="session", server="other"), now=1.0)
    store.add_workload(job("j1", kind="job"), now=1.0)
    with pytest.raises(Conflict, match="s1") as caught:
        store.add_workload(job("s3", kind="session", server=""), now=2.0)
    assert caught.value.existing == first
    store.commit([Change("s1", {"state": "stopped", "ended_at": 3.0})], now=3.0)
    assert store.add_workload(job("s3", kind="session", server=""), now=4.0).live


def test_of_two_requests_at_once_one_gets_the_session(store: Store, job) -> None:
    for round in range(20):
        gate = threading.Barrier(2)
        outcomes: list[str] = []

        def ask(id: str, round: int = round, gate: threading.Barrier = gate, outcomes: list[str] = outcomes) -> None:
            gate.wait()
            try:
                store.add_workload(job(id, kind="session", server=f"n{round}"), now=1.0)
                outcomes.append(id)
            except Conflict as conflict:
                outcomes.append("conflict" if conflict.existing else "no session named")

        threads = [threading.Thread(target=ask, args=(f"s{round}{side}",)) for side in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes)[0] == "conflict"
        assert len(set(outcomes)) == 2
    assert len(store.active()) == 20


@pytest.mark.covers("F25")
def test_five_requests_at_once_do_not_pass_a_cap_of_two(store: Store, job) -> None:
    cap = Cap(2, "session", with_gpus=True)
    store.add_workload(job("other", kind="session", owner="bo"), now=0.0)
    store.add_workload(job("cpu", kind="session", gpus=0, server="cpu"), now=0.0)
    gate = threading.Barrier(5)
    outcomes: list[str] = []

    def ask(number: int) -> None:
        gate.wait()
        new = job(f"s{number}", kind="session", server=f"n{number}")
        try:
            store.add_workload(new, (), None, cap, now=1.0)
            outcomes.append("lease")
        except TooMany as full:
            outcomes.append(f"refused: {full.limit} of {len(full.existing)}")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["lease"] * 2 + ["refused: 2 of 2"] * 3
    assert len(store.active()) == 4


def test_a_cap_counts_what_the_same_batch_adds_and_what_has_ended_no_more(store: Store, job) -> None:
    cap = Cap(2, "job", ("pending",))
    store.add_workload(job("j0"), now=0.0)
    store.commit([Change("j0", {"state": "running"})], now=0.0)
    answers = store.add_workloads([(job(f"j{n}"), (), None, cap) for n in range(1, 5)], now=1.0)
    assert [type(answer).__name__ for answer in answers] == ["Workload", "Workload", "TooMany", "TooMany"]
    store.commit([Change("j1", {"state": "cancelled", "ended_at": 2.0})], now=2.0)
    assert store.add_workload(job("j5"), (), None, cap, now=3.0).live
    assert store.add_workload(job("j6", owner="bo"), (), None, cap, now=3.0).live


def test_pages_are_newest_first_and_lose_nothing(store: Store, job) -> None:
    for number in range(25):
        store.add_workload(job(f"j{number:02}", team="rnd" if number % 2 else "devops"), now=float(number // 10))
    seen: list[str] = []
    cursor = None
    while True:
        page, cursor = store.workloads(limit=4, cursor=cursor)
        seen += [workload.id for workload in page]
        if cursor is None:
            break
    assert seen == sorted(seen, key=lambda id: (int(id[1:]) // 10, id), reverse=True)
    assert len(seen) == 25
    assert {w.team for w in store.workloads(teams=["rnd"])[0]} == {"rnd"}
    assert store.workloads(teams=[]) == ([], None)
    assert store.workloads(kind="session") == ([], None)
    for bad in ("x", "~", "nan~\x00", ""):
        with pytest.raises(ValueError, match="cursor"):
            store.workloads(cursor=bad)


def test_what_is_active_is_read_without_the_large_parts(store: Store, job) -> None:
    store.add_workload(job("late", source="x" * 1000), now=2.0)
    store.add_workload(job("early"), now=1.0)
    store.add_workload(job("over"), now=0.0)
    store.commit([Change("over", {"state": "failed", "ended_at": 3.0})], now=3.0)
    assert [(workload.id, workload.source) for workload in store.active()] == [("early", ""), ("late", "")]
    assert [w.id for w in store.workloads(states=["failed"])[0]] == ["over"]


def test_clones_share_their_files(store: Store, job, url: str) -> None:
    large = [("data.bin", bytes(1_000_000), False)]
    before = store.size()
    for number in range(20):
        store.add_workload(job(f"j{number}"), large, now=1.0)
    assert store.size() - before < 8_000_000
    assert store.files("j19")[0].data == large[0][1]


def test_the_database_is_private(sqlite_url: str) -> None:
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    store = open_store(sqlite_url)
    store.add_event("usage", None, None, {}, 1.0)
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == (0o700 if file.is_dir() else 0o600), file
    store.close()


def test_readiness_follows_the_last_write_and_waits_for_no_lock(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.05)
    store = open_store(sqlite_url)
    heard: list[str] = []
    store.on_commit(lambda: heard.append("a commit"))
    store.probe()
    assert store.failure() is None
    with sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        assert store.failure() is None
        with pytest.raises(StoreError, match="locked"):
            store.probe(older_than=0.0)
        assert store.failure() == "database is locked"
        other.execute("ROLLBACK")
    store.probe(older_than=0.0)
    assert store.failure() is None
    with store._database.write():
        assert store.failure() is None, "asked while a write is under way"
    store.close()
    assert heard == ["a commit"], "an empty write is no news"


def test_a_write_waits_for_another_though_one_before_them_failed_in_a_statement(store: Store) -> None:
    """Only where writes cannot begin, as with a lock of another process, is it better not to wait."""
    writer = store._database
    with pytest.raises(StoreError), writer.write() as connection:
        connection.execute(text("SELECT no_such_function()"))
    assert store.failure() is not None
    holding, ends = threading.Event(), threading.Event()

    def hold() -> None:
        with writer.write():
            holding.set()
            ends.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holding.wait(60)
    threading.Timer(4 * database.FAILING_QUEUE_SECONDS, ends.set).start()
    with writer.write() as connection:
        assert connection.execute(text("SELECT 1")).scalar() == 1
    thread.join()
    assert store.failure() is None


def test_reads_that_need_a_new_connection_wait_for_no_lock(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.2)
    store = open_store(sqlite_url)
    with sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None) as other, ExitStack() as reads:
        other.execute("BEGIN IMMEDIATE")
        for _ in range(12):
            connection = reads.enter_context(store._database.read())
            assert connection.execute(text("SELECT count(*) FROM workloads")).scalar_one() == 0
    store.close()


def test_a_row_that_is_refused_does_not_make_the_database_count_as_failing(store: Store, job) -> None:
    store.probe()
    store.add_workload(job("there"), now=1.0)
    again = text("INSERT INTO workloads SELECT * FROM workloads WHERE id = 'there'")
    with pytest.raises(RowRefused), store._database.write() as connection:
        connection.execute(again)
    assert store.failure() is None


@pytest.mark.parametrize(
    "bad", ["", "x", "sqlite://", "sqlite:///:memory:", "mysql://a@b/c", "sqlite:////no/such/dir/a"]
)
def test_a_database_that_cannot_be_opened_says_why(bad: str) -> None:
    with pytest.raises(StoreError, match="database"):
        open_store(bad)


def test_a_file_that_is_no_database_says_so(tmp_path: Path) -> None:
    (tmp_path / "makeway.sqlite").write_text("This is a diary." * 1000)
    with pytest.raises(StoreError, match="not a database"):
        open_store(f"sqlite:///{tmp_path / 'makeway.sqlite'}")


texts = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=30)
times = st.none() | st.floats(0, 1e12)
places = st.lists(
    st.builds(
        Place,
        texts,
        st.lists(st.integers(0, 99), max_size=3).map(tuple),
        st.lists(st.integers(0, 1000), max_size=3).map(tuple),
        texts,
    ),
    max_size=3,
).map(tuple)
notices = st.none() | st.builds(
    Notice, texts, st.floats(0, 1e12), st.floats(0, 1e12), st.sampled_from(["evict", "move"]), st.none() | texts
)
changes = st.fixed_dictionaries(
    {},
    optional={
        "state": st.sampled_from(["pending", "running", "checkpointing", "failed"]),
        "reason_message": texts,
        "reason_numbers": st.dictionaries(texts, st.integers(-(2**53), 2**53) | texts | st.booleans(), max_size=3),
        "borrowed_from": st.lists(texts, max_size=3).map(tuple),
        "placement": places,
        "nomination": places,
        "notice": notices,
        "started_at": times,
        "checkpoint_step": st.none() | st.integers(-(2**63) + 1, 2**63 - 1),
        "over_quota": st.booleans(),
        "evicted_for": st.none() | texts,
    },
)


@given(st.lists(changes, max_size=5))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_change_reads_back(tmp_path_factory: pytest.TempPathFactory, steps: list[dict[str, object]]) -> None:
    store = open_store(f"sqlite:///{tmp_path_factory.mktemp('store') / 'makeway.sqlite'}")
    try:
        store.add_workload(NewWorkload("j1", "job", "rnd", "gpu1", "ana"), now=1.0)
        expected: dict[str, object] = {}
        for step in steps:
            assert store.commit([Change("j1", step)], now=2.0) == {"j1"}
            expected |= step
        result = store.workload("j1")
        assert result is not None
        assert result.version == 1 + len(steps)
        assert {name: getattr(result, name) for name in expected} == expected
    finally:
        store.close()


def test_attempts_are_kept_in_order(store: Store, job) -> None:
    store.add_workload(job(), now=0.0)
    for number in (1, 2):
        opened = Attempt("j1", number, float(number), placement=(Place("n1", (0, 3), (1000, 500)),), over_quota=True)
        assert store.commit([Change("j1", {"attempt": number}, open_attempt=opened)], now=1.0)
        closing = {"ended_at": number + 0.5, "outcome": "preempted", "lost_seconds": 0.25, "evicted_for": "s1"}
        assert store.commit([Change("j1", close_attempt=closing)], now=2.0)
        assert store.attempts("j1")[-1].placement == opened.placement
    assert [(a.number, a.ended_at, a.evicted_for) for a in store.attempts("j1")] == [(1, 1.5, "s1"), (2, 2.5, "s1")]


def test_of_many_submissions_each_has_its_own_answer(store: Store, job) -> None:
    store.add_workload(job("old"), now=0.0)
    place = {"kind": "session", "server": "lab"}
    files = (("a.py", b"1", False),)
    answers = store.add_workloads(
        [
            (job("j1", source="x"), files, NewDecision("submit", "j1", "rnd", "ana", "job", "Submitted.")),
            (job("old"), (), NewDecision("submit", "old", "rnd", "ana", "job", "Submitted twice.")),
            (job("bad", name="a\x00"), (), None),
            (job("j1"), (), None),
            (job("s1", **place), (), None),
            (job("s2", **place), (), None),
            (job("twice"), (*files, *files), None),
            (job("j2"), files, None),
        ],
        now=1.0,
    )
    kinds = [type(answer).__name__ for answer in answers]
    assert kinds == [
        "Workload",
        "Conflict",
        "ValueError",
        "Conflict",
        "Workload",
        "Conflict",
        "ValueError",
        "Workload",
    ]
    assert [w.id for w in store.active()] == ["old", "j1", "s1", "j2"]
    assert store.files("j1") == store.files("j2") == (("a.py", b"1", False),)
    assert [d.workload for d in store.decisions()] == ["j1"]
    assert [e.workload for e in store.events(1)] == ["j1", "s1", "j2", "j1"]
