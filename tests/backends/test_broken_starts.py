"""Starts that break off between the pods and their Secret: no worker waits for a token that never comes."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import pytest
from api_server import PODS, ApiServer
from makeway_quota.backends.base import BackendRejected, BackendUnavailable, Phase
from makeway_quota.backends.kubernetes.api.client import ApiStatusError, ApiUnreachable, Object
from makeway_quota.backends.kubernetes.attempts.pod_waits import MAX_WAIT_SECONDS
from makeway_quota.backends.kubernetes.backend import UNREACHABLE_PAUSE
from makeway_quota.backends.kubernetes.pods.manifest import TOKEN
from makeway_quota.backends.remote.backend import REPORT_GRACE
from makeway_quota.backends.remote.workers import WorkerStatus
from makeway_quota.store.store import open_store
from pod_backend import Backend, order

Stored = dict[tuple[str, str], Object]
"""The objects of a cluster by kind and name; all replicas see the same."""


class StoringServer(ApiServer):
    """An API server as one replica reaches it: it stores what is created."""

    def __init__(self, stored: Stored) -> None:
        super().__init__()
        self.stored = stored

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Object:
        if path == PODS:
            self.lists[PODS] = [copy.deepcopy(result) for (kind, _), result in self.stored.items() if kind == "pods"]
        if not path.startswith(f"{PODS}/"):
            return await super().get(path, query)
        self._hear("GET", path)
        if ("pods", name := path.rpartition("/")[2]) not in self.stored:
            raise ApiStatusError(404, "NotFound", f"{name} not found")
        return self.stored["pods", name]

    async def create(self, path: str, body: Object) -> Object:
        await asyncio.sleep(0)
        self._hear("POST", path)
        kind, name = path.rpartition("/")[2], body["metadata"]["name"]
        if (kind, name) in self.stored:
            raise ApiStatusError(409, "AlreadyExists", f"{name} exists")
        made = copy.deepcopy(body)
        made["metadata"] |= {"uid": f"u{len(self.asked)} of {id(self)}", "namespace": "jobs", "resourceVersion": "20"}
        made["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
        self.stored[kind, name] = made
        return made

    async def delete(self, path: str, *, uid: str = "", grace: int | None = None) -> bool:
        self._hear("DELETE", path)
        kind, name = path.split("/")[-2:]
        return self.stored.pop((kind, name), None) is not None


class Replica(Backend):
    """A replica that hears of pods when the test says so, as an informer is some time behind."""

    server: StoringServer

    def listen(self) -> None:
        """Hear of all pods as they are now, and of those that are gone."""
        there = {name: result for (kind, name), result in self.server.stored.items() if kind == "pods"}
        for known in [known for known in self.pods.objects if known.partition("/")[2] not in there]:
            last = {"name": known.partition("/")[2], "namespace": "jobs", "uid": "", "resourceVersion": "20"}
            self.pods._gone(self.pods.objects[known])
            self.hear("DELETED", {"metadata": last})
        for result in there.values():
            self.hear("MODIFIED", result)

    async def unfinished(self) -> set[str]:
        """Return the jobs whose start is to be ordered again; no other one is reported as lost."""
        self.listen()
        seen = (await self.observe()).attempts
        assert {one.phase for one in seen} <= {Phase.STARTING}
        return {one.workload for one in seen if one.start_broke_off}

    async def start_again(self) -> None:
        """Order what is unfinished until nothing is, as the loop does."""
        for _ in range(5):
            for job in sorted(await self.unfinished()):
                try:
                    await self.start(order(job, self.workers_of(job)))
                except BackendUnavailable:
                    await self.undone(job)
            self.now += UNREACHABLE_PAUSE

    def workers_of(self, job: str) -> int:
        """Return the size of a job's gang."""
        return 4 if job.startswith("gang") else 1


def token_of(pod: Object) -> tuple[str, str]:
    """Return the Secret and the key that a pod takes its token from."""
    environment = pod["spec"]["containers"][0]["env"]
    (reference,) = [one["valueFrom"]["secretKeyRef"] for one in environment if one["name"] == TOKEN]
    return reference["name"], reference["key"]


def starved(stored: Stored) -> dict[str, str]:
    """Return what the kubelet says of the pods whose token is not there, by name."""
    result = {}
    for (kind, name), pod in stored.items():
        if kind == "pods":
            secret, key = token_of(pod)
            if ("secrets", secret) not in stored:
                result[name] = f'secret "{secret}" not found'
            elif key not in stored["secrets", secret]["stringData"]:
                result[name] = f"couldn't find key {key} in Secret jobs/{secret}"
    return result


def look(stored: Stored) -> None:
    """Start the containers that can be made, as the kubelet does; the others wait."""
    says = starved(stored)
    for (kind, name), pod in stored.items():
        if kind == "pods":
            pod["spec"]["nodeName"] = "n0"
            waiting = {"reason": "CreateContainerConfigError", "message": says.get(name)}
            state = {"waiting": waiting} if name in says else {"running": {}}
            phase = "Pending" if name in says else "Running"
            pod["status"] = {"phase": phase, "containerStatuses": [{"name": "worker", "state": state}]}


