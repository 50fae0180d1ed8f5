"""Jobs run as pods of a real cluster: admitted as *restricted*, noticed, resumed, and told apart when they end."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import uvicorn
import yaml
from informing import client
from makeway_api.client import AsyncClient
from makeway_api.models import FileIn, Job, JobRequest
from makeway_quota.application import Application
from makeway_quota.backends.base import StartOrder, WorkerPlace
from makeway_quota.backends.kubernetes.client import ApiRefusal, Object
from makeway_quota.backends.kubernetes.manifest import PodSettings, WorkerResources, worker_pod
from makeway_quota.main import main, make_backend
from makeway_quota.settings import load
from makeway_quota.web.app import create_app
from makeway_quota.web.auth import TokenAuth
from makeway_quota.web.http_server import server_config
from makeway_quota.web.settings import WebSettings
from pods import wait_until
from running import PEOPLE

from kube_cluster.api import GPU
from kube_cluster.cluster import Cluster
from kube_cluster.images import HOST
from kube_cluster.node import Node

pytestmark = pytest.mark.kube

ROOT = Path(__file__).parents[2]
NAMESPACE = "jobs"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
JOBS = "app.kubernetes.io/managed-by=makeway"
SETTINGS = PodSettings(NAMESPACE, "here", "http://10.0.0.1:1/services/makeway", HOST, HOST)
TRAIN = FileIn(path="train.py", data=base64.b64encode((ROOT / "docs" / "examples" / "train.py").read_bytes()).decode())


@pytest.fixture(scope="module")
def cluster(control_plane: Cluster) -> Cluster:
    """The shared cluster with a namespace that admits restricted pods only."""
    enforce = {"pod-security.kubernetes.io/enforce": "restricted"}
    control_plane.api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE, "labels": enforce}})
    accounts = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
    wait_until(lambda: control_plane.api.items(accounts), "the namespace has its service account")
    return control_plane


def order(workers: int = 1) -> StartOrder:
    places = tuple(WorkerPlace("node-0", (0,), (1000,)) for _ in range(workers))
    return StartOrder("j-1", 1, "fit", "ana", "rnd", "gpu1", ("true",), {}, places, grace=30.0)


# -- admission


@pytest.mark.covers("F81")
@pytest.mark.parametrize("workers", [1, 2])
async def test_pods_of_jobs_pass_the_restricted_standard(cluster: Cluster, workers: int) -> None:
    template = {"spec": {"containers": [{"name": "beside", "image": HOST}], "volumes": [{"name": "x", "emptyDir": {}}]}}
    settings = replace(SETTINGS, checkpoint_claim="checkpoints-{team}")
    given = WorkerResources(GPU, 1, 500, 256, (), template)
    async with client(cluster) as api:
        pod = worker_pod(settings, order(workers), 0, "api/v1/attempts/j-1/1/0", given)
        stored = await api.create(f"{PODS}?dryRun=All", pod)
        names = [one["name"] for one in stored["spec"]["containers"]]
        assert sorted(names) == ["beside", "worker"]
        mounts = [one["mountPath"] for c in stored["spec"]["containers"] for one in c.get("volumeMounts", ())]
        assert not [path for path in mounts if "serviceaccount" in path], "no token of the API server"


async def test_pods_beyond_the_restricted_standard_are_refused_there(cluster: Cluster) -> None:
    pod = worker_pod(SETTINGS, order(), 0, "api/v1/attempts/j-1/1/0", WorkerResources())
    pod["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    async with client(cluster) as api:
        with pytest.raises(ApiRefusal, match="allowPrivilegeEscalation") as refused:
            await api.create(f"{PODS}?dryRun=All", pod)
    assert refused.value.status == 403


# -- jobs on the real node


def volume(cluster: Cluster, name: str, path: Path | str) -> Object:
    """Make a claim of a folder of this machine, and return it as a volume of pods."""
    spec: Object = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "",
        "hostPath": {"path": str(path)},
        "claimRef": {"namespace": NAMESPACE, "name": name},
    }
    cluster.api.create("/api/v1/persistentvolumes", {"metadata": {"name": name}, "spec": spec})
    claim: Object = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "",
        "volumeName": name,
        "resources": {"requests": {"storage": "1Gi"}},
    }
    claims = f"/api/v1/namespaces/{NAMESPACE}/persistentvolumeclaims"
    cluster.api.create(claims, {"metadata": {"name": name}, "spec": claim})
    return {"name": name, "persistentVolumeClaim": {"claimName": name}}


@pytest.fixture(scope="module")
def policy(cluster: Cluster, real_node: Node, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A document whose profile mounts this machine's programs, and Makeway, into pods of an empty image."""
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    checkpoints.chmod(0o777)
    volumes = [volume(cluster, "usr", "/usr"), volume(cluster, "widgets", ROOT / "widgets")]
    volume(cluster, "checkpoints", checkpoints)
    mounts = [
        {"name": "usr", "mountPath": "/usr", "readOnly": True},
        {"name": "widgets", "mountPath": "/widgets", "readOnly": True},
    ]
    here = {"env": [{"name": "PYTHONPATH", "value": "/widgets"}], "volumeMounts": mounts}
    template = {
        "metadata": {"labels": {"cost": "12"}},
        "spec": {
            "volumes": volumes,
            "containers": [{"name": "worker", **here}],
            "initContainers": [{"name": "launcher", **here}],
        },
    }
    profile = {"gpus": 1, "pools": ["gpu"], "policies": [["rnd", "devops"]], "grace": 30, "pod": template}
    document = {
        "version": 1,
        "pools": [{"name": "gpu", "size": 2, "nodes": {"labels": {"makeway.test/real": "true"}}}],
        "profiles": [
            {"name": "gpu1", **profile},
            {"name": "other", **profile, "image": "makeway.test/nothing:1"},
            {"name": "small", **profile, "memory": 64},
            {"name": "gang", **profile, "workers": 2},
        ],
        "policies": [
            {"name": "rnd", "groups": ["rnd"], "quotas": [{"pools": ["gpu"], "reserved": 1, "limit": 2}]},
            {"name": "devops", "groups": ["devops"], "quotas": [{"pools": ["gpu"], "reserved": 1, "limit": 2}]},
        ],
    }
    return json.dumps(document)


