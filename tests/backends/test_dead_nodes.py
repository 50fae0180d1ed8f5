"""A job of a dead node starts elsewhere soon; where the service or the whole cluster is out of reach, it goes on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from api_server import ApiServer, node, pod
from makeway_quota.backends.base import LOST_AFTER, AttemptStatus, Phase
from makeway_quota.backends.kubernetes.api.client import ApiUnreachable
from makeway_quota.backends.kubernetes.cluster.dead_nodes import (
    MAX_STEP,
    NODE_LOST_AFTER,
    SAME_FAULT_WITHIN,
    DeadNodes,
    NodeReadiness,
)
from makeway_quota.backends.remote.workers import WorkerStatus
from makeway_quota.policy import read_policy
from makeway_quota.settings import load
from makeway_quota.store.store import open_store
from pod_backend import Backend

RUNS = WorkerStatus(started_at=10.0)
SECONDS = 100.0
"""How long a node is down until it is dead, here."""


class Nodes(Backend):
    """A cluster of three nodes, a job with a worker on each of the first two, and another on the third."""

    silent_since: dict[int, float]
    versions = 100

    async def prepare(self) -> None:
        self.silent_since = {}
        self._dead_nodes.after = SECONDS
        for number, name in enumerate(("n0", "n1")):
            result = pod("gang", worker=number, of=2)
            result["spec"]["nodeName"] = name
            self.hear("ADDED", result)
        self.report("gang", RUNS, RUNS)
        self.channel.silent = self.silent  # type: ignore[method-assign]
        assert (await self.look()).phase is Phase.RUNNING

    def silent(self, seconds: float) -> dict[tuple[str, int], int]:
        late = [worker for worker, since in self.silent_since.items() if self.now - since >= seconds]
        return {("gang", 1): late[-1]} if late else {}

    def set_ready(self, name: str, up: bool) -> None:
        """Make a node ready or not."""
        result = node(name)
        self.versions += 1
        result["metadata"]["resourceVersion"] = str(self.versions)
        result["status"]["conditions"][0]["status"] = "True" if up else "Unknown"
        self.inventory.nodes._event(json.dumps({"type": "MODIFIED", "object": result}).encode())

    async def look(self) -> AttemptStatus:
        return await self.seen("gang")

    async def passes(self, seconds: float) -> Phase:
        """Spend time as the loop does, and return the phase of the job at its end."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            await self.observe()
        return (await self.look()).phase


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    store, server = open_store(f"sqlite:///{tmp_path / 'makeway.sqlite'}"), ApiServer()
    server.lists["/api/v1/nodes"] = [node(name) for name in ("n0", "n1", "n2")]
    made = Nodes(server, store)
    await made.open()
    await made.nodes()
    await made.prepare()
    yield made
    await made.close(stop_jobs=False)
    store.close()


def fails(nodes: Nodes, *names: str, workers: tuple[int, ...] = (1,)) -> None:
    """Make nodes fail with the workers on them."""
    for name in names:
        nodes.set_ready(name, False)
    nodes.silent_since = dict.fromkeys(workers, nodes.now)


@pytest.mark.covers("N07", "F42")
async def test_a_job_of_a_dead_node_is_lost_after_its_own_time(nodes: Nodes) -> None:
    fails(nodes, "n1")
    assert await nodes.passes(SECONDS - 2) is Phase.RUNNING
    assert await nodes.passes(4) is Phase.LOST
    seen = await nodes.look()
    assert (seen.node_lost, seen.node_returned, seen.worker) == (True, False, 1)
    assert seen.message == "its node n1 is down, and worker 1 was not heard of for 1 min 40 s"
    nodes.set_ready("n1", True)
    nodes.silent_since = {}
    assert await nodes.passes(5) is Phase.LOST, "it stays so, whatever comes back"


async def test_a_worker_that_is_heard_goes_on_on_a_node_that_is_down(nodes: Nodes) -> None:
    fails(nodes, "n1", workers=())
    assert await nodes.passes(LOST_AFTER * 2) is Phase.RUNNING


async def test_a_silent_worker_on_a_node_that_is_ready_waits_as_before(nodes: Nodes) -> None:
    fails(nodes, "n1", workers=(0,))
    assert await nodes.passes(LOST_AFTER - 2) is Phase.RUNNING
    assert await nodes.passes(4) is Phase.LOST


async def test_a_cluster_that_is_out_of_reach_as_a_whole_is_waited_for(nodes: Nodes) -> None:
    fails(nodes, "n0", "n1", "n2", workers=(0, 1))
    assert await nodes.passes(LOST_AFTER - 2) is Phase.RUNNING
    nodes.set_ready("n2", True)
    assert await nodes.passes(1) is Phase.RUNNING, "its time begins where another node is ready"


