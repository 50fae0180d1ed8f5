"""Attempts that are not reported: expected, lost, or not started yet; and losses that say nothing about the job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from makeway_quota import policy
from makeway_quota.application import Application
from makeway_quota.backends.base import AttemptStatus, BackendState, NodeStatus, Observation, Phase
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.control.reconcile import reconcile
from makeway_quota.control.world.engine_view import EngineView, to_avoid
from makeway_quota.control.world.expectations import NOTE_AFTER, Expectations
from makeway_quota.control.world.observation import BackendStates
from makeway_quota.control.world.pool_assignment import divide
from makeway_quota.history.durations import Durations
from makeway_quota.store.records import NewWorkload, Workload
from makeway_quota.store.rows import initial_record
from makeway_quota.values import Place
from running import running

NODES = tuple(NodeStatus(name, "", (0, 1), virtual=True) for name in ("n1", "n2"))
KEY = ("j-12345678", 1)
POLICY = policy.read_policy("""
version: 1
pools:
  - {name: a, nodes: {local: {gpus: all}}}
  - {name: b, nodes: {labels: {pool: b}}}
profiles:
  - {name: gpu1, gpus: 1, pools: [a], policies: [rnd]}
  - {name: both, gpus: 1, policies: [rnd]}
policies: [{name: rnd, groups: [rnd], quotas: [{reserved: 2}]}]
""")
A100 = replace(POLICY.profiles[0], name="a100", models=("A100",))
POLICY = replace(POLICY, profiles=(*POLICY.profiles, A100))


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def row(**changes: object) -> Workload:
    """Return a job whose first attempt was just decided."""
    made = initial_record(NewWorkload(KEY[0], "job", "rnd", "gpu1", "ana", name="x"), 0.0)
    placed = {"state": "starting", "attempt": 1, "started_at": 10.0, "placement": (Place("n1", (0,), (1000,)),)}
    return made._replace(**(placed | changes))  # type: ignore[arg-type]


def test_an_attempt_is_started_once_then_expected_then_lost() -> None:
    clock = Clock()
    expectations = Expectations(60.0, clock)
    assert expectations.verdict(row(), synced=False, now=20.0) == "wait", "absence means nothing yet"
    assert expectations.verdict(row(), synced=True, now=20.0) == "start"
    expectations.expect_starts([KEY])
    clock.now += 59.0
    assert expectations.verdict(row(), synced=True, now=20.0) == "wait"
    clock.now += 1.0
    assert expectations.verdict(row(), synced=True, now=20.0) == "lost", "whatever the time of day says"
    assert expectations.verdict(row(attempt=2), synced=True, now=20.0) == "start"


@pytest.mark.parametrize("state", ["starting", "running", "checkpointing"])
def test_an_attempt_that_was_seen_once_and_is_gone_is_lost(state: str) -> None:
    expectations = Expectations(60.0, Clock())
    expectations.expect_starts([KEY])
    expectations.note([AttemptStatus(*KEY, Phase.STARTING)])
    assert expectations.verdict(row(state=state), synced=False, now=20.0) == "wait"
    assert expectations.verdict(row(state=state), synced=True, now=20.0) == "lost"


def test_a_new_process_knows_from_the_row_what_was_ordered() -> None:
    clock = Clock()
    before, after = Expectations(60.0, clock), Expectations(60.0, clock)
    before.expect_starts([KEY])
    assert before.launch_times_to_store([row()], now=500.0) == {}
    clock.now += NOTE_AFTER
    assert before.launch_times_to_store([row()], now=500.0) == {KEY[0]: 500.0 - NOTE_AFTER}
    noted = row(launched_at=500.0 - NOTE_AFTER)
    assert before.launch_times_to_store([noted], now=500.0) == {}
    assert after.verdict(noted, synced=True, now=510.0) == "wait"
    clock.now += 60.0 - NOTE_AFTER - 10.0
    assert after.verdict(noted, synced=True, now=510.0) == "lost"
    for odd in (-1e9, 1e9):
        assert Expectations(60.0, clock).verdict(noted, True, odd) in ("wait", "lost"), "never started again"
    ahead = Expectations(60.0, clock)
    assert ahead.verdict(noted, True, 510.0 + 3600) == "wait", "the clock of this process may be ahead"
    clock.now += 10.0
    assert ahead.verdict(noted, True, 510.0 + 3610) == "lost"
    running_row, evicted = row(state="running"), row(state="checkpointing")
    assert {after.verdict(item, True, 510.0) for item in (running_row, evicted._replace(attempt=3))} == {"lost"}


def test_an_attempt_whose_start_broke_off_has_yet_to_be_seen() -> None:
    expectations = Expectations(60.0, Clock())
    expectations.note([AttemptStatus(*KEY, Phase.STARTING)])
    expectations.note([AttemptStatus(*KEY, Phase.STARTING, start_broke_off=True)])
    assert expectations.verdict(row(), synced=True, now=20.0) == "start"


def test_what_is_over_is_not_remembered() -> None:
    expectations = Expectations(60.0, Clock())
    expectations.expect_starts([KEY, ("j-2", 1)])
    expectations.note([AttemptStatus(*KEY, Phase.STARTING), AttemptStatus("j-3", 4, Phase.STARTING)])
    expectations.keep({KEY[0]: row()})
    assert (list(expectations._ordered), expectations._reported) == ([KEY], {KEY})


async def test_a_deleted_attempt_is_lost_and_the_next_one_starts(tmp_path: Path) -> None:
    backend = MemoryBackend(NODES, real_time=True)
    async with running(tmp_path, backend=backend, MAKEWAY_TICK_SECONDS=0.1) as run:
        job = await run.submit("ana", "train", profile="gpu1")
        await run.job(job.id, "running")
        del backend.attempts[job.id, 1]
        await run.until(lambda: (job.id, 2) in backend.attempts, "a second attempt is started")
        assert (job.id, 1) not in backend.attempts, "the first one is not started again"
        attempts = [(a.number, a.outcome) for a in run.service.components.store.attempts(job.id)]
        assert attempts == [(1, "lost"), (2, None)]


class Late(MemoryBackend):
    """A backend whose list is behind: what is started is shown only once `shows` says so."""

    shows = False
    orders = 0

    async def start(self, order: object) -> None:
        self.orders += 1
        await super().start(order)  # type: ignore[arg-type]

    async def observe(self, since: int | None = None) -> Observation:
        seen = await super().observe()
        return seen if self.shows else replace(seen, attempts=())


async def test_an_attempt_that_is_not_shown_yet_is_not_started_again(tmp_path: Path) -> None:
    backend = Late(NODES, real_time=True)
    async with running(tmp_path, backend=backend, MAKEWAY_TICK_SECONDS=0.1) as run:
        job = await run.submit("ana", "train", profile="gpu1")
        await run.until(lambda: backend.orders, "it is ordered")
        cycles = run.service.loop.cycles
        await run.until(lambda: run.service.loop.cycles > cycles + 5, "cycles pass")
        assert (backend.orders, (await run.job(job.id)).state.value) == (1, "starting")
        backend.shows = True
        await run.job(job.id, "running")
        assert backend.orders == 1


async def test_before_a_backend_is_synced_nothing_is_concluded(tmp_path: Path) -> None:
    backend = Late(NODES, real_time=True)
    backend.shows = True
    async with running(tmp_path, backend=backend, MAKEWAY_TICK_SECONDS=0.1) as run:
        job = await run.submit("ana", "train", profile="gpu1")
        await run.job(job.id, "running")
        await run.service.stop(stop_jobs=False)
        backend.shows = backend.synced = False
        again = await Application.open(run.service.components.settings, backend)
        await again.start()
        run.service = again
        await run.until(lambda: again.loop.cycles > 5, "cycles pass")
        assert (await again.components.world.rows())[job.id].attempt == 1
        backend.shows = backend.synced = True
        await run.until(lambda: again.components.world.observed.synced, "the list is complete")
        assert (await again.components.world.rows())[job.id].state == "running"
        assert backend.orders == 1


def lost(job: Workload, nodes: tuple[NodeStatus, ...] = NODES, **facts: bool) -> Workload:
    """Return what a job is after it was lost once more, on the node where it ran."""
    seen = AttemptStatus(job.id, job.attempt, Phase.LOST, **facts)
    (change,) = reconcile(
        {job.id: job}, Observation(nodes, (seen,)), now=100.0, max_infra_failures=2, document=POLICY
    ).changes
    return job._replace(**change.fields)  # type: ignore[arg-type]


def test_a_loss_with_the_node_does_not_count() -> None:
    job = row(state="running")
    down = (NodeStatus("n1", "", (0, 1), ready=False), NODES[1])
    for after in (lost(job, down), lost(job, NODES[1:]), lost(job, node_lost=True)):
        assert (after.state, after.infra_failures, after.lost_on, after.failed_node) == ("pending", 0, (), "n1")


def test_a_job_avoids_the_node_where_it_is_lost_again_and_again() -> None:
    job = row(state="running")
    for times in range(1, 5):
        job = lost(job)
        assert (job.state, job.infra_failures, job.lost_on) == ("pending", times, ("n1",) * times)
        job = job._replace(state="running", placement=(Place("n1", (0,), (1000,)),))
    assert to_avoid(job.lost_on) == ("n1",)
    elsewhere = lost(job._replace(placement=(Place("n2", (0,), (1000,)),)))
    assert elsewhere.state == "failed", "it was lost on two nodes, more often than allowed: the job is to blame"


def test_a_job_that_was_lost_before_it_ran_is_not_said_to_have_lost_work() -> None:
    message = lost(row(state="starting")).reason_message
    assert message.endswith("was lost on n1 before it ran: exit code unknown. It waits for GPUs again.")
    assert "no checkpoint" in lost(row(state="running")).reason_message


def test_a_job_that_is_lost_again_ends_where_there_is_no_other_node() -> None:
    job = row(state="running", infra_failures=2, lost_on=("n1", "n1"))
    assert lost(job, NODES[:1]).state == "failed"


def test_a_job_goes_on_on_the_only_node_until_it_was_lost_too_often() -> None:
    job = row(state="running")
    for _ in range(2):
        job = lost(job, NODES[:1])
        assert (job.state, to_avoid(job.lost_on)) == ("pending", ()), "there is no other node to go to"
        job = job._replace(state="running", placement=(Place("n1", (0,), (1000,)),))
    assert lost(job, NODES[:1]).state == "failed"


@pytest.mark.parametrize(
    ("request_of", "other"),
    [
        ({}, NodeStatus("n2", "b", (0, 1))),
        ({}, NodeStatus("n2", "a", (0, 1), cordoned=True)),
        ({}, NodeStatus("n2", "a", (0, 1), ready=False)),
        ({"profile": "a100"}, NodeStatus("n2", "a", (0, 1), model="H100")),
        ({"gpus": 2000}, NodeStatus("n2", "a", (0,))),
        ({"cpu": 8000}, NodeStatus("n2", "a", (0, 1), cpu=4000)),
        ({"workers": 3, "min_workers": 3}, NodeStatus("n2", "a", (0, 1))),
    ],
    ids=["pool", "cordoned", "down", "model", "GPUs", "CPU", "gang"],
)
def test_a_job_avoids_no_node_where_it_fits_on_no_other(request_of: dict[str, object], other: NodeStatus) -> None:
    one = (NodeStatus("n1", "a", (0, 1, 2), model="A100"), other)
    fits = (one[0], NodeStatus("n2", "a", (0, 1, 2), model="A100"))
    for nodes, avoided, state in ((one, (), "failed"), (fits, ("n1",), "pending")):
        job = row(**{"state": "running", "gpus": 1000} | request_of)
        for _ in range(2):
            job = lost(job, nodes)
            assert job.state == "pending"
            job = job._replace(state="running", placement=(Place("n1", (0,), (1000,)),))
        assert to_avoid(job.lost_on) == avoided
        assert lost(job, nodes).state == state


def test_a_job_avoids_a_node_for_one_in_another_pool_of_its_profile() -> None:
    job = row(state="running", profile="both", infra_failures=2, lost_on=("n1", "n1"))
    job = lost(job, (NodeStatus("n1", "a", (0,)), NodeStatus("n2", "b", (0,))))
    assert (job.state, to_avoid(job.lost_on)) == ("pending", ("n1",))


def test_a_job_never_avoids_all_nodes_that_it_fits_on() -> None:
    job = row(state="running", gpus=1000, lost_on=("n1", "n1", "n2"), placement=(Place("n2", (0,), (1000,)),))
    assert to_avoid(lost(job).lost_on) == ()
    three = (*NODES, NodeStatus("n3", "", (0,)))
    assert to_avoid(lost(job, three).lost_on) == ("n1", "n2")


def test_a_job_avoids_each_part_of_a_divided_machine() -> None:
    document = policy.read_policy("""