def service_account(cluster: Cluster, file: Path) -> Path:
    """Write the kubeconfig of an account with the rights of the documentation alone."""
    namespace = "/api/v1/namespaces/default/serviceaccounts"
    page = (ROOT / "docs/how-to/run-jobs-as-pods.md").read_text(encoding="utf-8")
    (text,) = [dedent(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "kind: Role" in text]
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    subject = {"kind": "ServiceAccount", "name": "makeway", "namespace": "default"}
    if not cluster.api.items(namespace, fieldSelector="metadata.name=makeway"):
        cluster.api.create(namespace, {"metadata": {"name": "makeway"}})
        for role in yaml.safe_load_all(text):
            kind = role["kind"]
            place = f"{rbac}/namespaces/{NAMESPACE}" if kind == "Role" else rbac
            cluster.api.create(f"{place}/{kind.lower()}s", role)
            binding = {"roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": "makeway"}}
            binding |= {"metadata": {"name": "makeway"}, "subjects": [subject]}
            cluster.api.create(f"{place}/{kind.lower()}bindings", binding)
    token = cluster.api.create(f"{namespace}/makeway/token", {"spec": {"expirationSeconds": 3600}})["status"]["token"]
    config = json.loads(cluster.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    file.write_text(json.dumps(config))
    return file


class Serving:
    """A service on the cluster, and one client for each person."""

    def __init__(self, cluster: Cluster, folder: Path, policy: str) -> None:
        self.cluster = cluster
        self.clients: dict[str, AsyncClient] = {}
        host = cluster.api.get("/api/v1/namespaces/default/endpoints/kubernetes")["subsets"][0]["addresses"][0]["ip"]
        self.reservation = socket.socket()  # of the port, also while the service is stopped
        self.reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.reservation.bind((host, 0))
        self.url = f"http://{host}:{self.reservation.getsockname()[1]}/services/makeway"
        folder.mkdir(exist_ok=True)
        (folder / "policy.yaml").write_text(policy)
        self.environ = {
            "MAKEWAY_STATE_DIR": str(folder),
            "MAKEWAY_POLICY_FILE": str(folder / "policy.yaml"),
            "MAKEWAY_TICKET_SECRET": "a secret that all replicas have",
            "MAKEWAY_BACKEND": "kubernetes",
            "MAKEWAY_KUBECONFIG": str(service_account(cluster, folder / "kubeconfig")),
            "MAKEWAY_KUBE_NAMESPACE": NAMESPACE,
            "MAKEWAY_KUBE_LAUNCHER_IMAGE": HOST,
            "MAKEWAY_KUBE_CHECKPOINT_CLAIM": "checkpoints",
            "MAKEWAY_WORKER_URL": self.url,
        }

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Application]:
        """Run the service as configured; pods outlive it."""
        settings = load(environ=self.environ)
        service = await Application.open(settings, make_backend(settings))
        app = create_app(service.services, WebSettings(secret=b"test" * 8), TokenAuth(PEOPLE))
        server = uvicorn.Server(server_config(app, timeout_graceful_shutdown=1))
        await service.start()
        listener = socket.create_server(self.reservation.getsockname(), reuse_port=True)
        serving = asyncio.create_task(server._serve([listener]))
        try:
            yield service
        finally:
            app.state.streams.close()
            server.should_exit = True
            await serving
            await service.stop(stop_jobs=False)

    def client(self, person: str = "ana") -> AsyncClient:
        """Return that person's client; tokens are names here."""
        if person not in self.clients:
            self.clients[person] = AsyncClient(self.url, person)
        return self.clients[person]

    async def submit(self, person: str, name: str, *command: str, profile: str = "gpu1", **more: Any) -> Job:
        """Submit a job of one GPU."""
        job = await self.client(person).submit(JobRequest(name=name, command=[*command], profile=profile, **more))
        assert isinstance(job, Job)
        return job

    async def reaches(self, job: Job, *states: str, attempt: int = 1) -> Job:
        """Wait until a job is in one of the states, in this attempt or a later one."""
        found: list[Job] = []

        async def there() -> bool:
            found.append(await self.client("root").job(job.id))
            return found[-1].state.value in states and found[-1].attempt >= attempt

        await self.until(there, lambda: f"{job.name} becomes {states}: {found[-1]}")
        return found[-1]

    async def log(self, job: Job, attempt: int = 1) -> str:
        """Return what an attempt wrote."""
        page = await self.client("root").logs(job.id, attempt=attempt, offset=0, limit=2**20)
        return str(page.text)

    async def says(self, job: Job, text: str, attempt: int = 1) -> None:
        """Wait until an attempt wrote a text."""

        async def there() -> bool:
            return text in await self.log(job, attempt)

        await self.until(there, lambda: f"{job.name} says {text}")

    async def until(self, true: Callable[[], Awaitable[bool]], what: Callable[[], str]) -> None:
        """Wait until an answer is true; fail after a time that is much too long."""
        for _ in range(600):
            if await true():
                return
            await asyncio.sleep(0.2)
        raise AssertionError(f"waited in vain: {what()}; pods: {self.pods()}")

    def pods(self) -> dict[str, str]:
        """Return the phases of the jobs' pods by name."""
        found = self.cluster.api.items(PODS, labelSelector=JOBS)
        return {pod["metadata"]["name"]: pod["status"].get("phase", "") for pod in found}