async def test_a_node_that_comes_and_goes_is_not_dead(nodes: Nodes) -> None:
    fails(nodes, "n1")
    for _ in range(3):
        assert await nodes.passes(SECONDS - 20) is Phase.RUNNING
        nodes.set_ready("n1", True)
        assert await nodes.passes(2) is Phase.RUNNING
        nodes.set_ready("n1", False)


async def test_time_in_which_the_service_did_not_observe_does_not_count(nodes: Nodes) -> None:
    fails(nodes, "n1")
    await nodes.passes(10)
    nodes.now += 1.5 * SECONDS
    assert await nodes.passes(1) is Phase.RUNNING
    assert await nodes.passes(SECONDS - 10 - MAX_STEP - 3) is Phase.RUNNING
    assert await nodes.passes(5) is Phase.LOST


async def test_an_api_server_that_does_not_answer_makes_no_node_dead(nodes: Nodes) -> None:
    fails(nodes, "n1")
    nodes.inventory.nodes.problem = str(ApiUnreachable("the Kubernetes API server does not answer"))
    assert await nodes.passes(LOST_AFTER - 10) is Phase.RUNNING


async def test_an_attempt_that_has_ended_stays_so(nodes: Nodes) -> None:
    fails(nodes, "n1")
    ended = WorkerStatus(started_at=10.0, ended_at=20.0, exit_code=0)
    nodes.report("gang", ended, ended)
    assert await nodes.passes(2 * SECONDS) is Phase.EXITED


def test_the_time_is_a_setting(tmp_path: Path) -> None:
    environ = {"MAKEWAY_STATE_DIR": str(tmp_path), "MAKEWAY_BACKEND": "kubernetes"}
    environ["MAKEWAY_WORKER_URL"] = "http://makeway.example:8765"
    usual, longer = load(environ=environ), load(environ=environ | {"MAKEWAY_NODE_LOST_SECONDS": "3600"})
    assert usual.kubernetes is not None
    assert longer.kubernetes is not None
    assert (usual.kubernetes.node_lost_after, longer.kubernetes.node_lost_after) == (NODE_LOST_AFTER, 3600)
    assert usual.kubernetes.node_lost_after < usual.kubernetes.lost_after


class Cluster:
    """Nodes by name, some of them down since a time, and how long they have been observed."""

    def __init__(self, **nodes: NodeReadiness) -> None:
        self.now = 0.0
        self.nodes = nodes
        self.dead_nodes = DeadNodes(SECONDS, lambda: self.now)

    def dead(self, seconds: float = 2 * SECONDS) -> set[str]:
        """Observe the nodes for a while, and return those that are dead then."""
        for _ in range(int(seconds)):
            self.now += 1.0
            self.dead_nodes.observe(self.nodes, up_to_date=True)
        return set(self.dead_nodes.dead())


def up(pools: str = "gpu", zone: str = "") -> NodeReadiness:
    return NodeReadiness(True, tuple(pools.split()), zone)


def down(pools: str = "gpu", zone: str = "", since: float | None = 1000.0) -> NodeReadiness:
    return NodeReadiness(False, tuple(pools.split()), zone, since)


@pytest.mark.parametrize("since", [1000.0, 1000.0 + SAME_FAULT_WITHIN - 1, None])
def test_a_pool_that_is_cut_off_is_not_dead_while_another_one_is_ready(since: float | None) -> None:
    site = Cluster(a1=down("a"), a2=down("a", since=since), b1=up("b"), b2=up("b"), b3=up("b"))
    assert site.dead() == set()
    site.nodes["a2"] = up("a")
    assert site.dead(SECONDS - 2) == set(), "its time begins where another node of it is ready"
    assert site.dead(4) == {"a1"}


@pytest.mark.parametrize("pools", ["a s", "s a", "a s t", "t s a"])
def test_a_pool_that_is_cut_off_is_not_dead_where_its_nodes_are_in_other_pools_too(pools: str) -> None:
    others = {f"b{at}": up("a t") for at in range(5)}
    site = Cluster(a1=down(pools), a2=down(pools), **others)
    assert site.dead() == set(), "all of pool s went down with it"
    site.nodes["a2"] = up(pools)
    assert site.dead() == {"a1"}


def test_a_node_is_dead_where_each_of_its_pools_has_another_that_is_ready() -> None:
    site = Cluster(a1=down("a s"), a2=down("a s"), b1=up("a"), b2=up("s"), b3=up("a"))
    assert site.dead() == {"a1", "a2"}


def test_the_only_node_of_its_pool_is_dead_like_any_other() -> None:
    assert Cluster(a1=down("a"), b1=up("b")).dead() == {"a1"}


def test_the_nodes_of_a_pool_that_fail_one_after_the_other_are_dead() -> None:
    site = Cluster(a1=down("a"), a2=up("a"), b1=up("b"))
    assert site.dead() == {"a1"}
    site.nodes["a2"] = down("a", since=1000.0 + 7 * 86_400)
    assert site.dead() == {"a1", "a2"}


