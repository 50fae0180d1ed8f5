"""A node that refuses a pod for a moment costs its job nothing: it keeps its GPUs, and no one makes way again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from makeway_quota import policy
from makeway_quota.backends.base import AttemptStatus, NodeStatus, Observation, Phase, StartOrder
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.control.order_retries import OrderRetries
from makeway_quota.control.reconcile import reconcile
from makeway_quota.control.start_backoff import FIRST_DELAY, HELD_PAUSES, HELD_SECONDS, START_REFUSED, StartBackoff
from makeway_quota.store.records import Change, NewWorkload, Workload
from makeway_quota.store.rows import initial_record
from makeway_quota.values import Place
from running import running
from simulated_pods import Habits, SimulatedCluster, Site

NODES = tuple(NodeStatus(name, "", (0,), virtual=True) for name in ("n1", "n2"))
SAYS = "its node n1 refused its pod (UnexpectedAdmissionError): no healthy devices present"
KEPT = f"“x” of ana could not be started: {SAYS}. It keeps its GPUs, and is started again in 1 s."
POLICY = """
version: 1
pools: [{name: p}]
profiles:
  - {name: one, gpus: 1, pools: [p], policies: [[rnd, devops]], grace: 30}
  - {name: gang, gpus: 1, workers: 2, pools: [p], policies: [[rnd, devops]], grace: 30}
policies:
  - {name: rnd, groups: [rnd], quotas: [{pools: [p], reserved: 0}]}
  - {name: devops, groups: [devops], quotas: [{pools: [p], reserved: 2}]}
