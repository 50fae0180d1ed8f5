"""Measure what a click costs on a full node: the portal of the chart, whose jobs make way for the pods of a notebook.

The Hub, the proxy, the service, the spawner and the notebook are those that Helm installs on a real Kubernetes node of
this machine.
"""

from __future__ import annotations

import asyncio
import base64
import sys
import time

import httpx2
import yaml
from makeway_api.client import AsyncClient
from makeway_api.models import FileIn, JobRequest
from makeway_quota.backends.kubernetes.api.client import ApiClient
from makeway_quota.backends.kubernetes.api.connection import from_kubeconfig

from kube_cluster import image_build, portal, programs
from kube_cluster.api import Object
from kube_cluster.cluster import Cluster
from kube_cluster.problems import NotHere

from .measure import Measured
from .pod_reclaim import Times, jobs_of, until_running
from .pod_service import followed
from .reclaim import TRAINING, saved_in

ROUNDS = 50
FREE = 5
"""Starts that are measured while a GPU is free."""
GPUS = 2
TIMEOUT = 120.0
OWNER, BORROWER = "bo", "ana"
TEAMS = {OWNER: "devops", BORROWER: "rnd"}
POD = f"jupyter-{OWNER}"


def measure() -> list[Measured]:
    """Measure everything; nothing where Kubernetes has not been built or this machine cannot run a node."""
    if not programs.are_built():
        print("  Kubernetes is not built: run `make kube-test` once", file=sys.stderr)
        return []
    with Cluster.start() as cluster:
        try:
            node = cluster.add_node(gpus=GPUS)
            archives = image_build.build(list(portal.IMAGES.values()))
        except NotHere as reason:
            print(f"  {reason}", file=sys.stderr)
            return []
        for archive in archives.values():
            node.import_image(archive)
        portal.install(cluster, _values())
        portal.wait_until_ready(cluster)
        return asyncio.run(_measure(cluster))


def _values() -> Object:
    """Return the values of the demo, whose teams may borrow all GPUs."""
    values = portal.demo_values(GPUS)
    policy = yaml.safe_load(values["policy"])
    for team in policy["policies"]:
        for quota in team["quotas"]:
            quota.pop("limit", None)
    return values | {"policy": yaml.safe_dump(policy)}


async def _measure(cluster: Cluster) -> list[Measured]:
    url, password = portal.address(cluster.api), portal.secret(cluster.api)["password"]
    client = ApiClient(from_kubeconfig(cluster.kubeconfig))
    try:
        async with (
            followed(Times(client, f"/api/v1/namespaces/{portal.NAMESPACE}/pods")) as times,
            Person(url, OWNER) as owner,
            Person(url, BORROWER) as borrower,
        ):
            for person in (owner, borrower):
                await person.log_in(password)
            free = [await _click(owner, times) for _ in range(FREE)]
            beyond = await _reclaims(owner, borrower, times)
    finally:
        await client.close()
    note = (
        f"{ROUNDS} reclaims in a row on {GPUS} GPUs, through the Hub of the chart; every job that made way resumed, "
        "none was lost. From the request to the Hub to a running pod, less the time that the job took to save."
    )
    usual = sorted(free)[len(free) // 2]
    name = "click to guaranteed notebook pod on a full node beyond the job's own save"
    return [Measured(name, "s", beyond, "the same, a GPU is free", usual, 3.0, note, at_95=True)]


class Person:
    """A user of the portal, whose browser renders nothing."""

    def __init__(self, url: str, name: str) -> None:
        self.name = name
        self._url = url
        self._browser = httpx2.AsyncClient(base_url=url, follow_redirects=True, timeout=TIMEOUT, trust_env=False)
        self._client: AsyncClient | None = None

    async def __aenter__(self) -> Person:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            await self._client.close()
        await self._browser.aclose()

    @property
    def client(self) -> AsyncClient:
        """The client of the quota service, once the person has logged in."""
        assert self._client is not None
        return self._client

    async def log_in(self, password: str) -> None:
        """Send the form of the login page, and get a token for the quota service."""
        await self._browser.get("/hub/login")
        form = {"username": self.name, "password": password}
        params = {"_xsrf": self._browser.cookies["_xsrf"]}
        (await self._browser.post("/hub/login", params=params, data=form)).raise_for_status()
        token = (await self.hub("POST", "/tokens", {"note": "benchmark"})).json()["token"]
        self._client = AsyncClient(f"{self._url}/services/makeway", token)

    async def hub(self, method: str, path: str, body: object = None) -> httpx2.Response:
        """Send a request about this user to the Hub's API as the browser does."""
        headers = {
            "X-XSRFToken": self._browser.cookies.get("_xsrf", path="/hub/") or "",
            "Referer": f"{self._url}/hub/home",
        }
        url = f"/hub/api/users/{self.name}{path}"
        return (await self._browser.request(method, url, headers=headers, json=body)).raise_for_status()

    async def until(self, *states: str) -> None:
        """Return once the user's server is in one of these states: `ready` or `gone`."""
        ends = time.monotonic() + TIMEOUT
        while True:
            server = (await self.hub("GET", "")).json()["servers"].get("")
            if (server is None and "gone" in states) or (server is not None and server["ready"] and "ready" in states):
                return
            if time.monotonic() > ends:
                raise RuntimeError(f"The server of {self.name} is not {' or '.join(states)}: {server}")
            await asyncio.sleep(0.3)


async def _click(owner: Person, times: Times) -> float:
    """Start a notebook within the quota; stop it once it serves; return the seconds from the request to its pod."""
    times.drop(POD)
    began = time.monotonic()
    request = asyncio.create_task(owner.hub("POST", "/server", {"profile": "gpu1", "team": TEAMS[owner.name]}))
    try:
        seconds = await times.until(POD, "running") - began
    finally:
        await request
    (session,) = await owner.client.sessions()
    if session.preemptible:
        raise RuntimeError("The notebook is over quota.")
    await owner.until("ready")
    await owner.hub("DELETE", "/server")
    await owner.until("gone")
    await times.until_gone(POD)
    return seconds


async def _reclaims(owner: Person, borrower: Person, times: Times) -> list[float]:
    """Fill the GPUs with jobs of the borrower, and have one make way for the owner's notebook again and again."""
    beyond = list[float]()
    file = FileIn(path="train.py", data=base64.b64encode(TRAINING.encode()).decode())
    for number in range(GPUS):
        name, command, team = f"filler {number}", ["python3", "train.py"], TEAMS[borrower.name]
        await borrower.client.submit(JobRequest(name=name, team=team, profile="gpu1", command=command, files=[file]))
    for _ in range(ROUNDS):
        fillers = await until_running(borrower.client, GPUS)
        took = await _click(owner, times)
        jobs = await jobs_of(borrower.client)
        (remaining,) = (job.id for job in jobs if job.preemptions > fillers[job.id].preemptions)
        beyond.append(took - saved_in((await borrower.client.logs(remaining, attempt=fillers[remaining].attempt)).text))
    for job in await jobs_of(borrower.client):
        if outcomes := {attempt.outcome for attempt in job.attempts} - {None, "preempted"}:
            raise RuntimeError(f"{job.name} was lost: {outcomes}")
    return beyond