@pytest.fixture
async def serving(cluster: Cluster, policy: str, tmp_path: Path) -> AsyncIterator[Serving]:
    made = Serving(cluster, tmp_path / "state", policy)
    yield made
    for one in made.clients.values():
        await one.close()
    made.reservation.close()
    cluster.api.delete(PODS, gracePeriodSeconds="0")
    await asyncio.to_thread(wait_until, lambda: not made.pods(), "no pod of a job is left")


async def training(serving: Serving, person: str, name: str, seconds: str) -> Job:
    steps = ["--steps", "400", "--every", "5000", "--seconds", seconds]
    return await serving.submit(person, name, "python3", "train.py", *steps, files=[TRAIN])


def weights(log: str) -> str:
    found = re.search(r"weights (\w+)", log)
    assert found, log
    return found[1]


@pytest.mark.covers("F81", "F84", "F42", "F47")
async def test_a_job_is_a_pod_makes_way_and_resumes(serving: Serving, real_node: Node) -> None:
    async with serving.running():
        calm = await training(serving, "ana", "calm", "0")
        await serving.reaches(calm, "succeeded")
        first = await training(serving, "ana", "first", "0.05")
        second = await training(serving, "ana", "second", "0.05")
        for job in (first, second):
            await serving.says(job, "step 100")
        pod = serving.cluster.api.get(f"{PODS}/makeway-{second.id}-1-0")
        assert pod["spec"]["nodeName"] == real_node.name
        assert pod["metadata"]["labels"]["cost"] == "12"
        assert pod["spec"]["containers"][0]["resources"]["limits"] == {GPU: "1"}
        owner = await serving.submit("bo", "owner", "sleep", "3")
        await serving.reaches(owner, "running", "succeeded")
        evicted = await serving.reaches(second, "starting", "running", "pending", attempt=1)
        assert evicted.preemptions == 1
        assert (await serving.reaches(first, "running", "succeeded")).preemptions == 0
        await serving.reaches(owner, "succeeded")
        done = await serving.reaches(second, "succeeded", "failed", attempt=2)
        assert [each.outcome for each in done.attempts] == ["preempted", "succeeded"], done
        assert done.attempts[0].checkpoint is not None
        step = done.attempts[0].checkpoint.step
        assert f"going on at step {step} of 400" in await serving.log(second, 2)
        assert weights(await serving.log(second, 2)) == weights(await serving.log(calm))
        await serving.until(lambda: _false(serving.pods()), lambda: "the pods of ended attempts are removed")


