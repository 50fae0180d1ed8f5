"""Measure reclaims on a real Kubernetes node of this machine: training pods make way for the pods of an owner."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from makeway_api.client import AsyncClient
from makeway_api.models import FileIn, Job, JobRequest
from makeway_quota.backends.kubernetes.api.client import ApiClient, Object
from makeway_quota.backends.kubernetes.api.connection import from_kubeconfig
from makeway_quota.backends.kubernetes.api.informer import Informer

from kube_cluster import programs
from kube_cluster.cluster import Cluster
from kube_cluster.host_volumes import job_template, make_claim
from kube_cluster.images import host_pod
from kube_cluster.problems import NotHere

from .measure import Measured
from .pod_service import NAMESPACE, Service, followed, running
from .reclaim import TRAINING, saved_in

ROUNDS = 50
BARE = 5
GPUS = 2
TIMEOUT = 120.0
CORE = f"/api/v1/namespaces/{NAMESPACE}"
PODS = f"{CORE}/pods"


def measure() -> list[Measured]:
    """Measure everything; nothing where Kubernetes has not been built or this machine cannot run a node."""
    if not programs.are_built():
        print("  Kubernetes is not built: run `make kube-test` once", file=sys.stderr)
        return []
    with Cluster.start() as cluster, TemporaryDirectory(prefix="makeway-reclaim-") as folder:
        try:
            cluster.add_node(gpus=GPUS)
        except NotHere as reason:
            print(f"  {reason}", file=sys.stderr)
            return []
        cluster.api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        policy = _policy(cluster, Path(folder))
        endpoints = cluster.api.get("/api/v1/namespaces/default/endpoints/kubernetes")
        host = endpoints["subsets"][0]["addresses"][0]["ip"]
        with running(cluster.kubeconfig, policy, host, launchers=True) as service:
            return asyncio.run(_measure(cluster, service))


async def _measure(cluster: Cluster, service: Service) -> list[Measured]:
    client = ApiClient(from_kubeconfig(cluster.kubeconfig))
    try:
        async with followed(Times(client, PODS)) as times, AsyncClient(service.url, "user00-0") as owner:
            bare = [await _bare(client, times, number) for number in range(BARE)]
            async with AsyncClient(service.url, "user01-0") as borrower:
                result = await _reclaims(owner, borrower, times)
    finally:
        await client.close()
    note = (
        f"{ROUNDS} reclaims in a row on {GPUS} GPUs; every job that made way resumed, none was lost. As the API server "
        "reports it: from the container's end to the node of the owner's pod."
    )
    beyond = "From the owner's submission to a running pod, less the time that the job took to save."
    pods = sorted(bare)[len(bare) // 2]
    return [
        Measured(
            "exit of a preempted container to the owner's pod bound",
            "s",
            result.bound,
            "its goal",
            0.5,
            0.5,
            note,
            at_95=True,
        ),
        Measured("a reclaim by pods beyond the job's own save", "s", result.beyond, "a bare pod", pods, 3.0, beyond),
    ]


@dataclass(slots=True)
class Delays:
    """Seconds of each reclaim."""

    bound: list[float] = field(default_factory=list)
    beyond: list[float] = field(default_factory=list)


async def _reclaims(owner: AsyncClient, borrower: AsyncClient, times: Times) -> Delays:
    """Fill the GPUs with jobs of a team without a reservation, and take one back again and again."""
    result = Delays()
    data = base64.b64encode(TRAINING.encode()).decode()
    file = FileIn(path="train.py", data=data)
    command = ["python3", "train.py"]
    for number in range(GPUS):
        await borrower.submit(JobRequest(name=f"filler {number}", profile="gpu1", command=command, files=[file]))
    for _ in range(ROUNDS):
        fillers = await until_running(borrower, GPUS)
        began = time.monotonic()
        job = await owner.submit(JobRequest(name="owner", profile="gpu1", command=["sleep", "0.2"]))
        mine = f"makeway-{job.id}-1-0"
        await times.until(mine, "running")
        victim = next(entry for entry in await jobs_of(borrower) if entry.preemptions > fillers[entry.id].preemptions)
        attempt = fillers[victim.id].attempt
        result.bound.append(times.of(mine, "bound") - times.of(f"makeway-{victim.id}-{attempt}-0", "exited"))
        save = saved_in((await borrower.logs(victim.id, attempt=attempt)).text)
        result.beyond.append(times.of(mine, "running") - began - save)
    for item in await jobs_of(borrower):
        outcomes = {attempt.outcome for attempt in item.attempts} - {None}
        if outcomes - {"preempted"}:
            raise RuntimeError(f"{item.name} was lost: {outcomes}")
    return result


async def until_running(borrower: AsyncClient, many: int) -> dict[str, Job]:
    """Return the so many jobs of a borrower once all train, and have had the time to import what they need."""
    ends = time.monotonic() + TIMEOUT
    while True:
        result = {job.id: job for job in await jobs_of(borrower)}
        if len(result) == many and all(job.state == "running" for job in result.values()):
            break
        if time.monotonic() > ends:
            raise RuntimeError(f"The jobs do not run: {result}")
        await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)
    return result


async def jobs_of(client: AsyncClient) -> list[Job]:
    """Return the jobs of a user, with their attempts."""
    return [await client.job(job.id) for job in (await client.jobs(mine=True)).jobs]


# -- pods


class Times(Informer[str]):
    """When the API server reported that a pod was bound, ran, and exited (monotonic)."""

    def __init__(self, client: ApiClient, pods: str) -> None:
        """`pods`: the path of a namespace's pods."""
        super().__init__(client, pods, self._read)
        self._times: dict[tuple[str, str], float] = {}

    def drop(self, pod: str) -> None:
        """Drop what was reported of a pod that is gone: the next one has its name."""
        for key in [key for key in self._times if key[0] == pod]:
            del self._times[key]

    def of(self, pod: str, what: str) -> float:
        """Return when it was reported."""
        return self._times[pod, what]

    async def until(self, pod: str, what: str) -> float:
        """Wait until it is reported, and return when it was."""
        ends = time.monotonic() + TIMEOUT
        while (pod, what) not in self._times:
            if time.monotonic() > ends:
                raise RuntimeError(f"{pod} is not {what}; pods: {self.objects}")
            await asyncio.sleep(0.01)
        return self._times[pod, what]

    async def until_gone(self, pod: str) -> None:
        """Return when a pod is there no more."""
        while True:
            if all(key.partition("/")[2] != pod for key in self.objects):
                return
            await asyncio.sleep(0.05)

    def _read(self, pod: Object) -> str:
        now, name, status = time.monotonic(), pod["metadata"]["name"], pod["status"]
        phase = str(status.get("phase"))
        states = [item.get("state", {}) for item in status.get("containerStatuses", ())]
        happened = {
            "bound": bool(pod["spec"].get("nodeName")),
            "running": phase == "Running" and all("running" in state for state in states),
            "exited": phase in ("Succeeded", "Failed") or (bool(states) and all("terminated" in s for s in states)),
        }
        for what, true in happened.items():
            if true:
                self._times.setdefault((name, what), now)
        return phase


