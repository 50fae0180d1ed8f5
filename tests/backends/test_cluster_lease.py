"""A copy of an installation on the same cluster neither starts nor removes pods beside the original, and says so."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import closing
from pathlib import Path

import pytest
from api_server import PODS, ApiServer, node, pod
from makeway_quota.backends.base import BackendUnavailable
from makeway_quota.backends.kubernetes import backend as kubernetes_backend
from makeway_quota.backends.kubernetes.api.client import ApiStatusError, ApiUnreachable, Object
from makeway_quota.backends.kubernetes.cluster import cluster_lease
from makeway_quota.backends.kubernetes.cluster.cluster_lease import (
    DURATION,
    REFUSED_SECONDS,
    RENEW_SECONDS,
    ClusterLease,
)
from makeway_quota.store.store import open_store
from pod_backend import Backend, order

LEASES = "/apis/coordination.k8s.io/v1/namespaces/jobs/leases"


class Cluster(ApiServer):
    """An API server that keeps leases, as many services as there are have the same."""

    def __init__(self, leases: dict[str, Object]) -> None:
        super().__init__()
        self.leases = leases

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Object:
        if not path.startswith(LEASES):
            return await super().get(path, query)
        self._hear("GET", path)
        if (result := self.leases.get(path)) is None:
            raise ApiStatusError(404, "NotFound", "there is none")
        return result

    async def create(self, path: str, body: Object) -> Object:
        if path != LEASES:
            return await super().create(path, body)
        self._hear("POST", path)
        key = f"{path}/{body['metadata']['name']}"
        if key in self.leases:
            raise ApiStatusError(409, "AlreadyExists", "it is there")
        return self._keep(key, body)

    async def replace(self, path: str, body: Object) -> Object:
        self._hear("PUT", path)
        if self.leases[path]["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"]:
            raise ApiStatusError(409, "Conflict", "it has changed")
        return self._keep(path, body)

    def _keep(self, key: str, body: Object) -> Object:
        version = int(self.leases.get(key, {}).get("metadata", {}).get("resourceVersion", "0")) + 1
        self.leases[key] = {**body, "metadata": {**body["metadata"], "resourceVersion": str(version)}}
        return self.leases[key]


class Time:
    """One clock for all replicas."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def lease(cluster: ApiServer, holder: str, time: Time, instance: str = "here") -> ClusterLease:
    return ClusterLease(cluster, "jobs", instance, holder, monotonic=time, clock=time)


async def passes(time: Time, seconds: float, *leases: ClusterLease) -> None:
    """Have replicas look at the lease for a while."""
    ends = time.now + seconds
    while time.now < ends:
        time.now += RENEW_SECONDS
        for item in leases:
            await item.renew()


async def test_the_first_database_acts_and_a_copy_waits_until_it_is_gone() -> None:
    time, cluster = Time(), Cluster({})
    original, copy = lease(cluster, "a", time), lease(cluster, "b", time)
    assert not original.may_act, "not before it has looked"
    await passes(time, 3 * DURATION, original, copy)
    assert (original.may_act, original.problem, copy.may_act) == (True, "", False)
    assert "another database acts on the pods of the installation here in the namespace jobs" in copy.problem
    await passes(time, DURATION - RENEW_SECONDS, copy)
    assert not copy.may_act
    await passes(time, 3 * RENEW_SECONDS, copy)
    assert (copy.may_act, copy.problem) == (True, "")
    await original.renew()
    assert not original.may_act, "one that was frozen meanwhile leaves them to the other"


async def test_all_replicas_of_a_database_act_at_once() -> None:
    time, cluster = Time(), Cluster({})
    first, second = lease(cluster, "a", time), lease(cluster, "a", time)
    await first.renew()
    await second.renew()
    assert first.may_act
    assert second.may_act


async def test_a_service_that_ends_alone_leaves_the_pods_to_another_at_once() -> None:
    time, cluster = Time(), Cluster({})
    first, second = lease(cluster, "sqlite/a", time), lease(cluster, "sqlite/b", time)
    await first.renew()
    await second.renew()
    await second.release()
    assert first.may_act, "only its holder ends a lease"
    await first.release()
    assert not first.may_act
    await second.renew()
    assert (second.may_act, second.problem) == (True, "")


async def test_other_installations_do_not_wait() -> None:
    time, cluster = Time(), Cluster({})
    here, there = lease(cluster, "a", time), lease(cluster, "b", time, "there")
    await here.renew()
    await there.renew()
    assert here.may_act
    assert there.may_act


async def test_a_copy_whose_clock_is_far_ahead_takes_nothing_from_the_original() -> None:
    time, cluster = Time(), Cluster({})
    original = lease(cluster, "a", time)
    copy = ClusterLease(cluster, "jobs", "here", "b", monotonic=time, clock=lambda: time.now + 3600)
    await original.renew()
    await passes(time, 3 * DURATION, copy, original)
    assert (original.may_act, copy.may_act) == (True, False)


