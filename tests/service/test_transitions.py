"""The table of states: what each event does in each state of a row, and what the ends of a workload leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from makeway_quota.backends.base import AttemptStatus, Phase
from makeway_quota.control import transitions
from makeway_quota.control.transitions import EVENTS, AttemptEnd, Transition
from makeway_quota.engine.plan import Evict, Refusal, Start, Waiting
from makeway_quota.engine.snapshot import ADMITTED
from makeway_quota.store import Store, open_store
from makeway_quota.store.records import ENDED, LIVE_STATES, Attempt, Change, NewWorkload, Workload
from makeway_quota.values import Notice, Place

STATES = sorted({*LIVE_STATES, *ENDED})
HERE = (Place("n1", (0,), (1000,)),)
NOW = 5000.0
EXITED = AttemptStatus("j1", 3, Phase.EXITED, 4000.0, 4900.0, 1, message="it broke", step=7, checkpoint_at=4500.0)
END = AttemptEnd(EXITED, NOW, 900.0, lost_seconds=400.0)

MADE: dict[str, Callable[[Workload], Transition]] = {
    "start": lambda row: transitions.start(row, Start("j1", "p", (), True, "fifo", (), {}), "It starts.", NOW, 60, ()),
    "explain": lambda row: transitions.explain(row, Waiting("j1", "gpus", "gpus", (), {}), "No GPU is free."),
    "exclude": lambda row: transitions.exclude(row, "not_member", "ana left."),
    "try_soon": lambda row: transitions.try_soon(row, NOW + 1, "n1 is back.", ()),
    "move_queue": lambda row: Transition(transitions.move_queue(row, "ops", "queue_changed", "Moved.", {})),
    "refuse": lambda row: transitions.refuse(row, Refusal("j1", "unschedulable", "size", (), {}), "Too large.", NOW),
    "cancel": lambda row: transitions.cancel(row._replace(state="pending"), "ana", "ana cancelled it.", NOW),
    "request_cancel": lambda row: transitions.cancel(row._replace(state="running"), "ana", "ana cancelled it.", NOW),
    "launch": lambda row: transitions.launch(row.id, NOW),
    "retry_launch": lambda row: transitions.retry_launch(row, "start_postponed", "No answer."),
    "start_again": lambda row: transitions.start_again(row, "start_refused", "No device.", {"n": 1}, NOW + 1, NOW),
    "defer": lambda row: transitions.defer(row, "no_room", "A quota is used up.", 1, NOW + 60, ()),
    "run": lambda row: observed(row._replace(state="starting"), Phase.RUNNING),
    "open": lambda row: transitions.open_server(row, "It runs."),
    "report": lambda row: observed(row._replace(state="running"), Phase.RUNNING),
    "notice": lambda row: transitions.notice(row, Evict("j1", "p", NOW + 60, "reclaim", (), {}), "Way.", None, NOW),
    "preempt_test": lambda row: transitions.preempt_test(row, "ana", "ana tests it.", NOW),
    "overrun": lambda row: transitions.overrun(row, "Too long.", "1 h"),
    "requeue": lambda row: transitions.requeue(row, END, "preempted", "made_way", "It made way.", {"preemptions": 1}),
    "succeed": lambda row: transitions.finish(row, END, "succeeded", "It is done."),
    "fail": lambda row: transitions.finish(row, END, "failed", "It failed."),
    "end_cancelled": lambda row: transitions.finish(row, END, "cancelled", "ana cancelled it."),
    "release": lambda row: transitions.release(row, "release", "released", "It was stopped.", NOW),
    "resume": lambda row: transitions.resume(row, "ana resumes it.", NOW),
}
"""One transition of each event, for a row in any state"""

ALWAYS = {"id": "j1", "owner": "ana", "kind": "job", "team": "rnd", "profile": "one"}
"""Fields that no event but `move_queue` changes"""


def observed(row: Workload, phase: Phase) -> Transition:
    made = transitions.observe(row, AttemptStatus("j1", 3, phase, step=8, checkpoint_at=4950.0))
    assert made is not None
    return made


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    opened = open_store(f"sqlite:///{tmp_path_factory.mktemp('states') / 'makeway.sqlite'}")
    yield opened
    opened.close()


def stored(store: Store, id: str, state: str, **more: object) -> Workload:
    """Return a row in a state, with everything that a row in that state may have."""
    store.add_workload(NewWorkload(id, "job", "rnd", "one", "ana", gpus=1000), now=3000.0)
    fields: dict[str, object] = {"state": state, "attempt": 2, "exit_code": 75, "preemptions": 1}
    opened = None
    if state == "pending":
        fields |= {"nomination": HERE, "not_before": 5100.0, "start_tries": 2, "avoids": (("n2", 6000.0),)}
    elif state in ADMITTED:
        fields |= {"attempt": 3, "placement": HERE, "started_at": 4000.0, "over_quota": True, "borrowed_from": ("ops",)}
        opened = Attempt(id, 3, 4000.0, placement=HERE)
    else:
        fields["ended_at"] = 4800.0
    if state == "starting":
        fields |= {"start_tries": 2, "avoids": (("n2", 6000.0),), "reason_numbers": {"gpus": 1}}
    if state == "checkpointing":
        fields |= {"notice": Notice("reclaim", 4900.0, 4960.0, by_workload="p"), "evicted_for": "p"}
    store.commit([Change(id, fields | more, open_attempt=opened)], [], now=4000.0)
    row = store.workload(id)
    assert row is not None
    return row


def renamed(change: Change, id: str) -> Change:
    return Change(id, change.fields, change.expect_version, change.expect_states, None, change.close_attempt)


def test_every_event_has_one_transition() -> None:
    assert set(MADE) == set(EVENTS)


@pytest.mark.parametrize("event", EVENTS)
def test_every_event_in_every_state_has_the_outcome_of_the_table(store: Store, event: str) -> None:
    for state in STATES:
        id = f"{event}-{state}"
        before = stored(store, id, state)
        made = MADE[event](before)
        applied = store.commit([renamed(made.change, id)], made.decisions, now=NOW)
        after = store.workload(id)
        assert after is not None
        if state not in EVENTS[event].before:
            assert (id in applied, after) == (False, before), "an event without effect changes nothing"
            continue
        assert id in applied
        assert after.state == (EVENTS[event].after or state)
        assert after.live == (after.ended_at is None)
        for name, value in ALWAYS.items():
            assert name in ("id", "team") or getattr(after, name) == value
        if after.state not in ADMITTED:
            assert (after.placement, after.notice, after.evicted_for) == ((), None, None)
            assert (after.over_quota, after.borrowed_from) == (False, ())


@pytest.mark.parametrize("event", EVENTS)
def test_a_change_that_was_decided_on_another_version_has_no_effect(store: Store, event: str) -> None:
    state = min(EVENTS[event].before)
    id = f"late-{event}"
    before = stored(store, id, state)
    made = MADE[event](before).change
    if made.expect_version is None:
        return  # the state alone decides
    store.commit([Change(id, {"reason_message": "Somewhat else."})], [], now=NOW)
    assert not store.commit([renamed(made, id)], [], now=NOW)


ENDS: dict[str, tuple[str, Callable[[Workload], Transition]]] = {
    "failed": ("running", lambda row: transitions.finish(row, END, "failed", "Over.")),
    "failed under a notice": ("checkpointing", lambda row: transitions.finish(row, END, "failed", "Over.")),
    "failed to start": ("starting", lambda row: transitions.fail_to_start(row, "Over.", NOW)),
    "cancelled while pending": ("pending", lambda row: transitions.cancel(row, "ana", "Over.", NOW)),
    "cancelled while running": ("running", lambda row: transitions.finish(row, END, "cancelled", "Over.")),
    "cancelled before its start": ("starting", lambda row: transitions.cancel_before_start(row, "Over.", NOW)),
    "refused": ("pending", MADE["refuse"]),
    "refused session": ("pending", lambda row: transitions.refuse_session(row, "not_member", "Over.", NOW)),
    "released": ("running", MADE["release"]),
    "expired": ("checkpointing", lambda row: transitions.release(row, "expire", "lease_expired", "Over.", NOW)),
    "made way": ("checkpointing", lambda row: transitions.release(row, "release", "made_way", "Over.", NOW)),
    "succeeded": ("running", lambda row: transitions.finish(row, END, "succeeded", "Over.")),
    "withdrawn": ("running", lambda row: transitions.withdraw(row, NOW)),
}
"""Every way in which a workload ends: the state before, and its transition"""

OF_THE_CAUSE = {
    "state", "attempt", "exit_code", "message", "reason_code", "reason_message", "reason_numbers", "ran", "failures",
    "checkpoint_step", "checkpoint_at", "started_at", "version", "id",
}  # fmt: skip
"""Fields of an ended row that tell what happened; all others are the same after every end."""


def test_every_end_leaves_the_same_row(store: Store) -> None:
    rows = {}
    for at, (name, (state, make)) in enumerate(ENDS.items()):
        id = f"end-{at}"
        made = make(stored(store, id, state))
        assert store.commit([renamed(made.change, id)], made.decisions, now=NOW)
        row = store.workload(id)
        assert row is not None
        assert row.state in ENDED
        rows[name] = {field: value for field, value in row._asdict().items() if field not in OF_THE_CAUSE}
    first = next(iter(rows.values()))
    for name, row in rows.items():
        assert row == first, name


@pytest.mark.parametrize("way", [name for name in ENDS if name.startswith("failed")])
def test_every_failure_counts(store: Store, way: str) -> None:
    state, make = ENDS[way]
    row = stored(store, f"count-{way}", state)
    assert row._replace(**make(row).change.fields).failures == row.failures + 1
