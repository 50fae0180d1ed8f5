"""The backend for pods on simulated nodes: what it creates, what it reports while pods wait, and how they are lost."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from informing import client, soon, start_api_server, stop_api_server
from makeway_quota.backends.base import (
    BackendError,
    BackendFull,
    BackendRejected,
    BackendUnavailable,
    StartOrder,
)
from makeway_quota.backends.kubernetes.api.client import ApiStatusError, Object
from makeway_quota.backends.kubernetes.api.informer import Timing
from makeway_quota.backends.kubernetes.attempts.start_errors import start_error
from makeway_quota.backends.kubernetes.backend import MAX_CONCURRENT_CREATES, KubernetesBackend
from makeway_quota.backends.kubernetes.cluster.nodes import toleration
from makeway_quota.backends.kubernetes.pods.manifest import PodSettings, token_secret_of
from makeway_quota.backends.remote.worker_hosts import WorkerHosts
from makeway_quota.control.workers.channel import WorkerChannel
from makeway_quota.control.workers.tokens import AttemptTokens
from makeway_quota.policy import read_policy
from makeway_quota.store.store import open_store
from makeway_quota.values import Place
from pods import simulated_pod

from kube_cluster.api import ApiProblem
from kube_cluster.cluster import Cluster
from kube_cluster.simulated import SIMULATED

pytestmark = pytest.mark.kube

NAMESPACE = "simulated-jobs"
CORE = f"/api/v1/namespaces/{NAMESPACE}"
PODS = f"{CORE}/pods"
ACCOUNTS = f"{CORE}/serviceaccounts"
OURS = "app.kubernetes.io/managed-by=makeway"
NETWORK_POLICIES = f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies"
SETTINGS = PodSettings(NAMESPACE, "here", "http://10.0.0.1:1/services/makeway", "makeway:1", "notebook:1")
POLICY = """
version: 1
pools: [{name: gpu, nodes: {labels: {type: kwok}}}]
profiles: [{name: gpu1, gpus: 1, cpu: 2, memory: 1Gi}]
policies: []
"""
QUICK = Timing(first_pause=0.05, max_pause=0.4, silence=20.0)
LIMITS = {
    "scheduler": 600.0,
    "unschedulable": 1.5,
    "claims": 5.0,
    "incomplete": 1.5,
    "container": 5.0,
    "token": 5.0,
    "no_image": 5.0,
    "site_image": 5.0,
    "image_pull": 5.0,
    "image": 600.0,
    "volumes": 600.0,
    "init": 600.0,
}


@pytest.fixture(scope="module")
def cluster(kwok_cluster: Cluster) -> Iterator[Cluster]:
    kwok_cluster.api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    yield kwok_cluster
    kwok_cluster.api.delete(f"/api/v1/namespaces/{NAMESPACE}")


@asynccontextmanager
async def replica(cluster: Cluster, folder: Path, settings: PodSettings = SETTINGS) -> AsyncIterator[KubernetesBackend]:
    """Open the backend of one replica."""
    store = open_store(f"sqlite:///{folder / 'makeway.sqlite'}")
    async with client(cluster, seconds=10.0) as api:
        made = KubernetesBackend(api, settings, [toleration(SIMULATED)], timing=QUICK, limits=LIMITS)
        made.connect(WorkerChannel(store, AttemptTokens(b"secret" * 8)))
        document = read_policy(POLICY)
        made.follow_policy(lambda: document)
        await made.open()
        await made.nodes()
        yield made
        await made.close(stop_jobs=False)
    store.close()


@pytest.fixture
async def backend(cluster: Cluster, tmp_path: Path) -> AsyncIterator[KubernetesBackend]:
    async with replica(cluster, tmp_path) as made:
        await soon(lambda: cluster.api.items(ACCOUNTS), "the namespace has its service account")
        yield made
        cluster.api.delete(PODS, gracePeriodSeconds="0")
        await soon(lambda: not cluster.api.items(PODS), "no pod is left")


def order(name: str, *nodes: str, milli: int = 1000, **changes: Any) -> StartOrder:
    places = tuple(Place(node, (0,), (milli,)) for node in nodes)
    return StartOrder(name, 1, "fit", "ana", "rnd", "gpu1", ("true",), {}, places, 30.0, **changes)


def usable(backend: KubernetesBackend, name: str) -> bool:
    """Whether a node takes work."""
    node = backend.inventory.node_statuses().get(name)
    return node is not None and node.ready and not node.cordoned


async def hosts(backend: KubernetesBackend, name: str) -> WorkerHosts | None:
    result = await backend.hosts()
    assert result is not None
    return result.get((name, 1))


async def becomes(backend: KubernetesBackend, name: str, what: str, **facts: Any) -> WorkerHosts:
    """Wait until the hosts of an attempt are as the facts say."""
    for _ in range(1500):
        result = await hosts(backend, name)
        if result is not None and all(getattr(result, key) == value for key, value in facts.items()):
            return result
        await asyncio.sleep(0.05)
    raise AssertionError(f"{what}: {await hosts(backend, name)}")


async def test_a_gang_is_created_once_and_removed_as_a_whole(cluster: Cluster, backend: KubernetesBackend) -> None:
    gang = order("j-gang", "simulated-0003", "simulated-0004")
    await asyncio.gather(backend.start(gang), backend.start(gang))
    await backend.start(gang)
    pods = cluster.api.items(PODS)
    assert sorted(pod["metadata"]["name"] for pod in pods) == ["makeway-j-gang-1-0", "makeway-j-gang-1-1"]
    shared = [f"{CORE}/services", NETWORK_POLICIES]
    for path in shared:
        result = cluster.api.items(path, labelSelector="makeway/job=j-gang")
        assert [one["metadata"]["name"] for one in result] == ["makeway-j-gang-1"], path
    (secret,) = cluster.api.items(f"{CORE}/secrets", labelSelector=OURS)
    assert sorted(secret["data"]) == ["j-gang.1.0", "j-gang.1.1"]
    assert {token_secret_of(pod) for pod in pods} == {secret["metadata"]["name"]}
    await becomes(backend, "j-gang", "both pods run", workers=2, present=True, waiting_reason="")
    bound = {pod["metadata"]["name"]: pod["spec"].get("nodeName") for pod in cluster.api.items(PODS)}
    assert bound == {"makeway-j-gang-1-0": "simulated-0003", "makeway-j-gang-1-1": "simulated-0004"}
    assert not (await backend.nodes())["simulated-0003"].foreign_gpus
    await backend.forget("j-gang", 1)
    assert await hosts(backend, "j-gang") is None, "what is forgotten is reported no more"
    await soon(lambda: not cluster.api.items(PODS), "the pods are gone")
    for path in (f"{CORE}/secrets", *shared):
        left = partial(cluster.api.items, path, labelSelector=OURS)
        await soon(lambda left=left: not left(), f"and of {path}")
    assert await hosts(backend, "j-gang") is None


async def test_the_pods_of_several_gangs_are_created_some_at_a_time(
    cluster: Cluster, backend: KubernetesBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, open_requests = backend._client.create, [0]

    async def counted(path: str, body: Object) -> Object:
        if path != PODS:
            return await create(path, body)
        now.add(body["metadata"]["name"])
        open_requests.append(len(now))
        try:
            return await create(path, body)
        finally:
            now.discard(body["metadata"]["name"])

    now: set[str] = set()
    monkeypatch.setattr(backend._client, "create", counted)
    nodes = [f"simulated-{number:04d}" for number in range(10, 10 + MAX_CONCURRENT_CREATES // 2)]
    await asyncio.gather(*(backend.start(order(f"j-many-{number}", *nodes)) for number in range(3)))
    assert max(open_requests) == MAX_CONCURRENT_CREATES
    assert len(cluster.api.items(PODS)) == 3 * len(nodes)


async def test_a_pod_that_kubernetes_does_not_place_is_given_up_with_the_reason(
    cluster: Cluster, backend: KubernetesBackend
) -> None:
    full = simulated_pod("full", gpus=8)
    full["spec"]["nodeName"] = "simulated-0005"
    cluster.api.create(PODS, full)
    await backend.start(order("j-late", "simulated-0005"))
    await becomes(backend, "j-late", "it waits", waiting_reason="unschedulable")
    lost = await becomes(backend, "j-late", "it is given up", present=False)
    assert (lost.never_ran, lost.node_lost, lost.exit_code) == (True, False, None)
    assert lost.message.startswith("its pod waited for 2 s: Kubernetes does not place its pod: 0/")
    assert "Insufficient nvidia.com/gpu" in lost.message


async def test_a_gang_without_one_of_its_pods_is_given_up(cluster: Cluster, backend: KubernetesBackend) -> None:
    await backend.start(order("j-torn", "simulated-0006", "simulated-0007"))
    await becomes(backend, "j-torn", "both run", present=True, waiting_reason="")
    cluster.api.delete(f"{PODS}/makeway-j-torn-1-1")
    await becomes(backend, "j-torn", "one is missing", waiting_reason="incomplete")
    lost = await becomes(backend, "j-torn", "it is given up", present=False)
    assert lost.message == "worker 1: its pod was deleted by others"


async def test_a_gang_of_which_a_process_that_died_made_a_part_is_made_anew(
    cluster: Cluster, backend: KubernetesBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gang = order("j-half", "simulated-0016", "simulated-0017")
    create = backend._client.create

    async def dies(path: str, body: Object) -> Object:
        if body["metadata"]["name"].endswith("-1"):
            await asyncio.Event().wait()
        return await create(path, body)

    monkeypatch.setattr(backend._client, "create", dies)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2):
            await backend.start(gang)
    monkeypatch.undo()
    await soon(lambda: cluster.api.items(PODS), "its first pod is there")
    async with replica(cluster, tmp_path) as other:
        await becomes(other, "j-half", "it is unfinished", present=True, start_broke_off=True)
        with pytest.raises(BackendUnavailable, match="made anew"):
            await other.start(gang)
        await soon(lambda: not cluster.api.items(PODS), "its pod is deleted")
        await soon(lambda: not other._removals.undoing(("j-half", 1)), "and its start may be ordered again")
        await other.start(gang)
        await becomes(other, "j-half", "both pods run", present=True, start_broke_off=False, waiting_reason="")
        (secret,) = cluster.api.items(f"{CORE}/secrets", labelSelector=OURS)
        pods = cluster.api.items(PODS)
        assert sorted(secret["data"]) == ["j-half.1.0", "j-half.1.1"]
        assert {token_secret_of(pod) for pod in pods} == {secret["metadata"]["name"]}
        owners = {one["uid"] for one in secret["metadata"]["ownerReferences"]}
        assert owners == {pod["metadata"]["uid"] for pod in pods}


async def test_a_node_that_is_gone_takes_its_pods_with_it(cluster: Cluster, backend: KubernetesBackend) -> None:
    node = cluster.api.get("/api/v1/nodes/simulated-0008")
    await backend.start(order("j-gone", "simulated-0008"))
    await becomes(backend, "j-gone", "it runs", present=True, waiting_reason="")
    cluster.api.delete("/api/v1/nodes/simulated-0008")
    cluster.api.delete(f"{PODS}/makeway-j-gone-1-0", gracePeriodSeconds="0")
    lost = await becomes(backend, "j-gone", "it is lost", present=False)
    assert (lost.node_lost, lost.message) == (True, "its node simulated-0008 is gone")
    kept = {key: node["metadata"][key] for key in ("name", "labels", "annotations")}
    room = {key: node["status"][key] for key in ("allocatable", "capacity")}
    again = {"metadata": kept, "spec": {"taints": node["spec"]["taints"]}, "status": room}
    cluster.api.create("/api/v1/nodes", again)
    await soon(lambda: usable(backend, "simulated-0008"), "the node is back")


async def test_an_evicted_pod_does_not_count_against_its_job(cluster: Cluster, backend: KubernetesBackend) -> None:
    await backend.start(order("j-drained", "simulated-0009"))
    await becomes(backend, "j-drained", "it runs", present=True, waiting_reason="")
    name = "makeway-j-drained-1-0"
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": NAMESPACE}}
    cluster.api.create(f"{PODS}/{name}/eviction", eviction)
    lost = await becomes(backend, "j-drained", "it is lost", present=False)
    assert lost.node_lost
    assert "EvictionByEvictionAPI" in lost.message


async def refused_at_last(backend: KubernetesBackend, asked: StartOrder) -> BackendError:
    """Return how a start is refused that is repeated where it may pass, as the service does.

    Pods that are created at the same time compete for the quota, and all but one may meet a conflict; a start is not
    repeated either before the pods of the last one are deleted.
    """
    result: list[BackendError] = []
    for _ in range(200):
        try:
            await backend.start(asked)
        except BackendError as refused:
            result.append(refused)
            passes = type(refused) is BackendUnavailable or "(409 Conflict)" in str(refused)
            if not passes:
                return refused
            await asyncio.sleep(0.1)
        else:
            break
    raise AssertionError(f"{asked.workload} was not refused for good, but: {result}")


async def test_a_gang_that_a_quota_refuses_waits_and_leaves_nothing_meanwhile(
    cluster: Cluster, backend: KubernetesBackend
) -> None:
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "2"}}}
    cluster.api.create(f"{CORE}/resourcequotas", quota)

    def used() -> str | None:
        return cluster.api.get(f"{CORE}/resourcequotas/few")["status"].get("used", {}).get("pods")

    try:
        # A pod that is created before is not counted until the controller looks again, which takes it up to 5 minutes.
        await soon(lambda: used() == "0", "the quota is in force")
        await backend.start(order("j-one", "simulated-0012"))
        await soon(lambda: used() == "1", "it counts the pod")
        full = await refused_at_last(backend, order("j-many", "simulated-0010", "simulated-0011"))
        assert isinstance(full, BackendFull), repr(full)
        assert re.search(r"quota of the namespace is used up: .*exceeded quota: few", str(full))
        await soon(lambda: len(cluster.api.items(PODS)) == 1, "the pod that was created is deleted")
        never = await refused_at_last(backend, order("j-more", "simulated-0010", "simulated-0011", "simulated-0012"))
        assert re.search(r"Each of its 3 pods requests pods=1, and .* allows 2 in all", str(never)), repr(never)
        assert isinstance(never, BackendFull), "it can never fit, until an administrator acts"
    finally:
        cluster.api.delete(f"{CORE}/resourcequotas/few")


async def test_what_the_installation_lacks_is_no_fault_of_a_job(cluster: Cluster, tmp_path: Path) -> None:
    for lacks in ("service_account", "priority_class", "namespace"):
        async with replica(cluster, tmp_path, replace(SETTINGS, **{lacks: "forgotten"})) as backend:
            with pytest.raises(BackendUnavailable, match=r"an administrator has to act: .*forgotten"):
                await backend.start(order(f"j-{lacks.replace('_', '-')}", "simulated-0012"))
    cluster.api.create(ACCOUNTS, {"metadata": {"name": "no-rights"}})
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = cluster.api.create(f"{ACCOUNTS}/no-rights/token", request)["status"]["token"]
    try:
        cluster.api.with_token(token).create(PODS, {"metadata": {"name": "x"}})
    except ApiProblem as problem:
        text = str(problem).partition(": ")[2]
        result = start_error(ApiStatusError(problem.status, problem.reason, text), 1)
    assert isinstance(result, BackendRejected)
    assert "cannot create resource" in str(result)


async def test_a_part_of_a_gpu_is_refused_in_words(backend: KubernetesBackend) -> None:
    with pytest.raises(BackendError, match=r"nvidia\.com/gpu can only be requested as a whole"):
        await backend.start(order("j-part", "simulated-0012", milli=500))


async def test_without_the_api_server_nothing_is_concluded(cluster: Cluster, backend: KubernetesBackend) -> None:
    await backend.start(order("j-stays", "simulated-0013"))
    before = await becomes(backend, "j-stays", "it runs", present=True, waiting_reason="")
    command = await asyncio.to_thread(stop_api_server, cluster)
    await soon(lambda: backend.pods.problem and backend.inventory.problem, "the backend has noticed")
    assert await hosts(backend, "j-stays") == before
    with pytest.raises(BackendUnavailable, match="cannot be reached"):
        await backend.start(order("j-later", "simulated-0013"))
    with pytest.raises(BackendUnavailable, match="cannot be reached"):
        await backend.forget("j-stays", 1)
    await asyncio.to_thread(start_api_server, cluster, command)
    await soon(lambda: not backend.pods.problem and not backend.inventory.problem, "it follows again")
    assert await hosts(backend, "j-stays") == before
    await backend.start(order("j-later", "simulated-0013"))
    await becomes(backend, "j-later", "it runs", present=True, waiting_reason="")