def refusing(
    status: int, reason: str = "Forbidden", methods: Collection[str] = ("GET", "PUT", "POST")
) -> Callable[[str, str], None]:
    """Return an answer that refuses all that is asked of leases."""

    def refuse(method: str, path: str) -> None:
        if path.startswith(LEASES) and method in methods:
            raise ApiStatusError(status, reason, "no")

    return refuse


@pytest.mark.parametrize("status", [403, 404])
async def test_without_the_right_to_leases_the_service_acts_as_before(status: int) -> None:
    time, cluster = Time(), Cluster({})
    cluster.answer = refusing(status)
    result = lease(cluster, "a", time)
    await result.renew()
    assert not result.may_act, "the rights of a new installation may take a moment to count"
    await passes(time, REFUSED_SECONDS, result)
    await passes(time, RENEW_SECONDS, result)
    assert (result.may_act, result.problem) == (True, "")
    cluster.answer = lambda method, path: None
    await result.renew()
    assert len(cluster.leases) == 1, "it is tried again"


@pytest.mark.parametrize("status", [403, 404, 405, 409, 429, 500])
async def test_a_copy_that_saw_the_original_does_not_act_because_leases_are_refused(status: int) -> None:
    time, cluster = Time(), Cluster({})
    original, copy = lease(cluster, "a", time), lease(cluster, "b", time)
    await original.renew()
    await copy.renew()
    cluster.answer = refusing(status)
    await passes(time, 10 * DURATION, copy)
    assert not copy.may_act
    assert "another database acts" in copy.problem


@pytest.mark.parametrize("status", [401, 409, 422, 429, 500, 503])
async def test_a_service_that_cannot_renew_its_lease_says_why_it_does_not_act(status: int) -> None:
    time, cluster = Time(), Cluster({})
    result = lease(cluster, "a", time)
    await result.renew()
    cluster.answer = refusing(status, "Webhook", ("PUT",))
    await passes(time, DURATION - RENEW_SECONDS, result)
    assert (result.may_act, result.problem) == (True, "")
    await passes(time, 2 * RENEW_SECONDS, result)
    assert not result.may_act
    assert f"cannot be renewed (the Kubernetes API server refused the request ({status} Webhook)" in result.problem
    cluster.answer = lambda method, path: None
    await result.renew()
    assert (result.may_act, result.problem) == (True, "")


async def test_it_tells_when_it_stops_and_begins_to_act() -> None:
    time, cluster, told = Time(), Cluster({}), list[str]()
    result = ClusterLease(cluster, "jobs", "here", "a", lambda: told.append(result.problem[:9]), time, time)
    await result.renew()
    cluster.answer = refusing(500)
    await passes(time, 2 * DURATION, result)
    cluster.answer = lambda method, path: None
    await passes(time, DURATION, result)
    assert told == ["the Lease", ""]


async def test_a_lease_that_is_deleted_while_it_is_renewed_is_made_again() -> None:
    time, cluster = Time(), Cluster({})
    result, copy = lease(cluster, "a", time), lease(cluster, "b", time)
    await result.renew()
    deleted = list[str]()

    def delete(method: str, path: str) -> None:
        if method == "PUT" and not deleted:
            deleted.append(path)
            cluster.leases.clear()
            raise ApiStatusError(404, "NotFound", "it is gone")

    cluster.answer = delete
    time.now += RENEW_SECONDS
    await result.renew()
    await copy.renew()
    assert len(deleted) == 1
    assert (result.may_act, result.problem, copy.may_act) == (True, "", False)


async def test_a_replica_that_is_always_the_second_to_renew_acts() -> None:
    time, cluster = Time(), Cluster({})
    first, second = lease(cluster, "a", time), lease(cluster, "a", time)
    await first.renew()
    await second.renew()
    other = list[None]()

    def renew(method: str, path: str) -> None:
        """Renew for the first replica just before the second one does."""
        if method == "PUT" and not other:
            other.append(None)
            [key] = cluster.leases
            cluster._keep(key, cluster.leases[key])

    cluster.answer = renew
    for _ in range(10):
        time.now += RENEW_SECONDS
        other.clear()
        await second.renew()
    assert second.may_act


async def test_the_time_that_a_renewal_took_counts_as_passed() -> None:
    time, cluster = Time(), Cluster({})
    result = lease(cluster, "a", time)

    def slow(method: str, path: str) -> None:
        if method == "PUT":
            time.now += DURATION / 2

    await result.renew()
    cluster.answer = slow
    await result.renew()
    time.now += DURATION / 2
    assert not result.may_act, "another database may have counted from when the API server knew"


