"""Jobs of which nothing ran, through no fault of theirs: they are delayed, go to another node, and lose nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from makeway_quota import policy
from makeway_quota.backends.base import AttemptStatus, NodeStatus, Observation, Phase, StartOrder
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.control.reconcile import reconcile
from makeway_quota.control.start_backoff import (
    CLOCKS_DIFFER,
    FIRST_AVOIDED,
    FIRST_DELAY,
    MANY_TRIES,
    MAX_DELAY,
    NO_ROOM,
    RARE_DELAY,
    StartBackoff,
    backoff_until,
)
from makeway_quota.control.world.engine_view import EngineView
from makeway_quota.control.world.observation import Observed
from makeway_quota.control.world.pool_assignment import divide
from makeway_quota.history.durations import Durations
from makeway_quota.store.records import Change, NewWorkload, Workload
from makeway_quota.store.rows import initial_record
from makeway_quota.values import Place
from running import running

NODES = tuple(NodeStatus(name, "", (0,), virtual=True) for name in ("n1", "n2"))
SAYS = "its node n1 refused its pod (OutOfcpu): Node didn't have enough resource: cpu"
POLICY = policy.read_policy("""
version: 1
pools: [{name: a, nodes: {local: {gpus: all}}}]
profiles: [{name: gpu1, gpus: 1, policies: [rnd]}]
policies: [{name: rnd, groups: [rnd], quotas: [{reserved: 2}]}]
""")


def row(node: str = "n1", **changes: object) -> Workload:
    """Return a job whose first attempt was just ordered to start."""
    made = initial_record(NewWorkload("j-1", "job", "rnd", "gpu1", "ana", name="x", gpus=1000), 0.0)
    placed = {"state": "starting", "attempt": 1, "started_at": 10.0, "placement": (Place(node, (0,), (1000,)),)}
    return made._replace(**(placed | changes))  # type: ignore[arg-type]


def refused(
    job: Workload, backoff: StartBackoff, now: float, nodes: tuple[NodeStatus, ...] = NODES, **facts: bool
) -> Change:
    """Return what becomes of a job of which nothing ran, once it is committed."""
    change = not_run(job, backoff, now, nodes, **facts)
    backoff.committed([after(job, change)])
    return change


def not_run(
    job: Workload, backoff: StartBackoff, now: float, nodes: tuple[NodeStatus, ...] = NODES, **facts: bool
) -> Change:
    seen = AttemptStatus(job.id, job.attempt, Phase.LOST, message=SAYS, **({"never_ran": True} | facts))
    (change,) = reconcile(
        {job.id: job}, Observation(nodes, (seen,)), now=now, max_infra_failures=0, document=POLICY, backoff=backoff
    ).changes
    return change


def after(job: Workload, change: Change) -> Workload:
    return job._replace(**change.fields)  # type: ignore[arg-type]


def many(backoff: StartBackoff, now: float) -> Workload:
    """Return the job after so many tries in a row that it waits for an hour."""
    for _ in range(MANY_TRIES + 1):
        waits = after(row(), refused(row(), backoff, now))
    return waits


def avoided(backoff: StartBackoff, now: float) -> list[str]:
    return [node for node, _ in backoff.avoided_nodes("j-1", now)]


@pytest.mark.parametrize("node_lost", [False, True])
def test_a_job_of_which_nothing_ran_is_delayed_longer_and_longer_and_has_lost_nothing(node_lost: bool) -> None:
    backoff, waited = StartBackoff(), list[float]()
    for now in range(100, 117):
        change = refused(row(), backoff, float(now), node_lost=node_lost)
        waits = after(row(), change)
        assert (waits.state, waits.failures, waits.infra_failures, waits.lost_on) == ("pending", 0, 0, ())
        assert change.drop_attempt, "it is none of its attempts"
        assert SAYS in waits.reason_message
        until = backoff_until(waits, float(now))
        assert until is not None
        waited.append(until - now)
    short, hour = [60.0, 120.0, 240.0, 480.0, *[900.0] * 8], 3600.0
    assert waited == [*short, *[hour] * 5], "others make way for each try"
    backoff.committed([row(state="running")])
    assert refused(row(), backoff, 200.0).fields["not_before"] == 260.0, "once it ran, it begins anew"


def test_a_job_says_after_how_many_tries_it_waits_for_how_long() -> None:
    waits = many(StartBackoff(), 100.0)
    assert waits.reason_numbers == {"tries": MANY_TRIES + 1}
    assert waits.reason_message.endswith("; after 13 tries in a row it waits 1 h before the next one.")


def test_a_job_waits_for_the_quota_of_a_namespace_never_longer_than_a_quarter_of_an_hour() -> None:
    backoff = StartBackoff()
    for _ in range(MANY_TRIES + 20):
        change, _ = backoff.requeue(row(), "“train” of ana", SAYS, 100.0, NO_ROOM)
        waits = after(row(), change)
        backoff.committed([waits])
    assert waits.not_before == 100.0 + MAX_DELAY
    assert backoff_until(waits, 100.0) == waits.not_before
    assert backoff_until(waits, 30.0) is None, "the clock was set back"


def test_a_try_counts_once_it_is_committed() -> None:
    """The database may be away for many cycles, each of which finds the same attempt."""
    backoff = StartBackoff()
    for _ in range(20):
        change = not_run(row(), backoff, 100.0)
    assert change.fields["not_before"] == 160.0
    assert backoff.refused == {}


def test_another_replica_that_heard_of_the_tries_counts_on() -> None:
    first, second = StartBackoff(), StartBackoff()
    second.committed([many(first, 100.0)])
    assert refused(row(), second, 4000.0).fields["not_before"] == 4000.0 + 3600.0


def test_a_long_delay_lasts_in_another_process_and_ends_with_a_clock_that_is_set_back() -> None:
    waits = many(StartBackoff(), 10_000.0)
    until = waits.not_before
    assert until == 10_000.0 + 3600.0
    for now in (10_000.0, 10_000.0 - CLOCKS_DIFFER, until - 1.0):
        assert backoff_until(waits, now) == until
    for now in (9_999.0 - CLOCKS_DIFFER, until, until + 1.0):
        assert backoff_until(waits, now) is None
    once = after(row(), refused(row(), StartBackoff(), 10_000.0))
    assert backoff_until(once, 8_000.0) is None, "a delay of a minute does not become one of half an hour"
    untold = once._replace(reason_numbers={}, not_before=10_000.0 + MAX_DELAY)  # by an earlier version
    assert backoff_until(untold, 10_000.0) == 10_000.0 + MAX_DELAY


def test_a_job_is_shown_to_the_engine_when_the_clock_is_set_back() -> None:
    backoff, assignment = StartBackoff(), divide(NODES, POLICY)
    view, rows = EngineView(Durations(), backoff), {"j-1": many(backoff, 100_000.0)}
    view.stale = {"j-1"}
    for now, shown in ((100_000.0, 0), (100_000.0 - CLOCKS_DIFFER, 0), (50_000.0, 1)):
        view.show(rows, assignment, POLICY, now)
        assert len(view.workloads()) == shown
    assert view.workloads()[0].avoid == (), "nor does it avoid a node for so long"


def test_a_job_that_ran_was_lost() -> None:
    backoff = StartBackoff()
    change = refused(row(state="running"), backoff, 100.0, never_ran=False)
    assert change.fields["infra_failures"] == 1
    assert (backoff.refused, avoided(backoff, 100.0)) == ({}, [])


def test_a_job_avoids_the_node_that_did_not_start_it_for_a_while_where_there_is_another() -> None:
    backoff = StartBackoff()
    refused(row(), backoff, 100.0, NODES[:1])
    assert avoided(backoff, 100.0) == [], "there is no other node"
    refused(row(), backoff, 100.0)
    assert avoided(backoff, 100.0) == ["n1"]
    refused(row("n2"), backoff, 200.0)
    assert avoided(backoff, 200.0) == ["n2"], "the other one had its turn"
    three = (*NODES, NodeStatus("n3", "", (0,), virtual=True))
    refused(row(), backoff, 300.0, three)
    assert avoided(backoff, 300.0) == ["n1", "n2"]
    assert avoided(backoff, 700.0) == ["n1"], "for 8 min after the second refusal, 16 min after the third one"
    refused(row("n3"), backoff, 700.0, (*three[:2], replace(three[2], ready=False)), node_lost=True, never_ran=False)
    assert avoided(backoff, 700.0) == ["n1"], "that a node is down says nothing new about the others"
    for now in range(100_000, 2_000_001, 100_000):
        refused(row(), backoff, now)
    max_length = RARE_DELAY + MAX_DELAY
    assert avoided(backoff, 1_999_999.0 + max_length) == ["n1"], "still at its next try"
    assert avoided(backoff, 2_000_000.0 + max_length) == []


def test_of_a_gang_only_the_node_that_did_not_start_its_worker_is_avoided() -> None:
    backoff, three = StartBackoff(), (*NODES, NodeStatus("n3", "", (0,), virtual=True))
    gang = row(workers=2, placement=(Place("n1", (0,), (1000,)), Place("n2", (0,), (1000,))))
    seen = AttemptStatus("j-1", 1, Phase.LOST, message=SAYS, never_ran=True, worker=1)
    reconcile(
        {"j-1": gang}, Observation(three, (seen,)), now=100.0, max_infra_failures=0, document=POLICY, backoff=backoff
    )
    assert avoided(backoff, 100.0) == ["n2"]


def test_a_job_whose_pod_was_preempted_there_goes_elsewhere_at_once() -> None:
    """The scheduler of Kubernetes gave its room to a pod that is more important."""
    backoff = StartBackoff()
    waits = after(row(), refused(row(state="running"), backoff, 100.0, node_lost=True, never_ran=False))
    assert (waits.state, waits.infra_failures, backoff_until(waits, 100.0)) == ("pending", 0, None)
    assert avoided(backoff, 100.0) == ["n1"]
    down = (replace(NODES[0], ready=False), NODES[1])
    other = StartBackoff()
    refused(row(state="running"), other, 100.0, down, node_lost=True, never_ran=False)
    assert avoided(other, 100.0) == [], "it takes nothing while it is down, and is as good as before afterwards"


def test_the_engine_sees_what_a_job_avoids_as_long_as_it_does() -> None:
    backoff, waits = StartBackoff(), row(state="pending", placement=())
    view, assignment = EngineView(Durations(), backoff), divide(NODES, POLICY)
    backoff.avoid("j-1", ["n1"], 100.0)
    view.stale = {"j-1"}
    for now, nodes in ((100.0, {"n1"}), (99.0 + FIRST_AVOIDED, {"n1"}), (100.0 + FIRST_AVOIDED, set[str]())):
        view.show({"j-1": waits}, assignment, POLICY, now)
        (shown,) = view.workloads()
        assert {node for node in shown.avoid if "/" not in node} == nodes


class Rejecting(MemoryBackend):
    """A backend of which one node runs nothing that it gets."""

    rejects = "n1"

    async def start(self, order: StartOrder) -> None:
        await super().start(order)
        if order.workers[0].node == self.rejects:
            entry = self.newest(order.workload)
            entry.status = replace(entry.status, phase=Phase.LOST, never_ran=True, node_lost=True, message=SAYS)


async def test_a_job_that_a_node_rejects_is_delayed_and_runs_on_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("makeway_quota.control.start_backoff.FIRST_DELAY", 0.5)
    backend = Rejecting(NODES, real_time=True)
    async with running(tmp_path, backend=backend, MAKEWAY_TICK_SECONDS=0.1) as run:
        job = await run.submit("ana", "train", profile="gpu1")
        runs = await run.job(job.id, "running")
        assert (runs.failures, len(runs.attempts)) == (0, 1), "what never ran is no attempt"
        row = run.service.components.store.workload(job.id)
        assert row is not None
        assert (row.infra_failures, row.attempt, row.placement[0].node) == (0, 2, "n2")
        message = [item.message for item in await run.client("ana").job_events(job.id) if item.code == "start_deferred"]
        assert message == [
            f"“train” of ana cannot be started yet: {SAYS}. Its GPUs go to others; it waits 0.5 s before the next try."
        ]


def test_another_process_knows_the_tries_and_the_avoided_nodes_of_a_job_that_is_being_started() -> None:
    first = StartBackoff()
    waits = many(first, 100.0)
    started = waits._replace(state="starting", reason_code="starting", reason_numbers={}, not_before=None)
    second = StartBackoff()
    second.committed([started])
    assert second.refused == first.refused == {"j-1": MANY_TRIES + 1}
    assert avoided(second, 100.0) == avoided(first, 100.0) == ["n1"]
    again = after(started, refused(started, second, 200.0))
    assert again.start_tries == MANY_TRIES + 2
    assert again.not_before == 200.0 + RARE_DELAY


def test_a_job_that_runs_begins_its_tries_anew_in_its_row() -> None:
    waits = many(StartBackoff(), 100.0)._replace(state="starting")
    running = AttemptStatus("j-1", 1, Phase.RUNNING)
    (change,) = reconcile(
        {"j-1": waits}, Observation(NODES, (running,)), now=200.0, max_infra_failures=0, document=POLICY
    ).changes
    assert (change.fields["start_tries"], change.fields["avoids"]) == (0, ())


@pytest.mark.parametrize("returned", [["n1"], ["n3"]])
def test_a_node_that_returns_ends_a_long_wait(returned: list[str]) -> None:
    backoff = StartBackoff()
    waits = many(backoff, 100.0)
    assert waits.not_before == 100.0 + RARE_DELAY
    (woken_soon,) = backoff.wake({"j-1": waits}, returned, 1000.0)
    woken = after(waits, woken_soon.change)
    assert woken.not_before == 1000.0
    assert backoff_until(woken, 1000.0) is None
    assert [node for node, _ in woken.avoids] == ([] if returned == ["n1"] else ["n1"])
    assert woken.reason_message == (
        f"“x” of ana could not be started: {SAYS}. Nodes are back ({returned[0]}), so it is tried again soon."
    )
    assert backoff.wake({"j-1": woken}, returned, 1001.0) == [], "it waits for nothing any more"


def test_a_node_that_comes_and_goes_has_a_job_tried_once_a_minute_at_most() -> None:
    backoff = StartBackoff()
    waits = many(backoff, 100.0)
    for now in (101.0, 130.0, 159.0):
        soon = backoff.wake({"j-1": waits}, ["n1"], now)
        waits = after(waits, soon[0].change) if soon else waits
        assert waits.not_before == 100.0 + FIRST_DELAY
    assert backoff.wake({"j-1": waits}, [], 500.0) == []


@pytest.mark.parametrize(
    ("before", "now", "returns"),
    [
        (NodeStatus("n1", "", (0,), ready=False), NodeStatus("n1", "", (0,)), True),
        (NodeStatus("n1", "", (0,), cordoned=True), NodeStatus("n1", "", (0,)), True),
        (NodeStatus("n1", "", (0,)), NodeStatus("n1", "", (0, 1)), True),
        (None, NodeStatus("n1", "", (0,)), True),
        (NodeStatus("n1", "", (0,)), NodeStatus("n1", "", (0,), foreign_cpu=1), False),
        (NodeStatus("n1", "", (0,), ready=False), NodeStatus("n1", "", (0,), ready=False, cordoned=True), False),
    ],
)
def test_a_node_returns_where_it_may_take_more_than_before(
    before: NodeStatus | None, now: NodeStatus, returns: bool
) -> None:
    observed = Observed()
    assert observed.merge(Observation((before,) if before else (), version=1)).returned == (), (
        "the first list returns nothing"
    )
    assert observed.merge(Observation((now,), version=2)).returned == (("n1",) if returns else ())
