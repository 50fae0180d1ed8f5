"""Of a workload the larger of plan and pod counts: what admission adds to its pods, also for its next start."""

from __future__ import annotations

from dataclasses import replace

import pytest
from makeway_quota import policy
from makeway_quota.backends.base import AttemptStatus, NodeStatus, Observation, Phase, WorkloadPod
from makeway_quota.control.world.observed_requests import KEPT
from makeway_quota.control.world.world import World
from makeway_quota.engine import schedule
from makeway_quota.engine.snapshot import Workload as Planned
from makeway_quota.store.records import NewWorkload, Place
from makeway_quota.store.rows import changed, initial_record
from memory_rows import Rows

DOCUMENT = policy.read_policy(
    """
version: 1
pools: [{name: p, nodes: {local: {gpus: all}}}]
profiles: [{name: one, gpus: 1, cpu: 4, memory: 4GiB, pools: [p], policies: [[rnd]]}]
policies: [{name: rnd, groups: [rnd], quotas: [{reserved: 2}]}]
"""
)
NODE = NodeStatus("n1", "p", (0, 1), cpu=10_000, memory=100_000, max_pods=110)


class Cluster:
    """A node with two GPUs and 10 CPUs, and the world that plans for it."""

    def __init__(self) -> None:
        self.rows, self.now = Rows(), 1000.0
        self.world = World(self.rows, DOCUMENT, 1, lambda: self.now)  # type: ignore[arg-type]
        self.world.observe(Observation((NODE,)))

    def submit(self, id: str, kind: str = "job") -> None:
        new = NewWorkload(id, kind, "rnd", "one", "ana", gpus=1000, cpu=4000, memory=4096)  # type: ignore[arg-type]
        self.rows.put(initial_record(new, self.now))

    def put(self, id: str, **fields: object) -> None:
        self.rows.put(changed(self.rows.found[id], fields))

    def start(self, id: str, device: int = 0, state: str = "starting") -> None:
        self.put(id, state=state, attempt=1, placement=(Place("n1", (device,), (1000,)),))

    def see(self, *attempts: AttemptStatus, node: NodeStatus = NODE) -> None:
        self.world.observe(Observation((node,), attempts))

    async def planned(self, id: str) -> Planned:
        changes = self.world.changes(await self.world.rows(), self.now, whole=True)
        return next(w for w in changes.snapshot.workloads if w.id == id)

    async def plan(self) -> set[str]:
        """Return the jobs that the next plan starts."""
        snapshot = self.world.changes(await self.world.rows(), self.now, whole=True).snapshot
        return {start.id for start in schedule(snapshot).start}


def waits(cpu: int, memory: int = 4096) -> AttemptStatus:
    return AttemptStatus("j-1", 1, Phase.STARTING, waiting_reason="unschedulable", cpu=cpu, memory=memory)


async def test_a_job_whose_pod_did_not_fit_leaves_its_gpu_to_others() -> None:
    result = Cluster()
    result.submit("j-1")
    result.start("j-1")
    result.see(waits(12_000))
    assert (await result.planned("j-1")).cpu == 12_000
    result.put("j-1", state="pending", placement=())
    result.now += 1
    result.submit("j-2")
    assert await result.plan() == {"j-2"}, "the pod of j-1 requests more than the node has"
    result.now += KEPT
    assert (await result.planned("j-1")).cpu == 4000, "what was added may have been taken away"
    assert "j-1" in await result.plan()


async def test_what_a_running_pod_requests_beyond_its_plan_is_given_to_no_other() -> None:
    result = Cluster()
    for id in ("j-1", "j-2"):
        result.submit(id)
    result.start("j-1", state="running")
    assert await result.plan() == {"j-2"}
    result.see(AttemptStatus("j-1", 1, Phase.RUNNING, cpu=7000, memory=1))
    now = await result.planned("j-1")
    assert (now.cpu, now.memory) == (7000, 4096), "the larger of plan and pod"
    assert await result.plan() == set(), "3 CPUs are left"
    result.see(AttemptStatus("j-1", 1, Phase.RUNNING, cpu=4000, memory=1))
    assert await result.plan() == {"j-2"}


async def test_a_new_policy_forgets_nothing_of_the_pods_that_run() -> None:
    result = Cluster()
    for id in ("j-1", "j-2"):
        result.submit(id)
    result.start("j-1", state="running")
    result.see(AttemptStatus("j-1", 1, Phase.RUNNING, cpu=7000, memory=1))
    result.world.use(DOCUMENT, 2)
    assert (await result.planned("j-1")).cpu == 7000
    assert await result.plan() == set(), "3 CPUs are left"


@pytest.mark.parametrize("cpu", [7000, 4000])
async def test_a_notebook_counts_as_its_pod(cpu: int) -> None:
    result = Cluster()
    result.submit("s-1", "session")
    result.submit("j-2")
    result.start("s-1", state="running")
    result.see(node=replace(NODE, pods=(WorkloadPod("s-1", 1000, cpu, 4096),)))
    assert (await result.planned("s-1")).cpu == cpu
    assert await result.plan() == (set() if cpu == 7000 else {"j-2"})


async def test_what_ended_workloads_requested_is_forgotten() -> None:
    result = Cluster()
    result.submit("j-1")
    result.start("j-1")
    await result.plan()
    result.see(waits(12_000))
    assert len(result.world.requested) == 1
    result.put("j-1", state="cancelled")
    await result.plan()
    assert len(result.world.requested) == 0
    for number in range(1000):
        result.see(replace(waits(12_000), workload=f"late-{number}"))
    assert len(result.world.requested) < 100, "pods of workloads that have ended already"
