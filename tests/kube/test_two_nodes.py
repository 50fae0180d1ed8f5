"""Two real nodes: pods reach each other; jobs go on where a kubelet is killed, a node is drained or gone for good."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_service import PODS as JOB_PODS
from job_service import TRAIN, Serving, make_namespace, policy_of, waits_because, weights
from makeway_api.models import Job
from makeway_quota.application import Application
from makeway_quota.store.records import Workload
from pods import PODS, evict, phase, wait_until

from kube_cluster.cluster import Cluster
from kube_cluster.images import host_pod
from kube_cluster.node import Node
from kube_cluster.problems import NotHere
from kube_cluster.simulated import is_ready

pytestmark = pytest.mark.kube

SERVER = "import socket; s = socket.create_server(('', 8000)); c, _ = s.accept(); c.sendall(b'hello'); c.close()"
CLIENT = "import socket; print(socket.create_connection(('{}', {}), 30).recv(5).decode())"
NODES = "/api/v1/nodes"
UNTIL_TOLD = (
    'mkdir -p "$MAKEWAY_CHECKPOINT_DIR"; echo one; until [ -e "$MAKEWAY_CHECKPOINT_DIR/end" ]; do sleep 0.1; done'
)


@pytest.fixture(scope="module")
def control_plane() -> Iterator[Cluster]:
    """Return a cluster of its own with two nodes of one GPU, the last of which a test ends."""
    with Cluster.start() as result:
        try:
            for _ in range(2):
                result.add_node(gpus=1)
        except NotHere as reason:
            pytest.skip(str(reason))
        yield result


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the jobs' checkpoints, which both nodes mount."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def jobs_policy(control_plane: Cluster, checkpoints: Path) -> str:
    """Return a policy document for jobs on the two nodes."""
    make_namespace(control_plane)
    return policy_of(control_plane, checkpoints)


def test_pods_of_two_nodes_reach_each_other_and_this_machine(control_plane: Cluster) -> None:
    api = control_plane.api
    api.create(PODS, host_pod("server", ["python3", "-c", SERVER], gpus=1))
    wait_until(lambda: phase(api, "server") == "Running", "the first pod runs")
    address = api.get(f"{PODS}/server")["status"]["podIP"]
    api.create(PODS, host_pod("client", ["python3", "-c", CLIENT.format(address, 8000)], gpus=1))
    wait_until(lambda: phase(api, "client") in ("Succeeded", "Failed"), "the second pod has ended")
    assert api.text(f"{PODS}/client/log") == "hello\n"
    nodes = {pod["spec"]["nodeName"] for pod in api.items(PODS)}
    assert nodes == {"node-0", "node-1"}
    host = api.get("/api/v1/namespaces/default/endpoints/kubernetes")["subsets"][0]["addresses"][0]["ip"]
    with socket.create_server((host, 0)) as listening:
        listening.settimeout(60)
        port = listening.getsockname()[1]
        api.create(PODS, host_pod("caller", ["python3", "-c", CLIENT.format(host, port)]))
        connection, _ = listening.accept()
        with connection:
            connection.sendall(b"there")
    wait_until(lambda: phase(api, "caller") == "Succeeded", "the third pod has ended")
    assert api.text(f"{PODS}/caller/log") == "there\n"
    api.delete(PODS, gracePeriodSeconds="0")
    wait_until(lambda: not api.items(PODS), "no pod is left")


# -- jobs


async def train(serving: Serving, name: str, seconds: float, every: int) -> Job:
    """Submit a training that saves after so many steps of this length; return it once it has made a hundred."""
    options = ["--steps", "400", "--every", str(every), "--seconds", str(seconds)]
    job = await serving.submit("ana", name, "python3", "train.py", *options, files=[TRAIN])
    await serving.says(job, "step 100")
    return job


def node_of(serving: Serving, job: Job, attempt: int = 1) -> Node:
    """Return the node of an attempt."""
    name = serving.cluster.api.get(f"{JOB_PODS}/makeway-{job.id}-{attempt}-0")["spec"]["nodeName"]
    return next(node for node in serving.cluster.nodes if node.name == name)


def ready(serving: Serving, node: Node) -> bool:
    """Whether Kubernetes takes a node for a working one."""
    return is_ready(serving.cluster.api.get(f"{NODES}/{node.name}"))


async def becomes(serving: Serving, node: Node, wanted: bool) -> None:
    """Wait until a node is ready, or is not."""
    what = f"{node.name} is {'' if wanted else 'not '}ready"
    await asyncio.to_thread(wait_until, lambda: ready(serving, node) is wanted, what)


async def kubelet(node: Node, other_than: int | None = None) -> int:
    """Return the PID of a node's kubelet, once it runs."""
    result: list[int | None] = []

    def runs() -> bool:
        result.append(node.service("kubelet"))
        return result[-1] not in (None, other_than)

    await asyncio.to_thread(wait_until, runs, f"the kubelet of {node.name} runs")
    assert result[-1] is not None
    return result[-1]


async def saved_step(serving: Serving, job: Job) -> int:
    """Return the step of a job's checkpoint, once the service knows of one."""
    result: list[Job] = []

    async def there() -> bool:
        result.append(await serving.client("root").job(job.id))
        return result[-1].checkpoint is not None and bool(result[-1].checkpoint.step)

    await serving.until(there, lambda: f"a checkpoint of {job.name} is reported: {result[-1]}")
    assert result[-1].checkpoint is not None
    return int(result[-1].checkpoint.step or 0)