def collect(stored: Stored) -> None:
    """Delete what belongs to pods that are gone, as Kubernetes' garbage collector does."""
    there = {result["metadata"]["uid"] for result in stored.values()}
    for name, result in list(stored.items()):
        owners = result["metadata"].get("ownerReferences", [])
        if owners and not any(owner["uid"] in there for owner in owners):
            del stored[name]


@pytest.fixture
def stored() -> Stored:
    return {}


Replicas = Callable[[], Awaitable[Replica]]


@pytest.fixture
async def replicas(tmp_path: Path, stored: Stored) -> AsyncIterator[Replicas]:
    """Return what starts a replica that reads the cluster as it is then."""
    store = open_store(f"sqlite:///{tmp_path / 'makeway.sqlite'}")
    made: list[Replica] = []

    async def start() -> Replica:
        replica = Replica(StoringServer(stored), store)
        await replica.open()
        await replica.nodes()
        made.append(replica)
        return replica

    yield start
    for replica in made:
        await replica.close(stop_jobs=False)
    store.close()


def dies_at(kind: str, after: int = 0) -> Callable[[str, str], None]:
    """Return an answer by which the process is gone when it creates something of a kind, or some of them later."""
    seen: list[str] = []

    def answer(method: str, path: str) -> None:
        if method == "POST" and path.endswith(f"/{kind}"):
            seen.append(path)
            if len(seen) > after:
                raise asyncio.CancelledError

    return answer


def no_answer(kind: str) -> Callable[[str, str], None]:
    """Return an answer by which nothing of a kind can be created."""

    def answer(method: str, path: str) -> None:
        if method == "POST" and path.endswith(f"/{kind}"):
            raise ApiUnreachable("no answer")

    return answer


JOBS = [f"j{number:02}" for number in range(16)]


async def start_all(replica: Replica, *jobs: str) -> None:
    await asyncio.gather(*(replica.start(order(job, replica.workers_of(job))) for job in jobs), return_exceptions=True)


@pytest.mark.parametrize("what", ["no Secret", "a Secret without its key"])
async def test_pods_without_tokens_of_a_process_that_died_are_started_again(
    stored: Stored, replicas: Replicas, what: str
) -> None:
    first = await replicas()
    first.server.answer = dies_at("secrets")
    await start_all(first, *JOBS)
    assert len(starved(stored)) == 16
    if what != "no Secret":
        (name, _) = token_of(stored["pods", "makeway-j00-1-0"])
        stored["secrets", name] = {"metadata": {"name": name, "uid": "u"}, "stringData": {"j00.1.0": "token"}}
    look(stored)
    waiting = {name.split("-")[1] for name in starved(stored)}
    second = await replicas()
    assert await second.unfinished() == set(), "the kubelet may be about to look again"
    second.now += MAX_WAIT_SECONDS["token"]
    assert await second.unfinished() == waiting
    await second.start_again()
    assert starved(stored) == {}
    assert sum(kind == "pods" for kind, _ in stored) == 16
    look(stored)
    second.now += 600.0
    second.channel.worker_statuses = lambda: {(job, 1): {0: WorkerStatus(started_at=1.0)} for job in JOBS}  # type: ignore[method-assign]
    second.channel.changed = lambda: {(job, 1) for job in JOBS}  # type: ignore[method-assign]
    second.listen()
    assert set((await second.phases()).values()) == {Phase.RUNNING}


@pytest.mark.parametrize("simulated", [False, True])
async def test_a_gang_of_which_a_process_that_died_made_a_part_is_made_anew(
    stored: Stored, replicas: Replicas, simulated: bool
) -> None:
    first = await replicas()
    first.server.answer = dies_at("pods", after=2)
    await start_all(first, "gang")
    assert len(starved(stored)) == 2
    look(stored)
    if simulated:
        for pod in stored.values():
            pod["status"] = {"phase": "Running"}
    second = await replicas()
    assert await second.unfinished() == set(), "the others may not be listed yet"
    second.now += MAX_WAIT_SECONDS["incomplete" if simulated else "token"]
    assert await second.unfinished() == {"gang"}
    await second.start_again()
    assert (len([kind for kind, _ in stored if kind == "pods"]), starved(stored)) == (4, {})


async def test_a_start_that_finds_a_part_of_its_gang_makes_it_anew(stored: Stored, replicas: Replicas) -> None:
    second = await replicas()
    first = await replicas()
    first.server.answer = dies_at("pods", after=2)
    await start_all(first, "gang")
    with pytest.raises(BackendRejected, match="made anew"):
        await second.start(order("gang", 4))
    await second.undone("gang")
    await second.start_again()
    assert (len([kind for kind, _ in stored if kind == "pods"]), starved(stored)) == (4, {})


async def test_a_start_that_another_process_finished_is_left_alone(stored: Stored, replicas: Replicas) -> None:
    second = await replicas()
    await (await replicas()).start(order("gang", 4))
    before = {name: result for name, result in stored.items() if name[0] in ("pods", "secrets")}
    await second.start(order("gang", 4))
    assert {name: result for name, result in stored.items() if name[0] in ("pods", "secrets")} == before


