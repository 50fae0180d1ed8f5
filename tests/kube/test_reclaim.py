"""Reclaims on a real node: as many jobs make way as are needed, whatever time each takes to save.

`RECLAIMS=50` runs as many in a row with each number of victims; `HISTORY=50 SEED=7` a random history of 50 reclaims.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from statistics import median

import pytest
from informing import client
from informing import running as following
from job_service import NAMESPACE, PODS, RUN_AS, Serving, make_namespace
from kube.node_faults import restart_device_plugin, restart_kubelet
from makeway_api.models import Job
from makeway_quota.application import Application
from makeway_quota.backends.kubernetes.api.client import Object
from makeway_quota.backends.kubernetes.api.informer import Informer
from makeway_quota.control.start_backoff import START_DEFERRED, START_REFUSED

from kube_cluster.cluster import Cluster
from kube_cluster.host_volumes import job_template, make_claim
from kube_cluster.images import HOST
from kube_cluster.problems import NotHere

pytestmark = pytest.mark.kube

ALL = 50
RECLAIMS = int(os.environ.get("RECLAIMS", "2"))
GPUS = 6
SAVES = (0.0, 0.4, 0.8, 1.2, 1.6, 2.0)
"""Seconds that each borrower takes to save."""
BORROWER = """
import os, signal, sys, time
def save(number, frame):
    time.sleep(float(sys.argv[1]))
    os._exit(75)