@pytest.mark.parametrize("odd", [{"metadata": {}}, {"metadata": None, "spec": {}}, {"spec": []}])
async def test_an_odd_lease_keeps_no_service_from_ending(odd: Object) -> None:
    time, cluster = Time(), Cluster({})
    result = lease(cluster, "sqlite/a", time)
    await result.renew()
    [key] = cluster.leases
    cluster.leases[key] = odd
    await result.release()


@pytest.mark.parametrize("odd", [{}, {"metadata": None}, {"metadata": {}, "spec": "x"}, {"metadata": {}, "spec": []}])
async def test_a_lease_that_is_not_understood_keeps_nothing_from_acting(odd: Object) -> None:
    time, cluster = Time(), Cluster({})
    result = lease(cluster, "a", time)
    await result.renew()
    [key] = cluster.leases
    cluster.leases[key] = odd
    for _ in range(3):
        time.now += DURATION
        await result.renew()
        assert result.may_act


async def test_without_an_answer_nothing_is_concluded_and_what_was_not_renewed_for_long_does_not_act() -> None:
    time, cluster = Time(), Cluster({})
    result = lease(cluster, "a", time)
    await result.renew()

    def silent(method: str, path: str) -> None:
        raise ApiUnreachable("it does not answer")

    cluster.answer = silent
    time.now += DURATION - 1
    await result.renew()
    assert result.may_act
    time.now += 2
    assert not result.may_act


@pytest.fixture
async def backends(tmp_path: Path) -> AsyncIterator[tuple[Backend, Backend]]:
    """The services of a database and of its copy on one cluster, on which a pod of job `fit` runs."""
    leases: dict[str, Object] = {}
    made: list[Backend] = []
    for holder in ("original", "copy"):
        server = Cluster(leases)
        server.lists["/api/v1/nodes"] = [node("n0")]
        server.lists[PODS] = [pod("fit")]
        backend = Backend(server, open_store(f"sqlite:///{tmp_path / holder}.sqlite"))
        backend.act_for_database(holder)
        backend.fence_with(lambda: True)
        await backend.open()
        made.append(backend)
    yield made[0], made[1]
    for backend in made:
        await backend.close(stop_jobs=False)
        backend.store.close()


async def test_a_copy_starts_kills_and_removes_nothing_and_tells_why(backends: tuple[Backend, Backend]) -> None:
    original, copy = backends
    assert (original.reachable, copy.reachable) == (True, False)
    assert original.problem == ""
    assert "Stop the other service" in copy.problem
    with pytest.raises(BackendUnavailable, match="another database acts"):
        await copy.start(order("new"))
    await copy.kill("fit", 1)
    for _ in range(100):
        copy.now += 1.0
        await copy.observe()
    with pytest.raises(BackendUnavailable, match="another database acts"):
        await copy.forget("fit", 1)
    assert isinstance(copy.server, Cluster)
    changed = [one for one in copy.server.asked if one.split()[0] in ("POST", "DELETE") and LEASES not in one]
    assert changed == []
    await original.start(order("new"))
    await original.forget("fit", 1)
    assert f"DELETE {PODS}/makeway-fit-1-0" in original.server.asked


async def test_a_service_that_begins_while_leases_do_not_answer_acts_once_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a webhook for leases that hangs while all else of the API server answers."""
    monkeypatch.setattr(kubernetes_backend, "OPEN_TIMEOUT", 0.05)
    monkeypatch.setattr(cluster_lease, "RENEW_SECONDS", 0.0)
    answers = asyncio.Event()

    class Hanging(Cluster):
        async def get(self, path: str, query: Mapping[str, str] | None = None) -> Object:
            if path.startswith(LEASES) and not answers.is_set():
                await answers.wait()
                raise ApiUnreachable("the webhook did not answer")
            return await super().get(path, query)

    backend = Backend(Hanging({}), open_store(f"sqlite:///{tmp_path / 'db.sqlite'}"))
    backend.act_for_database("here")
    backend.fence_with(lambda: True)
    try:
        await backend.open()
        assert backend.lease is not None
        assert not backend.lease.may_act
        answers.set()
        async with asyncio.timeout(10):
            while not backend.lease.may_act:  # noqa: ASYNC110 - a matter of time
                await asyncio.sleep(0)
    finally:
        await backend.close(stop_jobs=False)
        backend.store.close()


def test_a_copy_of_a_database_has_another_identity_and_a_restart_the_same(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/one/makeway.sqlite"
    (tmp_path / "one").mkdir()
    with closing(open_store(url)) as store:
        first = store.identity()
    with closing(open_store(url)) as store:
        assert store.identity() == first
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    (tmp_path / "three").mkdir()
    with closing(sqlite3.connect(tmp_path / "one" / "makeway.sqlite")) as connection:
        connection.execute("VACUUM INTO ?", [str(tmp_path / "three" / "makeway.sqlite")])
    for name in ("two", "three"):
        with closing(open_store(f"sqlite:///{tmp_path}/{name}/makeway.sqlite")) as store:
            assert store.identity() != first