async def calm_weights(serving: Serving) -> str:
    """Return the weights of a training that nothing disturbs."""
    calm = await train(serving, "calm", 0.0, 5000)
    await serving.reaches(calm, "succeeded")
    return weights(await serving.log(calm))


@pytest.mark.no_repeat
@pytest.mark.covers("N07", "F47")
async def test_a_job_goes_on_while_its_kubelet_is_killed(serving: Serving) -> None:
    async with serving.running():
        job = await train(serving, "goes on", 0.05, 5000)
        node = node_of(serving, job)
        for _ in range(3):
            old = await kubelet(node)
            os.kill(old, signal.SIGKILL)
            await kubelet(node, other_than=old)
        done = await serving.reaches(job, "succeeded", "failed")
        assert (done.state.value, len(done.attempts), done.preemptions) == ("succeeded", 1, 0), done
        await serving.no_pod_left()


@pytest.mark.no_repeat
@pytest.mark.covers("F42", "F47")
async def test_a_job_of_a_drained_node_saves_and_goes_on_at_the_other_node(serving: Serving) -> None:
    async with serving.running() as service:
        wanted = await calm_weights(serving)
        job = await train(serving, "drained", 0.03, 5000)
        node = node_of(serving, job)
        place = f"{NODES}/{node.name}"
        serving.cluster.api.merge(place, {"spec": {"unschedulable": True}})
        try:
            evict(serving.cluster.api, serving.cluster.api.get(f"{JOB_PODS}/makeway-{job.id}-1-0"))
            await serving.reaches(job, "running", attempt=2)
            assert node_of(serving, job, 2).name != node.name
            done = await serving.reaches(job, "succeeded", "failed", attempt=2)
        finally:
            serving.cluster.api.merge(place, {"spec": {"unschedulable": False}})
        assert (done.state.value, len(done.attempts)) == ("succeeded", 2), done
        assert done.attempts[0].checkpoint is not None
        log = await serving.log(job, 2)
        assert f"going on at step {done.attempts[0].checkpoint.step} of 400" in log
        assert weights(log) == wanted
        assert row_of(service, job).infra_failures == 0, "however often nodes are drained"


@pytest.mark.no_repeat
@pytest.mark.covers("N07", "F42", "F47")
async def test_a_job_waits_for_a_node_out_of_reach_and_leaves_one_that_is_gone(
    serving: Serving, checkpoints: Path
) -> None:
    """The kubelet of one node stops; the other node is switched off and deleted, so this test is the last of them."""
    async with serving.running() as service:
        wanted = await calm_weights(serving)
        stays = await serving.submit("ana", "stays", "sh", "-c", UNTIL_TOLD)
        await serving.says(stays, "one")
        lost = await train(serving, "lost", 0.08, 20)
        saved = await saved_step(serving, lost)
        silent, gone = node_of(serving, stays), node_of(serving, lost)
        stopped = await kubelet(silent)
        os.kill(stopped, signal.SIGSTOP)
        try:
            switch_off(serving.cluster, gone)
            serving.cluster.api.delete(f"{NODES}/{gone.name}")
            await waits_because(serving, lost, f"It was running on {gone.name}, which was lost.")
            await becomes(serving, silent, False)
            await asyncio.sleep(3)  # some cycles
            during = await serving.client("root").job(stays.id)
            assert (during.state.value, len(during.attempts), during.preemptions) == ("running", 1, 0), during
            assert (await serving.client("root").job(lost.id)).state.value == "pending", "no GPU is free for it"
        finally:
            os.kill(stopped, signal.SIGCONT)
        await becomes(serving, silent, True)
        (checkpoints / stays.id / "end").touch()
        kept = await serving.reaches(stays, "succeeded", "failed")
        assert (kept.state.value, len(kept.attempts)) == ("succeeded", 1), kept
        done = await serving.reaches(lost, "succeeded", "failed", attempt=2)
        assert [item.outcome for item in done.attempts] == ["lost", "succeeded"], done
        told = [one.message for one in await serving.client("ana").job_events(lost.id) if one.verb == "requeue"]
        assert len(told) == 1
        assert f"was lost on {gone.name}: its node {gone.name} is gone; saved at step " in told[0]
        log = await serving.log(lost, 2)
        resumed = re.search(r"going on at step (\d+) of 400", log)
        assert resumed, log
        assert int(resumed[1]) >= saved, "what was saved after the last report is used, too"
        assert weights(log) == wanted
        assert (done.failures, row_of(service, lost).infra_failures) == (0, 0), "it is no fault of the job"


def switch_off(cluster: Cluster, node: Node) -> None:
    """End everything that runs on a node at once: its first process takes all others with it."""
    process = cluster.folder.started.pop(node.name)
    process.kill()
    process.wait()
    wait_until(lambda: node.service("kubelet") is None, f"nothing runs on {node.name}")


def row_of(service: Application, job: Job) -> Workload:
    """Return what the service's database has of a job."""
    result = service.components.store.workload(job.id)
    assert result is not None
    return result