async def _false(pods: dict[str, str]) -> bool:
    return not pods


async def test_a_drained_pod_saves_and_its_job_goes_on(serving: Serving) -> None:
    async with serving.running():
        job = await training(serving, "ana", "drained", "0.03")
        await serving.says(job, "step 100")
        name = f"makeway-{job.id}-1-0"
        metadata = {"name": name, "namespace": NAMESPACE}
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        serving.cluster.api.create(f"{PODS}/{name}/eviction", eviction)
        done = await serving.reaches(job, "succeeded", "failed", attempt=2)
        assert (done.state.value, len(done.attempts)) == ("succeeded", 2), done
        assert done.attempts[0].checkpoint is not None
        assert f"going on at step {done.attempts[0].checkpoint.step} of 400" in await serving.log(job, 2)


async def test_the_first_failure_of_a_gang_ends_it(serving: Serving) -> None:
    code = "import os, sys, time; rank = int(os.environ['RANK']); print(rank, os.environ['WORLD_SIZE'], flush=True); "
    code += "time.sleep(3); sys.exit(3) if rank else time.sleep(600)"
    async with serving.running():
        job = await serving.submit("ana", "gang", "python3", "-c", code, profile="gang")
        done = await serving.reaches(job, "failed")
        assert (len(done.attempts), done.attempts[0].exit_code) == (1, 3), done
        log = await serving.log(job)
        assert "0 2" in log
        assert "1 2" in log
        await serving.until(lambda: _false(serving.pods()), lambda: "both pods are removed")


async def test_a_snapshot_shows_the_cluster(serving: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving.running():
        job = await serving.submit("ana", "shown", "sleep", "600")
        await serving.reaches(job, "running")
    config = Path(serving.environ["MAKEWAY_STATE_DIR"]) / "config.py"
    config.write_text("")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in serving.environ.items():
            patch.setenv(name, value)
        assert await asyncio.to_thread(main, ["snapshot", "--config", str(config)]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    (node,) = [node for node in shown["nodes"] if node["gpus"]]
    assert (node["name"], node["pool"], node["gpus"]) == ("node-0", "gpu", 2)
    assert [one["id"] for one in shown["workloads"]] == [job.id]


async def test_a_first_start_takes_the_document_as_it_is(serving: Serving, policy: str) -> None:
    """A pool without labels has all nodes, and the policy says how large it is, not what is there at the start."""
    document = json.loads(policy)
    del document["pools"][0]["nodes"]
    text = json.dumps(document)
    Path(serving.environ["MAKEWAY_POLICY_FILE"]).write_text(text)
    async with serving.running() as service:
        current = service.components.store.policies.current()
        assert current is not None
        assert current.document == text
        job = await serving.submit("ana", "first", "true")
        await serving.reaches(job, "succeeded")


@pytest.mark.covers("N07")
async def test_a_pod_outlives_the_service_and_is_adopted(serving: Serving) -> None:
    async with serving.running():
        job = await serving.submit("ana", "long", "sh", "-c", "echo one; sleep 15; echo two")
        await serving.says(job, "one")
        before = serving.pods()
    assert serving.pods() == before
    async with serving.running():
        done = await serving.reaches(job, "succeeded", "failed")
        assert (done.state.value, len(done.attempts)) == ("succeeded", 1)
        assert await serving.log(job) == "one\ntwo\n"


async def test_a_job_is_cancelled_with_its_pod(serving: Serving) -> None:
    async with serving.running():
        job = await serving.submit("ana", "endless", "sleep", "600")
        await serving.reaches(job, "running")
        await serving.client("ana").cancel(job.id)
        await serving.reaches(job, "cancelled")
        await serving.until(lambda: _false(serving.pods()), lambda: "its pod is removed")


async def test_an_image_that_does_not_exist_is_told_in_words(serving: Serving) -> None:
    async with serving.running():
        job = await serving.submit("ana", "nothing", "true", profile="other")

        async def told() -> bool:
            found: Job = await serving.client("ana").job(job.id)
            return found.reason is not None and "image cannot be fetched" in found.reason.message

        await serving.until(told, lambda: "the reason is the image")
        await serving.client("ana").cancel(job.id)
        await serving.reaches(job, "cancelled")


async def test_a_job_that_uses_too_much_memory_fails_with_that_reason(serving: Serving) -> None:
    async with serving.running():
        code = "x = []\nwhile True: x.append(bytearray(2**20))"
        job = await serving.submit("ana", "large", "python3", "-c", code, profile="small")
        done = await serving.reaches(job, "failed")
        assert len(done.attempts) == 1
        assert "out of memory" in done.message