signal.signal(signal.SIGTERM, save)
print("trains", flush=True)
time.sleep(3600)
"""
NEVER_SAVES = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("trains", flush=True)
time.sleep(3600)
"""
KINDS: tuple[tuple[str, str, int, tuple[str, ...]], ...] = (
    ("a gang", "gang", 2, (BORROWER, "0.8")),
    ("never saves", "short", 1, (NEVER_SAVES,)),
    ("with another container", "beside", 1, (BORROWER, "0.4")),
    ("quick", "gpu1", 1, (BORROWER, "0.0")),
    ("slow", "gpu1", 1, (BORROWER, "1.6")),
)
"""Name, profile, GPUs and program of the borrowers of a random history."""
ROUNDS = int(os.environ.get("REFUSALS", "3"))
HISTORY = int(os.environ.get("HISTORY", "4"))
SEED = int(os.environ.get("SEED", "1"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster of its own, because its node has more GPUs than that of the others."""
    with Cluster.start() as result:
        try:
            result.add_node(gpus=GPUS)
        except NotHere as reason:
            pytest.skip(str(reason))
        make_namespace(result)
        yield result


@pytest.fixture(scope="module")
def spec(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Object:
    """Make the claims of checkpoints and programs once for all tests; return the pod spec of jobs."""
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    os.chown(checkpoints, *RUN_AS)
    make_claim(cluster.api, NAMESPACE, "checkpoints", checkpoints)
    return job_template(cluster.api, NAMESPACE)


@pytest.fixture
async def serving(cluster: Cluster, spec: Object, tmp_path: Path) -> AsyncIterator[Serving]:
    sizes = range(1, GPUS + 1)
    profile = {"pools": ["gpu"], "grace": 30, "policies": [["rnd", "devops"]], "pod": {"spec": spec}}
    document = {
        "version": 1,
        "pools": [{"name": "gpu", "size": GPUS, "nodes": {"labels": {"makeway.test/real": "true"}}}],
        "profiles": [
            *({"name": f"gpu{size}", "gpus": size, **profile} for size in sizes),
            {"name": "gang", "gpus": 1, "workers": 2, **profile},
            {"name": "short", "gpus": 1, **profile, "grace": 4},
            {"name": "beside", "gpus": 1, **profile, "pod": {"spec": with_another_container(spec)}},
        ],
        "policies": [
            {"name": "rnd", "groups": ["rnd"], "quotas": [{"pools": ["gpu"], "reserved": 0}]},
            {"name": "devops", "groups": ["devops"], "quotas": [{"pools": ["gpu"], "reserved": 4}]},
        ],
    }
    made = Serving(cluster, tmp_path / "state", json.dumps(document))
    yield made
    for one in made.clients.values():
        await one.close()
    made.reservation.close()


def with_another_container(spec: Object) -> Object:
    """Return a pod spec with a container beside the worker, which takes a second to end once the worker has saved."""
    (worker,) = spec["containers"]
    ends = "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), exit(0)))\ntime.sleep(3600)"
    context = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    beside = {**worker, "name": "beside", "image": HOST, "command": ["python3", "-c", ends], "securityContext": context}
    return {**spec, "containers": [worker, beside]}


class Moments(Informer[str]):
    """When the API server reported that pods were bound, and that their last container ended (monotonic)."""

    def __init__(self, api: object) -> None:
        super().__init__(api, PODS, self._read)  # type: ignore[arg-type]
        self.bound: dict[str, float] = {}
        self.ended: dict[str, float] = {}

    def _read(self, pod: Object) -> str:
        name, status = pod["metadata"]["name"], pod["status"]
        states = [item.get("state", {}) for item in status.get("containerStatuses", ())]
        if pod["spec"].get("nodeName"):
            self.bound.setdefault(name, time.monotonic())
        if status.get("phase") in ("Succeeded", "Failed") or (states and all("terminated" in item for item in states)):
            self.ended.setdefault(name, time.monotonic())
        return str(status.get("phase"))


async def borrowers(serving: Serving, ids: list[str]) -> dict[str, Job]:
    """Return the borrowers once all of them train."""
    result: dict[str, Job] = {}

    async def train() -> bool:
        for id in ids:
            result[id] = await serving.client("ana").job(id)
        return all(job.state == "running" for job in result.values())

    await serving.until(train, lambda: f"all borrowers run: {result}")
    for job in result.values():
        await serving.says(job, "trains", job.attempt)
    return dict(result)


@pytest.mark.covers("N33", "F20", "F81")
@pytest.mark.timeout(300 + 60 * RECLAIMS)
async def test_reclaims_in_a_row_stop_as_few_jobs_as_possible(serving: Serving, cluster: Cluster) -> None:
    async with serving.running(), client(cluster) as api:
        moments = Moments(api)
        async with following(moments):
            jobs = [
                await serving.submit("ana", f"borrower {at}", "python3", "-c", BORROWER, str(SAVES[at]))
                for at in range(GPUS)
            ]
            ids, waits = [job.id for job in jobs], []
            for _ in range(RECLAIMS):
                for victims in (2, 4, 1, 3):
                    before = await borrowers(serving, ids)
                    owner = await serving.submit("bo", "owner", "sleep", "0.5", profile=f"gpu{victims}")
                    await serving.reaches(owner, "succeeded")
                    after = await borrowers(serving, ids)
                    stopped = [id for id in ids if after[id].preemptions > before[id].preemptions]
                    assert sum(after[id].preemptions - before[id].preemptions for id in ids) == victims, stopped
                    remaining = [moments.ended[f"makeway-{id}-{before[id].attempt}-0"] for id in stopped]
                    waits.append(moments.bound[f"makeway-{owner.id}-1-0"] - max(remaining))
    print(
        f"\n{len(waits)} reclaims; the owner's pod was bound after the last exit: median {median(waits):.3f} s, "
        f"worst {max(waits):.3f} s, {sum(wait >= 0.5 for wait in waits)} after 0.5 s and more"
    )
    assert median(waits) < 0.5
    # Beside other tests, scheduler, kubelet and API server wait for a processor themselves.
    assert RECLAIMS < ALL or max(waits) < 0.5


def decided(service: Application) -> str:
    """Return the last decisions, oldest first."""
    newest = service.components.store.decisions(limit=40)
    return "\n".join(f"{item.at:.1f} {item.verb} {item.code} {item.message}" for item in reversed(newest))


def told(service: Application, job: Job, code: str) -> int:
    """Return how often the log of decisions has a code about a job."""
    return sum(item.code == code for item in service.components.store.decisions(job.id))


@pytest.mark.covers("N33", "F20", "F81")
@pytest.mark.timeout(300 + 60 * HISTORY)
async def test_in_a_random_history_no_more_gpus_make_way_than_are_asked_for(serving: Serving, cluster: Cluster) -> None:
    """A gang, one that never saves, one with another container, and restarts while they make way.

    Where the kubelet refuses the owner's pod, as its device plugin is just gone, the owner keeps the GPUs meanwhile.
    """
    random, restarts = Random(SEED), Counter[str]()
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(serving.running())
        jobs = [
            await serving.submit("ana", name, "python3", "-c", *program, profile=profile)
            for name, profile, _, program in KINDS
        ]
        gpus = {job.id: size for job, (_, _, size, _) in zip(jobs, KINDS, strict=True)}
        total = refusals = 0
        for _ in range(HISTORY):
            asked, restart = random.randint(1, 4), random.choice(["none", "service", "kubelet", "plugin"])
            before = await borrowers(serving, [*gpus])
            owner = await serving.submit("bo", "owner", "sleep", "0.5", profile=f"gpu{asked}")
            await asyncio.sleep(random.uniform(0.0, 1.5))
            restarts[restart] += 1
            if restart == "service":
                await stack.aclose()
                service = await stack.enter_async_context(serving.running())
            elif restart != "none":
                await (restart_kubelet if restart == "kubelet" else restart_device_plugin)(serving, cluster.nodes[0])
            await serving.reaches(owner, "succeeded")
            after = await borrowers(serving, [*gpus])
            many = {after[id].name: after[id].preemptions - before[id].preemptions for id in gpus}
            stopped = sum(size * (after[id].preemptions - before[id].preemptions) for id, size in gpus.items())
            refused, deferred = (told(service, owner, code) for code in (START_REFUSED, START_DEFERRED))
            total, refusals = total + stopped, refusals + refused
            what = f"for {asked} GPUs, restarted: {restart}, refused {refused} times: {many}"
            assert (stopped, deferred) == (asked, 0), f"{what}\n{decided(service)}"
    print(
        f"\n{HISTORY} reclaims with seed {SEED}, restarts {dict(restarts)}: {total} GPUs made way, none needlessly, "
        f"with {refusals} starts that the kubelet refused"
    )


@pytest.mark.covers("N33", "F20")
@pytest.mark.timeout(600)
async def test_an_owner_whose_pod_the_kubelet_refuses_keeps_its_gpus(serving: Serving, cluster: Cluster) -> None:
    """The device plugin goes just before the owner's pod is bound, which the scheduler hears of later."""
    refusals = 0
    async with serving.running() as service:
        jobs = [await serving.submit("ana", f"borrower {at}", "python3", "-c", BORROWER, "1.2") for at in range(GPUS)]
        ids = [job.id for job in jobs]
        for _ in range(ROUNDS):
            before = await borrowers(serving, ids)
            owner = await serving.submit("bo", "owner", "sleep", "0.5", profile="gpu2")
            await asyncio.sleep(1.0)  # two borrowers save

            async def refused(owner: Job = owner) -> bool:
                return told(service, owner, START_REFUSED) > 0

            await restart_device_plugin(serving, cluster.nodes[0], again_until=refused)
            await serving.reaches(owner, "succeeded")
            after = await borrowers(serving, ids)
            stopped = sum(after[id].preemptions - before[id].preemptions for id in ids)
            refusals += told(service, owner, START_REFUSED)
            assert (stopped, told(service, owner, START_DEFERRED)) == (2, 0), decided(service)
    print(f"\n{ROUNDS} reclaims, {refusals} starts that the kubelet refused, no needless preemption")
    assert refusals, "the kubelet refused no pod: the test has shown nothing"