"""
ONE_POOL = policy.read_policy("""
version: 1
pools: [{name: a, nodes: {local: {gpus: all}}}]
profiles: [{name: gpu1, gpus: 1, policies: [rnd]}]
policies: [{name: rnd, groups: [rnd], quotas: [{reserved: 2}]}]
""")


def row(**changes: object) -> Workload:
    """Return a job whose first attempt was just ordered to start."""
    made = initial_record(NewWorkload("j-1", "job", "rnd", "gpu1", "ana", name="x", gpus=1000), 0.0)
    placed = {"state": "starting", "attempt": 1, "started_at": 10.0, "placement": (Place("n1", (0,), (1000,)),)}
    return made._replace(**(placed | changes))  # type: ignore[arg-type]


def refused(
    job: Workload, now: float, backoff: StartBackoff | None = None, nodes: tuple[NodeStatus, ...] = NODES
) -> Change:
    """Return what becomes of a job whose pod a node refused."""
    seen = AttemptStatus(job.id, job.attempt, Phase.LOST, message=SAYS, never_ran=True, refused=True, node_lost=True)
    backoff = backoff or StartBackoff()
    backoff.committed([job])
    (change,) = reconcile(
        {job.id: job}, Observation(nodes, (seen,)), now=now, max_infra_failures=0, document=ONE_POOL, backoff=backoff
    ).changes
    return change


def after(job: Workload, change: Change) -> Workload:
    return job._replace(**change.fields)  # type: ignore[arg-type]


def test_a_job_that_its_node_refuses_keeps_its_gpus_and_is_started_again_in_seconds() -> None:
    change = refused(row(), 100.0)
    again = after(row(), change)
    assert (again.state, again.attempt, again.placement, again.not_before) == ("starting", 2, row().placement, 101.0)
    assert (again.reason_code, again.reason_message) == (START_REFUSED, KEPT)
    assert (again.start_tries, again.avoids, again.infra_failures) == (0, (), 0)
    assert change.drop_attempt
    assert change.open_attempt is not None
    assert (change.open_attempt.number, change.open_attempt.placement) == (2, row().placement)


def test_a_job_that_is_refused_again_and_again_gives_its_gpus_back_and_keeps_them_no_second_time() -> None:
    job, now, starts = row(), 100.0, 0
    while job.state == "starting":
        job = after(job, refused(job, now))  # by another process each time
        starts += 1
        if job.not_before is not None and job.state == "starting":
            assert job.not_before - now == HELD_PAUSES[starts - 1]
            now = job.not_before
    assert (job.state, job.placement, starts) == ("pending", (), len(HELD_PAUSES) + 1)
    assert (job.not_before, job.start_tries) == (now + FIRST_DELAY, 1)
    assert "refusal 2 in a row" in after(row(), refused(after(row(), refused(row(), 0.0)), 1.0)).reason_message
    later = job._replace(state="starting", attempt=7, placement=row().placement, reason_numbers={}, not_before=None)
    assert after(later, refused(later, now + 100.0)).state == "pending", "it keeps its GPUs from others once"


def test_a_job_keeps_its_gpus_for_a_minute_at_most() -> None:
    once = after(row(), refused(row(), 100.0))
    assert after(once, refused(once, 100.0 + HELD_SECONDS)).state == "starting"
    assert after(once, refused(once, 100.1 + HELD_SECONDS)).state == "pending"
    assert after(once, refused(once, 50.0)).state == "pending", "the clock was set back"


@pytest.mark.parametrize("facts", [{"ready": False}, {"cordoned": True}])
def test_a_job_keeps_no_gpus_of_a_node_that_takes_no_work(facts: dict[str, bool]) -> None:
    nodes = (replace(NODES[0], **facts), NODES[1])  # type: ignore[arg-type]
    assert after(row(), refused(row(), 100.0, nodes=nodes)).state == "pending"


def test_a_job_that_runs_is_no_more_said_to_have_been_refused() -> None:
    again = after(row(), refused(row(), 100.0))
    seen = AttemptStatus("j-1", 2, Phase.RUNNING)
    (change,) = reconcile(
        {"j-1": again}, Observation(NODES, (seen,)), now=102.0, max_infra_failures=0, document=ONE_POOL
    ).changes
    runs = after(again, change)
    assert (runs.state, runs.not_before, runs.reason_code, runs.reason_numbers) == ("running", None, "starting", {})


def test_the_next_start_of_an_attempt_is_ordered_when_it_is_due() -> None:
    now = 50.0
    retries, key = OrderRetries(lambda: now), ("j-1", 2)
    retries.postpone(key, 2.0)
    assert (retries.wait(key), retries.due()) == (True, 2.0)
    now = 51.0
    retries.postpone(key, 2.0)
    assert (retries.wait(key), retries.due()) == (True, 1.0), "it is not put off once more"
    now = 52.0
    assert not retries.wait(key)


class Refusing(MemoryBackend):
    """A backend of which the node refuses the first starts of what it gets."""

    refuses = 2

    async def start(self, order: StartOrder) -> None:
        await super().start(order)
        if self.refuses:
            self.refuses -= 1
            entry = self.newest(order.workload)
            facts = {"never_ran": True, "refused": True, "node_lost": True}
            entry.status = replace(entry.status, phase=Phase.LOST, message=SAYS, **facts)  # type: ignore[arg-type]


async def test_a_job_that_is_refused_for_a_moment_runs_where_it_was_planned_and_says_why_it_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("makeway_quota.control.start_backoff.HELD_PAUSES", (0.2, 0.2))
    async with running(tmp_path, backend=Refusing(NODES, real_time=True), MAKEWAY_TICK_SECONDS=0.1) as run:
        job = await run.submit("ana", "x", profile="gpu1")
        runs = await run.job(job.id, "running")
        assert (runs.failures, len(runs.attempts)) == (0, 1)
        events = [item for item in await run.client("ana").job_events(job.id) if item.code == START_REFUSED]
        assert [item.message.partition(": ")[0] for item in events] == [
            "“x” of ana could not be started",
            "“x” of ana could not be started (refusal 2 in a row)",
        ]
        stored = run.service.components.store.workload(job.id)
        assert stored is not None
        assert (stored.attempt, stored.placement[0].node, stored.infra_failures) == (3, "n1", 0)


async def site(folder: Path, nodes: dict[str, int]) -> Site:
    result = Site(SimulatedCluster(nodes), folder, POLICY)
    await result.start()
    return result


async def preemptions(found: Site) -> int:
    return sum(row.preemptions + (row.state == "checkpointing") for row in (await found.rows()).values())


@pytest.mark.covers("N33", "F20")
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(("profile", "victims"), [("one", 1), ("gang", 2)])
@pytest.mark.parametrize(("seconds", "told_after"), [(1.0, 9.0), (9.0, 9.0), (12.0, 0.5), (30.0, 10.0)])
async def test_a_device_plugin_that_restarts_as_an_owner_starts_costs_no_second_victim(
    tmp_path: Path, profile: str, victims: int, seconds: float, told_after: float, restarts: bool
) -> None:
    result = await site(tmp_path, {"n1": 3, "n2": 1})
    for number in range(4):
        result.cluster.habits[f"r{number}"] = Habits(saves=1.0 + number)
        result.submit(f"r{number}", "rnd")
        await result.run(1.0)
    result.submit("d", "devops", profile, gpus=1000, workers=victims)
    for _ in range(400):
        if any(name.startswith("makeway-d-") for name in result.cluster.bound):
            break
        await result.run(0.05)
    (node, *_) = {pod.node for pod in result.cluster.pods.values() if pod.key[0] == "d" and pod.node}
    result.cluster.lose_plugin(node, seconds, told_after)
    if restarts:
        await result.run(2.0)
        await result.restart()
    await result.run(seconds + 20.0)
    rows = await result.rows()
    assert rows["d"].state == "running", rows["d"].reason_message
    assert rows["d"].attempt > 1, "its node refused it"
    assert await preemptions(result) == victims
    await result.stop()


@pytest.mark.covers("N33", "F20")
async def test_a_job_that_is_refused_for_ever_does_not_keep_the_gpus_from_others(tmp_path: Path) -> None:
    result = await site(tmp_path, {"n1": 1})
    result.cluster.without_plugin.add("n1")
    result.submit("d", "devops")
    await result.run(HELD_SECONDS + 5.0)
    rows = await result.rows()
    assert (rows["d"].state, rows["d"].reason_code, rows["d"].start_tries) == ("pending", "start_deferred", 1)
    before = rows["d"].attempt
    await result.run(400.0)
    rows = await result.rows()
    assert rows["d"].attempt - before <= 3, "each try after that gives its GPUs back at once"
    await result.stop()


@pytest.mark.covers("N33", "F20")
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("at", [0.5, 2.0, 3.95])
@pytest.mark.parametrize(("seconds", "told_after"), [(1.0, 0.1), (8.0, 0.1), (8.0, 3.0), (20.0, 0.1)])
async def test_a_device_plugin_that_restarts_while_a_victim_saves_costs_no_second_one(
    tmp_path: Path, at: float, seconds: float, told_after: float, restarts: bool
) -> None:
    result = await site(tmp_path, {"n1": 1, "n2": 1})
    for number in range(2):
        result.cluster.habits[f"r{number}"] = Habits(saves=4.0)
        result.submit(f"r{number}", "rnd")
        await result.run(1.0)
    result.submit("d", "devops")
    await result.run(at)
    (victim,) = [row for row in (await result.rows()).values() if row.state == "checkpointing"]
    node = victim.placement[0].node
    result.cluster.lose_plugin(node, seconds, told_after)
    if restarts:
        await result.run(0.5)
        await result.restart()
    await result.run(seconds + 25.0)
    rows = await result.rows()
    assert (rows["d"].state, await preemptions(result)) == ("running", 1), rows["d"].reason_message
    assert rows["d"].placement[0].node == node
    await result.stop()