async def _bare(client: ApiClient, times: Times, number: int) -> float:
    """Return the seconds from the creation of a pod without a service until it runs."""
    name = f"bare-{number}"
    began = time.monotonic()
    await client.create(PODS, host_pod(name, ["sleep", "600"], gpus=1))
    took = await times.until(name, "running") - began
    await client.delete(f"{PODS}/{name}", grace=0)
    await times.until_gone(name)
    return took


# -- what pods mount


def _policy(cluster: Cluster, checkpoints: Path) -> str:
    """Return a document whose pods see this machine's programs, and Makeway, in an empty image."""
    checkpoints.chmod(0o777)
    make_claim(cluster.api, NAMESPACE, "checkpoints", checkpoints)
    spec = job_template(cluster.api, NAMESPACE)
    teams = [("team00", GPUS), ("team01", 0)]
    document = {
        "version": 1,
        "pools": [{"name": "gpu", "size": GPUS, "nodes": {"labels": {"makeway.test/real": "true"}}}],
        "profiles": [{"name": "gpu1", "gpus": 1, "pools": ["gpu"], "grace": 30, "pod": {"spec": spec}}],
        "policies": [{"name": name, "groups": [name], "quotas": [{"reserved": many}]} for name, many in teams],
    }
    return json.dumps(document)