version: 1
pools: [{name: a, nodes: {local: {gpus: [0]}}}, {name: b, nodes: {local: {gpus: [1]}}}]
profiles: [{name: gpu1, gpus: 1, policies: [rnd]}]
policies: [{name: rnd, groups: [rnd], quotas: [{reserved: 2}]}]
""")
    view, job = EngineView(Durations()), row(state="pending", placement=(), lost_on=("n1", "n1"))
    view.stale_hosts = {"n1", "n2"}
    view.show({job.id: job}, divide(NODES, document), document, 100.0)
    (shown,) = view.workloads()
    assert {node.name for node in view.nodes()} - set(shown.avoid) == {"n2/a", "n2/b"}


@pytest.mark.parametrize(("durable", "cost_since"), [(True, 90.0), (False, None)])
def test_checkpoints_that_end_with_their_pod_make_no_victim_cheaper(durable: bool, cost_since: float | None) -> None:
    job = row(state="running", checkpoint_step=9, checkpoint_at=90.0)
    document = policy.read_policy("{version: 1, pools: [], profiles: [], policies: []}")
    view = EngineView(Durations(), durable_checkpoints=lambda row: durable)
    view.show({job.id: job}, divide(NODES, document), document, 100.0)
    (shown,) = view.workloads()
    assert shown.last_checkpoint_at == cost_since


def test_a_job_says_why_its_attempt_is_still_starting() -> None:
    job = row()
    seen = AttemptStatus(*KEY, Phase.STARTING, waiting_reason="image_pull", message="The image is pulled.", since=12.0)
    (change,) = reconcile({job.id: job}, Observation(NODES, (seen,)), now=20.0, max_infra_failures=2).changes
    assert change.fields == {"reason_code": "image_pull", "reason_message": "The image is pulled."}
    told = job._replace(reason_code="image_pull", reason_message="The image is pulled.")
    assert not reconcile({job.id: told}, Observation(NODES, (seen,)), now=21.0, max_infra_failures=2).changes


def test_the_deadline_of_a_start_begins_again_once_its_backend_answers_again() -> None:
    clock = Clock()
    expectations = Expectations(60.0, clock)
    expectations.expect_starts([KEY])
    for passed in (50.0, 50.0):
        clock.now += passed
        assert expectations.verdict(row(), synced=False, now=20.0) == "wait"
    clock.now += 59.0
    assert expectations.verdict(row(), synced=True, now=20.0) == "wait"
    clock.now += 1.0
    assert expectations.verdict(row(), synced=True, now=20.0) == "lost"


def test_nothing_is_gone_from_a_backend_that_cannot_be_observed() -> None:
    silent = BackendStates([BackendState("here", synced=True), BackendState("far", synced=True, problem="no route")])
    assert [silent.absence_is_certain(name) for name in ("here", "far", "")] == [True, False, False]
    heard = BackendStates([BackendState("here", synced=True), BackendState("far", synced=True)])
    assert [heard.absence_is_certain(name) for name in ("here", "far", "")] == [True, True, True]