def test_a_zone_that_is_cut_off_is_not_dead_although_its_pools_have_other_nodes() -> None:
    site = Cluster(a1=down("a", "east"), b1=down("b", "east"), a2=up("a", "west"), b2=up("b", "west"), b3=up("b"))
    assert site.dead() == set()
    site.nodes["b1"] = up("b", "east")
    assert site.dead() == {"a1"}


def test_most_nodes_of_a_cluster_that_go_down_at_once_are_not_dead() -> None:
    ready = {f"r{at}": up(f"p{at}") for at in range(2)}
    gone = {f"d{at}": down(f"p{at}") for at in range(3)}
    assert Cluster(**ready, **gone).dead() == set()
    more = {f"s{at}": up(f"p{at}") for at in range(3)}
    assert Cluster(**ready, **gone, **more).dead() == set(gone)
    apart = {name: down(node.pools[0], since=1e4 * at) for at, (name, node) in enumerate(gone.items(), 1)}
    assert Cluster(**ready, **apart).dead() == set(gone)


def test_two_nodes_that_fail_together_in_a_pool_with_others_are_dead() -> None:
    assert Cluster(a1=down("a"), a2=down("a"), a3=up("a"), b1=up("b")).dead() == {"a1", "a2"}


async def test_a_pool_that_is_cut_off_keeps_its_jobs_on_the_cluster(nodes: Nodes) -> None:
    document = read_policy(
        "{version: 1, pools: [{name: a, nodes: {labels: {p: a}}}, {name: b, nodes: {labels: {p: b}}}],"
        " profiles: [{name: gpu1, gpus: 1}], policies: []}"
    )
    nodes.follow_policy(lambda: document)
    for at, (name, pool_) in enumerate({"n0": "a", "n1": "a", "n2": "b"}.items()):
        result = node(name)
        result["metadata"] |= {"labels": {"p": pool_}, "resourceVersion": str(50 + at)}
        nodes.inventory.nodes._event(json.dumps({"type": "MODIFIED", "object": result}).encode())
    await nodes.observe()
    for name in ("n0", "n1"):
        result = node(name)
        nodes.versions += 1
        result["metadata"] |= {"labels": {"p": "a"}, "resourceVersion": str(nodes.versions)}
        result["status"]["conditions"][0]["status"] = "Unknown"
        nodes.inventory.nodes._event(json.dumps({"type": "MODIFIED", "object": result}).encode())
    nodes.silent_since = dict.fromkeys((0, 1), nodes.now)
    assert await nodes.passes(LOST_AFTER - 2) is Phase.RUNNING


async def test_a_pool_of_mixed_nodes_that_is_cut_off_keeps_its_jobs_on_the_cluster(nodes: Nodes) -> None:
    document = read_policy(
        "{version: 1, pools: [{name: a, nodes: {labels: {p: a}}},"
        " {name: s, resource: nvidia.com/mig-1g.10gb, nodes: {labels: {p: a}}}],"
        " profiles: [{name: gpu1, gpus: 1}], policies: []}"
    )
    nodes.follow_policy(lambda: document)

    def shown(name: str, slices: int, ready: str) -> None:
        result = node(name)
        nodes.versions += 1
        result["metadata"] |= {"labels": {"p": "a"}, "resourceVersion": str(nodes.versions)}
        result["status"]["allocatable"] |= {"nvidia.com/mig-1g.10gb": str(slices)}
        result["status"]["conditions"][0]["status"] = ready
        nodes.inventory.nodes._event(json.dumps({"type": "MODIFIED", "object": result}).encode())

    for name, slices in {"n0": 7, "n1": 7, "n2": 0, "n3": 0, "n4": 0}.items():
        shown(name, slices, "True")
    await nodes.observe()
    assert nodes.inventory.node_statuses()["n1"].pools == ("a", "s")
    for name in ("n0", "n1"):
        shown(name, 7, "Unknown")
    nodes.silent_since = dict.fromkeys((0, 1), nodes.now)
    assert await nodes.passes(LOST_AFTER - 2) is Phase.RUNNING


def test_a_zone_that_goes_down_in_a_large_cluster_costs_a_look_at_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node was compared with each: the service stood still for half a minute, at every observation."""
    compared = 0

    class Counted(NodeReadiness):
        def __getattribute__(self, name: str) -> object:
            nonlocal compared
            compared += name == "down_since"
            return super().__getattribute__(name)

    nodes = {f"n{n}": Counted(n % 3 != 0, (f"p{n % 7}",), f"z{n % 3}", None if n % 3 else 10.0) for n in range(900)}
    result = DeadNodes(after=1.0, monotonic=iter((0.0, 0.0, 5.0, 10.0)).__next__)
    for _ in range(3):
        result.observe(nodes, up_to_date=True)
    assert compared < 30 * len(nodes)
    assert result.dead() == frozenset(), "a zone that is cut off as a whole"