async def test_after_minutes_without_an_api_server_the_secret_is_written_for_all_its_pods(
    stored: Stored, replicas: Replicas
) -> None:
    replica = await replicas()
    replica.server.answer = no_answer("secrets")
    await start_all(replica, *JOBS, "gang")
    pods = {name: result["metadata"]["uid"] for (kind, name), result in stored.items() if kind == "pods"}
    assert len(pods) == len(starved(stored)) == 20
    replica.now += 300.0
    assert await replica.unfinished() == {*JOBS, "gang"}
    replica.server.answer = lambda method, path: None
    await replica.start_again()
    assert {name: result["metadata"]["uid"] for (kind, name), result in stored.items() if kind == "pods"} == pods
    assert starved(stored) == {}
    owners = [result["metadata"]["ownerReferences"] for (kind, _), result in stored.items() if kind == "secrets"]
    assert {owner["uid"] for item in owners for owner in item} == {*pods.values()}


@pytest.mark.parametrize("stored_all_the_same", [False, True])
async def test_a_secret_stays_until_the_last_pod_that_names_it_is_gone(
    stored: Stored, replicas: Replicas, stored_all_the_same: bool
) -> None:
    replica = await replicas()
    create = replica.server.create

    async def lose(path: str, body: Object) -> Object:
        """Lose the answer, or the request, of every second pod."""
        if not path.endswith("/pods") or body["metadata"]["name"] not in lost:
            return await create(path, body)
        lost.discard(body["metadata"]["name"])
        if stored_all_the_same:
            await create(path, body)
        raise ApiUnreachable("no answer")

    lost = {f"makeway-{job}-1-0" for job in JOBS[::2]}
    replica.server.create = lose  # type: ignore[method-assign]
    await start_all(replica, *JOBS)
    assert await replica.unfinished() == {*JOBS[::2]}
    for job in JOBS[1::2]:
        del stored["pods", f"makeway-{job}-1-0"]
    collect(stored)
    replica.now += UNREACHABLE_PAUSE
    for _ in range(3):
        for job in JOBS[::2]:
            try:
                await replica.start(order(job))
            except BackendUnavailable:
                await replica.undone(job)
        collect(stored)
    assert sorted(name for kind, name in stored if kind == "pods") == [f"makeway-{job}-1-0" for job in JOBS[::2]]
    for job in JOBS[::2]:
        assert starved(stored) == {}
        del stored["pods", f"makeway-{job}-1-0"]
        collect(stored)
    assert not [name for kind, name in stored if kind == "secrets"]


async def test_what_else_a_container_lacks_and_what_has_run_is_not_started_again(
    stored: Stored, replicas: Replicas
) -> None:
    replica = await replicas()
    await start_all(replica, "j00", "gang")
    look(stored)
    status = stored["pods", "makeway-j00-1-0"]["status"]
    waiting = {"reason": "CreateContainerConfigError", "message": 'secret "of the template" not found'}
    status |= {"phase": "Pending", "containerStatuses": [{"name": "worker", "state": {"waiting": waiting}}]}
    del stored["pods", "makeway-gang-1-3"]
    reports = {("gang", 1): {number: WorkerStatus(started_at=1.0) for number in range(3)}}
    replica.channel.worker_statuses = lambda: reports  # type: ignore[method-assign]
    for _ in range(3):
        assert await replica.unfinished() == set()
        replica.now += MAX_WAIT_SECONDS["token"] - 1.0
    replica.now += MAX_WAIT_SECONDS["container"] + REPORT_GRACE
    await replica.observe()
    replica.now += REPORT_GRACE
    assert await replica.phases() == {"j00": Phase.LOST, "gang": Phase.LOST}


async def test_a_replica_that_leads_no_more_keeps_no_tokens(stored: Stored, replicas: Replicas) -> None:
    replica = await replicas()
    replica.server.answer = dies_at("secrets")
    await start_all(replica, *JOBS)
    assert replica._tokens._of
    replica.fence_with(lambda: False)
    await replica.observe()
    assert not replica._tokens._of


async def test_the_start_of_a_gang_breaks_off_where_a_watch_finds_the_api_server_away(
    stored: Stored, replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pods beyond those that are created at the same time ask whether it answers first."""
    backend = await replicas()
    with monkeypatch.context() as away:
        first = backend.server.answer

        def breaks(method: str, path: str) -> None:
            first(method, path)
            if (method, path) == ("POST", PODS):
                away.setattr(backend.pods, "problem", "the Kubernetes API server does not answer")

        backend.server.answer = breaks
        with pytest.raises(BackendUnavailable, match="does not answer"):
            await backend.start(order("gang", 20))
        backend.server.answer = first
    created = sum(kind == "pods" for kind, _ in stored)
    assert 0 < created < 20
    assert await backend.unfinished() == {"gang"}
    backend.now += UNREACHABLE_PAUSE
    backend.server.asked.clear()
    await backend.start(order("gang", 20))
    assert backend.server.asked.count(f"POST {PODS}") == 20 - created
    assert await backend.unfinished() == set()
