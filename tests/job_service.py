"""A service whose jobs are pods on the real node of the test cluster, and what those pods mount."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import uvicorn
import yaml
from makeway_api.client import AsyncClient
from makeway_api.models import FileIn, Job, JobRequest
from makeway_quota.application import Application
from makeway_quota.backends.choice import make_backend
from makeway_quota.settings import load
from makeway_quota.web.app import create_app
from makeway_quota.web.login.auth import TokenAuth
from makeway_quota.web.server.http_server import server_config
from makeway_quota.web.settings import WebSettings
from pods import wait_until
from running import PEOPLE

from kube_cluster.cluster import Cluster
from kube_cluster.host_volumes import job_template, make_claim
from kube_cluster.images import HOST

ROOT = Path(__file__).parents[1]
NAMESPACE = "jobs"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
RUN_AS = (1000, 100)
"""User and group of jobs' pods, as the settings have them."""
JOBS = "app.kubernetes.io/managed-by=makeway"
TRAIN = FileIn(path="train.py", data=base64.b64encode((ROOT / "docs" / "examples" / "train.py").read_bytes()).decode())


def make_namespace(cluster: Cluster) -> None:
    """Create the namespace of the jobs, which admits restricted pods only, if it is not there."""
    if cluster.api.items("/api/v1/namespaces", fieldSelector=f"metadata.name={NAMESPACE}"):
        return
    enforce = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE, "labels": enforce}})
    accounts = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
    wait_until(lambda: cluster.api.items(accounts), "the namespace has its service account")


def policy_of(cluster: Cluster, checkpoints: Path) -> str:
    """Return a document whose profiles mount this machine's programs, and Makeway, into pods of an empty image."""
    os.chown(checkpoints, *RUN_AS)
    checkpoints.chmod(0o755)  # as a volume to which Kubernetes gives no group: only who owns it makes folders
    make_claim(cluster.api, NAMESPACE, "checkpoints", checkpoints)
    template = {"metadata": {"labels": {"cost": "12"}}, "spec": job_template(cluster.api, NAMESPACE)}
    profile = {"gpus": 1, "pools": ["gpu"], "policies": [["rnd", "devops"]], "grace": 30, "pod": template}
    document = {
        "version": 1,
        "pools": [{"name": "gpu", "size": 2, "nodes": {"labels": {"makeway.test/real": "true"}}}],
        "profiles": [
            {"name": "gpu1", **profile},
            {"name": "other", **profile, "image": "127.0.0.1:5999/nothing:1"},
            {"name": "small", **profile, "memory": 64},
            {"name": "scratch", **profile, "disk": 64},
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


@asynccontextmanager
async def served(environ: Mapping[str, str], host: str, port: int) -> AsyncIterator[Application]:
    """Run the service on a reserved port until the block ends; pods outlive it."""
    settings = load(environ=environ)
    service = await Application.open(settings, make_backend(settings))
    app = create_app(service.services, WebSettings(secret=b"test" * 8), TokenAuth(PEOPLE))
    server = uvicorn.Server(server_config(app, timeout_graceful_shutdown=1))
    await service.start()
    listener = socket.create_server((host, port), reuse_port=True)
    serving = asyncio.create_task(server._serve([listener]))
    try:
        yield service
    finally:
        app.state.streams.close()
        server.should_exit = True
        await serving
        await service.stop(stop_jobs=False)


class Serving:
    """A service on the cluster, and one client for each person."""

    def __init__(self, cluster: Cluster, folder: Path, policy: str) -> None:
        self.cluster = cluster
        self.clients: dict[str, AsyncClient] = {}
        self.patience = 120.0
        """Seconds, much too long, after which `until` has waited in vain"""
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
        async with served(self.environ, *self.reservation.getsockname()) as service:
            yield service

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
        result: list[Job] = []

        async def there() -> bool:
            result.append(await self.client("root").job(job.id))
            return result[-1].state.value in states and result[-1].attempt >= attempt

        await self.until(there, lambda: f"{job.name} becomes {states}: {result[-1]}")
        return result[-1]

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
        """Wait until an answer is true; raise TimeoutError after a time that is much too long."""
        for _ in range(round(5 * self.patience)):
            if await true():
                return
            await asyncio.sleep(0.2)
        raise TimeoutError(f"waited in vain: {what()}; pods: {self.pods()}")

    async def no_pod_left(self) -> None:
        """Wait until the pods of all jobs are removed."""

        async def gone() -> bool:
            return not self.pods()

        await self.until(gone, lambda: "no pod of a job is left")

    def pods(self) -> dict[str, str]:
        """Return the phases of the jobs' pods by name."""
        result = self.cluster.api.items(PODS, labelSelector=JOBS)
        return {pod["metadata"]["name"]: pod["status"].get("phase", "") for pod in result}


async def training(serving: Serving, person: str, name: str, seconds: str) -> Job:
    steps = ["--steps", "400", "--every", "5000", "--seconds", seconds]
    return await serving.submit(person, name, "python3", "train.py", *steps, files=[TRAIN])


async def waits_because(serving: Serving, job: Job, *words: str) -> None:
    """Wait until the reason of a job contains the words."""
    result: list[str] = []

    async def told() -> bool:
        one: Job = await serving.client("ana").job(job.id)
        result.append(one.reason.message if one.reason else "")
        return all(word in result[-1] for word in words)

    await serving.until(told, lambda: f"the reason says {words}: {result[-1]}")


def weights(log: str) -> str:
    result = re.search(r"weights (\w+)", log)
    assert result, log
    return result[1]
