"""Jobs as pods at 1,000 simulated nodes: how fast they run, what a cycle takes, and the load on the API server.

The pods are simulated by kwok; etcd, API server, scheduler, the service and its API are real, and share the machine.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from makeway_api.client import AsyncClient
from makeway_api.models import JobRequest
from makeway_quota.backends.kubernetes.api.client import ApiClient, Object
from makeway_quota.backends.kubernetes.api.connection import from_kubeconfig
from makeway_quota.backends.kubernetes.api.informer import Informer

from kube_cluster import programs
from kube_cluster.api import GPU, Api
from kube_cluster.cluster import Cluster
from kube_cluster.images import HOST
from kube_cluster.simulated import toleration

from .measure import Measured
from .pod_service import NAMESPACE, followed, running
from .request_load import TEAMS, USERS, policy
from .requests import p95

NODES = 1000
GPUS = 8
"""on a node"""
JOBS = 2000
RUNNING, WAITING = 8000, 10_000
NODE_CHANGES = 20
"""a second"""
SECONDS = 60.0
PAUSE = 5.0
"""seconds in which the service writes how everything is"""
AT_ONCE = 16
"""requests of the load at the same time"""
GOAL = 1 / 0.8
"""times the seconds of bare pods"""
TIMEOUT = 1200.0
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"


def measure() -> list[Measured]:
    """Measure everything; nothing where Kubernetes has not been built."""
    if not programs.are_built():
        print("  Kubernetes is not built: run `make kube-test` once", file=sys.stderr)
        return []
    with Cluster.start() as cluster:
        cluster.add_simulated_nodes(NODES, gpus=GPUS)
        cluster.api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        return asyncio.run(_measure(cluster))


async def _measure(cluster: Cluster) -> list[Measured]:
    client = ApiClient(from_kubeconfig(cluster.kubeconfig))
    try:
        async with followed(Phases(client)) as pods:
            before = await _bare(client, pods)
            with running(cluster.kubeconfig, _policy()) as service:
                async with _load(service.url) as load:
                    took = await _jobs(load, pods, JOBS)
                    first = service.figures()
                    await _jobs(load, pods, RUNNING - JOBS)
                    service.launch()
                    await load.submit(WAITING)
                    await asyncio.sleep(PAUSE)
                    service.figures()
                    changes = await _change_nodes(cluster.api)
                    busy = service.figures()
            await _empty(client, pods)
            after = await _bare(client, pods)
    finally:
        await client.close()
    return _rows(before, took, after, first, busy, changes)


def _rows(
    before: float, took: float, after: float, first: dict[str, Any], busy: dict[str, Any], changes: int
) -> list[Measured]:
    bare = (before + after) / 2
    cycle = 1000 * p95(busy["cycles"])
    rate = (
        f"{JOBS / took:.0f} jobs a second; bare pods, before and after: {JOBS / before:.0f} and {JOBS / after:.0f}. "
        f"For each job, the service sent {first['requests'] / JOBS:.1f} requests to the API server and read "
        f"{first['bytes'] / JOBS / 1024:.1f} KiB."
    )
    state = (
        f"{RUNNING:,} pods run, {WAITING:,} jobs wait, {changes / SECONDS:.0f} nodes change each second; "
        f"{len(busy['cycles'])} cycles in {SECONDS:.0f} s; the service sent {busy['requests']} requests and read "
        f"{busy['bytes'] / 2**20:.1f} MiB meanwhile."
    )
    memory = busy["memory"] / 2**20
    return [
        Measured(f"{JOBS:,} jobs as pods, until all run", "s", [took], "bare pods", bare, GOAL * bare, rate),
        Measured("cycle of the loop over pods, p95", "ms", [cycle], "its goal", 100.0, 100.0, state),
        Measured("memory of the service over pods", "MiB", [memory], "its goal", 700.0, 700.0, "with the same jobs"),
    ]


def _policy() -> str:
    return policy(NODES).replace("{name: gpu, profiles", "{name: gpu, nodes: {labels: {type: kwok}}, profiles")


# -- pods


class Phases(Informer[str]):
    """The phases of the pods of the namespace."""

    def __init__(self, client: ApiClient) -> None:
        super().__init__(client, PODS, lambda pod: str(pod["status"].get("phase")))

    async def until(self, running: int) -> None:
        """Return when so many pods run, and no other is there."""
        ends = time.monotonic() + TIMEOUT
        while len(self.objects) != running or any(phase != "Running" for phase in self.objects.values()):
            if time.monotonic() > ends:
                raise RuntimeError(f"{len(self.objects)} pods, of which not all run; expected {running}.")
            await asyncio.sleep(0.05)


def _pod(number: int) -> Object:
    """Return the least pod with a GPU."""
    container = {"name": "worker", "image": HOST, "resources": {"limits": {GPU: "1"}}}
    return {"metadata": {"name": f"bare-{number}"}, "spec": {"containers": [container], "tolerations": [toleration()]}}


async def _bare(client: ApiClient, pods: Phases) -> float:
    """Return the seconds in which pods without a service run that were created as fast as possible."""
    began = time.monotonic()
    room = asyncio.Semaphore(AT_ONCE)

    async def create(number: int) -> None:
        async with room:
            await client.create(PODS, _pod(number))

    await asyncio.gather(*(create(number) for number in range(JOBS)))
    await pods.until(JOBS)
    took = time.monotonic() - began
    await _empty(client, pods)
    return took


async def _empty(client: ApiClient, pods: Phases) -> None:
    """Delete all pods and wait until they are gone."""
    while names := [key.partition("/")[2] for key in pods.objects]:
        for at in range(0, len(names), AT_ONCE):
            await asyncio.gather(*(client.delete(f"{PODS}/{name}", grace=0) for name in names[at : at + AT_ONCE]))
        await asyncio.sleep(1.0)


async def _change_nodes(api: Api) -> int:
    """Change an annotation and the cordon of nodes at the rate of the benchmark; return how many changed."""
    began, changes = time.monotonic(), 0
    while (past := time.monotonic() - began) < SECONDS:
        name = f"simulated-{changes % NODES:04d}"
        # every tenth change is one that Makeway counts: the node is closed for new pods, and opened in the next turn
        spec = {"spec": {"unschedulable": changes // NODES % 2 == 0}} if changes % 10 == 0 else {}
        change = {"metadata": {"annotations": {"bench": str(changes)}}, **spec}
        await asyncio.to_thread(api.merge, f"/api/v1/nodes/{name}", change)
        changes += 1
        await asyncio.sleep(max(0.0, changes / NODE_CHANGES - past))
    return changes


# -- jobs


class Load:
    """Clients of all teams that submit jobs of one GPU."""

    def __init__(self, clients: Sequence[AsyncClient]) -> None:
        self._clients = clients
        self._submitted = 0

    async def submit(self, jobs: int) -> None:
        """Submit so many jobs, one after the other in each of the clients."""
        room = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> None:
            async with room:
                request = JobRequest(name=f"train {number}", profile="gpu1", command=["python", "train.py"])
                await self._clients[number % len(self._clients)].submit(request)

        await asyncio.gather(*(one(self._submitted + number) for number in range(jobs)))
        self._submitted += jobs


@asynccontextmanager
async def _load(url: str) -> AsyncIterator[Load]:
    clients = [AsyncClient(url, f"user{number % TEAMS:02}-{number % USERS}") for number in range(AT_ONCE)]
    try:
        yield Load(clients)
    finally:
        for client in clients:
            await client.close()


async def _jobs(load: Load, pods: Phases, jobs: int) -> float:
    """Submit jobs; return the seconds until all of them run."""
    began, there = time.monotonic(), len(pods.objects)
    await load.submit(jobs)
    await pods.until(there + jobs)
    return time.monotonic() - began
